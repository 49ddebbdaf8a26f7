# SPDX-License-Identifier: Apache-2.0
"""The load bias of mapped ELF files."""

from __future__ import annotations

from collections.abc import Sequence

from sonde._native import ExecutableSegment
from sonde.resolve.mappings import Mapping


def load_bias(mapping: Mapping, segments: Sequence[ExecutableSegment]) -> int | None:
    """Mapped address less linked address; None where no executable segment is mapped there."""
    end = mapping.offset + mapping.end - mapping.start
    for segment in segments:
        if segment.offset < end and mapping.offset < segment.offset + segment.size:
            return mapping.start - (segment.address + mapping.offset - segment.offset)
    return None
