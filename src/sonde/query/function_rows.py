# SPDX-License-Identifier: Apache-2.0
"""Functions and their weights, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sonde.model.answers import FunctionUse
from sonde.query.row_sequence import RowSequence, rounded_sum
from sonde.query.session import Session

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class FunctionRows(RowSequence[FunctionUse]):
    """Uses of functions, in the order of their numbers."""

    def __init__(
        self, session: Session, numbers: Ints, frames: Ints, sums: Sequence[Floats]
    ) -> None:
        """`numbers`: indices in `session.functions`; `frames`: the frame of the user's code of each
        (`function_locations`); `sums`: the six weights of `FunctionUse`, not rounded."""
        self._session = session
        self.has_locations = bool((frames >= 0).any())
        self._self_ns = sums[1]
        super().__init__(self._use, (numbers, frames, *sums))

    @property
    def self_ns_in_all(self) -> int:
        """Self time of all rows, each rounded."""
        return rounded_sum(self._self_ns)

    def _use(self, number: int, frame: int, *weights: float) -> FunctionUse:
        name, binary, file = self._session.functions[number]
        count, ns, size, all_count, all_ns, all_size = map(round, weights)
        location = self._session.stacks.frames[frame].location if frame >= 0 else ""
        return FunctionUse(
            name, binary, file, count, ns, size, all_count, all_ns, all_size, location
        )
