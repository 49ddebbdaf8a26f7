# SPDX-License-Identifier: Apache-2.0
"""One process of this machine, from its birth until its last samples are resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sonde import _native, procfs
from sonde.model.owner import UNKNOWN, Owner
from sonde.model.process import KTHREADD_PID, Process
from sonde.resolve.images import Image
from sonde.resolve.mappings import AddressSpace

if TYPE_CHECKING:
    from sonde.resolve.perf_maps import ProcessPerfMap

EXEC_GRACE_NS: Final = 15_000_000_000
"""How long the mappings before an exec are kept: longer than samples wait to be resolved."""

MAX_THREADS: Final = 4_096
"""Names kept of one process's threads."""


class LiveProcess:
    """A process of this machine, as far as it is known."""

    __slots__ = (
        *("_exe", "comm", "dead_ns", "frames", "image", "owner", "perf_map"),
        *("pid", "ppid", "previous", "previous_until_ns", "start_ns", "threads", "used_ns"),
        *("step", "who", "who_ns", "who_until_ns"),
    )

    def __init__(self, pid: int, start_ns: int, ppid: int, comm: str, image: Image) -> None:
        self.pid = pid
        self.start_ns = start_ns
        """0: not known."""
        self.ppid = ppid
        self.comm = comm
        self._exe = ""
        self.image = image
        self.previous: Image | None = None
        """The image before the last exec, until samples of it have surely been resolved."""
        self.previous_until_ns = 0
        self.threads: dict[int, str] | None = None
        self.dead_ns = 0
        """When it ended, CLOCK_MONOTONIC; 0 while it lives."""
        self.used_ns = 0
        self.frames = _native.Places()
        """Of addresses already resolved, and whether each was a leaf's."""
        self.owner: procfs.Owner | None = None
        self.perf_map: ProcessPerfMap | None = None
        self.step: tuple[str, str] | None = None
        """(job, step) of Slurm, where the step's keeper started it."""
        self.who: Owner | None = None
        """Whose it is, as known at `who_ns`."""
        self.who_ns = 0
        self.who_until_ns = 0
        """Until then that holds, if no note says otherwise."""

    @property
    def key(self) -> tuple[int, int]:
        """(pid, start_ns)"""
        return self.pid, self.start_ns

    @property
    def is_alive(self) -> bool:
        """As far as is known."""
        return not self.dead_ns

    @property
    def is_kernel(self) -> bool:
        """Whether it is one of the kernel's own threads."""
        return KTHREADD_PID in (self.pid, self.ppid)

    @property
    def exe(self) -> str:
        """File name of the executable, '' unknown and for kernel threads."""
        if not self._exe:
            self._exe = self.image.program
            if not self._exe and self.is_alive and not self.is_kernel:
                self._exe = procfs.read_exe(self.pid)
        return self._exe

    def set_exe(self, exe: str) -> None:
        """Say what it runs, where that is known before its mappings are."""
        self._exe = exe

    def record(self) -> Process:
        """As the tables have it."""
        who = self.who or UNKNOWN
        return Process(self.pid, self.start_ns, self.ppid, self.comm, self.exe, who)

    def space(self) -> AddressSpace:
        """Its mappings as known now."""
        image = self.image
        if image.pending and image.update():
            self.forget_frames()
        return image.space()

    def forget_frames(self) -> None:
        """What its addresses mean has changed."""
        self.frames.clear()

    def forget_image(self) -> None:
        """Nobody will ask about its addresses again; its names stay."""
        self._exe = self.exe
        self.image, self.previous = Image(self.pid, "exec"), None
        self.perf_map = self.owner = None
        self.forget_frames()

    def renamed(self, tid: int, comm: str) -> bool:
        """A thread has this name. Returns whether another one's was forgotten for it."""
        if tid == self.pid:
            self.comm = comm
        if self.threads is None:
            self.threads = {}
        crowded = len(self.threads) >= MAX_THREADS and tid not in self.threads
        if crowded:
            del self.threads[next(iter(self.threads))]
        self.threads[tid] = comm
        return crowded

    def executed(self, now_ns: int) -> None:
        """It runs another program now; addresses mean something else."""
        self.previous, self.previous_until_ns = self.image, now_ns + EXEC_GRACE_NS
        self.image = Image(self.pid, "exec")
        self._exe = ""
        self.perf_map = None
        self.threads = None
        self.forget_frames()
