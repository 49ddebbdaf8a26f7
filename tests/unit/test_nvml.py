# SPDX-License-Identifier: Apache-2.0
"""NVIDIA devices through a stub of NVML: every signal, and whatever can go wrong with them."""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from ctypes import Structure, sizeof

import pytest

from nvml_stub import Stub, header_folder
from sonde import procfs
from sonde.collect import subprocess_runner
from sonde.collect.devices.nvml import NvmlSource
from sonde.collect.devices.nvml_library import LAYOUTS, GpmMetrics
from sonde.collect.polling import Points, Schedule
from sonde.collect.subprocess_runner import SubprocessRunner
from sonde.metrics import catalogue, labels

SOURCE = "sonde.collect.devices.nvml:NvmlSource"


class Watched:
    """The source in its process, as the agent has it."""

    def __init__(self, runner):
        self.runner = runner
        self.metrics = []
        self.notes = []
        runner.start()

    def take(self):
        points = self.runner.take()
        self.metrics += points.metrics
        self.notes += [(row[2], row[6]) for row in points.events]

    def until(self, condition, seconds=40):
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.take()
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError((self.notes, len(self.metrics), self.values()))

    def values(self):
        return {(row[1], row[2]): row[3] for row in self.metrics}

    def value(self, series, since=0, **attributes):
        """The last value of the series that has these attributes, of the rows from one on."""
        wanted = {name.replace("__", "."): value for name, value in attributes.items()}
        found = None
        for _, name, tags, value in self.metrics[since:]:
            if name == series and wanted.items() <= json.loads(tags or "{}").items():
                found = value
        return found

    def forget(self):
        self.metrics.clear()
        self.notes.clear()


@pytest.fixture
def stub(tmp_path):
    return Stub(tmp_path)


@pytest.fixture
def watched(stub, monkeypatch):
    for name in ("LD_LIBRARY_PATH", "NVML_STUB"):
        monkeypatch.setenv(name, stub.environment[name])
    monkeypatch.setattr(subprocess_runner, "SILENT_S", 2.0)
    monkeypatch.setattr(subprocess_runner, "RETRY_FIRST_S", 0.2)
    watched = Watched(SubprocessRunner("nvml", SOURCE))
    yield watched
    watched.runner.stop()


def test_layouts_are_those_of_the_header(tmp_path):
    checks = []
    for name, layout in LAYOUTS.items():
        checks.append(f"_Static_assert(sizeof({name}) == {sizeof(layout)}, {json.dumps(name)});")
        if issubclass(layout, Structure):
            for field in layout._fields_:
                offset = getattr(layout, field[0]).offset
                checks.append(
                    f"_Static_assert(offsetof({name}, {field[0]}) == {offset}, "
                    f"{json.dumps(name + '.' + field[0])});"
                )
    checks.append(
        f"_Static_assert(offsetof(nvmlGpmMetricsGet_t, metrics) == {GpmMetrics.metrics.offset},"
        ' "nvmlGpmMetricsGet_t");'
    )
    source = tmp_path / "layouts.c"
    source.write_text("\n".join(["#include <stddef.h>", "#include <nvml.h>", *checks, ""]))
    subprocess.run(["cc", f"-I{header_folder()}", "-c", source, "-o", "/dev/null"], check=True)


