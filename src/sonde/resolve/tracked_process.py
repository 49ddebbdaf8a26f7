# SPDX-License-Identifier: Apache-2.0
"""The state kept of one process, from its fork until its last samples are resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from sonde import _native, procfs
from sonde.model.owner import UNKNOWN, Owner
from sonde.model.process import KTHREADD_PID, Process
from sonde.resolve.mappings import AddressSpace
from sonde.resolve.process_image import MAX_DEPTH, ProcessImage

EXEC_GRACE_NS: Final = 15_000_000_000
"""How long the image before an exec is kept: longer than samples wait to be resolved."""

MAX_THREADS: Final = 4_096
"""Names kept of one process's threads."""


@dataclass(slots=True)
class PerfMapState:
    """What was read of the perf map that a process writes."""

    names: _native.PerfMap = field(default_factory=_native.PerfMap)
    inode: int = 0
    """Of the file that was read."""
    checked_ns: int = 0
    """When it was last read for more, CLOCK_MONOTONIC."""
    left_out: int = 0
    """Lines that `names` did not take, as far as they are counted."""
    counted_bytes: int = 0
    """Of memory that `names` takes, as far as they are counted."""


@dataclass(frozen=True, slots=True)
class JitName:
    """The name of compiled code, with paths cut to file names."""

    kind: str
    """jit | python"""
    function: str
    file: str = ""


class GeneratedCode(Protocol):
    """Code that a runtime has generated in a process, as read from outside."""

    def name_at(self, address: int) -> JitName | None:
        """The compiled code at an address."""


class Held(Protocol):
    """Counts the mappings that images hold."""

    def add(self, process: TrackedProcess, grown: Sequence[ProcessImage], more: int) -> None:
        """Count `more` mappings, by which images of a process have grown. Drops some, of any
        process, where there are too many."""


