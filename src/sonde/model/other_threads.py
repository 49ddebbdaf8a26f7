# SPDX-License-Identifier: Apache-2.0
"""Threads of a record of which a timeline has only two sums each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OtherThreads:
    """A column each of all threads that were on a CPU and have no track, in no order."""

    ran_ns: F64
    """Time on a CPU, by samples."""
    queued_ns: F64
    """Time in a run queue."""
    pid: I64
    processes: Mapping[int, str] = field(default_factory=dict)
    """By pid, what each runs, as `Track.process`."""

    def __len__(self) -> int:
        return len(self.ran_ns)


def no_other_threads() -> OtherThreads:
    """An empty table."""
    return OtherThreads(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
