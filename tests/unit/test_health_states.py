# SPDX-License-Identifier: Apache-2.0
"""Every check of `sonde health` in every state, from what a stub of NVML and of libcuda answer and
from files in the kernel's shape up to the verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hardware_tree import HARDWARE_STATES
from nvml_stub import Stub
from sonde.collect.devices.nvml import NvmlSource
from sonde.collect.polling import Points, Schedule
from sonde.health import CHECKS, Status, bandwidth, examine, with_files
from sonde.health.results import table

UUID = "GPU-11111111-1111-1111-1111-111111111111"
"""As the stub of libcuda has it."""
COPIES = Path(__file__).parents[1] / "programs/cuda/copies.c"
GIB = 2**30
WELL = {
    "uuid": UUID,
    "utilization": 0,
    "used": 0,
    "field_82": 45,
    "field_91": 18,
}
"""One H200 at rest."""
FILES = {
    "sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:1b:00.0/class": "0x030200",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  x",
    "usr/lib64/libnvidia-ml.so.580.159": "",
    "sys/devices/system/edac/mc/mc0/ce_count": "0",
    "sys/devices/system/edac/mc/mc0/ue_count": "0",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE",
    "kernel.log": "",
}
SECOND = {
    "sys/bus/pci/devices/0000:1c:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:1c:00.0/class": "0x030200",
}
BUSY = {"utilization": 95}


def xid(number):
    return {"kernel.log": f"[   12.5] NVRM: Xid (PCI:0000:1B:00): {number}, pid=1"}


def answers(**given):
    return {name.replace("__", "."): value for name, value in given.items()}


# check, state: (what the library answers, what the files hold, GB/s of copies, others not well)
STATES = {
    ("library", "warn"): (answers(fail__nvmlEventSetWait_v2=4), {}, 55, ()),
    # Nothing answers, so nothing can be counted.
    ("library", "fail"): (answers(fail__nvmlInit_v2=9), {}, 55, ("device_count",)),
    ("device_count", "warn"): ({"devices": 2, "1.uuid": "GPU-2"}, {}, 55, ()),
    ("device_count", "fail"): ({}, SECOND, 55, ()),
    ("driver_match", "warn"): (
        {},
        {"usr/lib64/libnvidia-ml.so.580.159": None, "usr/lib64/libnvidia-ml.so.590.44.1": ""},
        *(55, ()),
    ),
    ("driver_match", "fail"): ({"driver": "580.95"}, {}, 55, ()),
    ("host_memory", "warn"): ({}, {"sys/devices/system/edac/mc/mc0/ce_count": "7"}, 55, ()),
    ("host_memory", "fail"): ({}, {"sys/devices/system/edac/mc/mc0/ue_count": "1"}, 55, ()),
    ("network", "warn"): ({}, {"sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN"}, 55, ()),
    ("network", "fail"): (
        {},
        {f"sys/class/infiniband/mlx5_{card}/ports/1/state": "1: DOWN" for card in (0, 1)},
        *(55, ()),
    ),
    ("reachable", "warn"): (answers(fail__nvmlDeviceGetPowerUsage=4), {}, 55, ()),
    ("reachable", "fail"): (answers(fail__nvmlDeviceGetUtilizationRates=15), {}, 55, ()),
    ("memory_size", "warn"): ({"total": 136 * GIB}, {}, 55, ()),
    ("memory_size", "fail"): ({"total": 120 * GIB}, {}, 55, ()),
    ("sram_errors", "warn"): ({"sram_corrected": 100}, {}, 55, ()),
    ("sram_errors", "fail"): ({"sram_uncorrected": 1}, {}, 55, ()),
    ("dram_errors", "warn"): ({"dram_uncorrected": 4}, {}, 55, ()),
    ("dram_errors", "fail"): ({"ecc_uncorrected_volatile": 1}, {}, 55, ()),
    ("corrected_errors", "warn"): ({"ecc_corrected_volatile": 10_000}, {}, 55, ()),
    ("corrected_errors", "fail"): ({"ecc_corrected_volatile": 1_000_000}, {}, 55, ()),
    ("remapping", "warn"): ({"field_144": 1}, {}, 55, ()),
    ("remapping", "fail"): ({"field_145": 1}, {}, 55, ()),
    ("xid", "warn"): ({}, xid(63), 55, ()),
    ("xid", "fail"): ({}, xid(79), 55, ()),
    # A model that nobody entered.
    ("nvlink_up", "warn"): ({"name": "NVIDIA New PCIe", "nvlinks_down": 18}, {}, 55, ()),
    ("nvlink_up", "fail"): ({"nvlinks_down": 1}, {}, 55, ()),
    ("nvlink_errors", "warn"): ({"field_52": 1_000}, {}, 55, ()),
    ("nvlink_errors", "fail"): ({"field_59": 1}, {}, 55, ()),
    ("pcie_width", "warn"): ({"pcie_width": 8, "pcie_width_max": 8}, {}, 55, ()),
    ("pcie_width", "fail"): ({"pcie_width": 8}, {}, 55, ()),
    ("pcie_generation", "warn"): ({"pcie_generation": 4, "pcie_generation_max": 4}, {}, 55, ()),
    ("pcie_generation", "fail"): ({"pcie_generation": 1} | BUSY, {}, None, ()),
    ("pcie_replays", "warn"): ({"field_94": 1_000}, {}, 55, ()),
    ("pcie_replays", "fail"): ({"field_94": 100_000}, {}, 55, ()),
    ("host_bandwidth", "warn"): ({}, {}, 40, ()),
    ("host_bandwidth", "fail"): ({}, {}, 20, ()),
    ("temperature", "warn"): ({"temperature": 83}, {}, 55, ()),
    ("temperature", "fail"): ({"temperature": 92}, {}, 55, ()),
    ("memory_temperature", "warn"): ({"field_82": 95}, {}, 55, ()),
    ("memory_temperature", "fail"): ({"field_82": 105}, {}, 55, ()),
    ("throttling", "warn"): ({"throttle": 0x20}, {}, 55, ()),
    ("throttling", "fail"): ({"throttle": 0x48}, {}, 55, ()),
    ("power_limit", "warn"): ({"power_limit": 500_000}, {}, 55, ()),
    ("power_limit", "fail"): ({"power_limit": 300_000}, {}, 55, ()),
    ("clocks", "warn"): ({"clock_sm": 1_200} | BUSY, {}, None, ()),
    ("clocks", "fail"): ({"clock_sm": 345} | BUSY, {}, None, ()),
}


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    stub = Stub(tmp_path_factory.mktemp("health"))
    cuda = stub.folder / "libcuda.so.1"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(COPIES), "-o", str(cuda)], check=True)
    return stub


@pytest.fixture
def judge(stub, tmp_path, monkeypatch):
    """Verdicts of a node on which the library, the files and the copies are as given."""

    def judged(answers, files, copies_gb_s):
        stub.forget()
        stub.answers(WELL | answers)
        for path, text in (FILES | files).items():
            if text is not None:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(text + "\n")
        for name in ("LD_LIBRARY_PATH", "NVML_STUB"):
            monkeypatch.setenv(name, stub.environment[name])
        schedule, points = Schedule(NvmlSource(str(stub.library))), Points()
        schedule.run_due(points)
        schedule.close()
        trouble = [row[6] for row in points.events if row[2] == "signal_lost"]
        facts = with_files(points.metrics, trouble, tmp_path, tmp_path / "kernel.log")
        if copies_gb_s:
            monkeypatch.setenv("COPIES_GB_S", str(copies_gb_s))
            facts.bandwidth = bandwidth.measure(facts)
        return {f"{one.check} {one.device}".strip(): one for one in examine(facts)}

    return judged


def test_a_node_that_is_well_passes_all_23(judge):
    results = judge({}, {}, 55)
    others = {check for check, _ in HARDWARE_STATES}
    of_devices = [check for check in CHECKS if check not in others]
    assert [name.partition(" ")[0] for name in results] == of_devices
    assert len(results) == 23
    for one in results.values():
        assert (one.status, one.remedy, one.failure) == (Status.PASS, "", ""), one
        assert one.figure, one
        assert one.expected, one


@pytest.mark.parametrize(("check", "state"), STATES)
def test_a_check_in_a_state(judge, check, state):
    answers, files, copies_gb_s, others = STATES[check, state]
    # Copies take a process each: only where they are what is looked at.
    results = judge(answers, files, copies_gb_s if check == "host_bandwidth" else None)
    (one,) = (results[name] for name in (check, f"{check} gpu 0") if name in results)
    assert one.status == state, one
    assert one.figure, one
    assert one.expected, one
    assert one.figure != one.expected
    assert one.remedy, one
    assert one.failure in table("failures") or one.failure == "program"
    bad = {name.partition(" ")[0] for name, it in results.items() if it.status is not Status.PASS}
    assert bad == {check, *others}


def test_every_check_has_every_state_or_a_reason_why_not():
    shown = set(STATES) | set(HARDWARE_STATES) | {(check, "pass") for check in CHECKS}
    for check, known in table("checks").items():
        for state in Status:
            cannot = known.get("cannot", {}).get(state)
            assert bool(known.get(state)) != bool(cannot), (check, state)
            assert ((check, state) in shown) != bool(cannot), (check, state)


def test_the_page_of_checks_is_what_the_tables_say():
    script = Path(__file__).parents[2] / "scripts/health_docs.py"
    assert subprocess.run([sys.executable, str(script), "--check"]).returncode == 0
