# SPDX-License-Identifier: Apache-2.0
"""The mappings of a process between two calls of execve(2), built when they are first used.

Most processes are never sampled. So mmap events are queued unparsed, and the sorted address space
is built from them when a sample needs it.
"""

from __future__ import annotations

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
_MAX_DEPTH: Final = 32
"""Longest chain of images that refer to their parent's; beyond, one is built at the fork."""


class ProcessImage:
    """The mappings of a process from one exec to the next.

    That of a forked child refers to its parent's until it is built.
    """

    __slots__ = (
        *("_depth", "_program", "_source", "_space"),
        *("left_out", "pending", "pid", "queued_bytes"),
    )

    def __init__(self, pid: int, source: Literal["proc", "exec"] | ProcessImage) -> None:
        """`source` is what the image starts with: "proc": the content of /proc/PID/maps; "exec":
        nothing; or the content of another image."""
        self.pid = pid
        self.pending: list[MmapEvent] = []
        self.queued_bytes = 0
        """Of the paths of `pending`, as they are in memory."""
        self.left_out = 0
        """Mappings dropped because of the limits."""
        self._program = ""
        self._source = source
        self._space: AddressSpace | None = None
        self._depth: int = source._depth + 1 if isinstance(source, ProcessImage) else 0

    def has_room(self, path_bytes: int) -> bool:
        """Whether another mapping may be queued; `path_bytes`: of its path, as it is in memory."""
        room = self.queued_bytes + path_bytes <= MAX_PENDING_BYTES
        return room and len(self.pending) < MAX_PENDING

    def add(self, event: MmapEvent) -> None:
        """Queue a new mapping."""
        path_bytes = getsizeof(event.path)
        if self.has_room(path_bytes):
            self.pending.append(event)
            self.queued_bytes += path_bytes
        else:
            self.left_out += 1

    def forked(self, pid: int) -> ProcessImage:
        """The image of a forked child."""
        if self._depth >= _MAX_DEPTH:
            self.space()
        return ProcessImage(pid, self)

    @property
    def is_complete(self) -> bool:
        """Whether all its mappings are known without reading /proc."""
        if self._space is not None or self._source == "exec":
            return True
        return isinstance(self._source, ProcessImage) and self._source.is_complete

    def space(self) -> AddressSpace:
        """The address space with all queued mappings applied."""
        space = self._space
        if space is None or self.pending:
            self.update()
            space = self._space
            assert space is not None
        return space

    def update(self) -> bool:
        """Apply queued mappings. Returns whether one replaced a known mapping."""
        space, replaced = self._space, False
        if space is None:
            space = self._space = self._start()
            self.left_out += space.left_out
        self.program  # noqa: B018 (the property reads the queue, which is emptied below)
        for event in self.pending:
            replaced |= space.add(_mapping(event))
        self.pending, self.queued_bytes = [], 0
        self._source, self._depth = "exec", 0
        return replaced

    def pending_mapping(self, file: FileKey) -> Mapping | None:
        """The first queued mapping of a file, None without one."""
        return next((_mapping(event) for event in self.pending if event.file == file), None)

    @property
    def program(self) -> str:
        """Name of the first file mapped after the exec: the program. '' where no exec was seen."""
        if not self._program and self._source == "exec":
            of_files = (it for it in self.pending if it.file[2] and it.path.startswith("/"))
            if first := next(of_files, None):
                self._program = procfs.printable(_mapping(first).name)
        return self._program

    def _start(self) -> AddressSpace:
        parent = self._source if isinstance(self._source, ProcessImage) else None
        if self._source == "exec":
            return AddressSpace()
        if parent is not None and parent.is_complete:
            return parent.space().copy()
        return self._read() or (parent.space().copy() if parent is not None else AddressSpace())

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
                self._space, self._source, self._depth = space, "exec", 0

    @property
    def is_built(self) -> bool:
        """Whether its mappings are known but for queued ones."""
        return self._space is not None

    @property
    def source(self) -> ProcessImage | None:
        """The parent's image, as long as this one refers to it."""
        return self._source if isinstance(self._source, ProcessImage) else None

    @property
    def count(self) -> int:
        """Mappings in memory, queued ones included."""
        return len(self.pending) + (0 if self._space is None else len(self._space))

    @property
    def size(self) -> int:
        """Like `count`, where a long path counts for several."""
        queued = len(self.pending) + self.queued_bytes // PATH_UNIT_BYTES
        return queued + (0 if self._space is None else self._space.size)


def _mapping(event: MmapEvent) -> Mapping:
    end = event.address + event.length
    return Mapping(event.address, end, event.file_offset, event.file, event.path)
