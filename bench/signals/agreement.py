# SPDX-License-Identifier: Apache-2.0
"""Do the figures agree with what was done, and with nvidia-smi's?

`python -m bench.signals.agreement OUT` reads what `python -m bench.signals OUT` left there, prints
a table and writes agreement.json.

A figure agrees with dmon where each of dmon's rows, one a second and in whole units, lies between
the least and the most that Sonde saw from one second before that second to one after it, give or
take one unit: the second is that of its clock, cut, and what either was given may be a second old.
Rates are summed up and held to the bytes that the load moved; PCIe is counted on the wire, so once
as it is (for information) and once without the headers of its packets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.signals.recording import (
    DIRECTIONS,
    EDGE_NS,
    HEADERS,
    LoadRecording,
    Points,
    Rows,
    column,
    integral,
    mean,
)
from sonde.errors import SondeError

SECOND_NS = 1_000_000_000
MIB = 2.0**20
BYTES_BOUND = 0.05
ENERGY_BOUND = 0.05
"""dmon's power, an average of the driver's, is asked each second; loads change within that."""
MEMORY_BOUND = 0.02
"""Of two tenants: the driver holds some memory that it counts on nobody."""
ENERGY_AGE_S = 13.0
"""A page's energy is at most so old: asked each ten seconds, read when somebody asks."""
GENERAL = {"hw__gpu__task": "general"}
CORE = {"hw__type": "gpu", "hw__sensor_location": "gpu"}
HBM = {"hw__type": "gpu", "hw__sensor_location": "memory"}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    figure: str
    where: str
    peer: str
    truth: float
    seen: float
    unit: str
    difference: str
    bound: str
    holds: bool | None
    """None where it is for information."""


@dataclass(frozen=True)
class Figure:
    """What both report: dmon's column, our series, and the factor from our unit to its."""

    name: str
    unit: str
    column: str
    series: str
    attributes: dict[str, str]
    scale: float


FIGURES = (
    Figure("utilization", "%", "sm", "hw.gpu.utilization", GENERAL, 100),
    Figure("memory controller", "%", "mem", "sonde.gpu.memory.busy", {}, 100),
    Figure("SM clock", "MHz", "pclk", "sonde.gpu.clock", {"sonde__gpu__clock__domain": "sm"}, 1e-6),
    Figure("memory clock", "MHz", "mclk", "sonde.gpu.clock",
        {"sonde__gpu__clock__domain": "memory"}, 1e-6),
    Figure("power", "W", "pwr", "hw.power", {}, 1),
    Figure("temperature", "°C", "gtemp", "hw.temperature", CORE, 1),
    Figure("temperature of memory", "°C", "mtemp", "hw.temperature", HBM, 1),
    Figure("memory used", "MiB", "fb", "hw.gpu.memory.usage", {}, 1 / MIB),
)  # fmt: skip


def loads(recording: LoadRecording, dmon: Rows) -> list[Row]:
    """The phases of a recorded load."""
    rows: list[Row] = []
    for phase in recording.phases:
        for one in FIGURES:
            rows += _or_missing(one.name, phase, lambda: [_beside(recording, dmon, phase, one)])  # noqa: B023
    rows += _or_missing("DRAM", "stream", lambda: [_dram(recording)])
    for phase in DIRECTIONS:
        rows += _or_missing("PCIe", phase, lambda: _recorded_pcie(recording, phase))  # noqa: B023
    rows += [_calls(recording, phase) for phase in DIRECTIONS]
    return [*rows, *_or_missing("energy", "all phases", lambda: [_energy(recording, dmon)])]


def tenants(recording: LoadRecording) -> list[Row]:
    """Two processes on one device: what is reported of each, summed up, beside the device's."""
    phases = recording.phases
    start_ns = max(one["start_ns"] for one in phases) + EDGE_NS
    end_ns = min(one["end_ns"] for one in phases) - EDGE_NS

    def mean_of(series: str, **wanted: str) -> float:
        attributes = {name.replace("__", "."): value for name, value in wanted.items()}
        found = [mean(points, start_ns, end_ns) for points in recording.each(series, attributes)]
        return sum(value for value in found if value == value)

    held, device = mean_of("sonde.process.gpu.memory"), mean_of("hw.gpu.memory.usage")
    used = 100 * mean_of("sonde.process.gpu.utilization", sonde__gpu__engine="sm")
    active = 100 * mean_of("sonde.gpu.graphics.active")
    general = 100 * mean_of("hw.gpu.utilization", **GENERAL)
    return [
        _share("memory of processes", "tenants", "the device's", device, held, "B", MEMORY_BOUND),
        _share("use by processes", "tenants", "GPM's", active, used, "%", BYTES_BOUND),
        # The driver's samples of single moments, asked ten times a second: for information.
        _share("use by processes", "tenants", "the device's", general, used, "%", None),
    ]