class TrackedProcess:
    """A process of this machine, alive or recently ended."""

    __slots__ = (
        *(
            "_exe",
            "_party",
            "party_of_parent",
            "comm",
            "command",
            "credentials",
            "dead_ns",
            "frames",
            "generated_code",
            "given_names",
            "held",
        ),
        *(
            "image",
            "may_have_threads",
            "owner",
            "owner_read_ns",
            "owner_valid_until_ns",
            "perf_map",
        ),
        *("pid", "ppid", "previous", "previous_until_ns", "slurm_step"),
        *("start_ns", "threads", "used_ns"),
    )

    def __init__(self, pid: int, start_ns: int, ppid: int, comm: str, image: ProcessImage) -> None:
        self.pid = pid
        self.start_ns = start_ns
        """After boot (CLOCK_BOOTTIME), in whole clock ticks; 0 where unknown."""
        self.ppid = ppid
        self.comm = comm
        """Name of the first thread."""
        self.command: str | None = None
        """What it runs as an interpreter, and its rank (`procfs.scripts_of`); '' of other programs,
        None as long as it was not read."""
        self._exe = ""
        self._party: int | None = None
        self.party_of_parent = procfs.NOBODY
        """Of who forked it, or of that one's parent; NOBODY: root's, or not known."""
        self.image = image
        self.held: Held | None = None
        """Where its mappings are counted; None: nowhere."""
        self.previous: ProcessImage | None = None
        """The image before the last exec, kept until its last samples are resolved."""
        self.previous_until_ns = 0
        """Until when it is kept; CLOCK_MONOTONIC."""
        self.threads: dict[int, str] | None = None
        """Names by thread id, as far as they are known."""
        self.given_names: dict[int, str] | None = None
        """Names that a runtime gives its threads, by thread id, as far as they were read."""
        self.may_have_threads = False
        """Whether there may be threads besides the first, or may have been since the last exec."""
        self.dead_ns = 0
        """When it ended, CLOCK_MONOTONIC; 0 while it lives."""
        self.used_ns = 0
        """When it was last looked up, CLOCK_MONOTONIC."""
        self.frames = _native.FrameCache()
        """Frames by (address, 1 for a leaf)."""
        self.credentials: procfs.Credentials | None = None
        """User ids and inner pid; read together with its perf map."""
        self.perf_map: PerfMapState | None = None
        self.generated_code: GeneratedCode | None = None
        """The code of a runtime (a JVM, V8) that can be read from outside; None without one."""
        self.slurm_step: tuple[str, str] | None = None
        """(job, step), where a slurmstepd started the process."""
        self.owner: Owner | None = None
        """As known at `owner_read_ns`."""
        self.owner_read_ns = 0
        self.owner_valid_until_ns = 0
        """Until then `owner` is used without reading /proc, unless a note is newer."""

    @property
    def key(self) -> tuple[int, int]:
        """(pid, start_ns)"""
        return self.pid, self.start_ns

    @property
    def is_alive(self) -> bool:
        """Whether no end of it is known."""
        return not self.dead_ns

    @property
    def is_kernel(self) -> bool:
        """Whether it is one of the kernel's own threads."""
        return KTHREADD_PID in (self.pid, self.ppid)

    @property
    def party(self) -> int:
        """Its user or container (`procfs.party_of`), as found at the first access since its exec;
        where it had ended by then, that of its parent, so that nobody gets a second part of what is
        shared by processes that soon end."""
        if self._party is None:
            party = procfs.party_of(self.pid) if self.is_alive else procfs.NOBODY
            self._party = self.party_of_parent if party == procfs.NOBODY else party
        return self._party

    def party_for_child(self) -> int:
        """The party that a process has from this one if it ends before it is looked at; NOBODY for
        children of root, which are of any user."""
        party = self._party
        if party is None and self.party_of_parent == procfs.NOBODY and self.is_alive:
            party = self.party
        if party is None or party in (procfs.NOBODY, procfs.UNKNOWN_PARTY):
            party = self.party_of_parent
        return party or procfs.NOBODY

    @property
    def exe(self) -> str:
        """File name of the executable, '' unknown and for kernel threads."""
        if not self._exe:
            self._exe = self.image.program
            if not self._exe and self.is_alive and not self.is_kernel:
                self._exe = procfs.read_exe(self.pid)
        return self._exe

    def set_exe(self, exe: str) -> None:
        """Set the executable's file name, where it is known before the mappings are."""
        self._exe = exe

    def record(self) -> Process:
        """The row of the process table."""
        owner = self.owner or UNKNOWN
        command = procfs.with_comm(self.command, self.comm) if self.command else ""
        return Process(self.pid, self.start_ns, self.ppid, self.comm, self.exe, owner, command)

    def space(self) -> AddressSpace:
        """Its mappings as known now; frames of replaced ones are forgotten."""
        if self.image.pending or not self.image.is_built:
            self._build(self._update)
        return self.image.space()

    def previous_space(self) -> AddressSpace:
        """Its mappings before the last exec, as far as they are kept."""
        if self.previous is not None:
            self._build(self.previous.space)
        return self.previous.space() if self.previous is not None else AddressSpace()

    def read_ahead(self) -> None:
        """Read its mappings now, unless they are very many."""
        self._build(self.image.read_ahead)

    def forked_image(self, pid: int) -> ProcessImage:
        """The image of a child that it forks now."""
        if self.image.depth >= MAX_DEPTH:
            self._build(self.image.build_source)
        image = self.image
        if image.pending:  # of which this process's image shows nothing from here on
            self.forget_frames()
        child = image.forked(pid)
        if not image.is_shared:
            self.image = image.forked(self.pid)
        return child

    def _update(self) -> None:
        image = self.image
        if image.pending and image.update():
            self.forget_frames()
        image.space()

    def _build(self, work: Callable[[], object]) -> None:
        """Do what builds images of it, and count by how much they grow."""
        images = list(images_of(self))
        sizes = [it.size for it in images]
        work()
        changes = [it.size - size for it, size in zip(images, sizes, strict=True)]
        grown = [it for it, change in zip(images, changes, strict=True) if change > 0]
        if self.held is not None and grown:
            self.held.add(self, grown, sum(changes))

    def forget_frames(self) -> None:
        """Drop cached frames: its mappings have changed."""
        self.frames.clear()

    def forget_image(self) -> None:
        """Drop what resolves addresses; names stay. For a process whose samples are resolved."""
        self._exe = self.exe
        self.image, self.previous = ProcessImage(self.pid, "exec"), None
        self.perf_map = self.credentials = self.generated_code = None
        self.forget_frames()

    def set_thread_name(self, tid: int, comm: str) -> bool:
        """Record a thread's name. Returns whether another thread's name was evicted for it."""
        if tid == self.pid:
            self.comm = comm
        if self.threads is None:
            self.threads = {}
        is_full = len(self.threads) >= MAX_THREADS and tid not in self.threads
        if is_full:
            del self.threads[next(iter(self.threads))]
        self.threads[tid] = comm
        return is_full

    def on_exec(self, now_ns: int) -> None:
        """The process runs another program from now on, with new mappings."""
        self.previous, self.previous_until_ns = self.image, now_ns + EXEC_GRACE_NS
        self.image = ProcessImage(self.pid, "exec")
        self._exe = ""
        self.command = None
        self._party = None
        self.owner_valid_until_ns = 0  # who started it may have taken another user's id before
        self.perf_map = self.generated_code = None
        self.threads = self.given_names = None
        self.may_have_threads = False
        self.forget_frames()


def images_of(process: TrackedProcess, seen: set[int] | None = None) -> Iterator[ProcessImage]:
    """The images that a process keeps in memory: of its program, of the one before an exec, and
    those that they refer to; without those whose id is in `seen`, where they are added."""
    seen = set() if seen is None else seen
    for first in (process.image, process.previous):
        for image in first.with_sources() if first is not None else ():
            if id(image) in seen:
                break  # so are those that it refers to
            seen.add(id(image))
            yield image
