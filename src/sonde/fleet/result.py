# SPDX-License-Identifier: Apache-2.0
"""A release: estimates with error bars and their privacy guarantee, as table, CSV or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sonde.errors import UsageError
from sonde.fleet.buckets import BucketSpace
from sonde.fleet.noise import format_rounded_up
from sonde.fleet.task import Task
from sonde.private_files import replacing

CONFIDENCE = 0.95
"""Of the interval around a count that its `error` describes."""


@dataclass(frozen=True)
class Row:
    """One bucket: the noised count of samples, half the width of the noise's 95 % interval, and its
    share of all samples.
    """

    bucket: int
    application: str
    kernel: str
    activity: str
    count: int
    error: float
    share: float


@dataclass(frozen=True)
class Result:
    """A release of the batch of `duration_s` that began at `start_s` (since 1970). `epsilon` is per
    unit of privacy; None: that unit is not protected.

    `budget` is the epsilon that may be spent in a year. `deviation` is the standard deviation of a
    bucket's noise, in samples.
    """

    task: str
    start_s: int
    duration_s: int
    unit: str
    epsilon: dict[str, float | None]
    delta: float
    budget: float
    deviation: float
    rows: list[Row]

    def top(self, count: int) -> list[Row]:
        """The rows with the most samples, the largest first."""
        return sorted(self.rows, key=lambda row: -row.count)[:count]

    def privacy_guarantee(self) -> str:
        """The privacy guarantee as text: epsilon per unit, and delta. Shown wherever a result
        is.
        """

        def of_unit(unit: str) -> str:
            epsilon = self.epsilon[unit]
            return (
                f"ε = {format_rounded_up(epsilon)} per {unit}"
                if epsilon is not None
                else f"no ε per {unit}"
            )

        units = sorted(self.epsilon, key=lambda unit: unit != self.unit)
        return f"{', '.join(of_unit(unit) for unit in units)} (δ = {format_rounded_up(self.delta)})"


def make_result(
    task: Task, start_s: int, counts: Sequence[int], epsilon: dict[str, float | None]
) -> Result:
    """The release with these noised counts, one per bucket, and these costs per unit of privacy."""
    space = BucketSpace.of_task(task)
    error = task.mechanism.half_width(CONFIDENCE)
    total = max(1, sum(counts))
    rows = []
    for bucket, count in enumerate(counts):
        application, kernel, activity = space.label(bucket)
        rows.append(Row(bucket, application, kernel, activity, count, error, count / total))
    return Result(
        task.name,
        start_s,
        task.release_s,
        task.privacy.unit,
        epsilon,
        task.privacy.delta,
        task.privacy.budget,
        task.mechanism.deviation(),
        rows,
    )


def to_table(result: Result, count: int = 20) -> str:
    """The largest buckets as a text table, with error bars."""
    when = datetime.fromtimestamp(result.start_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        f"{result.task}: {result.duration_s / 3600:g} h from {when}",
        f"privacy: {result.privacy_guarantee()}",
        "",
        f"{'application':<20} {'kernel':<20} {'activity':<9} "
        f"{'samples':>10} {'± 95 %':>8} {'share':>7}",
    ]
    for row in result.top(count):
        mark = "" if row.count > row.error else "  (within the noise)"
        lines.append(
            f"{row.application:<20} {row.kernel:<20} {row.activity:<9} {row.count:>10} "
            f"{row.error:>8.1f} {row.share:>7.2%}{mark}"
        )
    return "\n".join(lines)


_COLUMNS = ("bucket", "application", "kernel", "activity", "count", "error", "share")


def to_csv(result: Result) -> str:
    """All buckets as CSV. The first line is a comment with the privacy guarantee, so that each copy
    includes it.
    """
    out = io.StringIO()
    out.write(
        f"# {result.task} from {result.start_s} for {result.duration_s} s; "
        f"{result.privacy_guarantee()}\n"
    )
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in result.rows:
        writer.writerow([getattr(row, name) for name in _COLUMNS])
    return out.getvalue()


def write(result: Result, path: Path) -> None:
    """Writes Parquet or CSV, by the file name's suffix (`page` renders HTML). Raises UsageError,
    SinkError.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise UsageError(f"unknown kind of file: {path.name}", "end it in .csv or .parquet")
    content = to_csv(result).encode() if path.suffix == ".csv" else to_parquet(result)
    with replacing(path) as out:
        out.write(content)


def to_parquet(result: Result) -> bytes:
    """All buckets as Parquet, with the privacy guarantee in the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [getattr(row, name) for row in result.rows] for name in _COLUMNS}
    table = pa.table(columns).replace_schema_metadata(
        {
            "sonde.fleet.task": result.task,
            "sonde.fleet.start_s": str(result.start_s),
            "sonde.fleet.duration_s": str(result.duration_s),
            "sonde.fleet.privacy": result.privacy_guarantee(),
        }
    )
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()
