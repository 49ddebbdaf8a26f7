# SPDX-License-Identifier: Apache-2.0
"""The executable segments of ELF files, and the load bias of their mappings."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from sonde.resolve.mappings import Mapping

_MAX_HEADERS: Final = 256
_PT_LOAD: Final = 1
_PF_X: Final = 1


class Segment(NamedTuple):
    """An executable PT_LOAD segment."""

    offset: int
    """In the file."""
    address: int
    """As linked."""
    size: int
    """In memory."""


def executable_segments(fd: int) -> tuple[Segment, ...]:
    """The executable segments of a 64-bit ELF file (elf(5)); empty where they cannot be read."""
    try:
        header = os.pread(fd, 64, 0)
        at, size, count = (
            struct.unpack_from(layout, header, offset)[0]
            for layout, offset in (("<Q", 32), ("<H", 54), ("<H", 56))
        )
        raw = os.pread(fd, size * min(count, _MAX_HEADERS), at)
        found = []
        for start in range(0, len(raw) - 55, size or 56):
            kind, flags, offset, address, _, length = struct.unpack_from("<IIQQQQ", raw, start)
            if kind == _PT_LOAD and flags & _PF_X:
                found.append(Segment(offset, address, length))
    except (OSError, struct.error):
        return ()
    return tuple(found)


def load_bias(mapping: Mapping, segments: Sequence[Segment]) -> int | None:
    """Difference between mapped and linked addresses; None where no segment is mapped there."""
    end = mapping.offset + mapping.end - mapping.start
    for segment in segments:
        if segment.offset < end and mapping.offset < segment.offset + segment.size:
            return mapping.start - (segment.address + mapping.offset - segment.offset)
    return None
