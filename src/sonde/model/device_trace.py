# SPDX-License-Identifier: Apache-2.0
"""A trace of all that a process asked of its devices: every kernel, copy, set and call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Kind(IntEnum):
    """What a row is of; numbers of `enum inject_traced_kind`."""

    KERNEL = 1
    COPY = 2
    SET = 3
    RUNTIME = 4
    DRIVER = 5


DEVICE_KINDS = (Kind.KERNEL, Kind.COPY, Kind.SET)
CALL_KINDS = (Kind.RUNTIME, Kind.DRIVER)


@dataclass(frozen=True, slots=True)
class RawTrace:
    """What a process left: copied once, not checked but for its size."""

    head: Mapping[str, int]
    """The fields of `struct inject_trace`."""
    records: bytes
    record_bytes: int
    fields: Mapping[str, tuple[int, str]]
    """Of a record: offset, and type as in the module `struct`."""
    names: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """Checked rows of one trace."""

    pid: int
    start_ns: int
    """CLOCK_MONOTONIC; begin of the trace."""
    end_ns: int
    wall_offset_ns: int
    """Add it to a time to get that of the wall."""
    rows: NDArray[Any]
    """Structured, ordered by start: `start_ns`, `end_ns` (CLOCK_MONOTONIC), `node`, `bytes`,
    `correlation`, `name`, `device`, `stream`, `graph`, `tid` (as this machine numbers it),
    `result`, `kind` (`Kind`), `direction`, `memory`, `grid_0` … `block_2`, `registers`,
    `shared_bytes`."""
    names: Mapping[int, str]
    """By `rows["name"]`; kernels demangled."""
    is_cut: bool
    """It ended early: another profiler came, or it was called off."""
    lost: Mapping[str, int]
    """What is missing, by the reason."""
    clock_error_ns: int = 0
    """By how much the device's clock and the host's drifted apart over the trace."""

    def of(self, *kinds: Kind) -> NDArray[Any]:
        """The rows of these kinds."""
        kind = self.rows["kind"]
        chosen: NDArray[np.bool_] = kind == kinds[0]
        for other in kinds[1:]:
            chosen = chosen | (kind == other)
        return self.rows[chosen]

    def count(self, *kinds: Kind) -> int:
        """How many rows of these kinds there are."""
        return len(self.of(*kinds))