def test_every_signal_of_a_device(stub, watched):
    me = os.getpid()
    stub.set_answers(
        utilization=87, memory_busy=31, used=5 << 30, power=432100, temperature=61, clock_sm=1755,
        throttle=0x44, field_82=70, gpm_2=96.5, gpm_10=50, gpm_21=1000, ecc_corrected=12,
        sram_uncorrected=1, field_143=2, field_144=1, field_94=5, pcie_generation=4, field_91=18,
        nvlinks_down=1, energy=5000, processes=f"{me}:1048576:40,{me + 100000}:2097152:20",
    )  # fmt: skip
    watched.until(lambda: watched.value("sonde.gpu.dram.active") is not None)
    value = watched.value
    assert value("hw.gpu.utilization", hw__gpu__task="general") == 0.87
    assert value("sonde.gpu.memory.busy") == 0.31
    assert value("hw.gpu.memory.usage") == 5 << 30
    assert value("hw.gpu.memory.limit") == 150754820096
    assert value("hw.power") == 432.1
    assert value("hw.temperature", hw__sensor_location="gpu") == 61
    assert value("hw.temperature", hw__sensor_location="memory") == 70
    assert value("sonde.gpu.clock", sonde__gpu__clock__domain="sm") == 1.755e9
    reason = "sonde.gpu.throttle.reason"
    on = {
        json.loads(tags)[reason]
        for (series, tags), number in watched.values().items()
        if series == "sonde.gpu.throttled" and number
    }
    assert on == {"software_power_cap", "hardware_thermal"}
    assert value("sonde.gpu.sm.active") == pytest.approx(0.965)
    assert value("sonde.gpu.pcie.throughput", network__io__direction="receive") == 1000 * 2**20
    # Bytes are the rate times the time that it holds for.
    assert 0 < value("hw.gpu.io", network__io__direction="receive") < 1.5 * 1000 * 2**20
    assert value("hw.errors", error__type="corrected", sonde__gpu__memory__kind="dram") == 0
    assert value("hw.errors", error__type="uncorrected", sonde__gpu__memory__kind="sram") == 1
    assert value("sonde.gpu.remapped_rows", error__type="uncorrected") == 2
    assert value("sonde.gpu.remap.state", sonde__gpu__remap="pending") == 1
    assert value("sonde.gpu.pcie.replays") == 5
    assert value("sonde.gpu.pcie.link.generation", sonde__gpu__pcie__link="current") == 4
    assert value("sonde.gpu.nvlink.links", sonde__gpu__nvlink__state="up") == 17
    assert value("hw.energy") == 5
    mine = {"process__pid": str(me)}
    assert value("sonde.process.gpu.memory", **mine) == 1 << 20
    assert value("sonde.process.gpu.utilization", sonde__gpu__engine="sm", **mine) == 0.4
    gone = {"process__pid": str(me + 100000)}
    assert value("sonde.process.gpu.utilization", sonde__gpu__engine="sm", **gone) == 0.2
    assert not watched.notes


def test_every_series_is_in_the_catalogue_with_its_attributes(stub, watched):
    stub.answers({"field_91": 2, "processes": f"{os.getpid()}:1:1", "0.xid_count": 1})
    watched.until(lambda: watched.value("sonde.gpu.xid") and watched.value("hw.energy"))
    # From two samples, so a second after all that is asked at once.
    watched.until(lambda: watched.value("sonde.gpu.dram.active") is not None)
    for _, series, tags, _ in watched.metrics:
        assert series in catalogue()
        assert json.loads(tags or "{}").keys() <= set(catalogue()[series].attributes), series


def test_mig_instances_are_devices_with_a_parent(stub, watched):
    stub.set_answers(mig=2)
    watched.until(lambda: watched.value("sonde.gpu.sm.active", hw__id="MIG-stub-0-1") is not None)
    info = [json.loads(tags) for _, series, tags, _ in watched.metrics if series.endswith(".info")]
    assert {one["hw.id"]: one.get("hw.parent") for one in info} == {
        "GPU-stub-0": None,
        "MIG-stub-0-0": "GPU-stub-0",
        "MIG-stub-0-1": "GPU-stub-0",
    }
    # What an instance does not report is left out without a note.
    instance = {"hw__id": "MIG-stub-0-0"}
    assert watched.value("hw.gpu.utilization", hw__gpu__task="general", **instance) is None
    assert watched.value("hw.gpu.memory.usage", **instance)
    assert not watched.notes


def test_an_xid_is_reported_as_it_happens(stub, watched):
    watched.until(lambda: watched.value("hw.power"))
    stub.answers({"0.xid": 63, "0.xid_count": 2})
    began_s = time.monotonic()
    watched.until(lambda: watched.notes)
    assert time.monotonic() - began_s < 1.5
    assert watched.notes[0] == ("xid", "GPU-stub-0: XID 63")
    watched.until(lambda: watched.value("sonde.gpu.xid", sonde__gpu__xid__number=63) == 2)


