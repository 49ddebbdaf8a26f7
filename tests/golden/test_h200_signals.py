# SPDX-License-Identifier: Apache-2.0
"""A minute of an H200 under known loads, replayed: do the signals show what was done?

`bench/signals` recorded it: idle, matmul, copies to the device and back, a memory-bound kernel, 8 s
each, while nvidia-smi's dmon watched the same device; then two tenants in turn.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from bench.signals import agreement
from bench.signals.recording import EDGE_NS, HEADERS, LoadRecording, column

from sonde.export import summary
from sonde.query import queries

DATA = Path(__file__).parents[1] / "data"


def recorded(name):
    return LoadRecording(DATA / f"{name}.sonde", DATA / f"{name}.json")


@pytest.fixture(scope="module")
def recording():
    return recorded("h200_signals")


@pytest.fixture(scope="module")
def dmon(recording):
    return recording.dmon(DATA / "h200_signals_dmon.txt")


def mean_by_dmon(dmon, recording, phase, name):
    start_ns, end_ns = recording.span(phase)
    values = [value for _, value in column(dmon, name, start_ns + 2 * EDGE_NS, end_ns - EDGE_NS)]
    assert len(values) >= 2
    return sum(values) / len(values)


def test_it_is_a_minute_at_ten_readings_a_second(recording):
    points = recording.points("hw.gpu.utilization", hw__gpu__task="general")
    assert (points[-1][0] - points[0][0]) / 1e9 > 50
    gaps = [(b - a) / 1e9 for (a, _), (b, _) in pairwise(points)]
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.1, abs=0.005)
    assert max(gaps) < 0.5
    assert not queries.losses(recording.session)


def test_device_memory_traffic_is_what_was_moved(recording):
    moved = recording.phases["stream"]["bytes"]
    assert recording.integral_of("stream", "sonde.gpu.dram.throughput") == pytest.approx(
        moved, rel=0.02
    )


@pytest.mark.parametrize(("phase", "direction"), [("h2d", "receive"), ("d2h", "transmit")])
def test_pcie_traffic_is_what_was_copied_and_the_headers(recording, phase, direction):
    copied = recording.phases[phase]["bytes"] * (1 + HEADERS[direction])
    seen = recording.integral_of(
        phase, "sonde.gpu.pcie.throughput", network__io__direction=direction
    )
    assert seen == pytest.approx(copied, rel=0.02)


@pytest.mark.parametrize("phase", ["h2d", "d2h"])
def test_device_calls_on_the_same_clock_moved_the_same_bytes(recording, phase):
    """Exact totals of the calls, beside the signals: two instruments, one recording."""
    phases = recording.phases[phase]
    where = queries.Where(start_ns=phases["start_ns"], end_ns=phases["end_ns"])
    calls = queries.device_calls(recording.session, where)
    moved = sum(call.bytes.get(phase, 0) for call in calls)
    assert moved == pytest.approx(phases["bytes"], rel=0.15)  # rows of a second, cut at its start


@pytest.mark.parametrize(
    ("phase", "low", "high"),
    [("idle", 0, 0), ("matmul", 0.95, 1), ("h2d", 0, 0.001), ("stream", 0.95, 1)],
)
def test_multiprocessors_work_when_kernels_run_and_not_for_copies(recording, phase, low, high):
    assert low <= recording.mean_of(phase, "sonde.gpu.sm.active") <= high


def test_only_the_matmul_uses_tensor_cores(recording):
    tensor = {
        phase: recording.mean_of(phase, "sonde.gpu.tensor.active", sonde__gpu__precision="any")
        for phase in recording.phases
    }
    assert tensor.pop("matmul") > 0.9
    assert set(tensor.values()) == {0.0}


@pytest.mark.parametrize("phase", ["idle", "matmul", "h2d", "d2h", "stream"])
def test_figures_are_those_of_dmon(recording, dmon, phase):
    """Within its resolution: a watt, a percent, some clock steps; its PCIe is a sample of 20 ms."""

    def dmons(name):
        return mean_by_dmon(dmon, recording, phase, name)

    power = recording.mean_of(phase, "hw.power")
    assert power == pytest.approx(dmons("pwr"), rel=0.02, abs=1)
    busy = recording.mean_of(phase, "hw.gpu.utilization", hw__gpu__task="general")
    assert 100 * busy == pytest.approx(dmons("sm"), abs=2)
    memory = recording.mean_of(phase, "sonde.gpu.memory.busy")
    assert 100 * memory == pytest.approx(dmons("mem"), abs=2)
    clock = recording.mean_of(phase, "sonde.gpu.clock", sonde__gpu__clock__domain="sm")
    assert clock / 1e6 == pytest.approx(dmons("pclk"), rel=0.02)
    held = recording.mean_of(phase, "hw.gpu.memory.usage")
    assert held / 2**20 == pytest.approx(dmons("fb"), rel=0.001)
    degrees = recording.mean_of(phase, "hw.temperature", hw__sensor_location="gpu")
    assert degrees == pytest.approx(dmons("gtemp"), abs=2)
    # The direction of the data: the two count the requests of the other direction differently.
    directions = {"h2d": [("rxpci", "receive")], "d2h": [("txpci", "transmit")]}
    for name, direction in directions.get(phase, ()):
        rate = recording.mean_of(
            phase, "sonde.gpu.pcie.throughput", network__io__direction=direction
        )
        assert rate / 1e6 == pytest.approx(dmons(name), rel=0.03)


def test_two_tenants_add_up_to_the_device():
    """Memory of both. Time: the driver counts it all on one of two that take turns (so does
    nvidia-smi pmon), so only the sum can be held."""
    rows = agreement.tenants(recorded("h200_tenants"))
    assert [row.holds for row in rows] == [True, True, None], rows


def test_the_table_of_agreement_holds(recording, dmon):
    """Each figure beside its truth, as `python -m bench.signals.agreement` prints it."""
    rows = agreement.loads(recording, dmon)
    figures = {row.figure for row in rows if row.holds}
    assert figures > {"utilization", "SM clock", "power", "temperature", "memory used", "DRAM"}
    assert [row for row in rows if row.holds is False] == []


def test_the_first_screen_shows_them(recording):
    text = summary.render(recording.session)
    assert "GPU METRICS" in text
    assert "memory traffic" in text
