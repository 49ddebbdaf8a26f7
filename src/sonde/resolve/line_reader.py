# SPDX-License-Identifier: Apache-2.0
"""Reads DWARF line tables in a subprocess, started as `python -m sonde.resolve.line_reader`.

Debug data is large and comes from any user. So it is read at low priority, with limits of memory
and CPU time; if this process dies, only source lines are missing.

Protocol: one line of JSON per request on stdin, {"path", "beside", "offsets"}, and one per
response on stdout: {"locations": for each offset [[function, file, line], …]}, innermost inlined
function first, or {"error"}. `path` is that of a descriptor of the parent (/proc/PID/fd/N),
`beside` where the file is.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from sonde import _native

MEMORY_BYTES = 1 << 30
CPU_S = 60
"""Limits of this process: RLIMIT_DATA, and CPU time for all requests."""
NICE = 10
MAX_INLINED = 16
"""Locations returned of one address: nested inlined functions."""


def main() -> None:
    """Answer requests until stdin ends."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        request = json.loads(line)
        response: dict[str, object]
        try:
            found = _native.source_lines(
                request["path"], request["beside"], request["offsets"], MAX_INLINED
            )
            response = {"locations": found}
        except (OSError, MemoryError) as error:
            response = {"error": str(error)}
        sys.stdout.write(json.dumps(response) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
