# SPDX-License-Identifier: Apache-2.0
"""The rows of `device_run` of a capture, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.model.timeline import F64, I32, I64
from sonde.query.capture import Capture
from sonde.query.columns import int64_column


@dataclass(frozen=True, slots=True)
class RunColumns:
    """Rows of `device_run`; each array has one entry for each row."""

    start_ns: I64
    end_ns: I64
    name: I32
    """Index into `names`, as `kind` into `kinds`."""
    kind: I32
    pid: I64
    device: I64
    stream: I64
    weight: F64
    names: list[str]
    kinds: list[str]

    def __len__(self) -> int:
        return len(self.start_ns)


def no_runs() -> RunColumns:
    """Columns of no rows."""
    none = np.array([], np.int64)
    return RunColumns(
        none, none, none.astype(np.int32), none.astype(np.int32), none, none, none,
        none.astype(np.float64), [], [],
    )  # fmt: skip


def run_columns(capture: Capture) -> RunColumns:
    """The columns of a capture's `device_run`."""
    runs = capture.tables["device_run"]
    names = runs.column("name").combine_chunks()
    kinds = runs.column("kind").combine_chunks()
    return RunColumns(
        start_ns=int64_column(runs, "start_time_ns"),
        end_ns=int64_column(runs, "end_time_ns"),
        name=names.indices.to_numpy(),
        kind=kinds.indices.to_numpy(),
        pid=int64_column(runs, "pid"),
        device=int64_column(runs, "device"),
        stream=int64_column(runs, "stream"),
        weight=runs.column("weight").to_numpy(),
        names=names.dictionary.to_pylist(),
        kinds=kinds.dictionary.to_pylist(),
    )
