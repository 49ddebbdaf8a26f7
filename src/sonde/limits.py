# SPDX-License-Identifier: Apache-2.0
"""How much memory a file of somebody else's may take once it is unpacked.

A few kilobytes can unpack to any size. So each reader of files (captures, traces, profiles) spends
from one budget before it takes memory, and ends with a clear error where that is used up. It is
half of the machine's memory, 4 GB at the most; SONDE_READ_LIMIT sets another.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from sonde.errors import CaptureTooLarge, UsageError

VARIABLE = "SONDE_READ_LIMIT"
USUAL_BYTES = 4 << 30
FREE_BYTES = 64 << 20
"""What unpacks to no more than this may have any ratio."""
RATIO = 512
"""Above that, unpacked bytes for each packed one. Captures reach 40, traces 60."""

MOST_NAME_CHARS = 16_384
"""Of a name or path as it is read; the rest is cut off, counted and reported. Compilers make names
of some kilobytes; the longest so far has some 20,000 characters."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def most_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """The limit for one file. Raises UsageError for a value that is no size."""
    told = environ.get(VARIABLE, "")
    if not told:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(USUAL_BYTES, memory // 2) if memory > 0 else USUAL_BYTES
    found = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", told.strip(), re.IGNORECASE | re.ASCII)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not size:
        raise UsageError(f"{VARIABLE} is {told!r}", f"give a size, as {VARIABLE}=8G")
    return size


def text_bytes(text: str) -> int:
    """Memory that Python takes for a text: up to four bytes a character, by the widest of them."""
    return sys.getsizeof(text)


def shortened(text: str) -> str:
    """A name, cut to what is kept of one."""
    return text if len(text) <= MOST_NAME_CHARS else text[: MOST_NAME_CHARS - 1] + "…"


def is_plausible(unpacked_bytes: int, packed_bytes: int) -> bool:
    """Whether data of our kind can be packed so well."""
    return unpacked_bytes <= max(FREE_BYTES, RATIO * packed_bytes)


class Budget:
    """The memory that one file may take."""

    def __init__(self, name: str, packed_bytes: int, limit_bytes: int | None = None) -> None:
        """`name`: the file's, for messages; `packed_bytes`: its size on the disk."""
        self.name = name
        self.packed_bytes = packed_bytes
        self.limit_bytes = most_bytes() if limit_bytes is None else limit_bytes
        self.unpacked_bytes = 0
        """In all, also what was let go of since."""
        self.held_bytes = 0

    def unpack(self, count_bytes: int) -> None:
        """Account for bytes about to be unpacked and held. Raises CaptureTooLarge."""
        self.pass_on(count_bytes)
        self.hold(count_bytes)

    def pass_on(self, count_bytes: int) -> None:
        """Account for bytes that are unpacked and not held. Raises CaptureTooLarge."""
        self.unpacked_bytes += count_bytes
        if not is_plausible(self.unpacked_bytes, self.packed_bytes):
            raise CaptureTooLarge(
                f"{self.name} unpacks to more than {RATIO} times its {self.packed_bytes:,} bytes: "
                "no recording does",
                "get it again from its source, or record again",
            )

    def hold(self, count_bytes: int) -> None:
        """Account for memory about to be taken; negative: given back. Raises CaptureTooLarge."""
        self.held_bytes += count_bytes
        if self.held_bytes > self.limit_bytes:
            raise CaptureTooLarge(
                f"{self.name} takes more than {self.limit_bytes / 1e9:.3g} GB of memory to read",
                f"record for a shorter time, or allow more: {VARIABLE}=16G",
            )
