# SPDX-License-Identifier: Apache-2.0
"""Reads DWARF in a process of its own: `sonde.resolve.line_reader`.

Debug data is large and anybody may have made it: so it is read at low priority and under limits of
memory and time, and where this dies only lines are missing. A request is a line of JSON,
{"path", "offsets"}; the answer is one too: {"places": for each offset [[function, file, line], …]},
the innermost inlined function first, or {"error"}.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from sonde import _native

MEMORY_BYTES = 1 << 30
CPU_S = 60
NICE = 10
MAX_PLACES = 16
"""Functions inlined into one another at one address."""


def main() -> None:
    """Answer requests until there are no more."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object]
        try:
            path, offsets = request["path"], request["offsets"]
            answer = {"places": _native.source_lines(path, offsets, MAX_PLACES)}
        except (OSError, MemoryError) as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
