# SPDX-License-Identifier: Apache-2.0
"""What the host probes report of machines that this one is not: fed with such machines' files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sonde import host
from sonde.errors import HostError
from sonde.host import Status, capabilities, devices, kernel, machine, namespaces


def test_every_finding_has_a_remedy_when_something_is_wrong() -> None:
    findings = host.examine()

    assert len({finding.name for finding in findings}) == len(findings)
    for finding in findings:
        assert finding.detail
        if finding.status in (Status.WARN, Status.FAIL):
            assert finding.needed_for, finding
            assert finding.remedy, finding


def test_missing_btf_stops_recording_and_names_the_option(tmp_path: Path) -> None:
    finding = kernel.btf(tmp_path / "vmlinux")

    assert finding.status is Status.FAIL
    assert "CONFIG_DEBUG_INFO_BTF" in finding.remedy


@pytest.mark.parametrize(
    ("text", "status", "detail"),
    [
        ("[none] integrity confidentiality\n", Status.PASS, "none"),
        ("none [integrity] confidentiality\n", Status.PASS, "integrity"),
        ("none integrity [confidentiality]\n", Status.FAIL, "confidentiality"),
    ],
)
def test_only_confidentiality_lockdown_is_in_the_way(
    tmp_path: Path, text: str, status: Status, detail: str
) -> None:
    path = tmp_path / "lockdown"
    path.write_text(text)

    finding = kernel.lockdown(path)

    assert finding.status is status
    assert detail in finding.detail


def test_a_refused_feature_fails_and_an_unpermitted_one_is_unknown() -> None:
    refused = kernel._feature("ring", lambda: errno.EINVAL, "waits", "Boot another.")
    unknown = kernel._feature("ring", lambda: errno.EPERM, "waits", "Boot another.")
    optional = kernel._feature("multi", lambda: errno.EINVAL, "speed", "-", essential=False)

    assert (refused.status, refused.remedy) == (Status.FAIL, "Boot another.")
    assert unknown.status is Status.ABSENT
    assert optional.status is Status.WARN


def test_hidden_kernel_addresses_are_distinguished_from_visible_ones(tmp_path: Path) -> None:
    hidden, visible = tmp_path / "hidden", tmp_path / "visible"
    hidden.write_text("0000000000000000 T _stext\n0000000000000000 T start\n")
    visible.write_text("0000000000000000 A zero\nffffffff81000000 T _stext\n")

    assert kernel.kernel_addresses(hidden).status is Status.WARN
    assert kernel.kernel_addresses(visible).status is Status.PASS


def test_capabilities_are_read_from_the_effective_set() -> None:
    none = capabilities.effective("CapPrm:\tffff\nCapEff:\t0000000000000000\n")
    everything = capabilities.effective("CapEff:\t000001ffffffffff\n")

    assert [c.name for c in capabilities.missing(none, required_only=True)] == [
        "CAP_BPF",
        "CAP_PERFMON",
    ]
    assert capabilities.missing(everything) == []


def test_sys_admin_does_for_bpf_but_not_for_ptrace() -> None:
    names = [c.name for c in capabilities.missing(1 << capabilities.SYS_ADMIN)]

    assert "CAP_BPF" not in names
    assert "CAP_SYS_PTRACE" in names


def test_the_remedy_in_a_container_is_how_to_start_it_on_a_host_sudo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capabilities, "in_container", lambda: None)
    assert "sudo" in capabilities.how_to_grant()

    monkeypatch.setattr(capabilities, "in_container", lambda: "docker")
    assert "--cap-add BPF" in capabilities.how_to_grant()
    assert "--pid=host" in capabilities.how_to_grant()

    monkeypatch.setattr(capabilities, "in_container", lambda: "kubernetes")
    assert "hostPID: true" in capabilities.how_to_grant()


def test_the_command_to_repeat_is_given_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "sonde"
    script.touch(mode=0o755)
    monkeypatch.setattr(capabilities, "in_container", lambda: None)

    monkeypatch.setattr("sys.argv", [str(script), "record", "--", "echo", "a b"])
    assert f"sudo {script} record -- echo 'a b'" in capabilities.how_to_grant()

    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest", "-q"])
    assert "sudo sonde record" in capabilities.how_to_grant()
    assert "sonde record" in capabilities.without_root()


def test_a_foreign_pid_namespace_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "pid").symlink_to("pid:[4026532201]")
    (tmp_path / "uts").symlink_to("uts:[4026531838]")

    assert namespaces.is_initial("pid", tmp_path) is False
    assert namespaces.is_initial("uts", tmp_path) is True
    assert namespaces.is_initial("ipc", tmp_path) is None
    assert not namespaces.all_initial(tmp_path)


def test_namespaces_that_are_not_known_are_not_the_hosts(tmp_path: Path) -> None:
    ours = tmp_path / "status"
    ours.write_text(f"NSpid:\t{os.getpid()}\n")
    for kind, inode in namespaces.INITIAL.items():
        (tmp_path / kind).symlink_to(f"{kind}:[{inode}]")
    assert namespaces.all_initial(tmp_path)
    namespaces.require_host_pids(tmp_path, ours)

    (tmp_path / "pid").unlink()
    assert not namespaces.all_initial(tmp_path)
    with pytest.raises(HostError, match="cannot be read"):
        namespaces.require_host_pids(tmp_path, ours)
    ours.write_text("Name:\tx\n")
    with pytest.raises(HostError, match="does not show"):
        namespaces.require_matching_proc(ours)


def test_a_machine_that_cannot_be_distinguished_from_a_container_cannot_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "is_initial", lambda *_: None)
    (found,) = namespaces.findings()
    assert found.status is Status.FAIL
    assert "/proc" in found.remedy


def test_gpus_are_counted_by_model(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build\n"
    )
    for address in ("0000:1b:00.0", "0000:43:00.0"):
        folder = tmp_path / "gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t 18\n")

    finding = devices.nvidia(driver, tmp_path / "gpus")

    assert finding.status is Status.PASS
    assert finding.detail == "2 × NVIDIA H200; driver 580.159"


def test_a_driver_without_gpu_is_worth_a_warning(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu\n")

    finding = devices.nvidia(driver, tmp_path / "none")

    assert finding.status is Status.WARN
    assert "550.54.14" in finding.detail


def test_an_opencl_driver_whose_library_is_gone_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libgood.so"
    library.touch()
    (tmp_path / "good.icd").write_text(f"{library}\n")
    (tmp_path / "bad.icd").write_text("libsonde-does-not-exist.so.1\n")

    finding = devices.opencl(tmp_path)

    assert finding.status is Status.WARN
    assert "bad (libsonde-does-not-exist.so.1)" in finding.detail
    assert devices.opencl(tmp_path / "none").status is Status.ABSENT


@pytest.mark.parametrize("content", [b"lib\xff.so\n", b"/" + b"x" * 5_000, b"a\0b"])
def test_an_opencl_file_with_anything_in_it_names_no_library(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "any.icd").write_bytes(content)

    finding = devices.opencl(tmp_path)

    assert finding.status is Status.WARN
    assert "library not found: any" in finding.detail


def test_an_unknown_processor_cannot_record() -> None:
    assert machine.architecture("x86_64").status is Status.PASS
    assert machine.architecture("aarch64").status is Status.WARN
    assert machine.architecture("riscv64").status is Status.FAIL


def test_control_group_versions_are_distinguished(tmp_path: Path) -> None:
    for name, marker in {
        "two": "cgroup.controllers",
        "both": "unified/cgroup.procs",
        "one": "memory/tasks",
    }.items():
        path = tmp_path / name / marker
        path.parent.mkdir(parents=True)
        path.touch()

    assert machine.control_groups(tmp_path / "two").detail == "version 2"
    assert "version 1 and version 2" in machine.control_groups(tmp_path / "both").detail
    assert machine.control_groups(tmp_path / "one").detail == "version 1"
    assert machine.control_groups(tmp_path / "none").status is Status.ABSENT


def test_a_driver_without_its_library_has_no_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    assert devices.nvidia_metrics(driver).status is Status.ABSENT
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159\n")
    monkeypatch.setattr(devices, "_findable", lambda library: False)
    finding = devices.nvidia_metrics(driver)
    assert finding.status is Status.WARN
    assert "libnvidia-ml1" in finding.remedy
    monkeypatch.setattr(devices, "_findable", lambda library: True)
    assert devices.nvidia_metrics(driver).status is Status.PASS


def test_a_proc_of_another_pid_namespace_is_noticed(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nNSpid:\t{os.getpid()}\n")
    assert namespaces.proc_is_ours(status) is True
    status.write_text(f"Name:\tx\nNSpid:\t4711\t{os.getpid()}\n")
    assert namespaces.proc_is_ours(status) is False
    status.write_text("Name:\tx\n")  # a kernel without pid namespaces
    assert namespaces.proc_is_ours(status) is None
    assert namespaces.proc_is_ours(tmp_path / "not there") is False
