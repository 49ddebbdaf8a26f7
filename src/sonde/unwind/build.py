# SPDX-License-Identifier: Apache-2.0
"""Builds unwind tables in a process of its own, which runs this file and loads little else.

It reads files that anybody may have made, some of them large: so it runs at low priority, under a
memory limit, and where it dies its parent starts another. A request is a line of JSON,
{"path", "out"}; the answer is one too: {} or {"error"}. Beside the table OUT it writes OUT.json
with what the file tells about CPython.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path

from sonde import _native

MEMORY_BYTES = 512 << 20
NICE = 10


def build(path: str, out: str) -> None:
    """Make the table of one file. Raises OSError where it is no file that has one."""
    _native.build_unwind_table(path, out)
    found = None
    with contextlib.suppress(OSError):
        found = _native.find_cpython(path)
    python = None
    if found is not None:
        version, runtime, key, evaluation, raw = found
        python = [version, runtime, key, list(evaluation), bytes(raw).hex()]
    beside = Path(f"{out}.json.part")
    beside.write_text(json.dumps({"python": python}))
    beside.replace(f"{out}.json")


def main() -> None:
    """Answer requests until there are no more."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            build(request["path"], request["out"])
            answer = {}
        except (OSError, MemoryError) as error:
            answer = {"error": str(error)}
        _native.release_memory()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
