# SPDX-License-Identifier: Apache-2.0
"""What one program start (exec) has mapped, put together only when somebody asks.

Most processes are never sampled, so what the kernel tells of their mappings is kept as it came and
costs next to nothing until then.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, Literal

from sonde import procfs
from sonde._native import MmapEvent
from sonde.resolve.mappings import AddressSpace, FileKey, Mapping

MAX_PENDING: Final = 4096
"""Mappings told and not yet looked at, of one image."""
MAX_PENDING_BYTES: Final = 1 << 20
"""Of their paths."""
AHEAD_BYTES: Final = 256 << 10
"""Of the text of a process's mappings, read before anybody asks: 2,500 lines."""
_MAX_DEPTH: Final = 32
"""Forks in a row without an exec before mappings are put together at once."""


class Image:
    """The mappings of a process from one exec to the next, or shared with the process it forked."""

    __slots__ = (
        *("_depth", "_pending_bytes", "_program", "_source", "_space"),
        *("left_out", "pending", "pid"),
    )

    def __init__(self, pid: int, source: Literal["proc", "exec"] | Image) -> None:
        """`source`: read /proc/PID/maps; start empty; or start as another image is."""
        self.pid = pid
        self.pending: list[MmapEvent] = []
        self._pending_bytes = 0
        self.left_out = 0
        """Mappings that were not taken in."""
        self._program = ""
        self._source = source
        self._space: AddressSpace | None = None
        self._depth: int = source._depth + 1 if isinstance(source, Image) else 0

    def add(self, event: MmapEvent) -> None:
        """A new mapping. It is looked at when somebody asks."""
        self._pending_bytes += len(event.path)
        if len(self.pending) < MAX_PENDING and self._pending_bytes <= MAX_PENDING_BYTES:
            self.pending.append(event)
        else:
            self.left_out += 1

    def forked(self, pid: int) -> Image:
        """The image of a child."""
        if self._depth >= _MAX_DEPTH:
            self.space()
        return Image(pid, self)

    @property
    def is_told(self) -> bool:
        """Whether all its mappings are known without asking /proc."""
        if self._space is not None or self._source == "exec":
            return True
        return isinstance(self._source, Image) and self._source.is_told

    def space(self) -> AddressSpace:
        """The mappings as known now."""
        space = self._space
        if space is None or self.pending:
            self.update()
            space = self._space
            assert space is not None
        return space

    def update(self) -> bool:
        """Take in what was told since. Returns whether that took the place of something."""
        space, replaced = self._space, False
        if space is None:
            space = self._space = self._start()
            self.left_out += space.left_out
        self.program  # noqa: B018 (asked for while the events are there to tell)
        for event in self.pending:
            replaced |= space.add(_mapping(event))
        self.pending, self._pending_bytes = [], 0
        self._source, self._depth = "exec", 0
        return replaced

    def told(self, file: FileKey) -> list[Mapping]:
        """The mapping of a file that was told and not yet taken in; an empty list without one."""
        events = (event for event in self.pending if event.file == file)
        return [_mapping(event) for event in islice(events, 1)]

    @property
    def program(self) -> str:
        """File name of what an exec mapped first: the program. '' where no exec was seen."""
        if not self._program and self._source == "exec":
            for event in self.pending:
                if event.file[2] and event.path.startswith("/"):
                    self._program = procfs.printable(_mapping(event).name)
                    break
        return self._program

    def _start(self) -> AddressSpace:
        parent = self._source if isinstance(self._source, Image) else None
        if self._source == "exec":
            return AddressSpace()
        if parent is not None and parent.is_told:
            return parent.space().copy()
        return self._read() or (parent.space().copy() if parent is not None else AddressSpace())

    def _read(self, most_bytes: int = procfs.MAX_MAPS_BYTES) -> AddressSpace | None:
        try:
            with procfs.MapsReader(self.pid, most_bytes) as reader:
                return AddressSpace.read(reader)
        except OSError:
            return None

    def read_ahead(self) -> None:
        """Read its mappings before anybody asks, unless there are very many."""
        if self._space is None and self._source == "proc" and not self.pending:
            space = self._read(AHEAD_BYTES)
            if space is not None and not space.left_out:
                self._space, self._source, self._depth = space, "exec", 0

    @property
    def size(self) -> int:
        """Mappings held."""
        return len(self.pending) + (0 if self._space is None else len(self._space))


def _mapping(event: MmapEvent) -> Mapping:
    end = event.address + event.length
    return Mapping(event.address, end, event.file_offset, event.file, event.path)
