# SPDX-License-Identifier: Apache-2.0
"""What README.md shows is what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.cli.main import main

ROOT = Path(__file__).parents[2]


def test_the_verdict_in_the_readme_is_the_one_printed(capsys: pytest.CaptureFixture[str]) -> None:
    block = (ROOT / "README.md").read_text().split("$ sonde explain rank.sonde\n")[1]
    shown = block.split("```")[0]

    main(["explain", str(ROOT / "tests/data/h200_input_pipeline.sonde")])

    assert capsys.readouterr().out == shown