def test_permission_denied_to_one_signal_leaves_the_others(stub, watched):
    stub.answers({"fail.nvmlDeviceGetPowerUsage": 4})
    watched.until(lambda: watched.value("hw.gpu.utilization") is not None)
    assert watched.notes == [("signal_lost", "nvml.0.power: permission denied")]
    assert watched.value("sonde.source.up", sonde__source="nvml.0.power") == 0
    assert watched.value("hw.power") is None
    stub.answers({"fail.nvmlDeviceGetPowerUsage": None})
    watched.until(lambda: watched.value("hw.power"))
    assert watched.notes[1][0] == "signal_back"
    assert watched.value("sonde.source.up", sonde__source="nvml.0.power") == 1


def test_a_lost_device_leaves_the_others_and_comes_back(stub, watched):
    stub.set_answers(devices=2)
    watched.until(lambda: watched.value("hw.power", hw__id="GPU-stub-1"))
    stub.answers({"0.lost": 1})
    watched.until(lambda: watched.notes)
    assert "nvml.0.fast: the GPU is lost" in watched.notes[0][1]
    watched.forget()
    for _ in range(2):  # messages, each with what was asked since the one before
        count = len(watched.metrics)
        watched.until(lambda: watched.value("hw.power", hw__id="GPU-stub-1", since=count))  # noqa: B023
    assert watched.value("hw.power", hw__id="GPU-stub-0") is None
    assert watched.value("sonde.source.up", sonde__source="nvml.0.fast") in (None, 0)
    stub.answers({"0.lost": None})
    watched.until(lambda: watched.value("hw.power", hw__id="GPU-stub-0"))
    watched.until(lambda: watched.value("sonde.source.up", sonde__source="nvml.0.fast") == 1)
    assert "signal_back" in {name for name, _ in watched.notes}


def test_a_gap_ends_also_where_the_source_was_opened_again_meanwhile(stub, monkeypatch):
    """In this process, by a clock of our own."""
    now_ns = time.monotonic_ns()
    schedule = Schedule(NvmlSource(str(stub.library)), clock=lambda: now_ns)

    def asked(seconds):
        nonlocal now_ns
        points = Points()
        for _ in range(seconds):
            now_ns += 1_000_000_000
            schedule.run_due(points)
        return [row[6] for row in points.events], [
            row[3] for row in points.metrics if row[1:3] == ("sonde.source.up", FAST)
        ]

    monkeypatch.setenv("NVML_STUB", stub.environment["NVML_STUB"])
    asked(1)
    stub.answers({"lost": 1})
    notes, up = asked(20)  # the device is looked for, and nothing is found
    assert notes[0] == "nvml.0.fast: the GPU is lost: it fell off the bus"
    assert "nvml: devices came or went" in notes
    assert up[0] == 0
    stub.answers({"lost": None})
    notes, up = asked(40)
    assert any(note.startswith("nvml.0.fast: back after") for note in notes), notes
    assert up == [1]
    schedule.close()


FAST = labels(sonde__source="nvml.0.fast")


def test_a_driver_that_is_unloaded_and_loaded_again(stub, watched):
    watched.until(lambda: watched.value("hw.power"))
    stub.answers({"fail.nvmlDeviceGetPowerUsage": 9, "fail.nvmlInit_v2": 9})
    watched.until(lambda: watched.notes)
    assert watched.notes == [("signal_lost", "nvml: the driver is not loaded")]
    watched.forget()
    stub.answers({"fail.nvmlDeviceGetPowerUsage": None, "fail.nvmlInit_v2": None})
    watched.until(lambda: watched.value("hw.power"))
    assert watched.notes[0][0] == "signal_back"


def test_a_hung_call_is_named_given_up_and_asked_again(stub, watched):
    watched.until(lambda: watched.value("hw.power"))
    stub.answers({"hang.nvmlDeviceGetMemoryInfo_v2": 1})
    watched.until(lambda: watched.notes)
    assert watched.notes == [("signal_lost", "nvml: does not answer: it hangs in nvml.0.fast")]
    assert watched.value("sonde.source.up", sonde__source="nvml") == 0
    stub.answers({"hang.nvmlDeviceGetMemoryInfo_v2": None})
    watched.forget()
    watched.until(lambda: watched.value("hw.power"))
    assert [name for name, _ in watched.notes] == ["signal_back"]


def test_a_crash_in_the_library_is_survived(stub, watched):
    watched.until(lambda: watched.value("hw.power"))
    stub.answers({"crash.nvmlDeviceGetPowerUsage": 1})
    watched.until(lambda: watched.notes)
    assert re.fullmatch(r"nvml: its process was killed by signal 11", watched.notes[0][1])
    stub.answers({"crash.nvmlDeviceGetPowerUsage": None})
    watched.forget()
    watched.until(lambda: watched.value("hw.power"))


