# SPDX-License-Identifier: Apache-2.0
"""Threads of a record of which a timeline has only two sums each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OtherThreads:
    """A column each of all threads that were on a CPU and have no track, in no order."""

    ran_ns: F64
    """Time on a CPU, by samples."""
    queued_ns: F64
    """Time in a run queue."""

    def __len__(self) -> int:
        return len(self.ran_ns)


def no_other_threads() -> OtherThreads:
    """An empty table."""
    return OtherThreads(np.zeros(0), np.zeros(0))
