# SPDX-License-Identifier: Apache-2.0
"""AMD and Intel devices, unverified on hardware: files as their drivers write them, and a stub of
AMD SMI's module."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import pytest

from sonde.collect.devices import drm as drm_module
from sonde.collect.devices.amdsmi import AmdSmiSource
from sonde.collect.devices.drm import DrmSource
from sonde.collect.polling import Points, SourceUnavailable
from sonde.metrics import catalogue
from sonde.procfs import character_device

CARD = "sys/class/drm/card1/device"
AMDGPU = {
    f"{CARD}/vendor": "0x1002",
    f"{CARD}/uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:03:00.0",
    f"{CARD}/gpu_busy_percent": "37",
    f"{CARD}/mem_info_vram_used": "1048576",
    f"{CARD}/mem_info_vram_total": "17163091968",
    f"{CARD}/current_link_width": "8",
    f"{CARD}/max_link_width": "16",
    f"{CARD}/hwmon/hwmon4/power1_average": "93000000",
    f"{CARD}/hwmon/hwmon4/power1_cap": "303000000",
    f"{CARD}/hwmon/hwmon4/freq1_input": "2482000000",
    f"{CARD}/hwmon/hwmon4/temp1_input": "51000",
    f"{CARD}/hwmon/hwmon4/temp1_label": "edge",
    f"{CARD}/hwmon/hwmon4/temp3_input": "62000",
    f"{CARD}/hwmon/hwmon4/temp3_label": "mem",
    f"{CARD}/hwmon/hwmon4/pwm1": "51",
    "proc/4711/fdinfo/5": (
        "pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t9\n"
        "drm-engine-gfx:\t2500000000 ns\ndrm-engine-compute:\t500000000 ns\n"
        "drm-memory-vram:\t2048 KiB\ndrm-memory-gtt:\t64 KiB"
    ),
    "proc/4711/fdinfo/6": "drm-pdev:\t0000:03:00.0\ndrm-client-id:\t9\ndrm-memory-vram:\t1 KiB",
}
XE = {
    f"{CARD}/vendor": "0x8086",
    f"{CARD}/uevent": "DRIVER=xe\nPCI_SLOT_NAME=0000:00:02.0",
    f"{CARD}/hwmon/hwmon2/energy1_input": "7000000",
    "proc/4711/fdinfo/5": (
        "drm-driver:\txe\ndrm-pdev:\t0000:00:02.0\ndrm-client-id:\t3\n"
        "drm-engine-rcs:\t9 ns\ndrm-resident-vram0:\t4 MiB\ndrm-total-vram0:\t64 MiB"
    ),
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(drm_module.present, "amd_library", lambda: False)
    monkeypatch.setattr(drm_module, "_is_card", lambda path: True)
    monkeypatch.setattr(drm_module, "start_of", lambda pid: "")  # 4711 may run here

    def machine(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text + "\n")
        fds = tmp_path / "proc/4711/fd"
        fds.mkdir(parents=True, exist_ok=True)
        for fd in (5, 6):
            (fds / str(fd)).symlink_to("/dev/dri/renderD128")
        (fds / "1").symlink_to("/dev/null")
        return DrmSource(tmp_path)

    return machine


def asked(source):
    """One round of everything: {(series, attributes): value}."""
    points = Points()
    source.open()
    for poll in sorted(source.polls(), key=lambda poll: -poll.period_s):
        poll.read(points)
    assert not points.events
    for _, series, tags, _ in points.metrics:
        metric = catalogue()[series]
        assert set(json.loads(tags or "{}")) <= set(metric.attributes), series
        assert source.name in metric.source.replace(",", "").split(), series
    return {
        (series, *sorted(v for k, v in json.loads(tags or "{}").items() if k != "hw.id")): value
        for _, series, tags, value in points.metrics
    }


def test_files_of_amdgpu(machine):
    values = asked(machine(AMDGPU))
    assert values["hw.gpu.utilization", "general"] == 0.37
    assert values["hw.gpu.memory.usage",] == 1 << 20
    assert values["hw.power", "gpu"] == 93
    assert values["sonde.gpu.power.limit",] == 303
    assert values["sonde.gpu.clock", "sm"] == 2.482e9
    assert values["hw.temperature", "gpu", "gpu"] == 51
    assert values["hw.temperature", "gpu", "memory"] == 62
    assert values["hw.fan.speed_ratio", "fan"] == pytest.approx(0.2)
    assert values["sonde.gpu.pcie.link.width", "current"] == 8
    assert values["sonde.process.gpu.engine.time", "4711", "gfx"] == 2.5
    assert values["sonde.process.gpu.engine.time", "4711", "compute"] == 0.5
    assert values["sonde.process.gpu.memory", "4711"] == 2 << 20  # once for both descriptors


def test_only_a_device_of_drm_is_a_card_whatever_its_path(machine, monkeypatch):
    """Another mount namespace makes any path of a file."""
    source = machine(AMDGPU)
    monkeypatch.undo()
    devices = {"5": os.makedev(226, 128), "6": 0}
    monkeypatch.setattr(
        drm_module.procfs, "character_device", lambda path: devices[path.rpartition("/")[2]]
    )
    source._find_clients()
    assert [it.fdinfo.name for it in source._clients] == ["5"]
    assert source._left_out == 0


def test_what_a_descriptor_is(tmp_path):
    with Path("/dev/null").open("rb") as device, (tmp_path / "plain").open("wb") as plain:
        folder = f"/proc/{os.getpid()}/fd"
        assert character_device(f"{folder}/{device.fileno()}") == os.makedev(1, 3)
        assert character_device(f"{folder}/{plain.fileno()}") == 0


def test_many_open_cards_of_one_user_shut_nobody_else_out(machine, tmp_path, monkeypatch):
    source = machine(AMDGPU)
    many = tmp_path / "proc/4000/fd"
    many.mkdir(parents=True)
    for fd in range(300):
        (many / str(fd)).symlink_to("/dev/dri/renderD128")
    monkeypatch.setattr(drm_module.procfs, "party_of", lambda pid: pid)
    source._find_clients()
    pids = [it.pid for it in source._clients]
    assert len(pids) == drm_module.CLIENTS_MAX
    assert pids.count(4711) == 2
    points = Points()
    source._read_slow(points)
    values = {series: value for _, series, _, value in points.metrics}
    assert values["sonde.gpu.clients_left_out"] == 302 - drm_module.CLIENTS_MAX
    monkeypatch.setattr(drm_module, "DESCRIPTORS_MAX", 100)
    source._find_clients()
    assert (len(source._clients), source._left_out) == (102, 1)


def test_files_of_intel(machine):
    values = asked(machine(XE))
    assert values["hw.energy", "gpu"] == 7
    assert values["sonde.process.gpu.engine.time", "4711", "rcs"] == 9e-9
    assert values["sonde.process.gpu.memory", "4711"] == 4 << 20


def test_cards_of_nvidia_are_left_to_nvml(machine):
    source = machine(AMDGPU | {f"{CARD}/vendor": "0x10de"})
    with pytest.raises(SourceUnavailable, match="no card"):
        source.open()


class AmdSmiException(Exception):  # noqa: N818  # the module's own name
    pass


@pytest.fixture
def amdsmi(monkeypatch):
    """A stub of the module: one device, answers as its documentation has them."""
    module = types.ModuleType("amdsmi")
    answers = {
        "init": None,
        "shut_down": None,
        "get_processor_handles": ["h0"],
        "get_gpu_device_uuid": "ff74-0001",
        "get_gpu_device_bdf": "0000:83:00.0",
        "get_gpu_activity": {"gfx_activity": 90, "umc_activity": 40, "mm_activity": "N/A"},
        "get_gpu_vram_usage": {"vram_total": 196592, "vram_used": 283},
        "get_power_info": {"current_socket_power": 140, "power_limit": 750},
        "get_clock_info": {"clk": 1200, "max_clk": 2100},
        "get_temp_metric": 47,
        "get_gpu_process_list": [{"pid": os.getpid(), "memory_usage": {"vram_mem": 4096}}],
        "get_gpu_asic_info": {"market_name": "AMD Instinct MI300X"},
        "get_energy_count": {"energy_accumulator": 1000000, "counter_resolution": 15.3},
        "get_gpu_total_ecc_count": {"correctable_count": 2, "uncorrectable_count": 0},
    }
    failing = set()

    def function(name):
        def call(*_):
            if name in failing:
                raise AmdSmiException(f"{name}: not supported")
            return answers[name]

        return call

    for name in answers:
        setattr(module, f"amdsmi_{name}", function(name))
    module.AmdSmiException = AmdSmiException
    module.AmdSmiClkType = types.SimpleNamespace(GFX=1, MEM=2)
    module.AmdSmiTemperatureType = types.SimpleNamespace(HOTSPOT=1, VRAM=2)
    module.AmdSmiTemperatureMetric = types.SimpleNamespace(CURRENT=0)
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return failing


def claimed_of(source):
    return {name for name, metric in catalogue().items() if source in metric.source.split(", ")}


def test_the_catalogue_claims_no_more_of_amd_smi_than_it_reports(amdsmi):
    assert claimed_of("amdsmi") == {key[0] for key in asked(AmdSmiSource())}


def test_the_catalogue_claims_no_more_of_drm_than_it_reports(machine):
    values = {
        key[0] for key in asked(machine(AMDGPU | {f"{CARD}/hwmon/hwmon4/energy1_input": "1"}))
    }
    assert claimed_of("drm") == values


def test_answers_of_amd_smi(amdsmi):
    values = asked(AmdSmiSource())
    assert values["hw.gpu.utilization", "general"] == pytest.approx(0.9)
    assert values["hw.gpu.memory.usage",] == 283 << 20
    assert values["hw.power", "gpu"] == 140
    assert values["sonde.gpu.clock", "sm"] == 1.2e9
    assert values["hw.errors", "corrected", "gpu"] == 2
    assert values["hw.energy", "gpu"] == pytest.approx(15.3)


def test_one_question_that_fails_leaves_the_others(amdsmi):
    amdsmi.add("get_power_info")
    values = asked(AmdSmiSource())
    assert ("hw.power", "gpu") not in values
    assert values["hw.gpu.utilization", "general"] == pytest.approx(0.9)


def test_a_driver_that_answers_nothing_is_a_gap(amdsmi):
    source = AmdSmiSource()
    source.open()
    amdsmi.update({"get_gpu_activity", "get_gpu_vram_usage", "get_power_info"})
    cheap = source.polls()[0]
    with pytest.raises(SourceUnavailable):
        cheap.read(Points())


def test_without_the_module_there_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(SourceUnavailable, match="amdsmi cannot be loaded"):
        AmdSmiSource().open()
