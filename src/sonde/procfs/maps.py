# SPDX-License-Identifier: Apache-2.0
"""/proc/PID/maps, read in pieces and within bounds, as its length is up to the process.

65,000 mappings of a file with a path of 4,000 bytes are 260 MB of text, which take the kernel more
than a second to write.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, Self

from sonde.procfs.held import HeldFile

MAX_MAPS_BYTES: Final = 32 << 20
"""Read of one /proc/PID/maps: 300,000 mappings with paths of common length."""
MAX_MAPS_CPU_S: Final = 0.5
"""CPU time of this thread between the first block of one and the last: what is done with them.
Reading is bounded in bytes, and for each block in time."""
MAX_LINE_BYTES: Final = 64 << 10
_BLOCK_BYTES: Final = 64 << 10


class MapsReader:
    """The lines of one /proc/PID/maps, in blocks, in order of address."""

    __slots__ = ("_cpu_s", "_file", "_most_bytes", "is_cut")

    def __init__(
        self,
        pid: int | str,
        most_bytes: int = MAX_MAPS_BYTES,
        most_cpu_s: float = MAX_MAPS_CPU_S,
    ) -> None:
        """Raises OSError where the process is gone, may not be looked at, or makes us wait."""
        self._file = HeldFile(f"/proc/{pid}/maps", first=min(_BLOCK_BYTES, most_bytes))
        self._most_bytes = most_bytes
        self._cpu_s = most_cpu_s
        self.is_cut = False
        """A bound was reached, and there is more than was read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def blocks(self) -> Iterator[bytes]:
        """Whole lines, some 64 KiB of them at a time. Raises OSError."""
        until_s = time.thread_time() + self._cpu_s
        left, rest = self._most_bytes, b""
        while piece := self._file.read(min(_BLOCK_BYTES, left)):
            block = rest + piece
            left -= len(block) - len(rest)
            end = block.rfind(b"\n") + 1
            rest = block[end:]
            if end:
                yield block[:end]
            if left <= 0 or len(rest) > MAX_LINE_BYTES or time.thread_time() >= until_s:
                self.is_cut = bool(rest or self._file.read(1))
                return

    def lines(self) -> Iterator[bytes]:
        """Line by line, without their ends. Raises OSError."""
        for block in self.blocks():
            # Not splitlines(): a carriage return in a path would begin a forged line.
            yield from block[:-1].split(b"\n")


def read_maps(pid: int) -> bytes | None:
    """The text of /proc/PID/maps as far as the bounds allow; b'' of a kernel thread, None where it
    cannot be read."""
    try:
        with MapsReader(pid) as reader:
            return b"".join(reader.blocks())
    except OSError:
        return None
