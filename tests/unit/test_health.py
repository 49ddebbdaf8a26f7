# SPDX-License-Identifier: Apache-2.0
"""Judgement of facts; the answer as people, Slurm and Kubernetes read it.

Every state of every check, from the library's answers on: test_health_states.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hardware_tree
from nvml_stub import Stub
from sonde.health import CHECKS, Status, examine, node
from sonde.health.facts import Facts, devices_of
from sonde.health.results import table
from sonde.metrics import labels_of

SONDE = [sys.executable, "-m", "sonde", "health"]
UUID = "GPU-1"
H200 = {
    "hw.name": "NVIDIA H200",
    "hw.model": "NVIDIA H200",
    "hw.driver_version": "580.159",
    "sonde.gpu.index": "0",
    "sonde.gpu.pci.address": "00000000:1b:00.0",
}
GOOD = {
    ("hw.gpu.memory.limit", ""): 150754820096,
    ("hw.gpu.utilization", "hw.gpu.task=general"): 0.0,
    ("hw.errors", "error.type=uncorrected,sonde.gpu.memory.kind=sram"): 0,
    ("sonde.gpu.ecc.volatile", "error.type=uncorrected"): 0,
    ("sonde.gpu.ecc.volatile", "error.type=corrected"): 3,
    ("sonde.gpu.remapped_rows", "error.type=uncorrected"): 0,
    ("sonde.gpu.remap.state", "sonde.gpu.remap=pending"): 0,
    ("sonde.gpu.remap.state", "sonde.gpu.remap=failed"): 0,
    ("sonde.gpu.nvlink.links", "sonde.gpu.nvlink.state=up"): 18,
    ("sonde.gpu.nvlink.links", "sonde.gpu.nvlink.state=down"): 0,
    ("sonde.gpu.nvlink.errors", "error.type=replay"): 0,
    ("sonde.gpu.pcie.link.width", "sonde.gpu.pcie.link=current"): 16,
    ("sonde.gpu.pcie.link.width", "sonde.gpu.pcie.link=max"): 16,
    ("sonde.gpu.pcie.link.generation", "sonde.gpu.pcie.link=current"): 5,
    ("sonde.gpu.pcie.link.generation", "sonde.gpu.pcie.link=max"): 5,
    ("sonde.gpu.pcie.replays", ""): 0,
    ("hw.temperature", "hw.sensor_location=gpu"): 41,
    ("hw.temperature", "hw.sensor_location=memory"): 45,
    ("sonde.gpu.throttled", "sonde.gpu.throttle.reason=hardware_thermal"): 0,
    ("sonde.gpu.throttled", "sonde.gpu.throttle.reason=software_thermal"): 0,
    ("sonde.gpu.throttled", "sonde.gpu.throttle.reason=software_power_cap"): 0,
    ("sonde.gpu.power.limit", ""): 700,
    ("sonde.gpu.clock.limit", "sonde.gpu.clock.domain=sm"): 1.98e9,
    ("sonde.gpu.clock", "sonde.gpu.clock.domain=sm"): 1.98e9,
}


def test_devices_are_reported_in_the_order_of_their_indices():
    rows = [
        (0, "sonde.gpu.info", labels_of({"hw.id": f"GPU-{index}", "sonde.gpu.index": index}), 1.0)
        for index in ("10", "2.1", "2", "0", "2.0")
    ]

    indices = [one.about["sonde.gpu.index"] for one in devices_of(rows)]
    assert indices == ["0", "2", "2.0", "2.1", "10"]


def facts_of(changes=None, about=None, **of_node):
    """A good node with one H200, and what is changed in it."""
    values = GOOD | (changes or {})
    rows = [(0, "sonde.gpu.info", labels_of({"hw.id": UUID} | H200 | (about or {})), 1.0)]
    for (series, tags), value in values.items():
        if value is not None:
            pairs = dict(pair.split("=") for pair in tags.split(",") if pair)
            rows.append((0, series, labels_of({"hw.id": UUID} | pairs), float(value)))
    good = {
        "on_the_bus": 1,
        "module_version": "580.159",
        "memory_corrected": 0,
        "memory_uncorrected": 0,
        "ports": {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "ACTIVE"},
        "bandwidth": {UUID: 55e9},
    }
    chosen = good | of_node
    trouble = chosen.pop("trouble", [])
    return Facts(devices=devices_of(rows), trouble=trouble, **chosen)


def of_check(name, facts):
    (result,) = (result for result in examine(facts) if result.check == name)
    return result


def test_a_good_node_passes_every_check_there_is(tmp_path, monkeypatch):
    hardware_tree.write_files(tmp_path)
    hardware_tree.write_tools(tmp_path / "tools")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    results = examine(facts_of(hardware=hardware_tree.collected(tmp_path)))
    assert {result.check for result in results} == set(CHECKS)
    assert {result.status for result in results} == {Status.PASS}
    assert not any(result.remedy for result in results)


XID = "sonde.gpu.xid"
BUSY = {("hw.gpu.utilization", "hw.gpu.task=general"): 1.0}


@pytest.mark.parametrize(
    ("check", "status", "changes"),
    [
        ("memory_size", "fail", {("hw.gpu.memory.limit", ""): 120e9}),
        ("sram_errors", "fail",
         {("hw.errors", "error.type=uncorrected,sonde.gpu.memory.kind=sram"): 1}),
        ("dram_errors", "fail", {("sonde.gpu.ecc.volatile", "error.type=uncorrected"): 1}),
        ("corrected_errors", "warn", {("sonde.gpu.ecc.volatile", "error.type=corrected"): 20000}),
        ("remapping", "warn", {("sonde.gpu.remapped_rows", "error.type=uncorrected"): 2}),
        ("remapping", "fail", {("sonde.gpu.remapped_rows", "error.type=uncorrected"): 8}),
        ("remapping", "warn", {("sonde.gpu.remap.state", "sonde.gpu.remap=pending"): 1}),
        ("remapping", "fail", {("sonde.gpu.remap.state", "sonde.gpu.remap=failed"): 1}),
        ("xid", "pass", {(XID, "sonde.gpu.xid.number=13"): 4}),
        ("xid", "warn", {(XID, "sonde.gpu.xid.number=63"): 1}),
        ("xid", "warn", {(XID, "sonde.gpu.xid.number=9999"): 1}),
        ("xid", "fail", {(XID, "sonde.gpu.xid.number=79"): 1, (XID, "sonde.gpu.xid.number=13"): 1}),
        ("nvlink_up", "fail", {("sonde.gpu.nvlink.links", "sonde.gpu.nvlink.state=up"): 17}),
        ("nvlink_errors", "warn", {("sonde.gpu.nvlink.errors", "error.type=replay"): 5000}),
        ("nvlink_errors", "fail", {("sonde.gpu.nvlink.errors", "error.type=recovery"): 1}),
        ("pcie_width", "fail", {("sonde.gpu.pcie.link.width", "sonde.gpu.pcie.link=current"): 8}),
        ("pcie_generation", "pass",
         {("sonde.gpu.pcie.link.generation", "sonde.gpu.pcie.link=current"): 1}),
        ("pcie_generation", "fail",
         {("sonde.gpu.pcie.link.generation", "sonde.gpu.pcie.link=current"): 1} | BUSY),
        ("pcie_generation", "warn",  # the slot's own
         {("sonde.gpu.pcie.link.generation", "sonde.gpu.pcie.link=current"): 4,
          ("sonde.gpu.pcie.link.generation", "sonde.gpu.pcie.link=max"): 4}),
        ("pcie_replays", "warn", {("sonde.gpu.pcie.replays", ""): 2000}),
        ("temperature", "warn", {("hw.temperature", "hw.sensor_location=gpu"): 85}),
        ("temperature", "fail", {("hw.temperature", "hw.sensor_location=gpu"): 95}),
        ("memory_temperature", "warn", {("hw.temperature", "hw.sensor_location=memory"): 97}),
        ("memory_temperature", "fail", {("hw.temperature", "hw.sensor_location=memory"): 106}),
        ("throttling", "warn",
         {("sonde.gpu.throttled", "sonde.gpu.throttle.reason=software_thermal"): 1}),
        ("throttling", "fail",
         {("sonde.gpu.throttled", "sonde.gpu.throttle.reason=hardware_thermal"): 1}),
        ("throttling", "pass",
         {("sonde.gpu.throttled", "sonde.gpu.throttle.reason=software_power_cap"): 1}),
        ("power_limit", "warn", {("sonde.gpu.power.limit", ""): 500}),
        ("clocks", "warn", {("sonde.gpu.clock.limit", "sonde.gpu.clock.domain=sm"): 1.2e9}),
        ("clocks", "warn", {("sonde.gpu.clock", "sonde.gpu.clock.domain=sm"): 0.9e9} | BUSY),
        ("clocks", "fail", {("sonde.gpu.clock", "sonde.gpu.clock.domain=sm"): 0.6e9} | BUSY),
        ("clocks", "pass", {("sonde.gpu.clock", "sonde.gpu.clock.domain=sm"): 0.345e9}),
    ],
)  # fmt: skip
def test_a_device_that_is_not_well(check, status, changes):
    result = of_check(check, facts_of(changes))
    assert result.status == status
    assert result.figure
    assert result.expected
    assert bool(result.remedy) == bool(result.failure) == (status != "pass")


@pytest.mark.parametrize(
    ("reasons", "status", "figure", "remedy"),
    [
        (("hardware_thermal", "hardware_slowdown"), "fail", "hardware thermal", "fans"),
        (("hardware_power_brake", "hardware_slowdown"), "fail", "hardware power brake", "budget"),
        (("hardware_slowdown",), "fail", "hardware slowdown", "and not which"),
        (("sync_boost", "display_clock"), "pass", "none", ""),
    ],
)
def test_the_specific_reason_of_throttling_goes_before_the_sum(reasons, status, figure, remedy):
    flags = {("sonde.gpu.throttled", f"sonde.gpu.throttle.reason={one}"): 1 for one in reasons}
    found = of_check("throttling", facts_of(flags))
    assert (found.status, found.figure) == (status, figure)
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("check", "status", "of_node"),
    [
        ("library", "fail", {"trouble": ["nvml: does not answer: it hangs in nvml.open"]}),
        ("device_count", "fail", {"on_the_bus": 8}),
        ("driver_match", "fail", {"module_version": "580.95"}),
        ("host_memory", "warn", {"memory_corrected": 5}),
        ("host_memory", "fail", {"memory_uncorrected": 1}),
        ("network", "warn", {"ports": {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}}),
        ("network", "fail", {"ports": {"mlx5_0/1": "DOWN"}}),
        ("reachable", "fail", {"trouble": ["nvml.0.fast: the GPU is lost: it fell off the bus"]}),
        ("reachable", "fail", {"trouble": ["nvml.0.1.normal: does not answer"]}),
        ("reachable", "warn", {"trouble": ["nvml.0.memory limit: permission denied"]}),
        ("reachable", "pass", {"trouble": ["nvml.1.fast: the GPU is lost: it fell off the bus"]}),
        ("library", "pass", {"trouble": ["nvml.0.fast: the GPU is lost: it fell off the bus"]}),
        ("library", "warn", {"trouble": ["nvml.events: permission denied"]}),
        ("host_bandwidth", "warn", {"bandwidth": {UUID: 40e9}}),
        ("host_bandwidth", "fail", {"bandwidth": {UUID: 12e9}}),
        ("xid", "fail", {"xids": [("0000:1b:00", 74)]}),
        ("xid", "pass", {"xids": [("0000:1c:00", 74)]}),
    ],
)
def test_a_node_that_is_not_well(check, status, of_node):
    assert of_check(check, facts_of(**of_node)).status == status


def test_every_class_of_failure_has_checks_and_every_check_a_class():
    named = {name for entry in table("failures").values() for name in entry["checks"]}
    assert named == set(CHECKS)
    classes = set(table("failures"))
    for entry in table("xids")["xid"]:
        assert entry["class"] in classes | {"program"}
    numbers = [n for entry in table("xids")["xid"] for n in entry["numbers"]]
    assert len(numbers) == len(set(numbers))


def test_a_device_nobody_entered_is_judged_by_what_it_reports_itself():
    about = {"hw.model": "NVIDIA Something New", "hw.name": "NVIDIA Something New"}
    results = examine(facts_of(about=about))
    assert {result.status for result in results} == {Status.PASS}
    assert "memory_size" not in {result.check for result in results}
    width = {("sonde.gpu.pcie.link.width", "sonde.gpu.pcie.link=current"): 8}
    assert of_check("pcie_width", facts_of(width, about)).status == "fail"


def test_files_of_the_kernel_are_read(tmp_path):
    for path, text in {
        "sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:1b:00.0/class": "0x030200",
        "sys/bus/pci/devices/0000:1b:00.1/vendor": "0x10de",
        "sys/bus/pci/devices/0000:1b:00.1/class": "0x040300",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  x",
        "sys/devices/system/edac/mc/mc0/ce_count": "4",
        "sys/devices/system/edac/mc/mc0/ue_count": "1",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "kernel.log": "[    1.0] x\n[   12.5] NVRM: Xid (PCI:0000:1B:00): 79, GPU has fallen off\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    facts = node.gather(tmp_path, tmp_path / "kernel.log")
    assert facts.on_the_bus == 1
    assert facts.module_version == "580.159"
    assert (facts.memory_corrected, facts.memory_uncorrected) == (4, 1)
    assert facts.ports == {"mlx5_0/1": "ACTIVE"}
    assert facts.xids == [("0000:1b:00", 79)]


# ---- the command, with a stub of NVML ----


@pytest.fixture
def stub(tmp_path):
    return Stub(tmp_path)


def health(stub, *arguments):
    return subprocess.run(
        [*SONDE, *arguments], env=stub.environment, capture_output=True, text=True, timeout=60
    )


def test_the_command_reports_fit(stub):
    done = health(stub)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("fit for work: ")


def test_the_command_reports_unfit_and_why(stub):
    stub.answers({"devices": 2, "1.sram_uncorrected": 3, "1.temperature": 85})
    done = health(stub)
    assert done.returncode == 1
    assert re.search(r"✗ gpu 1 sram errors +3 uncorrected, 0 corrected \(expected: 0", done.stdout)
    assert "remedy: Drain the node and have the GPU tested" in done.stdout
    assert "unfit for work" in done.stdout
    report = json.loads(health(stub, "--json").stdout)
    assert report["status"] == "fail"
    bad = {(one["device"], one["check"]) for one in report["results"] if one["status"] != "pass"}
    assert bad == {("gpu 1", "sram_errors"), ("gpu 1", "temperature")}


def test_slurm_gets_one_line_and_an_exit_code(stub):
    done = health(stub, "--slurm")
    assert (done.returncode, done.stdout) == (0, "sonde pass\n")
    stub.answers({"field_145": 1})
    done = health(stub, "--slurm")
    assert done.returncode == 1
    assert done.stdout == "sonde fail: gpu 0 remapping: 0 rows replaced, no spare row left\n"


def test_kubernetes_gets_a_node_condition(stub):
    (good,) = json.loads(health(stub, "--kubernetes").stdout)["conditions"]
    assert (good["type"], good["status"]) == ("SondeDevicesHealthy", "True")
    stub.answers({"pcie_width": 8})
    done = health(stub, "--kubernetes")
    (bad,) = json.loads(done.stdout)["conditions"]
    assert done.returncode == 1
    assert (bad["status"], bad["reason"]) == ("False", "PcieWidth")
    assert "gpu 0 pcie_width: 8" in bad["message"]


def test_a_driver_that_hangs_is_a_failure_not_a_hang(stub):
    """With less patience than ten seconds."""
    stub.answers({"hang.nvmlInit_v2": 1})
    impatient = (
        "import sys; from sonde.cli.main import main; from sonde.collect import subprocess_runner;"
        "subprocess_runner.STARTS_IN_S = 3.0; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", impatient, "health", "--slurm"],
        env=stub.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "it hangs in nvml.open" in done.stdout


def test_bandwidth_is_refused_while_the_device_is_in_use(stub):
    stub.set_answers(utilization=90)
    done = health(stub, "--bandwidth")
    assert done.returncode == 2
    assert "gpu 0 is in use (90 % busy" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_slurm_script_drains_with_the_reason(stub, tmp_path):
    """With a stub of scontrol that writes down what it was asked."""
    script = Path(__file__).parents[2] / "deploy/slurm/sonde-healthcheck"
    tools = tmp_path / "bin"
    tools.mkdir()
    asked = tmp_path / "asked"
    (tools / "scontrol").write_text(f'#!/bin/sh\n[ "$1" = update ] && echo "$*" >> {asked}\n')
    (tools / "sonde").write_text(f'#!/bin/sh\nexec {sys.executable} -m sonde "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = stub.environment | {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SLURMD_NODENAME": "node7",
    }
    assert subprocess.run([script], env=environment).returncode == 0
    assert not asked.exists()
    stub.answers({"ecc_uncorrected_volatile": 1})
    assert subprocess.run([script], env=environment).returncode == 1
    assert asked.read_text().startswith(
        "update NodeName=node7 State=DRAIN Reason=sonde fail: gpu 0 dram_errors: 1 uncorrected"
    )