def test_without_the_library_there_is_a_gap_with_a_reason(stub, watched):
    watched.runner.stop()
    aside = stub.library.rename(stub.library.with_suffix(".aside"))
    watched.runner.start()
    watched.until(lambda: watched.notes)
    assert watched.notes == [("signal_lost", "nvml: libnvidia-ml.so.1 is not installed")]
    assert watched.value("sonde.source.up", sonde__source="nvml") == 0
    aside.rename(stub.library)  # installed while we run
    watched.until(lambda: watched.value("hw.power"))
    assert [name for name, _ in watched.notes] == ["signal_lost", "signal_back"]
    assert watched.value("sonde.source.up", sonde__source="nvml") == 1


def test_nothing_is_started_where_there_is_nothing_to_ask():
    runner = SubprocessRunner("nvml", SOURCE, present=lambda: False)
    runner.start()
    assert not runner.take().metrics
    assert runner._child is None
    runner.stop()


def test_the_child_ends_with_its_parent(stub):
    program = (
        "import os, time; from sonde.collect.subprocess_runner import SubprocessRunner;"
        f"a = SubprocessRunner('nvml', {SOURCE!r}); a.start(); time.sleep(1.5);"
        "print(a._child.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=stub.environment, capture_output=True, text=True
    )
    child = int(done.stdout)
    for _ in range(50):
        stat = procfs.read_stat(child)
        if stat is None or stat.state == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the child is still there")


def test_what_is_no_message_is_a_gap_and_the_next_process_is_read(stub, watched, monkeypatch):
    watched.until(lambda: watched.value("hw.power"))
    watched.runner._buffer[:0] = b"\xff\xff\xff\xffrubbish"
    watched.until(lambda: watched.notes)
    assert watched.notes == [("signal_lost", "nvml: its process sent an invalid message")]
    watched.forget()
    watched.until(lambda: watched.value("hw.power"))
    assert watched.notes[0][0] == "signal_back"


def test_without_room_for_a_process_the_agent_goes_on(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess_runner.subprocess, "Popen", refuse)
    runner = SubprocessRunner("nvml", SOURCE)
    runner.start()
    (event,) = runner.take().events
    assert event[6] == "nvml: cannot be started: Cannot allocate memory"
    assert not runner.take().events  # reported once
    runner.stop()


def gaps(watched):
    """Seconds between the answers to a cheap question."""
    times = [row[0] for row in watched.metrics if row[1] == "sonde.gpu.memory.busy"]
    return [(after - before) / 1e9 for before, after in itertools.pairwise(times)]


def test_a_device_at_rest_is_asked_once_a_second_and_often_when_it_is_about_to_be_used(
    stub, watched
):
    stub.set_answers(utilization=0, used=0, processes="", field_91=18)
    watched.until(lambda: len(gaps(watched)) >= 3 and min(gaps(watched)[-3:]) > 0.5)
    watched.forget()
    stub.set_answers(used=1 << 30)  # somebody took memory
    watched.until(lambda: len(gaps(watched)) >= 2 and min(gaps(watched)) < 0.5)
    watched.forget()
    watched.runner.mark_active()
    watched.until(lambda: len(gaps(watched)) >= 20)
    assert statistics.median(gaps(watched)[-10:]) < 0.5


def test_a_device_in_use_is_asked_once_a_second_where_nobody_keeps_the_answers(stub, watched):
    stub.set_answers(utilization=90, processes=f"{os.getpid()}:1024:90")
    watched.until(lambda: len(gaps(watched)) >= 10 and statistics.median(gaps(watched)) < 0.5)
    watched.runner.keep_last_only(2.0)
    watched.until(lambda: len(gaps(watched)) >= 3 and min(gaps(watched)[-3:]) > 0.5)
    watched.forget()
    stub.answers({"utilization": 90, "0.xid": 79, "0.xid_count": 1})
    watched.until(lambda: any(name == "xid" for name, _ in watched.notes))
    watched.runner.keep_last_only(0.0)
    watched.forget()
    watched.until(lambda: len(gaps(watched)) >= 3 and min(gaps(watched)) > 0.5)
