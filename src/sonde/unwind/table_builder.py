# SPDX-License-Identifier: Apache-2.0
"""Finds or builds unwind tables, in a subprocess of `table_cache`.

It reads files of any user, some of them large. So it runs at low priority and under a memory
limit; if it dies, its parent starts another one.

Protocol: one line of JSON per request on stdin, {"path", "folder", "prefix"} and "memory", the
bytes that a build may take; and one per response on stdout: {"name", "was_there"} or {"error"},
with the CPU time that it took, "cpu_s". A file that needs more memory ends this process, which its
parent takes as a refusal. A table is the file PREFIX-DIGEST.unw in the folder: the prefix is the
build id and size of the file that it is of (`table_cache.key_of`), the digest covers all bytes of
that file that were read to build it.
"""

from __future__ import annotations

import heapq
import json
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sonde import _native

MEMORY_BYTES = 512 << 20
"""Limit of data memory (RLIMIT_DATA), whatever a request allows."""
NICE = 10
MAX_CANDIDATES = 8
"""Tables that a file is compared with, most recently used first. With more files of one prefix,
some tables are built again."""
_ENDING = ".unw"


def find(path: str, folder: Path, prefix: str) -> str:
    """The name of the table in the folder that a build of this file would give; '' without one."""
    tables = []
    for table in folder.glob(f"{prefix}-*{_ENDING}"):
        with suppress(OSError):
            tables.append((table.stat().st_mtime_ns, table))
    for _, table in heapq.nlargest(MAX_CANDIDATES, tables):
        with suppress(OSError):
            if _native.is_unwind_table_of(str(table), path):
                os.utime(table)
                return table.name.removesuffix(_ENDING)
    return ""


def build(path: str, folder: Path, prefix: str) -> str:
    """Build the table of a file and return its name. Raises OSError without unwind data."""
    temporary = folder / f"{prefix}-{os.getpid()}.new"
    try:
        _native.build_unwind_table(path, str(temporary))
        digest, *_ = _native.unwind_table_origin(str(temporary))
        name = f"{prefix}-{digest}"
        temporary.replace(folder / f"{name}{_ENDING}")
    finally:
        temporary.unlink(missing_ok=True)
    return name


def allow(more_bytes: int) -> None:
    """Limit the data memory of this process to what it has now and `more_bytes`, and in any case to
    MEMORY_BYTES. Raises OSError."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    has_bytes = pages * resource.getpagesize()
    most_bytes = min(MEMORY_BYTES, has_bytes + more_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, MEMORY_BYTES))


def respond(request: dict[str, Any]) -> dict[str, object]:
    """The response to a request."""
    path, folder, prefix = request["path"], Path(request["folder"]), request["prefix"]
    try:
        if name := find(path, folder, prefix):
            return {"name": name, "was_there": True}
        return {"name": build(path, folder, prefix), "was_there": False}
    except (OSError, MemoryError) as error:
        return {"error": str(error)}


def main() -> None:
    """Answer requests until stdin ends."""
    os.nice(NICE)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        began_s = time.process_time()
        request = json.loads(line)
        allow(request.get("memory", MEMORY_BYTES))
        response = respond(request)
        _native.release_memory()
        response["cpu_s"] = time.process_time() - began_s
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
