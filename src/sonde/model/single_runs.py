# SPDX-License-Identifier: Apache-2.0
"""Runs on devices that were sampled one by one, in columns: one of each block of launches."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SingleRuns:
    """Each row is a run that was timed; it stands for `weight` runs of its thread and kind.

    All columns have one entry for each run.
    """

    start_ns: NDArray[np.int64]
    """When the host enqueued the run."""
    length_ns: NDArray[np.int64]
    """On the device, without the time slices of another process that held it up."""
    weight: NDArray[np.float64]
    track: NDArray[np.int32]
    """The thread that launched it, index into `Timeline.tracks`."""
    name: NDArray[np.int32]
    """Index into `Timeline.names`."""
    call: NDArray[np.uint8]
    """`CallKind` of the call that launched it."""
    stream: NDArray[np.int64]
    """Different numbers for different streams of a process."""
    direction: NDArray[np.uint8]
    """`CopyDirection` of a copy."""
    bytes: NDArray[np.int64]
    """Moved by a copy."""

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> SingleRuns:
        """The selected rows: by a mask with one entry for each, or by their indices."""
        return SingleRuns(*(getattr(self, one.name)[rows] for one in fields(self)))


def no_single_runs() -> SingleRuns:
    """An empty table."""
    none = np.zeros(0, np.int64)
    small, code = none.astype(np.int32), none.astype(np.uint8)
    return SingleRuns(none, none, none.astype(np.float64), small, small, code, none, code, none)
