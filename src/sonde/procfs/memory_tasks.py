# SPDX-License-Identifier: Apache-2.0
"""Where a process's memory is seen once its first thread has ended and others go on.

/proc/PID is that first thread: it has no memory, files, folders or namespaces any more. The same
names below /proc/TID of another thread have. Part of the child of `procfs.broker` (serve.py).
"""

from __future__ import annotations

import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from sonde.procfs.proc_folder import here
else:
    from proc_folder import here

MAX_TASKS = 64
"""How many threads of a process are looked at for one that has not ended."""
ENDED = (b"Z", b"X", b"x")
"""States of threads."""


def state_of(folder: str) -> tuple[bytes, int]:
    """State (one letter) of a task and number of its process's threads. Raises OSError."""
    with open(here(f"{folder}/stat"), "rb", buffering=0) as file:  # noqa: PTH123
        fields = file.read(4096).rpartition(b") ")[2].split()
    return (fields[0], int(fields[17])) if len(fields) > 17 else (b"X", 0)


def memory_task(pid: int) -> int:
    """The first thread, `pid`, unless that has ended before another one: then that one."""
    with suppress(OSError):
        state, threads = state_of(f"/proc/{pid}")
        if state not in ENDED or threads < 2:
            return pid
        with os.scandir(here(f"/proc/{pid}/task")) as tasks:
            for _, task in zip(range(MAX_TASKS), tasks, strict=False):
                with suppress(OSError):
                    if task.name != str(pid) and state_of(task.path)[0] not in ENDED:
                        return int(task.name)
    return pid


def elsewhere(path: str) -> str | None:
    """Where a path below /proc/PID leads by the thread that has the memory; None where that is the
    first one, or the path is another thread's."""
    _, _, rest = path.partition("/proc/")
    pid, _, below = rest.partition("/")
    if not path.startswith("/proc/") or not pid.isdecimal() or below.startswith("task/"):
        return None
    tid = memory_task(int(pid))
    return None if tid == int(pid) else f"/proc/{tid}/{below}"
