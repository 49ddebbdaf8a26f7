# SPDX-License-Identifier: Apache-2.0
"""Figures of nodes over time for charts, and their summary for a list of nodes.

Besides the metrics that agents polled, three series are computed from samples and timed runs:
`sonde.cpu` (mean number of threads on a CPU, blocked, runnable: weights of samples divided by the
time), `sonde.device.busy` (mean number of runs on devices at a time: Horvitz-Thompson sums of the
timed runs) and `sonde.device.launches` (launches a second, estimated likewise).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from sonde.query.bounded import bounded, count_beyond
from sonde.query.selection import Selection, StoreTables
from sonde.query.stored import MAX_POINTS, MAX_ROWS, MAX_SERIES

SUMMARY = (
    *("hw.gpu.utilization", "sonde.gpu.sm.active", "sonde.gpu.tensor.active", "hw.power"),
    *("hw.gpu.memory.usage", "hw.gpu.memory.limit", "hw.temperature", "sonde.gpu.throttled"),
    *("hw.errors", "sonde.gpu.clock"),
)
"""Series that a list of nodes shows."""
_TICK_NS = 1_000_000_000
"""Shortest step of computed series: agents sum samples over a second."""
_OBSERVED = (
    "SELECT node, 'sonde.cpu' AS series, kind AS labels, time_ns, weight_ns AS amount FROM sample"
    " {sample} AND kind IN ('cpu', 'blocked', 'runqueue')"
    " UNION ALL SELECT node, 'sonde.device.busy', kind, start_time_ns,"
    " weight * (end_time_ns - start_time_ns) FROM device_run {run} AND kind <> 'sync'"
    " UNION ALL SELECT node, 'sonde.device.launches', '', start_time_ns, weight * 1000000000"
    " FROM device_run {run} AND kind IN ('kernel', 'replay')"
)


def charts(
    session: StoreTables, selection: Selection, names: Sequence[str], points: int = MAX_POINTS
) -> pa.Table:
    """Several series: node, series, labels, time_ns (of the step), value (mean), least, most.

    The selected time is divided into `points` equal steps, at most `MAX_POINTS`; those of computed
    series last at least a second. Of the metrics `names` the first `MAX_SERIES` series by node,
    name and labels are read; computed series have their kind as `labels`, and `least` and `most`
    equal to `value`.
    """
    points = max(1, min(points, MAX_POINTS))
    step = max(1, -(-(selection.end_ns - selection.start_ns) // points))
    clause, parameters = selection.sql(kind=False, process=False)
    marks = ", ".join("?" * len(names)) or "''"
    chosen = (
        f"SELECT node, series, labels, time_ns, value FROM metric {clause} AND series IN ({marks})"
    )
    metric = session.arrow(
        f"WITH chosen AS ({chosen}), "
        "listed AS (SELECT DISTINCT node, series, labels FROM chosen ORDER BY node, series, labels"
        f" LIMIT {MAX_SERIES}) "
        "SELECT node, series, labels, ? + (time_ns - ?) // ? * ? AS time_ns, avg(value) AS value,"
        " min(value) AS least, max(value) AS most FROM chosen JOIN listed"
        " USING (node, series, labels) GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4",
        [*parameters, *names, selection.start_ns, selection.start_ns, step, step],
    )
    if metric.num_rows >= MAX_SERIES:  # each series has a row at least
        each = f"SELECT DISTINCT node, series, labels FROM ({chosen}) AS chosen"
        count_beyond(session, each, [*parameters, *names], MAX_SERIES)
    observed = _observed(session, selection, max(step, _TICK_NS))
    return pa.concat_tables([metric, observed.cast(metric.schema)])


def _observed(session: StoreTables, selection: Selection, step: int) -> pa.Table:
    sample, of_sample = selection.sql(kind=False)
    run, of_run = selection.sql("start_time_ns", kind=False)
    rows = _OBSERVED.format(sample=sample, run=run)
    parameters: list[Any] = [*of_sample, *of_run, *of_run]
    return bounded(
        session,
        f"WITH seen AS ({rows}) SELECT node, series, labels,"
        " ? + (time_ns - ?) // ? * ? AS time_ns, sum(amount) / ? AS value,"
        " sum(amount) / ? AS least, sum(amount) / ? AS most FROM seen"
        " GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4",
        [*parameters, selection.start_ns, selection.start_ns, step, step, step, step, step],
        MAX_POINTS * MAX_SERIES,
    )


def devices(session: StoreTables, selection: Selection, limit: int = 10 * MAX_ROWS) -> pa.Table:
    """The series of `SUMMARY`, by node and labels, at most `limit`: node, series, labels, mean,
    least, most, last (the latest value)."""
    clause, parameters = selection.sql(kind=False, process=False)
    marks = ", ".join("?" * len(SUMMARY))
    return bounded(
        session,
        "SELECT node, series, labels, avg(value) AS mean, min(value) AS least, max(value) AS most,"
        f" max_by(value, time_ns) AS last FROM metric {clause} AND series IN ({marks})"
        " GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
        [*parameters, *SUMMARY],
        limit,
    )


def kernels(session: StoreTables, selection: Selection, limit: int = 50) -> pa.Table:
    """Runs on devices by kind and name, at most `limit`, those with most device time: kind, name,
    runs (estimated), ns, mean_ns, most_ns (longest), timed (runs whose time was measured)."""
    clause, parameters = selection.sql("start_time_ns", kind=False)
    return bounded(
        session,
        "SELECT kind, name, sum(weight) AS runs,"
        " sum(weight * (end_time_ns - start_time_ns)) AS ns,"
        " sum(weight * (end_time_ns - start_time_ns)) / sum(weight) AS mean_ns,"
        " max(end_time_ns - start_time_ns) AS most_ns, count(*) AS timed"
        f" FROM device_run {clause} AND kind <> 'sync' GROUP BY 1, 2"
        " ORDER BY 4 DESC, 1, 2",
        parameters,
        MAX_ROWS,
        limit,
    )