def page(watched: Any) -> list[Row]:
    """An agent that only serves a page: its counters over each load. `watched` as
    `bench.signals.page` writes it."""
    scrapes, rows = watched["scrapes"], []
    for number, load in enumerate(watched["loads"]):
        direction, where = (
            DIRECTIONS.get(load["name"], ""),
            f"{load['name']}, each {load['pace_s']:g} s",
        )
        later = [*watched["loads"][number + 1 :], {"start_ns": float("inf")}][0]
        before = _last(scrapes, load["start_ns"])
        after = _last(scrapes, later["start_ns"])
        if direction:
            seen = _counted(after, direction) - _counted(before, direction)
            rows += _pcie(f"page: {where}", direction, load["bytes"], seen)
            seen = _called(after, direction) - _called(before, direction)
            rows.append(_exact("bytes of device calls", f"page: {where}", load["bytes"], seen))
        else:
            seconds = (load["end_ns"] - load["start_ns"]) / 1e9
            at_end = _last(scrapes, load["end_ns"] + SECOND_NS)
            seen = _value(at_end, "sonde_gpu_dram_throughput_bytes_per_second")
            rows.append(
                _share("DRAM rate", f"page: {where}", "bytes moved", load["bytes"] / seconds, seen,
                    "B/s", BYTES_BOUND)
            )  # fmt: skip
    copied = sum(load["bytes"] for load in watched["loads"] if load["name"] == "h2d")
    first = _last(scrapes, watched["loads"][0]["start_ns"])
    seen = _counted(scrapes[-1], "receive") - _counted(first, "receive")
    rows += _pcie("page: all of it", "receive", copied, seen)
    rows += _page_energy(scrapes)
    return [*rows, *_chip_totals(scrapes)]


