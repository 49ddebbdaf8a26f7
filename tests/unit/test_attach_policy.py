# SPDX-License-Identifier: Apache-2.0
"""Whose device time may be taken, and what programs that are started are given for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.attach import launch
from sonde.attach.policy import Facts, Policy
from sonde.errors import UsageError

TRAINER = Facts(
    exe="python3.11",
    units=("system.slice", "train-7.service"),
    job="4711",
    pod="0f3c6a2e-1111-2222-3333-444455556666",
    user="alice",
)


def test_off_allows_nobody() -> None:
    assert not Policy("off").allows(Facts(opted=True))


def test_all_allows_everybody_but_those_who_opted_out() -> None:
    assert Policy("all").allows(Facts())
    assert not Policy("all").allows(Facts(opted=False))


@pytest.mark.parametrize(
    "entry",
    ["exe:python*", "unit:train-*.service", "job:4711", "pod:0f3c6a2e-*", "user:alice", "exe:*"],
)
def test_a_list_allows_what_it_names(entry: str) -> None:
    assert Policy("allow-list", [entry]).allows(TRAINER)
    assert not Policy("allow-list", [entry]).allows(Facts(exe="", user="bob", job="47110"))


def test_under_a_list_a_process_may_opt_in_and_out() -> None:
    assert Policy("allow-list").allows(Facts(opted=True))
    assert not Policy("allow-list").allows(Facts())
    assert not Policy("allow-list", ["user:alice"]).allows(Facts(user="alice", opted=False))


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
        ("0::/\n", (), "", ""),
    ],
)  # fmt: skip
def test_what_a_process_is_told_by(
    tmp_path: Path, cgroup: str, units: tuple[str, ...], job: str, pod: str
) -> None:
    facts = Facts.of(7, proc(tmp_path, cgroup))

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
def test_what_a_process_says_itself(tmp_path: Path, environ: bytes, opted: bool | None) -> None:
    assert Facts.of(7, proc(tmp_path, "0::/\n", environ)).opted is opted


def test_nothing_is_known_of_a_process_that_is_gone(tmp_path: Path) -> None:
    assert Facts.of(8, tmp_path) == Facts()


# ---- programs that are started ----


@pytest.fixture
def vendors(tmp_path: Path) -> Path:
    (tmp_path / "pocl.icd").touch()
    return tmp_path


LIBRARY = Path("/var/cache/sonde/x.so")


def test_cuda_alone_needs_no_preload(tmp_path: Path) -> None:
    assert launch.variables({}, LIBRARY, 100, tmp_path) == {
        "SONDE_INJECT": "11:100",
        "CUDA_INJECTION64_PATH": str(LIBRARY),
    }


def test_opencl_is_preloaded_before_what_is_preloaded_already(vendors: Path) -> None:
    given = launch.variables({"LD_PRELOAD": "libother.so"}, LIBRARY, vendors=vendors)

    assert given["LD_PRELOAD"] == f"{LIBRARY}:libother.so"


def test_another_tools_injection_is_left_alone(tmp_path: Path) -> None:
    given = launch.variables({"CUDA_INJECTION64_PATH": "/opt/nsys"}, LIBRARY, vendors=tmp_path)

    assert "CUDA_INJECTION64_PATH" not in given
    assert given["LD_PRELOAD"] == str(LIBRARY)


@pytest.mark.parametrize("environ", [{"SONDE_MAY_ATTACH": "off"}, {"SONDE_INJECT": "off"}])
def test_a_program_may_opt_out(vendors: Path, environ: dict[str, str]) -> None:
    assert launch.variables(environ, LIBRARY, vendors=vendors) == {}
