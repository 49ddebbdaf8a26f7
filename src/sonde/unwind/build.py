# SPDX-License-Identifier: Apache-2.0
"""Finds or builds unwind tables in a process of its own, which loads little else.

It reads files that anybody may have made, some of them large: so it runs at low priority, under a
memory limit, and where it dies its parent starts another. A request is a line of JSON,
{"path", "folder", "prefix"}; the answer is one too: {"name", "was_there"} or {"error"}. A table is
called PREFIX-DIGEST.unw in the folder; the digest is over all that was read to make it.
"""

from __future__ import annotations

import heapq
import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from sonde import _native

MEMORY_BYTES = 512 << 20
NICE = 10
MAX_CANDIDATES = 8
"""Tables that a file is compared with, those used last first. Many files that go by one name cost
each of them a new build, and nothing else."""
_ENDING = ".unw"


def find(path: str, folder: Path, prefix: str) -> str:
    """The table in the folder that would be made of this file; '' none."""
    there = []
    for table in folder.glob(f"{prefix}-*{_ENDING}"):
        with suppress(OSError):
            there.append((table.stat().st_mtime_ns, table))
    for _, table in heapq.nlargest(MAX_CANDIDATES, there):
        with suppress(OSError):
            if _native.is_unwind_table_of(str(table), path):
                os.utime(table)
                return table.name.removesuffix(_ENDING)
    return ""


def build(path: str, folder: Path, prefix: str) -> str:
    """Make the table of one file. Raises OSError where it is no file that has one."""
    beside = folder / f"{prefix}-{os.getpid()}.new"
    try:
        _native.build_unwind_table(path, str(beside))
        digest, _ = _native.unwind_table_origin(str(beside))
        name = f"{prefix}-{digest}"
        beside.replace(folder / f"{name}{_ENDING}")
    finally:
        beside.unlink(missing_ok=True)
    return name


def answer(request: dict[str, str]) -> dict[str, object]:
    """What a request is answered with."""
    path, folder, prefix = request["path"], Path(request["folder"]), request["prefix"]
    try:
        if name := find(path, folder, prefix):
            return {"name": name, "was_there": True}
        return {"name": build(path, folder, prefix), "was_there": False}
    except (OSError, MemoryError) as error:
        return {"error": str(error)}


def main() -> None:
    """Answer requests until there are no more."""
    os.nice(NICE)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        answered = answer(json.loads(line))
        _native.release_memory()
        sys.stdout.write(json.dumps(answered) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
