# SPDX-License-Identifier: Apache-2.0
"""Whose device time may be taken, and what programs that are started are given for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.attach import launch, policy
from sonde.attach.policy import Policy, ProcessFacts
from sonde.errors import UsageError

TRAINER = ProcessFacts(
    exe="python3.11",
    units=("system.slice", "train-7.service"),
    job="4711",
    pod="0f3c6a2e-1111-2222-3333-444455556666",
    user="alice",
)


def test_off_allows_nobody() -> None:
    assert not Policy("off").allows(ProcessFacts(opted=True))


def test_all_allows_everybody_but_those_who_opted_out() -> None:
    assert Policy("all").allows(ProcessFacts())
    assert not Policy("all").allows(ProcessFacts(opted=False))


@pytest.mark.parametrize(
    "entry",
    ["exe:python*", "unit:train-*.service", "job:4711", "pod:0f3c6a2e-*", "user:alice", "exe:*"],
)
def test_a_list_allows_what_it_names(entry: str) -> None:
    assert Policy("allow-list", [entry]).allows(TRAINER)
    assert not Policy("allow-list", [entry]).allows(ProcessFacts(exe="", user="bob", job="47110"))


def test_a_process_opts_in_only_where_the_operator_lets_its_user() -> None:
    wishes = ProcessFacts(user="bob", opted=True)
    assert not Policy("allow-list").allows(wishes)
    assert not Policy("allow-list", ["user:alice", "opted-in:alice"]).allows(wishes)
    assert Policy("allow-list", ["opted-in:bob"]).allows(wishes)
    assert Policy("allow-list", ["opted-in:*"]).allows(wishes)
    assert not Policy("allow-list", ["opted-in:*"]).allows(ProcessFacts(user="bob"))
    assert not Policy("allow-list", ["opted-in:*"]).allows(ProcessFacts(opted=True)), (
        "of nobody known"
    )


def test_a_process_opts_out_whatever_the_operator_lists() -> None:
    listed = Policy("allow-list", ["user:alice", "opted-in:*"])
    assert not listed.allows(ProcessFacts(user="alice", opted=False))


@pytest.mark.parametrize("entry", ["python", "exe:", "label:x", ":x", ""])
def test_an_entry_that_means_nothing_is_refused(entry: str) -> None:
    with pytest.raises(UsageError, match="device_time_allow") as wrong:
        Policy("allow-list", [entry])
    assert "KIND:PATTERN" in wrong.value.remedy


def proc(folder: Path, cgroup: str, environ: bytes = b"") -> Path:
    (folder / "7").mkdir()
    (folder / "7/exe").symlink_to("/usr/bin/trainer (deleted)")
    (folder / "7/cgroup").write_text(cgroup)
    (folder / "7/environ").write_bytes(environ)
    return folder


@pytest.mark.parametrize(
    ("cgroup", "units", "job", "pod"),
    [
        (
            "0::/system.slice/train.service\n",
            ("system.slice", "train.service"),
            "", "",
        ),
        ("0::/system.slice/slurmstepd.scope/job_42/step_0/user\n",
         ("system.slice", "slurmstepd.scope"), "42", ""),
        ("0::/kubepods.slice/kubepods-pod0f3c6a2e_1111_2222_3333_444455556666.slice/cri-1.scope\n",
         ("kubepods.slice", "kubepods-pod0f3c6a2e_1111_2222_3333_444455556666.slice",
          "cri-1.scope"), "", "0f3c6a2e-1111-2222-3333-444455556666"),
        ("0::/kubepods.slice/kubepods-burstable.slice/"
         "kubepods-burstable-pod0f3c6a2e_1111_2222_3333_444455556666.slice/cri-1.scope\n",
         ("kubepods.slice", "kubepods-burstable.slice",
          "kubepods-burstable-pod0f3c6a2e_1111_2222_3333_444455556666.slice", "cri-1.scope"), "",
         "0f3c6a2e-1111-2222-3333-444455556666"),
        ("12:memory:/kubepods/burstable/pod0f3c6a2e-1111-2222-3333-444455556666/9d1c\n0::/\n",
         (), "", "0f3c6a2e-1111-2222-3333-444455556666"),
        ("0::/../../kubepods/pod0f3c6a2e-1111-2222-3333-444455556666/9d1c\n",
         (), "", "0f3c6a2e-1111-2222-3333-444455556666"),
        ("5:devices:/slurm/uid_1000/job_42/step_0/task_0\n", (), "42", ""),
        ("0::/system.slice/node1_slurmstepd.scope/job_42/step_0\n",
         ("system.slice", "node1_slurmstepd.scope"), "42", ""),
        ("0::/\n", (), "", ""),
    ],
)  # fmt: skip
def test_what_a_process_is_identified_by(
    tmp_path: Path, cgroup: str, units: tuple[str, ...], job: str, pod: str
) -> None:
    facts = ProcessFacts.of(7, proc(tmp_path, cgroup))

    assert (facts.exe, facts.units, facts.job, facts.pod) == ("trainer", units, job, pod)
    assert facts.user


@pytest.mark.parametrize(
    ("environ", "opted"),
    [
        (b"A=1\0SONDE_MAY_ATTACH=on\0", True),
        (b"SONDE_MAY_ATTACH=OFF", False),
        (b"SONDE_MAY_ATTACH=on\0SONDE_INJECT=off\0", False),
        (b"SONDE_MAY_ATTACH=perhaps\0", None),
        (b"XSONDE_MAY_ATTACH=on\0\xff\0", None),
    ],
)
def test_what_a_process_declares_itself(tmp_path: Path, environ: bytes, opted: bool | None) -> None:
    assert ProcessFacts.of(7, proc(tmp_path, "0::/\n", environ)).opted is opted


POD = "0f3c6a2e-1111-2222-3333-444455556666"


@pytest.mark.parametrize(
    "group",
    [
        f"/user.slice/user-1000.slice/user@1000.service/app.slice/{name}"
        for name in (
            "train-7.service", "kubepods.slice/pod" + POD, "slurmstepd.scope/job_4711",
            "job_4711/train-7.service",
        )
    ]
    + [
        f"/system.slice/docker-9d1c.scope/{name}"
        for name in ("train-7.service", "kubepods/pod" + POD, "job_4711", "slurm/uid_0/job_4711")
    ]
    + ["/docker/9d1c/system.slice/train-7.service", f"/docker/9d1c/pod{POD}", "/job_4711"],
)  # fmt: skip
def test_a_control_group_that_a_user_or_a_container_named_proves_nothing(
    tmp_path: Path, group: str
) -> None:
    facts = ProcessFacts.of(7, proc(tmp_path, f"0::{group}\n"))

    assert (facts.job, facts.pod) == ("", "")
    assert "train-7.service" not in facts.units


@pytest.mark.parametrize(
    ("uids", "user"),
    [((0, 0, 0, 0), "root"), ((65534, 0, 0, 0), ""), ((0, 65534, 65534, 65534), ""), ((), "")],
)
def test_a_process_with_the_rights_of_two_users_is_neither_s(
    tmp_path: Path, uids: tuple[int, ...], user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy.procfs, "user_ids", lambda _: uids)
    assert ProcessFacts.of(7, proc(tmp_path, "0::/\n")).user == user


def test_nothing_is_known_of_a_process_that_is_gone() -> None:
    assert ProcessFacts.of(2**22 + 1) == ProcessFacts()


# ---- programs that are started ----


LIBRARY = Path("/var/cache/sonde/x.so")


def test_device_libraries_themselves_bring_it() -> None:
    assert launch.variables({}, LIBRARY, 100) == {
        "SONDE_INJECT": "11:100",
        "CUDA_INJECTION64_PATH": str(LIBRARY),
        "OPENCL_LAYERS": str(LIBRARY),
    }


def test_opencl_layers_of_others_stay() -> None:
    given = launch.variables({"OPENCL_LAYERS": "libother.so"}, LIBRARY)

    assert given["OPENCL_LAYERS"] == f"{LIBRARY}:libother.so"


def test_another_tools_injection_is_left_alone() -> None:
    given = launch.variables({"CUDA_INJECTION64_PATH": "/opt/nsys"}, LIBRARY)

    assert "CUDA_INJECTION64_PATH" not in given


@pytest.mark.parametrize("environ", [{"SONDE_MAY_ATTACH": "off"}, {"SONDE_INJECT": "off"}])
def test_a_program_may_opt_out(environ: dict[str, str]) -> None:
    assert launch.variables(environ, LIBRARY) == {}