def costs(out: Path) -> list[Row]:
    """CPU of the process that asks NVML, as it reports it; and of the agent with a page."""
    rows = []
    process, asking = "the NVML process", {"sonde.source": "nvml"}
    for name in ("idle", "phases"):
        if (out / f"{name}.sonde").exists():
            recording = LoadRecording(out / f"{name}.sonde")
            for points in recording.each("sonde.source.cpu_seconds", asking):
                rows.append(_cost(name, process, points[len(points) // 3 :]))
    if (out / "page.json").exists():
        scrapes = json.loads((out / "page.json").read_text())["scrapes"]
        for who, name, wanted in (
            (process, "sonde_source_cpu_seconds_total", 'sonde_source="nvml"'),
            ("the agent", "agent_cpu_s", ""),
        ):
            points = [(one["time_ns"], _value(one, name, wanted)) for one in scrapes]
            points = [one for one in points if one[1] == one[1]]
            if len(points) >= 2:
                rows.append(_cost("page", who, points))
    return rows


def read(out: Path) -> tuple[list[Row], list[str]]:
    """All of it, and what could not be read, a line each."""
    failed: list[str] = []

    def with_loads() -> list[Row]:
        recording = LoadRecording(out / "phases.sonde", out / "phases.json")
        return loads(recording, recording.dmon(out / "dmon.txt"))

    def with_tenants() -> list[Row]:
        recording = LoadRecording(out / "tenants.sonde")
        recording.phases = [
            json.loads(path.read_text()) for path in sorted(out.glob("tenant-*.json"))
        ]
        return tenants(recording)

    parts: dict[str, Callable[[], list[Row]]] = {
        "phases": with_loads,
        "tenants": with_tenants,
        "page": lambda: page(json.loads((out / "page.json").read_text())),
        "costs": lambda: costs(out),
    }
    rows = []
    for name, part in parts.items():
        try:
            rows += part()
        except (SondeError, OSError, ValueError, LookupError, ZeroDivisionError) as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return rows, failed


def render(rows: Iterable[Row]) -> str:
    """The table."""
    lines = [
        f"{'figure':<24}{'where':<24}{'beside':<14}{'truth':>14}{'seen':>14} {'':<5}"
        f"{'difference':>12}  {'bound':<18} holds"
    ]
    for row in rows:
        holds = {True: "yes", False: "NO", None: ""}[row.holds]
        scale, prefix = _readable(max(abs(row.truth), abs(row.seen)), row.unit)
        lines.append(
            f"{row.figure:<24}{row.where:<24}{row.peer:<14}{row.truth / scale:>14.3f}"
            f"{row.seen / scale:>14.3f} {prefix + row.unit:<5}{row.difference:>12}  "
            f"{row.bound:<18} {holds}"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table of the folder OUT; 1 where a figure does not hold or is missing."""
    if len(sys.argv) != 2:
        print("usage: python -m bench.signals.agreement OUT", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    rows, failed = read(out)
    print(render(rows))
    wrong = [row for row in rows if row.holds is False]
    (out / "agreement.json").write_text(
        json.dumps({"rows": [asdict(row) for row in rows], "failed": failed}, indent=1)
    )
    held = sum(row.holds is True for row in rows)
    print(f"{held} of {held + len(wrong)} hold")
    for line in failed:
        print(f"missing: {line}")
    return 1 if wrong or failed else 0


# ---- rows ----


def _beside(recording: LoadRecording, dmon: Rows, phase: str, figure: Figure) -> Row:
    start_ns, end_ns = recording.span(phase)
    values = column(dmon, figure.column, start_ns + EDGE_NS, end_ns - EDGE_NS)
    points = [
        (time_ns, value * figure.scale)
        for time_ns, value in recording.points(figure.series, **figure.attributes)
    ]
    outside = sum(not _is_within(value, time_ns, points) for time_ns, value in values)
    bound = f"{outside} of {len(values)} rows off"
    if not values:
        return Row(figure.name, phase, "dmon", 0, 0, figure.unit, "", "no rows of dmon", False)
    truth = sum(value for _, value in values) / len(values)
    seen = mean(points, values[0][0], values[-1][0] + SECOND_NS)
    difference = f"{seen - truth:+.2f} {figure.unit}"
    return Row(
        figure.name, phase, "dmon", truth, seen, figure.unit, difference, bound, outside == 0
    )


def _is_within(value: float, time_ns: int, points: Points) -> bool:
    near = [
        seen for at_ns, seen in points if time_ns - SECOND_NS <= at_ns <= time_ns + 2 * SECOND_NS
    ]
    return bool(near) and min(near) - 1 <= value <= max(near) + 1


def _share(
    figure: str, where: str, peer: str, truth: float, seen: float, unit: str, bound: float | None
) -> Row:
    """Held to a share of the truth, or for information."""
    off = seen / truth - 1 if truth else float("nan")
    limit = "" if bound is None else f"{100 * bound:g} %"
    holds = None if bound is None else abs(off) <= bound
    return Row(figure, where, peer, truth, seen, unit, f"{100 * off:+.2f} %", limit, holds)


def _exact(figure: str, where: str, truth: float, seen: float) -> Row:
    difference, holds = f"{seen - truth:+.3g} B", seen == truth
    return Row(figure, where, "bytes copied", truth, seen, "B", difference, "exact", holds)


def _pcie(where: str, direction: str, copied: float, seen: float) -> list[Row]:
    """On the wire, and without headers."""
    data = seen / (1 + HEADERS[direction])
    return [
        _share(f"PCIe {direction}, wire", where, "bytes copied", copied, seen, "B", None),
        _share(f"PCIe {direction}, data", where, "bytes copied", copied, data, "B", BYTES_BOUND),
    ]


def _or_missing(figure: str, where: str, make: Callable[[], list[Row]]) -> list[Row]:
    """Its rows, or one that marks it as missing."""
    try:
        return make()
    except LookupError as error:
        return [Row(figure, where, "", 0, 0, "", "", f"missing: {error}", False)]


def _dram(recording: LoadRecording) -> Row:
    seen = recording.integral_of("stream", "sonde.gpu.dram.throughput")
    moved = recording.phases["stream"]["bytes"]
    return _share("DRAM", "stream", "bytes moved", moved, seen, "B", BYTES_BOUND)


def _recorded_pcie(recording: LoadRecording, phase: str) -> list[Row]:
    direction = DIRECTIONS[phase]
    seen = recording.integral_of(
        phase, "sonde.gpu.pcie.throughput", network__io__direction=direction
    )
    return _pcie(phase, direction, recording.phases[phase]["bytes"], seen)


def _calls(recording: LoadRecording, phase: str) -> Row:
    """All of the recording: rows of calls are of whole seconds. A step ran before the phases."""
    load = recording.phases[phase]
    truth = load["bytes"] + load["bytes"] // max(1, load["steps"])
    seen = recording.copied(phase)
    return _exact("bytes of device calls", phase, truth, seen)


def _energy(recording: LoadRecording, dmon: Rows) -> Row:
    """Between its first and its last row beside dmon's power."""
    values = column(dmon, "pwr", 0, 2**63)
    points = [
        one
        for one in recording.points("hw.energy")
        if values and values[0][0] <= one[0] <= values[-1][0]
    ]
    if len(points) < 2:
        raise LookupError("reported less than twice")
    (start_ns, first), (end_ns, last) = points[0], points[-1]
    truth = integral(values, start_ns, end_ns)
    return _share("energy", "all phases", "dmon's power", truth, last - first, "J", ENERGY_BOUND)


def _page_energy(scrapes: list[Any]) -> Iterator[Row]:
    """The page's is what the library reported at most ENERGY_AGE_S ago."""
    values = [one for one in scrapes if one.get("energy_j") is not None]
    shown = [_value(one, "hw_energy_joules_total") for one in values]
    if not values or shown[-1] != shown[-1]:
        return
    outside = held = 0
    for number, one in enumerate(values):
        old = [o for o in values[:number] if o["time_ns"] <= one["time_ns"] - ENERGY_AGE_S * 1e9]
        if old:
            held += 1
            outside += not old[-1]["energy_j"] - 1 <= shown[number] <= one["energy_j"] + 1
    yield Row("energy", "page: all of it", "the library's", values[-1]["energy_j"], shown[-1], "J",
        f"{shown[-1] - values[-1]['energy_j']:+.0f} J", f"{outside} of {held} off",
        outside == 0 if held else None)  # fmt: skip


def _chip_totals(scrapes: list[Any]) -> Iterator[Row]:
    """For information: newer libraries have totals themselves (GPM 255, 256)."""
    values = [one for one in scrapes if one.get("gpm_totals")]
    for direction in ("transmit", "receive"):
        if len(values) >= 2 and direction in values[0]["gpm_totals"]:
            truth = values[-1]["gpm_totals"][direction] - values[0]["gpm_totals"][direction]
            if not truth:
                continue
            seen = _counted(values[-1], direction) - _counted(values[0], direction)
            what = f"PCIe {direction}, wire"
            yield _share(what, "page: all of it", "chip's total", truth, seen, "B", None)


def _cost(where: str, who: str, points: Points) -> Row:
    (start_ns, first), (end_ns, last) = points[0], points[-1]
    share = 100 * (last - first) / ((end_ns - start_ns) / 1e9)
    return Row(f"CPU of {who}", where, "", 0, share, "% of a core", "", "", None)


# ---- of a page ----


def _last(scrapes: list[Any], before_ns: float) -> Any:
    """The last scrape before a time. Raises LookupError where there is none."""
    return [one for one in scrapes if one["time_ns"] <= before_ns][-1]


def _counted(scrape: Any, direction: str) -> float:
    wanted = f'network_io_direction="{direction}"'
    return _value(scrape, "hw_gpu_io_bytes_total", wanted)


def _called(scrape: Any, direction: str) -> float:
    """Bytes of all device calls in that direction."""
    wanted = f'network_io_direction="{direction}"'
    return sum(
        float(value)
        for key, value in scrape["values"].items()
        if key.startswith("sonde_device_call_io_bytes_total{") and wanted in key
    )


def _value(scrape: Any, name: str, wanted: str = "") -> float:
    """NaN where it is not reported."""
    for key, value in scrape["values"].items():
        if key.partition("{")[0] == name and wanted in key:
            return float(value)
    return float("nan")


def _readable(value: float, unit: str) -> tuple[float, str]:
    if unit not in ("B", "B/s"):
        return 1, ""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return scale, prefix
    return 1, ""


if __name__ == "__main__":
    sys.exit(main())
