# SPDX-License-Identifier: Apache-2.0
"""Where the threads of a process begin: the addresses that a whole stack ends in.

The entry point of the program and of its loader; functions of libc whose unwind information states
that nobody called them (clone, clone3); the roots of Go's stacks, which its own tracebacks end at.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GO_ROOTS = (
    *("runtime.goexit", "runtime.rt0_go", "runtime.mstart", "runtime.mstart0", "runtime.mcall"),
    *("runtime.morestack", "runtime.clone"),
)
_LIBC = re.compile(r"(libc[.-].*|libc|libpthread[.-].*|ld-linux.*|ld-musl.*)\Z")
_START_BYTES = 0x40
"""Of `_start`, whose size need not be in any table."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapped part of a file."""

    start: int
    end: int
    offset: int
    path: str

    @property
    def name(self) -> str:
        """Of the file, without its folder."""
        return Path(self.path).name


class Entries:
    """Of one process, as it is mapped now. `symbols`: the program before it was stripped."""

    def __init__(self, pid: int, symbols: Path | None = None) -> None:
        self._mappings = _mappings(pid)
        self._ranges: list[tuple[int, int]] = []
        program = str(Path(f"/proc/{pid}/exe").readlink())
        for path in {it.path for it in self._mappings}:
            if path == program or _LIBC.match(Path(path).name):
                named = str(symbols) if symbols and path == program else path
                for low, high in entries(named):
                    start = self.of_linked(Path(path).name, low)
                    if start is not None:
                        self._ranges.append((start, start + high - low))

    def has(self, address: int) -> bool:
        """Threads begin at this address, or what they begin with returns there."""
        return any(low <= address <= high for low, high in self._ranges)

    def of_offset(self, name: str, offset: int) -> int | None:
        """The address at which a file of that name has mapped an offset of itself."""
        for it in self._mappings:
            if it.name == name and it.offset <= offset < it.offset + it.end - it.start:
                return it.start + offset - it.offset
        return None

    def of_linked(self, name: str, address: int) -> int | None:
        """The address at which a file of that name has what was linked at another."""
        for path in {it.path for it in self._mappings if it.name == name}:
            for offset, linked, size in _loads(path):
                if linked <= address < linked + size:
                    return self.of_offset(name, offset + address - linked)
        return None


def _mappings(pid: int) -> list[Mapping]:
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, _, end = fields[0].partition("-")
            found.append(Mapping(int(start, 16), int(end, 16), int(fields[2], 16), fields[5]))
    return found


@cache
def _loads(path: str) -> list[tuple[int, int, int]]:
    """(file offset, address as linked, size) of what is loaded."""
    listing = _run("readelf", "-lW", path)
    rows = re.findall(r"^\s+LOAD\s+(\w+) (\w+) \w+ (\w+)", listing, re.MULTILINE)
    return [(int(a, 16), int(b, 16), int(c, 16)) for a, b, c in rows]


@cache
def entries(path: str) -> list[tuple[int, int]]:
    """Address ranges, as linked, that threads begin in."""
    if not Path(path).is_file():
        return []
    found = re.search(r"Entry point address:\s+0x(\w+)", _run("readelf", "-hW", path))
    start = int(found[1], 16) if found else 0
    ranges = [(start, start + _START_BYTES)] if start else []
    if _LIBC.match(Path(path).name):
        for frame in _run("readelf", "--debug-dump=frames", path).split("\n\n"):
            where = re.search(r"pc=(\w+)\.\.(\w+)", frame)
            if where and "DW_CFA_undefined: r16" in frame:
                ranges.append((int(where[1], 16), int(where[2], 16)))
    if b"\xff Go buildinf:" in Path(path).read_bytes()[: 64 << 20]:
        for line in _run("nm", "-nS", path).splitlines():
            fields = line.split()
            if len(fields) == 4 and fields[3].removesuffix(".abi0") in GO_ROOTS:
                low = int(fields[0], 16)
                ranges.append((low, low + int(fields[1], 16)))
    return ranges


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
