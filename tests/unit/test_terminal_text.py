# SPDX-License-Identifier: Apache-2.0
"""Names from the kernel, devices and processes reach no terminal with control characters: neither
those below U+0020 nor C1 (U+0080 to U+009F), by one of which some terminals begin a sequence."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from sonde import health, host
from sonde.cli import main
from sonde.export.layout import one_line
from sonde.health import Result
from sonde.procfs import printable

CLI = Path(__file__).parents[2] / "src" / "sonde" / "cli"
CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
HOSTILE = "H200\x9b31m\x85\x1b[2J\x9d0;x\x9c\u202e"


def controls_in(text: str) -> set[str]:
    return {c for c in text if ord(c) in CONTROLS and c != "\n"}


@pytest.mark.parametrize("number", CONTROLS)
def test_every_control_character_is_replaced(number: int) -> None:
    assert one_line(f"a{chr(number)}b").isprintable()
    assert printable(f"a{chr(number)}b").isprintable()


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_doctor(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = host.Finding("device", host.Status.WARN, HOSTILE, HOSTILE, HOSTILE)
    monkeypatch.setattr(host, "examine", lambda: [finding])
    monkeypatch.setattr(host, "blocking", lambda findings: findings)

    assert main.main(["doctor", *flags]) == 3

    shown = capsys.readouterr().out
    assert "H200" in shown
    assert not controls_in(shown)
    if flags:
        assert json.loads(shown)["findings"][0]["detail"] == HOSTILE


@pytest.mark.parametrize("flags", [[], ["--json"], ["--slurm"], ["--kubernetes"]])
def test_health(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result("clock", HOSTILE, "", health.Status.FAIL, HOSTILE, HOSTILE, "", HOSTILE)
    monkeypatch.setattr(health, "gather", lambda **_: health.Facts([], []))
    monkeypatch.setattr(health, "examine", lambda facts: [result])

    assert main.main(["health", *flags]) == 1

    shown = capsys.readouterr().out
    assert "H200" in shown
    assert not controls_in(shown)


def test_documents_on_standard_output_are_ascii() -> None:
    """Where they are not, a terminal takes C1 characters in them for its own."""
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword):
                assert node.arg != "ensure_ascii", f"{path}:{node.value.lineno}"
