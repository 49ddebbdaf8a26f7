# SPDX-License-Identifier: Apache-2.0
"""What README.md shows is what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("sonde explain rank.sonde", ["explain"]),
        ("sonde report rank.sonde --format summary", ["report", "--format", "summary"]),
    ],
)
def test_what_the_readme_shows_is_what_is_printed(
    capsys: pytest.CaptureFixture[str], command: str, arguments: list[str]
) -> None:
    block = (ROOT / "README.md").read_text().split(f"$ {command}\n")[1]
    shown = block.split("```")[0]

    main([*arguments, str(ROOT / "tests/data/h200_input_pipeline.sonde")])

    assert capsys.readouterr().out == shown
