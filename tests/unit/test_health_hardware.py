# SPDX-License-Identifier: Apache-2.0
"""Checks of disks, fans, power supplies and sensors, from files in the kernel's format and from
recorded formats of smartctl, ipmitool and ipmi-sensors up to the verdict."""

from __future__ import annotations

import json
import time

import pytest

import hardware_tree as tree
from hardware_tree import HWMON, line, sata
from sonde.cli import main
from sonde.health import CHECKS, Status, disks, examine, hwmon, ipmi, node, tools
from sonde.health.facts import Facts
from sonde.health.hardware_facts import DISK_CHECKS, SENSOR_CHECKS, Sensor

HARDWARE_CHECKS = (*DISK_CHECKS, *SENSOR_CHECKS)


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Results by check of a node with these files and answers of tools."""

    def judged(files, answers):
        tree.write_files(tmp_path, files)
        tree.write_tools(tmp_path / "tools", **answers)
        monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
        facts = Facts([], [], hardware=tree.collected(tmp_path))
        assert facts.hardware.skipped == []
        assert facts.hardware.left_out == 0
        return {one.check: one for one in examine(facts)}

    return judged


def test_hardware_that_is_well_passes_every_check(judge):
    results = judge({}, {})
    assert list(results) == list(HARDWARE_CHECKS)
    for one in results.values():
        assert (one.status, one.remedy, one.failure) == (Status.PASS, "", ""), one
        assert one.figure, one
        assert one.expected, one
    assert results["disk_health"].figure == "2 of 2 disks well"


@pytest.mark.parametrize(("check", "state"), tree.HARDWARE_STATES)
def test_a_check_in_a_state(judge, check, state):
    results = judge(*tree.HARDWARE_STATES[check, state])
    assert results[check].status == state, results[check]
    assert results[check].remedy
    bad = {name for name, one in results.items() if one.status is not Status.PASS}
    assert bad == {check}


@pytest.mark.parametrize(
    ("check", "status", "figure", "files", "answers"),
    [
        ("disk_health", "fail", "nvme0 dead", {"sys/class/nvme/nvme0/state": "dead"}, {}),
        ("disk_health", "warn", "nvme0 connecting",
         {"sys/class/nvme/nvme0/state": "connecting"}, {}),
        ("disk_health", "fail", "sda reports that it is about to fail", {}, sata(5, passed=False)),
        ("disk_health", "warn", "Reallocated_Sector_Ct", {}, sata(5, when_failed="past")),
        ("disk_errors", "warn", "sda 8 (", {}, sata(5, raw={"value": 99, "string": "8 (1 0)"})),
        ("fans", "fail", "CPU fan 2100 RPM, minimum 500, fault", {f"{HWMON}0/fan1_fault": "1"}, {}),
        ("fans", "warn", "alarm", {f"{HWMON}0/fan1_alarm": "1"}, {}),
        ("fans", "fail", "FAN1 300 RPM, critical", {},
         line("FAN1,7800,RPM,ok", "FAN1,300,RPM,lcr")),
        ("power_supplies", "fail", "PS2 Status Non-Redundant: Insufficient Resources", {}, line(
            "10.2,Presence detected", "10.2,Non-Redundant: Insufficient Resources")),
        ("voltages", "pass", "", {f"{HWMON}0/in0_max": "0", f"{HWMON}0/in0_min": "0",
                                  f"{HWMON}0/in0_alarm": "1"}, {}),
        ("voltages", "warn", "12V 10.9 V, alarm", {}, line("12.192,Volts,ok", "10.9,Volts,lnc")),
        ("chassis_temperature", "fail", "coretemp Package id 0 100 °C",
         {f"{HWMON}1/temp1_input": "100000"}, {}),
        ("chassis_temperature", "warn", "alarm", {f"{HWMON}1/temp1_crit_alarm": "1"}, {}),
        ("chassis_sensors", "pass", "4 of 4 sensors well", {}, line(
            "General Chassis intrusion", "Predictive Failure Deasserted")),
    ],
)  # fmt: skip
def test_what_is_not_well_is_named(judge, check, status, figure, files, answers):
    found = judge(files, answers)[check]
    assert found.status == status
    if status != "pass":
        assert figure in found.figure


def test_a_disk_that_sleeps_is_neither_woken_nor_bad(judge, tmp_path):
    results = judge({}, {"sata": tree.STANDBY})
    assert results["disk_health"].figure == "1 of 1 disks well, 1 asleep"
    runs = (tmp_path / "tools/asked").read_text().split("\n")
    assert len([run for run in runs if run]) == 2  # one for each disk
    assert all("-n standby" in run for run in runs if run)
    assert [run.split()[1] for run in runs if run] == ["nvme", "sat"]


def test_a_suspended_disk_is_not_asked(judge, tmp_path):
    results = judge({"sys/block/sda/device/power/runtime_status": "suspended"}, {})
    assert results["disk_health"].figure == "1 of 1 disks well, 1 asleep"
    assert "/sda" not in (tmp_path / "tools/asked").read_text()


def test_wear_and_spare_of_disks_that_are_not_nvme():
    answer = tree.SATA | {
        "endurance_used": {"current_percent": 95},
        "spare_available": {"current_percent": 80, "threshold_percent": 10},
    }
    disk = disks.parse("sda", json.dumps(answer), 0)
    assert (disk.used_percent, disk.spare_percent, disk.spare_threshold_percent) == (95, 80, 10)


def test_what_the_tools_wrote_of_an_emulated_machine():
    """smartctl 7.3, ipmitool 1.8.19 and ipmi-sensors 1.6.10 on QEMU 7.2, shortened."""
    log = {"critical_warning": 0, "temperature": 50, "available_spare": 0,
           "available_spare_threshold": 0, "percentage_used": 0, "media_errors": 0}  # fmt: skip
    answer = {"smart_status": {"passed": True, "nvme": {"value": 0}}}
    disk = disks.parse(
        "nvme0", json.dumps(answer | {"nvme_smart_health_information_log": log}), 0, "live"
    )
    by_ipmitool = ipmi.parse(
        ipmi.TOOLS[0],
        "Inlet Temp,,,ns\nPS1 Status,02h,ok,10.1,\nPS2 Status,03h,ok,10.2,\n",
    )
    by_ipmi_sensors = ipmi.parse(
        ipmi.TOOLS[1],
        "0,Inlet Temp,Temperature,N/A,N/A,C,N/A\n1,PS1 Status,Power Supply,Nominal,N/A,N/A,'OK'\n"
        "2,PS2 Status,Power Supply,Nominal,N/A,N/A,'OK'\n",
    )
    assert by_ipmitool == by_ipmi_sensors
    assert by_ipmitool.left_out == 0
    facts = Facts([], [], hardware=by_ipmitool)
    facts.hardware.disks.append(disk)
    results = {one.check: one.figure for one in examine(facts) if one.status is Status.PASS}
    assert results == {
        "disk_health": "1 of 1 disks well",
        "disk_errors": "1 of 1 disks well",
        "disk_wear": "1 of 1 disks well",
        "power_supplies": "2 of 2 sensors well",
    }


def test_wear_before_smartctl_7_4():
    row = {"offset": 8, "name": "Percentage Used Endurance Indicator", "size": 1, "value": 91}
    statistics = {"pages": [{"number": 7, "revision": 1, "table": [row]}]}
    answer = tree.SATA | {"ata_device_statistics": statistics}
    assert disks.parse("sda", json.dumps(answer), 0).used_percent == 91
    answer = {"scsi_percentage_used_endurance_indicator": 7}
    assert disks.parse("sdb", json.dumps(answer), 0).used_percent == 7


def test_a_chassis_that_was_opened_is_no_fault():
    text = "5,Intrusion,Physical Security,Critical,N/A,N/A,'General Chassis Intrusion'"
    (result,) = examine(Facts([], [], hardware=ipmi.parse(ipmi.TOOLS[1], text)))
    assert (result.check, result.status) == ("chassis_sensors", "pass")


def test_without_smartctl_states_are_checked_and_the_rest_is_skipped(tmp_path, monkeypatch):
    tree.write_files(tmp_path)
    monkeypatch.setattr(tools, "find", lambda name: None)
    facts = Facts([], [], hardware=disks.read(tmp_path, time.monotonic() + 5))
    (one,) = facts.hardware.skipped
    assert one.checks == ("disk_errors", "disk_spare", "disk_wear")
    assert one.reason == "smartctl is not installed"
    assert "smartmontools" in one.remedy
    (result,) = examine(facts)
    assert (result.check, result.status) == ("disk_health", "pass")


def test_a_disk_that_smartctl_may_not_open_is_skipped(tmp_path, monkeypatch):
    messages = [{"string": "Smartctl open device: /dev/sda failed: Permission denied"}]
    no_nvme = dict.fromkeys(path for path in tree.FILES if "/nvme0/" in path)
    tree.write_files(tmp_path, no_nvme)
    tree.write_tool(
        tmp_path / "tools",
        "smartctl",
        f"echo '{json.dumps({'smartctl': {'messages': messages}})}'; exit 2",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    found = disks.read(tmp_path, time.monotonic() + 5)
    assert [one.reason for one in found.skipped] == ["smartctl has no permission"]
    assert examine(Facts([], [], hardware=found)) == []


def test_ipmi_sensors_in_the_place_of_ipmitool():
    found = ipmi.parse(ipmi.TOOLS[1], tree.IPMI_SENSORS)
    assert found.left_out == 0
    assert [(one.check, one.name) for one in found.sensors] == [
        ("chassis_temperature", "CPU1 Temp"),
        ("fans", "FAN1"),
        ("voltages", "12V"),
        ("power_supplies", "PS1 Status"),
        ("power_supplies", "PS2 Status"),
    ]
    lost = tree.IPMI_SENSORS.replace(
        "PS2 Status,Power Supply,Nominal,N/A,N/A,'Presence detected'",
        "PS2 Status,Power Supply,Critical,N/A,N/A,"
        "'Presence detected' 'Power Supply input lost (AC/DC)'",
    )
    sensors = ipmi.parse(ipmi.TOOLS[1], lost)
    (result,) = (
        one for one in examine(Facts([], [], hardware=sensors)) if one.check == "power_supplies"
    )
    assert result.status == "warn"
    assert "PS2 Status Presence detected, Power Supply input lost" in result.figure


def test_a_bmc_without_a_tool_is_one_line(tmp_path, monkeypatch):
    tree.write_files(tmp_path)
    monkeypatch.setattr(tools, "find", lambda name: None)
    (one,) = ipmi.read(tmp_path, time.monotonic() + 5).skipped
    assert one.reason == "IPMI: neither ipmitool nor ipmi-sensors is installed"
    assert one.remedy == "Install ipmitool."


def test_a_machine_with_none_of_it_has_nothing_to_report(tmp_path):
    facts = node.gather(tmp_path)
    assert (facts.hardware.disks, facts.hardware.sensors, facts.hardware.skipped) == ([], [], [])


# ---- tools and files that are not well, or hostile ----


@pytest.mark.parametrize(
    "text",
    ["", "smartctl 6.6", "[]", "null", "[" * 100_000, '{"smartctl": []}', '{"smart_status": 1}',
     '{"ata_smart_attributes": {"table": [1, {"id": 5, "raw": 7}]}}',
     '{"nvme_smart_health_information_log": {"media_errors": -1, "critical_warning": 1e999}}',
     '{"nvme_smart_health_information_log": {"media_errors": "many", "percentage_used": NaN}}',
     '{"nvme_smart_health_information_log": {"media_errors": ' + "9" * 400 + "}}"],
)  # fmt: skip
def test_a_hostile_answer_of_smartctl_is_no_value(text):
    disk = disks.parse("sda", text, 0)
    assert (disk.errors, disk.used_percent, disk.passed) == (None, None, None)


@pytest.mark.parametrize("tool", ipmi.TOOLS)
def test_hostile_lines_of_ipmi_are_counted(tool):
    text = "no sensor\n\x1b[31m,,,,\n" + ",".join("x" * 500 for _ in range(50)) + "\n\n"
    found = ipmi.parse(tool, text)
    assert (found.sensors, found.left_out) == ([], 3)
    many = ipmi.parse(ipmi.TOOLS[0], "F,1,RPM,ok\n" * (ipmi.MAX_SENSORS + 5))
    assert (len(many.sensors), many.left_out) == (ipmi.MAX_SENSORS, 5)


def test_control_characters_do_not_reach_a_figure(judge):
    results = judge(
        {f"{HWMON}0/fan1_label": "a\x1b[31mb", f"{HWMON}0/fan1_input": "0"},
        line("Drive Present", "Drive Fault \x1b]0;x\x07"),
    )
    for one in results.values():
        assert one.figure.isprintable(), one


@pytest.mark.parametrize(
    ("script", "reason"),
    [("sleep 60", "did not end within"), ("cat /dev/zero", "more than 1 MiB"),
     ("false", "listed no sensor (exit code 1)")],
)  # fmt: skip
def test_a_tool_that_hangs_or_floods_is_ended(tmp_path, monkeypatch, script, reason):
    tree.write_files(tmp_path)
    tree.write_tool(tmp_path / "tools", "ipmitool", f"exec {script}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    (one,) = ipmi.read(tmp_path, time.monotonic() + 1).skipped
    assert reason in one.reason


def test_a_disk_that_does_not_answer_is_a_warning(tmp_path, monkeypatch):
    tree.write_files(tmp_path)
    tree.write_tool(tmp_path / "tools", "smartctl", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    monkeypatch.setattr(disks, "DISK_S", 0.3)
    found = disks.read(tmp_path, time.monotonic() + 5)
    (result,) = examine(Facts([], [], hardware=found))
    assert (result.check, result.status) == ("disk_health", "warn")
    assert "no answer within" in result.figure


def test_sensors_beyond_the_limit_are_counted(tmp_path, monkeypatch):
    tree.write_files(tmp_path)
    monkeypatch.setattr(hwmon, "MAX_SENSORS", 2)
    found = hwmon.read(tmp_path, time.monotonic() + 5)
    assert (len(found.sensors), found.left_out) == (2, 2)


def test_a_figure_names_six_bad_ones_and_counts_the_rest():
    sensors = [Sensor("fans", f"FAN{n}", "RPM", 0.0, low=500.0) for n in range(40)]
    facts = Facts([], [])
    facts.hardware.sensors = sensors
    (result,) = examine(facts)
    assert result.status == "fail"
    assert result.figure.endswith("; 34 more (0 of 40 sensors well)")


# ---- the command ----


def test_the_command_in_all_its_outputs(tmp_path, monkeypatch, capsys):
    gather = node.gather
    monkeypatch.setattr("sonde.health.gather", lambda **_: gather(tmp_path))
    tree.write_files(tmp_path, {f"{HWMON}0/fan1_input": "0"})
    tree.write_tools(tmp_path / "tools")
    (tmp_path / "tools/smartctl").unlink()
    monkeypatch.setattr(
        tools, "find", lambda name: str(tmp_path / "tools/ipmitool") if name == "ipmitool" else None
    )

    assert main.main(["health"]) == 1
    text = capsys.readouterr().out
    assert "✗ fans " in text
    assert "docs/guide/runbooks.md#chassis-sensor" in " ".join(text.split())
    assert "· disk errors, disk spare, disk wear: skipped, smartctl is not installed." in text
    assert main.main(["health", "--slurm"]) == 1
    assert capsys.readouterr().out.startswith("sonde fail: fans: nct6798 CPU fan 0 RPM, minimum")
    assert main.main(["health", "--kubernetes"]) == 1
    (condition,) = json.loads(capsys.readouterr().out)["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "Fans")
    assert main.main(["health", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {one["check"] for one in report["results"]} == {"disk_health", *SENSOR_CHECKS}
    assert report["skipped"][0]["checks"] == ["disk_errors", "disk_spare", "disk_wear"]
    assert report["left_out"] == 0


def test_hardware_checks_follow_those_of_devices():
    assert CHECKS[-len(HARDWARE_CHECKS) :] == HARDWARE_CHECKS
    assert {check for check, _ in tree.HARDWARE_STATES} == set(HARDWARE_CHECKS)
