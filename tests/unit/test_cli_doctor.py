# SPDX-License-Identifier: Apache-2.0
"""`sonde doctor`, with and without privileges."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sonde.cli import doctor
from sonde.collect.kernel import BpfObject, Kernel
from sonde.errors import PermissionDenied
from sonde.host import Finding, Status

DOCTOR = [sys.executable, "-m", "sonde", "doctor"]
WITHOUT_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
AS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="gives capabilities up"
)

GOOD = Finding("BTF", Status.PASS, "works", "everything")
POOR = Finding("uprobes", Status.WARN, "missing", "device calls", "Boot another kernel.")
BROKEN = Finding("lockdown", Status.FAIL, "confidentiality", "everything", "Boot without.")


@pytest.mark.bpf
def test_a_machine_that_can_record_exits_with_0() -> None:
    done = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True)

    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["can_record"] is True
    assert {"name", "status", "detail", "needed_for", "remedy"} == set(document["findings"][0])


@AS_ROOT
def test_without_capabilities_it_names_them_and_how_to_grant_them() -> None:
    done = subprocess.run([*WITHOUT_CAPABILITIES, *DOCTOR], capture_output=True, text=True)

    assert done.returncode == 3
    assert "✗ CAP_BPF" in done.stdout
    assert "✗ CAP_PERFMON" in done.stdout
    assert "sudo " in done.stdout or "--cap-add" in done.stdout
    assert done.stderr == ""


def test_the_verdict_follows_the_worst_finding() -> None:
    assert doctor.verdict([GOOD]) == "sonde record works here, with everything it needs."
    assert "less data" in doctor.verdict([GOOD, POOR])
    assert "Boot another kernel." in doctor.verdict([GOOD, POOR])
    assert "cannot work here" in doctor.verdict([GOOD, POOR, BROKEN])
    assert "Boot another kernel." not in doctor.verdict([POOR, BROKEN])


def test_a_remedy_that_fixes_several_is_printed_once() -> None:
    twin = Finding("BPF", Status.FAIL, "refused", "everything", BROKEN.remedy)

    text = doctor.verdict([BROKEN, twin])

    assert text.count(BROKEN.remedy) == 1
    assert "lockdown, BPF" in text


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_table_keeps_to_the_terminals_width(width: int) -> None:
    long = Finding("memory", Status.WARN, "word " * 60, "captures", "Buy some.")

    lines = doctor.table([GOOD, long], width=width, colour=False).splitlines()

    assert max(map(len, lines)) <= width
    assert lines[0].startswith("✓ BTF")
    assert lines[1].startswith("! memory")


def test_colour_is_for_terminals_only() -> None:
    assert "\033[" not in doctor.table([BROKEN], width=80, colour=False)
    assert "\033[31m✗" in doctor.table([BROKEN], width=80, colour=True)


@pytest.mark.bpf
def test_it_reports_what_a_recording_holds_in_the_kernel() -> None:
    done = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True)

    findings = {it["name"]: it["detail"] for it in json.loads(done.stdout)["findings"]}
    assert "at most 64 MB with unwind tables" in findings["memory of BPF maps"]


@pytest.mark.parametrize("is_refused", [True, False])
def test_it_reports_how_connections_are_counted(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """Some kernels refuse iterators over the storages of sockets; a scan does not see them all."""

    class Refusing(Kernel):
        def load(self, wanted: BpfObject) -> object:  # type: ignore[override]
            if is_refused and not wanted.constants["scans_recount"]:
                raise PermissionDenied("refused", "")
            return SimpleNamespace()

    monkeypatch.setattr("sonde.collect.kernel.Kernel", Refusing)
    monkeypatch.setattr("sonde.collect.flows.expect_fields", lambda *_: None)
    (found,) = doctor._connections()
    assert found.status == ("warn" if is_refused else "pass")
    assert ("scans of open files" in found.detail) is is_refused
    assert bool(found.remedy) is is_refused


@pytest.mark.bpf
def test_it_reports_how_connections_are_counted_here() -> None:
    done = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True)
    findings = {it["name"]: it["detail"] for it in json.loads(done.stdout)["findings"]}
    assert findings["connections"].startswith("counted by ")
