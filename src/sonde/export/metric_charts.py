# SPDX-License-Identifier: Apache-2.0
"""Metrics over time: one line of bars for each series, on the same clock as the profiles.

The bars are means over cells of equal length; counters are shown as rates. A cell without a
reading stays empty: that is a gap, not a zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sonde.export.layout import columns, size, three_digits
from sonde.metrics import Metric, catalogue
from sonde.model.answers import MetricSeries
from sonde.query import queries
from sonde.query.labels import attributes_of
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session

BARS = "▁▂▃▄▅▆▇█"
CELLS = 40
"""Bars of a chart."""
FIRST: dict[str, tuple[str, str]] = {
    "hw.gpu.utilization": ("busy", "general"),
    "sonde.gpu.sm.active": ("SMs active", ""),
    "sonde.gpu.dram.throughput": ("memory traffic", ""),
    "hw.power": ("power", ""),
    "sonde.gpu.pcie.throughput": ("PCIe in", "receive"),
}
"""What the summary shows: by series its title, and a value that an attribute of it must have (''
none)."""
DEVICES_SHOWN = 2
"""In the summary, which counts the others."""
UNSHOWN = frozenset({"sonde.gpu.info", "hw.gpu.memory.limit", "sonde.gpu.clock.limit"})
"""Constants of a device: a chart of them is of no use."""
_HEAD_WIDTHS = (21, CELLS, -9, -9, -9)


@dataclass(frozen=True, slots=True)
class MetricChart:
    """A series as a chart: means over cells of equal length, None for a gap."""

    name: str
    of: str
    """The device: 'gpu 0'; '' for series that belong to none."""
    about: tuple[str, ...]
    """Values of its other attributes."""
    unit: str
    cells: list[float | None]
    low: float
    mean: float
    high: float

    @property
    def top(self) -> float:
        """The value of a full bar: 1 for a ratio, else the greatest value."""
        return 1.0 if self.unit == "1" else self.high


def charts(
    session: Session, names: Sequence[str], where: Where = EVERYTHING, cells: int = CELLS
) -> list[MetricChart]:
    """Charts of the series of these names, over the recording or the part that `where` selects."""
    start_ns = where.start_ns or session.info.start_ns
    end_ns = where.end_ns or session.info.start_ns + session.info.duration_ns
    devices = _devices(session)
    found = []
    for one in queries.metric_series(session, names, where):
        metric = catalogue().get(one.series)
        if metric is not None and end_ns > start_ns:
            found += _chart(one, metric, devices, start_ns, end_ns, cells)
    return found


def _devices(session: Session) -> dict[str, str]:
    """Name of each device by its id; the index is the one that nvidia-smi shows."""
    infos = queries.metric_series(session, ["sonde.gpu.info"])
    known = [attributes_of(one.labels) for one in infos]
    return {
        one["hw.id"]: f"gpu {one['sonde.gpu.index']}"
        for one in known
        if "hw.id" in one and "sonde.gpu.index" in one
    }


def _chart(
    one: MetricSeries,
    metric: Metric,
    devices: Mapping[str, str],
    start_ns: int,
    end_ns: int,
    cells: int,
) -> list[MetricChart]:
    points = list(zip(one.times_ns, one.values, strict=True))
    if metric.monotonic:
        points = [
            (time_ns, (value - before) / ((time_ns - before_ns) / 1e9))
            for (before_ns, before), (time_ns, value) in pairwise(points)
            if time_ns > before_ns and value >= before
        ]
    if not points:
        return []
    sums, counts = [0.0] * cells, [0] * cells
    for time_ns, value in points:
        cell = min(cells - 1, max(0, (time_ns - start_ns) * cells // (end_ns - start_ns)))
        sums[cell] += value
        counts[cell] += 1
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    values = [value for _, value in points]
    attributes = attributes_of(one.labels)
    device = attributes.pop("hw.id", "")
    attributes.pop("hw.type", None)
    attributes.pop("sonde.process.start", None)
    return [
        MetricChart(
            name=one.series,
            of=devices.get(device, device),
            about=tuple(str(value) for value in attributes.values()),
            unit=f"{metric.unit}/s" if metric.monotonic else metric.unit,
            cells=_filled_between_readings(means, one.times_ns, (end_ns - start_ns) / cells),
            low=min(values),
            mean=sum(values) / len(values),
            high=max(values),
        )
    ]


def _filled_between_readings(
    means: list[float | None], times_ns: Sequence[int], cell_ns: float
) -> list[float | None]:
    """Fill cells without a reading with the value before, for 1.5 times the usual interval between
    two readings: cells may be shorter than that."""
    intervals = sorted(b - a for a, b in pairwise(times_ns))
    usual_ns = intervals[len(intervals) // 2] if intervals else 0
    reach = int(1.5 * usual_ns / cell_ns)
    filled, since = list(means), reach + 1
    for place, value in enumerate(means):
        since = 0 if value is not None else since + 1
        if value is None and 0 < since <= reach:
            filled[place] = filled[place - 1]
    return filled


def bars(cells: Sequence[float | None], top: float) -> str:
    """One character a cell, from 0 to `top`; a blank for a gap."""
    step = top / len(BARS) if top else 1.0
    return "".join(
        " " if value is None else BARS[min(len(BARS) - 1, max(0, int(value / step)))]
        for value in cells
    )


def amount(value: float, unit: str) -> str:
    """A value with its unit, for people."""
    if unit in ("1", "s/s"):
        return f"{100 * value:.1f} %"
    if unit.startswith("By"):
        return size(value) + unit.removeprefix("By")
    if unit == "Hz":
        return f"{value / 1e6:,.0f} MHz"
    per_second = "/s" if unit.endswith("/s") else ""
    word = {"Cel": "°C", "J/s": "W"}.get(unit, per_second if unit.startswith("{") else unit)
    number = three_digits(value) if value >= 1 else f"{value:.2g}"
    return f"{number} {word}".rstrip()


def summary(session: Session, where: Where = EVERYTHING) -> list[str]:
    """A few lines for the summary; none where no device reported a metric."""
    found = [
        one
        for one in charts(session, list(FIRST), where)
        if not FIRST[one.name][1] or FIRST[one.name][1] in one.about
    ]
    if not found:
        return []
    order = list(FIRST)
    devices = sorted({one.of for one in found})
    shown = [one for one in found if one.of in devices[:DEVICES_SHOWN]]
    rows = [
        (
            f"  {FIRST[one.name][0]}" + (f" ({one.of})" if len(devices) > 1 else ""),
            bars(one.cells, one.top),
            *(amount(value, one.unit) for value in (one.low, one.mean, one.high)),
        )
        for one in sorted(shown, key=lambda one: (one.of, order.index(one.name)))
    ]
    head = ("GPU METRICS", "", "min", "mean", "max")
    lines = columns([head, *rows], _HEAD_WIDTHS)
    if len(devices) > DEVICES_SHOWN:
        lines.append(f"  {len(devices) - DEVICES_SHOWN} more devices: --format table")
    return lines


def table(session: Session, where: Where, limit: int) -> list[str]:
    """Charts of all series of devices, of processes on them, and of the host."""
    found = all_charts(session, where)
    if not found:
        return []
    rows = [
        (
            one.name,
            ", ".join((one.of, *one.about)) if one.of else ", ".join(one.about),
            bars(one.cells, one.top),
            *(amount(value, one.unit) for value in (one.low, one.mean, one.high)),
        )
        for one in (found[:limit] if limit else found)
    ]
    head = ("METRICS", "of", "", "min", "mean", "max")
    lines = columns([head, *rows], (28, 28, CELLS, -9, -9, -9))
    if limit and len(found) > limit:
        lines.append(f"… {len(found) - limit:,} more: --limit 0 shows all")
    return lines


def all_charts(session: Session, where: Where = EVERYTHING) -> list[MetricChart]:
    """Charts of all series of devices, processes on them and the host that were ever not 0."""
    groups = ("device", "process", "host")
    names = [one.name for one in catalogue().values() if one.group in groups]
    wanted = [name for name in names if name not in UNSHOWN]
    found = [one for one in charts(session, wanted, where) if one.high or one.low]
    place = {name: number for number, name in enumerate(catalogue())}
    return sorted(found, key=lambda one: place[one.name])  # devices first
