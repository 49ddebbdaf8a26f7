# SPDX-License-Identifier: Apache-2.0
"""`sonde docs`: the tutorials of an installation from a wheel."""

from __future__ import annotations

from pathlib import Path

from sonde.cli import docs
from sonde.cli.main import main

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


def test_the_pages_are_the_tutorials() -> None:
    """Copies, by `cp docs/tutorials/*.md src/sonde/cli/pages`: a package has its files below it."""
    assert docs.names() == sorted(path.stem for path in TUTORIALS.glob("*.md"))
    for name in docs.names():
        assert docs.text_of(name) == (TUTORIALS / f"{name}.md").read_text()


def test_a_page_is_printed_and_all_are_listed(capsys) -> None:
    assert main(["docs", "slow-server"]) == 0
    assert capsys.readouterr().out == (TUTORIALS / "slow-server.md").read_text()
    assert main(["docs"]) == 0
    assert "sonde docs slow-server        A server that is slow" in capsys.readouterr().out
