# SPDX-License-Identifier: Apache-2.0
"""The mappings of a process between two calls of execve(2), built when they are first used.

Most processes are never sampled. So mmap events are queued unparsed, and the sorted address space
is built from them when a sample needs it. A fork copies nothing: what both processes have is
shared until one of them changes its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, takewhile
from sys import getsizeof
from typing import Final, Literal

from sonde import procfs
from sonde._native import MmapEvent
from sonde.resolve.binary import FileKey
from sonde.resolve.mappings import PATH_UNIT_BYTES, AddressSpace, Mapping

MAX_PENDING: Final = 4096
"""Queued mmap events of one image."""
MAX_PENDING_BYTES: Final = 1 << 20
"""Of their paths in memory, together."""
READ_AHEAD_BYTES: Final = 256 << 10
"""Text of a process's mappings that `read_ahead` reads at most: 2,500 lines."""
MAX_DEPTH: Final = 32
"""Longest chain of unbuilt images, each with changes, before one is built at a fork."""


class ProcessImage:
    """The mappings of a process from one exec to the next.

    After a fork, parent and child have an image each that refers to the one that the parent had
    until then, which is never changed again: they share its content until they change theirs.
    """

    __slots__ = (
        *("_program", "_queued_before", "_source", "_space", "is_dropped"),
        *("left_out", "pending", "pid", "queued_bytes"),
    )

    def __init__(self, pid: int, source: Literal["proc", "exec"] | ProcessImage) -> None:
        """`source` is what the image starts with: "proc": the content of /proc/PID/maps; "exec":
        nothing; or the content of another image, to which nothing may be added any more."""
        self.pid = pid
        self.pending: list[MmapEvent] = []
        self.queued_bytes = 0
        """Of the paths of `pending`, as they are in memory."""
        self.left_out = 0
        """Mappings dropped because of the limits, as far as the caller has not counted them."""
        self.is_dropped = False
        """Whether its mappings were dropped because of what all processes hold."""
        self._program = ""
        self._source = source
        self._space: AddressSpace | None = None
        self._queued_before = (0, 0)
        """Mappings that the same process queued before its last forks, and bytes of their paths."""
        if isinstance(source, ProcessImage) and source.pid == pid:
            count, path_bytes = source._queued_before
            count, path_bytes = count + len(source.pending), path_bytes + source.queued_bytes
            self._queued_before = count, path_bytes

    def has_room(self, path_bytes: int) -> bool:
        """Whether another mapping may be queued; `path_bytes`: of its path, as it is in memory."""
        count, queued_bytes = self._queued_before
        room = queued_bytes + self.queued_bytes + path_bytes <= MAX_PENDING_BYTES
        return room and count + len(self.pending) < MAX_PENDING

    def add(self, event: MmapEvent) -> None:
        """Queue a new mapping."""
        path_bytes = getsizeof(event.path)
        if self.has_room(path_bytes):
            self.pending.append(event)
            self.queued_bytes += path_bytes
        else:
            self.left_out += 1

    def forked(self, pid: int) -> ProcessImage:
        """The image of a forked child. Nothing may be added to this one from then on: the parent
        continues with `forked` for its pid, unless `is_shared`."""
        source = self.source
        return ProcessImage(pid, source if source is not None and self.is_shared else self)

    @property
    def is_shared(self) -> bool:
        """Whether it has the content of the image that it refers to, unchanged."""
        return self._space is None and not self.pending and self.source is not None

    @property
    def depth(self) -> int:
        """How many images are not built of it and those that it refers to."""
        return sum(it._space is None for it in self.with_sources())

    @property
    def is_complete(self) -> bool:
        """Whether all its mappings are known without reading /proc."""
        return any(it._space is not None or it._source == "exec" for it in self.with_sources())

    def space(self) -> AddressSpace:
        """The address space with all queued mappings applied; shared with others: not to change."""
        source = self.source
        if source is not None and self.is_shared:
            own = self._read_own()
            if not own:
                self.build_source()
                return source.space()
            self._take(own)
        elif self._space is None or self.pending:
            self.update()
        assert self._space is not None
        return self._space

    def update(self) -> bool:
        """Apply queued mappings. Returns whether one replaced a known mapping."""
        return self._take(self._space if self._space is not None else self._start())

    def build_source(self) -> None:
        """Build the image that it refers to, which all share that refer to it, but none of those
        that this one refers to in turn: what they changed is applied to a copy of the nearest that
        is built."""
        image = self.source
        if image is None or image._space is not None or image.source is None:
            return
        space = image._read_own()
        if not space:
            *between, nearest = image.source.with_sources()
            space = nearest.space().copy()
            for event in chain.from_iterable(it.pending for it in reversed(between)):
                space.add(_mapping(event))
        image._take(space)

    def pending_mapping(self, file: FileKey) -> Mapping | None:
        """The first queued mapping of a file, None without one."""
        images = takewhile(lambda it: it.pid == self.pid, self.with_sources())
        queued = chain.from_iterable(it.pending for it in images)
        return next((_mapping(event) for event in queued if event.file == file), None)

    @property
    def program(self) -> str:
        """Name of the first file mapped after the exec: the program. '' where no exec was seen."""
        if not self._program and self._source == "exec":
            of_files = (it for it in self.pending if it.file[2] and it.path.startswith("/"))
            if first := next(of_files, None):
                self._program = procfs.printable(_mapping(first).name)
        source = self.source
        if not self._program and source is not None and source.pid == self.pid:
            self._program = source.program
        return self._program

    def drop(self) -> None:
        """Forget all mappings, those of images that refer to this one included. What is mapped
        later is added, as after an exec."""
        self._take(AddressSpace(), is_kept=False)
        self.is_dropped = True

    def _take(self, space: AddressSpace, is_kept: bool = True) -> bool:
        """Have this address space, which is of no other image, with queued mappings applied where
        they are kept. Returns whether one replaced a known mapping."""
        self.program  # noqa: B018 (the property reads the queue, which is emptied below)
        known_left_out = space.left_out if space is self._space else 0
        replaced = False
        for event in _lasting(self.pending) if is_kept else ():
            replaced |= space.add(_mapping(event))
        self.left_out += space.left_out - known_left_out
        self._space, self._source = space, "exec"
        self.pending, self.queued_bytes, self._queued_before = [], 0, (0, 0)
        return replaced

    def _start(self) -> AddressSpace:
        if self._source == "exec":
            return AddressSpace()
        own, source = self._read_own(), self.source
        if own or source is None:
            return own or AddressSpace()
        self.build_source()
        return source.space().copy()

    def _read_own(self) -> AddressSpace | None:
        """What /proc shows of it; None where its source is known, or shows the same, or where it
        has ended."""
        source = self.source
        if source is not None and (source.is_complete or source.pid == self.pid):
            return None
        return self._read()

    def _read(self, max_bytes: int = procfs.MAX_MAPS_BYTES) -> AddressSpace | None:
        try:
            with procfs.MapsReader(self.pid, max_bytes) as reader:
                return AddressSpace.read(reader)
        except OSError:
            return None

    def read_ahead(self) -> None:
        """Build the address space from /proc now, unless it is very large."""
        if self._space is None and self._source == "proc" and not self.pending:
            space = self._read(READ_AHEAD_BYTES)
            if space is not None and not space.left_out:
                self._take(space)

    @property
    def is_built(self) -> bool:
        """Whether its mappings are known but for queued ones, without a copy of its parent's."""
        source = self.source
        shares_built = source is not None and source._space is not None and not self.pending
        return self._space is not None or shares_built

    @property
    def source(self) -> ProcessImage | None:
        """The image whose content it had at the start, as long as this one refers to it."""
        return self._source if isinstance(self._source, ProcessImage) else None

    def with_sources(self) -> Iterator[ProcessImage]:
        """It, and the images that it refers to, one through the other. A built one has none."""
        image: ProcessImage | None = self
        while image is not None:
            yield image
            image = image.source

    @property
    def count(self) -> int:
        """Mappings in memory, queued ones included, without those of `source`."""
        return len(self.pending) + (0 if self._space is None else len(self._space))

    @property
    def size(self) -> int:
        """Like `count`, where a long path counts for several."""
        queued = len(self.pending) + self.queued_bytes // PATH_UNIT_BYTES
        return queued + (0 if self._space is None else self._space.size)


def _lasting(events: list[MmapEvent]) -> Iterator[MmapEvent]:
    """Those of which a later one from the same address does not replace all."""
    longest: dict[int, int] = {}
    kept = []
    for event in reversed(events):
        if event.length > longest.get(event.address, 0):
            longest[event.address] = event.length
            kept.append(event)
    return reversed(kept)


def _mapping(event: MmapEvent) -> Mapping:
    end = event.address + event.length
    return Mapping(event.address, end, event.file_offset, event.file, event.path)
