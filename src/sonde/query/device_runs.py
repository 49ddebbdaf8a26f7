# SPDX-License-Identifier: Apache-2.0
"""Runs on devices (kernels, copies, fills, graphs): estimates from the runs that were timed.

Each run is sampled with probability 1 / weight, singly or with all others of its window, so
sums of weights are unbiased (Horvitz and Thompson 1952). For single runs the variance of a sum of
weight * d is estimated by the sum of weight * (weight - 1) * d * d; for windows, which are sampled
whole, from the variance between the totals of windows.
"""

from __future__ import annotations

from sonde.model.answers import DeviceRuns
from sonde.model.profile import BASIC_KINDS, MEMORY_KINDS, ProfileKind
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session

NORMAL_95 = 1.96
"""Times the standard deviation: half the width of a 95 % confidence interval."""


def kinds_seen(session: Session) -> tuple[ProfileKind, ...]:
    """The kinds of profile that a report of this capture shows by default."""
    seen: tuple[ProfileKind, ...] = BASIC_KINDS
    if session.rows("SELECT 1 FROM device_run LIMIT 1"):
        seen += (ProfileKind.GPU_TIME,)
    if session.rows("SELECT 1 FROM sample WHERE kind IN ('mapped', 'faulted') LIMIT 1"):
        seen += MEMORY_KINDS
    return seen


def device_runs(session: Session, where: Where = EVERYTHING) -> list[DeviceRuns]:
    """Totals by process, kind and name, longest first; without host waits for a device."""
    # `Where` filters by `time_ns`, which rows of `device_run` do not have.
    clause, parameters = where.sql()
    clause = clause.replace("time_ns", "start_time_ns")
    rows = session.rows(
        "WITH run AS ("
        ' SELECT process, kind, name, source, weight AS w, "window", device, stream, bytes,'
        " CAST(end_time_ns - start_time_ns AS DOUBLE) AS d"
        f" FROM (SELECT * FROM device_run WHERE kind <> 'sync') {clause}), "
        "part AS ("
        ' SELECT process, kind, name, "window",'
        " sum(w * d) AS ns, sum(w * (w - 1) * d * d) AS own"
        ' FROM run GROUP BY process, kind, name, "window"), '
        "spread AS ("
        " SELECT process, kind, name,"
        ' sum(CASE WHEN "window" = 0 THEN own ELSE 0 END) AS own,'
        ' count(*) FILTER (WHERE "window" > 0) AS n,'
        ' coalesce(var_samp(ns) FILTER (WHERE "window" > 0), 0) AS between_windows'
        " FROM part GROUP BY process, kind, name), "
        "total AS ("
        " SELECT process, kind, name, string_agg(DISTINCT source, '+') AS sources,"
        " count(*) AS timed, sum(w) AS n, sum(w * d) AS ns, sum(w * bytes) AS bytes,"
        " quantile_cont(d, 0.5) AS p50, quantile_cont(d, 0.99) AS p99,"
        " count(DISTINCT device) AS devices, count(DISTINCT stream) AS streams"
        " FROM run GROUP BY process, kind, name) "
        "SELECT t.process, t.kind, t.name, t.sources, t.timed, t.n, t.ns,"
        # A weight below 1, which no recorder writes, would make the variance negative.
        " sqrt(greatest(0, s.own + s.n * s.between_windows)),"
        " t.p50, t.p99, t.bytes, t.devices, t.streams "
        "FROM total t JOIN spread s"
        " ON t.process = s.process AND t.kind = s.kind AND t.name = s.name "
        "ORDER BY t.ns DESC, t.process, t.kind, t.name",
        parameters,
    )
    return [
        DeviceRuns(
            session.processes[process],
            kind,
            name,
            sources,
            timed,
            round(count),
            round(ns),
            round(NORMAL_95 * sigma_ns),
            round(p50),
            round(p99),
            round(moved),
            devices,
            streams,
        )
        for (
            process, kind, name, sources, timed, count, ns, sigma_ns, p50, p99, moved,
            devices, streams,
        ) in rows
    ]  # fmt: skip
