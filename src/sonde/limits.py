# SPDX-License-Identifier: Apache-2.0
"""Limits the memory that an untrusted file may use once it is decompressed.

A few kilobytes can decompress to any size. So each reader of files (captures, traces, profiles)
accounts for memory in a budget before it allocates, and ends with a clear error where the budget is
exceeded. It is half of the machine's memory, at most 4 GB; SONDE_READ_LIMIT sets another limit.

Names in such files and of profiled code are cut where they are too long, alone or all together.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping

from sonde.errors import CaptureTooLarge, UsageError

VARIABLE = "SONDE_READ_LIMIT"
DEFAULT_LIMIT_BYTES = 4 << 30
FREE_BYTES = 64 << 20
"""Up to this decompressed size any compression ratio is allowed."""
RATIO = 512
"""Greatest compression ratio above that. Captures reach 40, traces 60."""

MAX_NAME_CHARS = 16_384
"""Names and paths are cut to this length; readers count and report the cuts. Compilers make names
of kilobytes; the longest known one has some 20,000 characters."""

JSON_BYTES = 52
"""Memory of JSON at most while it is decoded, for each byte of it: lists within lists take 44 bytes
for each, and the text itself four where one character of it is wide."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def most_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """The limit for one file. Raises UsageError for an invalid SONDE_READ_LIMIT."""
    text = environ.get(VARIABLE, "")
    if not text:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(DEFAULT_LIMIT_BYTES, memory // 2) if memory > 0 else DEFAULT_LIMIT_BYTES
    found = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", text.strip(), re.IGNORECASE | re.ASCII)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not size:
        raise UsageError(f"{VARIABLE} is {text!r}", f"set a size, for example {VARIABLE}=8G")
    return size


def text_bytes(text: str) -> int:
    """Memory of a Python string: one to four bytes per character, by the widest character."""
    return sys.getsizeof(text)


def shortened(text: str) -> str:
    """A name, cut to `MAX_NAME_CHARS`."""
    return text if len(text) <= MAX_NAME_CHARS else text[: MAX_NAME_CHARS - 1] + "…"


def common_length(sizes: Iterable[int], most: int) -> int:
    """The greatest length L such that the sum of `min(size, L)` is at most `most`: only the longest
    are cut, all to one length. The greatest size where all fit; 0 of none."""
    left, rest = most, sorted(sizes)
    for number, size in enumerate(rest):
        part = left // (len(rest) - number)
        if size > part:
            return part
        left -= size
    return rest[-1] if rest else 0


def cut(text: str, most: int) -> str:
    """A text of at most `most` bytes (UTF-8), which ends with a mark where it was cut."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= most:
        return text
    return raw[: max(0, most - len("…".encode()))].decode("utf-8", "ignore") + "…"


def is_plausible(unpacked_bytes: int, packed_bytes: int) -> bool:
    """Whether such a compression ratio is possible for the files that Sonde reads."""
    return unpacked_bytes <= max(FREE_BYTES, RATIO * packed_bytes)


class Budget:
    """The memory that one file may use, and how much of it is used."""

    def __init__(self, name: str, packed_bytes: int, limit_bytes: int | None = None) -> None:
        """`name`: of the file, for messages; `packed_bytes`: its size on disk."""
        self.name = name
        self.packed_bytes = packed_bytes
        self.limit_bytes = most_bytes() if limit_bytes is None else limit_bytes
        self.unpacked_bytes = 0
        """Decompressed so far, including memory that was freed since."""
        self.held_bytes = 0
        """In use now."""

    def unpack(self, count_bytes: int) -> None:
        """Account for bytes about to be decompressed and kept. Raises CaptureTooLarge."""
        self.pass_on(count_bytes)
        self.hold(count_bytes)

    def pass_on(self, count_bytes: int) -> None:
        """Account for bytes that are decompressed but not kept. Raises CaptureTooLarge."""
        self.unpacked_bytes += count_bytes
        if not is_plausible(self.unpacked_bytes, self.packed_bytes):
            raise CaptureTooLarge(
                f"{self.name} unpacks to more than {RATIO} times its {self.packed_bytes:,} bytes: "
                "no recording does",
                "get it again from its source, or record again",
            )

    def hold(self, count_bytes: int) -> None:
        """Account for memory about to be used; negative: freed. Raises CaptureTooLarge."""
        self.held_bytes += count_bytes
        if self.held_bytes > self.limit_bytes:
            raise CaptureTooLarge(
                f"{self.name} takes more than {self.limit_bytes / 1e9:.3g} GB of memory to read",
                f"record for a shorter time, or allow more: {VARIABLE}=16G",
            )
