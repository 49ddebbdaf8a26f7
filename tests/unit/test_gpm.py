# SPDX-License-Identifier: Apache-2.0
"""Bytes over PCIe summed up from GPM's rates, with a stub of NVML that counts as the chip does:
whatever the pauses between two samples, and whatever fails between them, none is lost."""

from __future__ import annotations

import random
import time
from ctypes import c_void_p

import pytest

from nvml_stub import Stub
from sonde.collect.devices.gpm import SHORTEST_NS, Gpm
from sonde.collect.devices.nvml import NvmlSource
from sonde.collect.devices.nvml_library import Nvml, NvmlError
from sonde.collect.polling import SLOW_S, Points, Schedule

TRANSMIT, RECEIVE = 20, 21
SECOND_NS = 1_000_000_000


class Chip:
    """A GPU whose PCIe moves what the test asks for, on a separate clock."""

    def __init__(self, stub):
        self.stub = stub
        self.now_ns = 1_000 * SECOND_NS
        self.bytes = {TRANSMIT: 5e9, RECEIVE: 7e9}  # what came before nobody counts
        self.began = dict(self.bytes)
        self._report()
        self.gpm = Gpm(Nvml(str(stub.library)), c_void_p(1), {"hw.id": "0"}, None, 0.0)
        self.rows = []

    def moves(self, seconds, transmit, receive):
        self.now_ns += round(seconds * 1e9)
        self.bytes[TRANSMIT] += transmit
        self.bytes[RECEIVE] += receive
        self._report()

    def _report(self):
        values = {f"gpm_bytes_{number}": f"{count:.0f}" for number, count in self.bytes.items()}
        self.stub.answers(values | {"gpm_now": f"{self.now_ns / 1e9:.9f}"})

    def asked(self):
        points = Points()
        try:
            self.gpm.read(points, self.now_ns)
        finally:
            self.rows += points.metrics
        return points.metrics

    def total(self, way):
        return [row[3] for row in self.rows if row[1] == "hw.gpu.io" and way in row[2]]


@pytest.fixture
def chip(tmp_path, monkeypatch):
    stub = Stub(tmp_path)
    monkeypatch.setenv("NVML_STUB", stub.environment["NVML_STUB"])
    return Chip(stub)


def test_the_total_is_right_whatever_the_pauses(chip):
    chip.asked()
    dice = random.Random(4)
    for pause_s in (1.0, 5.0, 1.0, 0.04, 0.9, 5.0, 0.15, 4.85, 30.0, 1.0):
        chip.moves(pause_s, dice.randrange(10**11), dice.randrange(10**11))
        chip.asked()
    for number, way in ((TRANSMIT, "transmit"), (RECEIVE, "receive")):
        total = chip.total(way)
        assert total[0] == 0  # reported with the time from which it counts
        assert total == sorted(total)
        assert total[-1] == pytest.approx(chip.bytes[number] - chip.began[number], rel=1e-6)


def test_two_samples_in_a_hurry_are_none(chip):
    """The library's own are renewed every 100 ms: between two it would see nothing, or all."""
    chip.asked()
    chip.moves(1, 0, 100)
    assert chip.asked()
    chip.moves(SHORTEST_NS / 2e9, 0, 50)
    assert chip.asked() == []
    chip.moves(1, 0, 50)
    chip.asked()
    assert chip.total("receive")[-1] == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize("call", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet", "21"])
def test_what_fails_for_a_while_loses_no_bytes(chip, call):
    """The call for a sample, that for the metrics, and a single metric."""
    key = f"fail.{call}" if call.startswith("nvml") else f"gpm_{call}_code"
    chip.asked()
    chip.moves(1, 0, 1000)
    chip.asked()
    chip.stub.answers({key: 4})
    for _ in range(3):
        chip.moves(1, 0, 10_000)
        with pytest.raises(NvmlError, match="permission denied"):
            chip.asked()
    chip.stub.answers({key: None})
    chip.moves(1, 0, 3000)
    chip.asked()
    assert chip.total("receive")[-1] == pytest.approx(34_000, rel=1e-3)


def test_a_metric_that_the_chip_has_not_leaves_the_others(chip):
    chip.stub.answers({"gpm_5_code": 3, "gpm_7_code": 999})
    chip.asked()
    for _ in range(2):
        chip.moves(1, 0, 1000)
        series = {row[1] for row in chip.asked()}
        assert "sonde.gpu.sm.active" in series
    chip.stub.answers({"gpm_5_code": None, "gpm_7_code": None, "gpm_2_code": 999})
    chip.moves(1, 0, 1000)
    assert "sonde.gpu.sm.active" not in {row[1] for row in chip.asked()}
    chip.stub.answers({"gpm_2_code": None})
    chip.moves(1, 0, 1000)
    assert "sonde.gpu.sm.active" in {row[1] for row in chip.asked()}
    assert chip.total("receive")[-1] == pytest.approx(4000, rel=1e-3)


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_what_is_no_number_is_not_summed_up(tmp_path, monkeypatch, text):
    stub = Stub(tmp_path)
    monkeypatch.setenv("NVML_STUB", stub.environment["NVML_STUB"])
    gpm = Gpm(Nvml(str(stub.library)), c_void_p(1), {"hw.id": "0"}, None, 0.0)
    points = Points()
    for second, value in enumerate(("1", "1", text, "1"), start=100):
        stub.answers({"gpm_21": value})
        gpm.read(points, second * SECOND_NS)
    totals = [row[3] for row in points.metrics if row[1] == "hw.gpu.io" and "receive" in row[2]]
    assert totals == [0, 2**20, 2 * 2**20]


def test_looking_for_devices_that_came_takes_no_samples(tmp_path, monkeypatch):
    """Nobody would give them back: two of each device, every ten seconds."""
    taken = []
    handle = Nvml.handle

    def counted(nvml, name, *arguments):
        if name == "nvmlGpmSampleAlloc":
            taken.append(name)
        return handle(nvml, name, *arguments)

    monkeypatch.setattr(Nvml, "handle", counted)
    stub = Stub(tmp_path)
    stub.set_answers(mig=1)
    monkeypatch.setenv("NVML_STUB", stub.environment["NVML_STUB"])
    now_ns = time.monotonic_ns()
    schedule = Schedule(NvmlSource(str(stub.library)), clock=lambda: now_ns)
    for _ in range(4):
        points = Points()
        schedule.run_due(points)
        assert not points.events
        now_ns += int(SLOW_S * 1e9)
    assert len(taken) == 4  # of the GPU and of its instance
    schedule.close()
