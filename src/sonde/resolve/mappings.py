# SPDX-License-Identifier: Apache-2.0
"""The executable mappings of a process, by address."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

from sonde import procfs
from sonde.resolve.binary import Binary, FileKey
from sonde.resolve.shared_texts import shared

MAX_MAPPINGS: Final = 16_384
"""Executable mappings kept of one process."""
PATH_UNIT_BYTES: Final = 256
"""A mapping counts as one more for each such number of bytes that its path takes in memory."""
MAX_PATH_BYTES: Final = 4 << 20
"""Of the paths of one process's mappings together: 16,384 have room for 200 characters each."""

_DELETED: Final = " (deleted)"
# start-end perms offset major:minor inode path (proc_pid_maps(5))
_LINE: Final = rb"^([0-9a-f]+)-([0-9a-f]+) (%s) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)$"
_ANY: Final = re.compile(_LINE % rb"[r-][w-][x-][ps]", re.DOTALL)
_EXECUTABLE: Final = re.compile(_LINE % rb"[r-][w-]x[ps]", re.DOTALL)


class Mapping:
    """One range of addresses, and the file mapped there, if any."""

    __slots__ = ("binary", "deleted", "end", "file", "offset", "path", "prot", "start")

    def __init__(
        self,
        start: int,
        end: int,
        offset: int = 0,
        file: FileKey = (0, 0, 0),
        path: str = "",
        prot: str = "r-xp",
    ) -> None:
        self.start = start
        self.end = end
        self.offset = offset
        """File offset of the first byte."""
        self.file = file
        self.deleted = path.endswith(_DELETED)
        self.path = shared(path.removesuffix(_DELETED))
        """As the process sees it; '' for anonymous memory; names such as [vdso] unchanged."""
        self.prot = prot
        self.binary: Binary | None = None
        """The file behind it; None until it was looked up."""

    @property
    def name(self) -> str:
        """What a frame shows: file name, [memfd:NAME], [vdso], or [anon] for anonymous memory."""
        if self.path.startswith(_MEMFD):
            return f"[memfd:{self.path.removeprefix(_MEMFD).partition('/')[0]}]"
        if self.has_file:
            return self.path.rpartition("/")[2]
        return self.path if self.path in ("[vdso]", "[vsyscall]") else "[anon]"

    @property
    def has_file(self) -> bool:
        """Whether a file is mapped that may hold code, one of memfd_create(2) included."""
        return self.file[2] != 0 and self.path[:1] == "/" and not self.path.startswith(_NO_FILES)

    def __repr__(self) -> str:
        return f"Mapping({self.start:#x}-{self.end:#x} {self.prot} {self.offset:#x} {self.path!r})"


_MEMFD: Final = "/memfd:"
_NO_FILES: Final = ("/dev/zero", "/SYSV", "/anon_hugepage", "//anon", "/[aio]")
"""How paths of memory without a file begin that look like files: shared memory, AIO rings."""


def parse_maps(text: bytes, executable_only: bool = True) -> Iterator[Mapping]:
    """The mappings in complete lines of /proc/PID/maps (proc_pid_maps(5)), in order of address."""
    pattern = _EXECUTABLE if executable_only else _ANY
    last, decoded = b"", ""
    for line in text.split(b"\n"):
        # Most lines are not executable: check the "x" before parsing the line.
        if executable_only and line[line.find(b" ") + 3 : line.find(b" ") + 4] != b"x":
            continue
        match = pattern.match(line)
        if match is None:
            continue
        start, end, prot, offset, major, minor, inode, path = match.groups()
        if path != last:
            last, decoded = path, path.replace(rb"\012", b"\n").decode("utf-8", "surrogateescape")
        yield Mapping(
            int(start, 16),
            int(end, 16),
            int(offset, 16),
            (int(major, 16), int(minor, 16), int(inode)),
            decoded,
            prot.decode(),
        )


class AddressSpace:
    """The mappings of a process, sorted by address, without overlaps."""

    __slots__ = ("_path_bytes", "_starts", "left_out", "mappings")

    def __init__(self, mappings: Iterable[Mapping] = ()) -> None:
        self.mappings: list[Mapping] = []
        self._starts: list[int] = []
        self._path_bytes = 0
        self.left_out = 0
        """Mappings beyond MAX_MAPPINGS or MAX_PATH_BYTES."""
        for mapping in mappings:
            self.add(mapping)

    def copy(self) -> AddressSpace:
        """A copy, as fork(2) makes it. The `Mapping` objects are shared."""
        copy = AddressSpace()
        copy.mappings = self.mappings.copy()
        copy._starts = self._starts.copy()
        copy._path_bytes = self._path_bytes
        return copy

    @classmethod
    def read(cls, reader: procfs.MapsReader) -> AddressSpace:
        """What a process has mapped now. Raises OSError where it has ended.

        Reading stops at the first mapping beyond the limit, so `left_out` is then 1.
        """
        space = cls()
        for block in reader.blocks():
            for mapping in parse_maps(block):
                space.add(mapping)
            if space.left_out:
                break
        space.left_out = int(bool(space.left_out or reader.is_cut))
        return space

    def find(self, address: int) -> Mapping | None:
        """The mapping that contains an address, None without one."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        mapping = self.mappings[index]
        return mapping if address < mapping.end else None

    def find_all(self, addresses: Iterable[int]) -> list[Mapping | None]:
        """`find` for several addresses, faster than one by one."""
        starts, mappings = self._starts, self.mappings
        found: list[Mapping | None] = []
        for address in addresses:
            index = bisect_right(starts, address) - 1
            if index < 0 or address >= mappings[index].end:
                found.append(None)
            else:
                found.append(mappings[index])
        return found

    def add(self, mapping: Mapping) -> bool:
        """Add a mapping, replacing what it overlaps. Returns whether it replaced something."""
        first = bisect_right(self._starts, mapping.start)
        if first and self.mappings[first - 1].end > mapping.start:
            first -= 1
        last = first
        while last < len(self.mappings) and self.mappings[last].start < mapping.end:
            last += 1
        pieces = [mapping]
        for old in self.mappings[first:last]:
            if old.start < mapping.start:
                pieces.insert(0, _part(old, old.start, mapping.start))
            if old.end > mapping.end:
                pieces.append(_part(old, mapping.end, old.end))
        paths = self._path_bytes + sum(map(_path_bytes, pieces))
        paths -= sum(map(_path_bytes, self.mappings[first:last]))
        is_full = len(self.mappings) + len(pieces) - (last - first) > MAX_MAPPINGS
        if is_full or paths > MAX_PATH_BYTES:
            self.left_out += 1
            return False
        self._path_bytes = paths
        self.mappings[first:last] = pieces
        self._starts[first:last] = [piece.start for piece in pieces]
        return last > first

    def __len__(self) -> int:
        return len(self.mappings)

    @property
    def size(self) -> int:
        """Mappings in memory; long paths count for several."""
        return len(self.mappings) + self._path_bytes // PATH_UNIT_BYTES


def _path_bytes(mapping: Mapping) -> int:
    return sys.getsizeof(mapping.path) if mapping.path else 0


def _part(mapping: Mapping, start: int, end: int) -> Mapping:
    part = Mapping(
        start, end, mapping.offset + start - mapping.start, mapping.file, "", mapping.prot
    )
    part.path, part.deleted, part.binary = mapping.path, mapping.deleted, mapping.binary
    return part
