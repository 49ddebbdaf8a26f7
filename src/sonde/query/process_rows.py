# SPDX-License-Identifier: Apache-2.0
"""What each process did, as columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.model.answers import ProcessUse
from sonde.query.columns import int64_column
from sonde.query.row_sequence import RowSequence, rounded_sum
from sonde.query.session import Session

Floats = npt.NDArray[np.float64]

_WEIGHTS = ("samples", "cpu_ns", "blocked_ns", "runqueue_ns", "device_calls", "device_ns")


class ProcessRows(RowSequence[ProcessUse]):
    """Uses of processes, in the order of the rows."""

    def __init__(self, session: Session, rows: pa.Table) -> None:
        """`rows`: process, threads and the sums of `_WEIGHTS`, which are floats."""
        self._session = session
        self.process = int64_column(rows, "process")
        """Indices in `Session.processes`."""
        threads = int64_column(rows, "threads")
        weights = {name: rows.column(name).to_numpy() for name in _WEIGHTS}
        self.cpu_ns: Floats = weights["cpu_ns"]
        self.runqueue_ns: Floats = weights["runqueue_ns"]
        self.device_calls: Floats = weights["device_calls"]
        """Neither is rounded, as the rows are."""
        self.cpu_samples_in_all = rounded_sum(weights["samples"])
        self.cpu_ns_in_all = rounded_sum(self.cpu_ns)
        self.device_calls_in_all = rounded_sum(self.device_calls)
        super().__init__(self._use, (self.process, threads, *weights.values()))

    def _use(self, process: int, threads: int, *weights: float) -> ProcessUse:
        return ProcessUse(self._session.processes[process], threads, *map(round, weights))
