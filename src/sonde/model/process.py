# SPDX-License-Identifier: Apache-2.0
"""Who ran: processes and threads. A process is (pid, start), because pids are used again."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.model.owner import UNKNOWN, Owner

KTHREADD_PID = 2


@dataclass(frozen=True, slots=True)
class Process:
    """A process that the capture saw."""

    pid: int
    start_ns: int
    """Start in ns since boot, rounded down to 10 ms (clock ticks)."""
    ppid: int = 0
    comm: str = ""
    exe: str = ""
    owner: Owner = UNKNOWN
    command: str = ""
    """Of an interpreter what it runs, and its rank in a job: 'train.py rank 3'; '' of others."""

    def __hash__(self) -> int:
        return hash((self.pid, self.start_ns))  # few of equal ones differ in more: much faster

    @property
    def name(self) -> str:
        """What an interpreter runs, else the name of its leader thread, else of its executable."""
        return self.command or self.comm or self.exe or f"pid {self.pid}"

    @property
    def label(self) -> str:
        """Name and pid, as tables print it."""
        is_named = self.command or self.comm or self.exe
        return f"{self.name} ({self.pid})" if is_named else self.name

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel thread (all are children of kthreadd) or the idle task."""
        return self.pid in (0, KTHREADD_PID) or self.ppid == KTHREADD_PID


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread of a process."""

    process: Process
    tid: int
    comm: str = ""

    def __hash__(self) -> int:
        return hash((self.tid, self.process.start_ns))

    @property
    def name(self) -> str:
        """Its own name, else that of its process. The first thread of an interpreter is called as
        its process, because it has the kernel's name of the interpreter."""
        is_first = self.tid == self.process.pid and self.process.command
        return self.process.name if is_first else self.comm or self.process.name
