# SPDX-License-Identifier: Apache-2.0
"""Finds the slots of processes: pointers in their data that lead into device libraries. It is the
subprocess of `slots`.

It reads files and memory of any user, which may take long or hang. So it runs at low priority and
under a memory limit; its parent kills it when it takes too long.

Protocol: one line of JSON per request on stdin, {"pid", "task", "start_ticks", "addresses",
"wide", "party"}, and one per response on stdout: {"slots": [[address, value, relocation], …],
"cut", "bytes", "cpu_s"} or {"error"}. `task`: a thread that shows the memory
(`procfs.memory_task`); `wide`: look in all writable data of modules, not only of those that look
functions up by name; `party`: the user or container of the process (`procfs.party_of`);
`relocation`: as in struct inject_slot of abi/inject.h; `cut`: not all was read.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from sonde import _native

MEMORY_BYTES = 192 << 20
"""Of this process, its limit (RLIMIT_DATA)."""
NICE = 10
MAX_BYTES = 1 << 30
"""Of a process's data, read for one request."""


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot. Raises OSError."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def respond(finder: _native.SlotFinder, request: dict[str, Any]) -> dict[str, object]:
    """The response to a request."""
    began_s = time.process_time()
    pid, addresses = request["pid"], request["addresses"]
    task, party = request.get("task", pid), request.get("party", 0)
    try:
        if start_ticks(pid) != request["start_ticks"]:
            return {"error": "it ended"}
        slots, cut, read = finder.find(task, addresses, bool(request["wide"]), MAX_BYTES, party)
        if start_ticks(pid) != request["start_ticks"]:
            return {"error": "it ended"}
    except (OSError, MemoryError) as error:
        return {"error": str(error)}
    cpu_s = time.process_time() - began_s
    return {"slots": slots, "cut": cut, "bytes": read, "cpu_s": cpu_s}


def main() -> None:
    """Answer requests until stdin ends."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    finder = _native.SlotFinder()
    for line in sys.stdin:
        response = respond(finder, json.loads(line))
        sys.stdout.write(json.dumps(response, separators=(",", ":")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
