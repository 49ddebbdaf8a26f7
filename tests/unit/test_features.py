# SPDX-License-Identifier: Apache-2.0
"""Holds docs/reference/features.md to the code: commands and tests exist, nothing is left out."""

from __future__ import annotations

import argparse
import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from sonde.cli import main as cli

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "docs" / "reference" / "features.md"
HEADER = ["capability", "command", "test", "figure", "shown on"]
QUOTED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Feature:
    capability: str
    commands: list[str]
    tests: list[str]
    figure: str
    shown_on: str


def features() -> list[Feature]:
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in FEATURES.read_text().splitlines()
        if line.startswith("|")
    ]
    header, _, *body = rows
    assert header == HEADER
    return [
        Feature(row[0], QUOTED.findall(row[1]), QUOTED.findall(row[2]), row[3], row[4])
        for row in body
    ]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    parser = cli.build_parser()
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("feature", features(), ids=lambda feature: feature.capability)
def test_what_is_claimed_exists(feature: Feature) -> None:
    assert feature.figure
    assert feature.shown_on
    assert feature.commands
    for command in feature.commands:
        program, name, *flags = command.split()
        if program == "make":
            assert name in make_targets(), command
            continue
        assert program == "sonde", command
        parser = subparsers()[name]
        for action in parser._actions:  # a command may have subcommands
            if isinstance(action, argparse._SubParsersAction) and flags:
                assert flags[0] in action.choices, command
                parser = action.choices[flags[0]]
        options = parser._option_string_actions
        for flag in flags:
            if flag.startswith("-") and flag != "--":
                assert flag in options, f"{command}: no such flag {flag}"
    assert feature.tests
    for test in feature.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        if name:
            functions = {
                node.name
                for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            assert name in functions, test


def test_every_command_and_every_format_is_listed() -> None:
    claimed = " ".join(command for feature in features() for command in feature.commands)

    for name in cli.COMMANDS:
        assert f"sonde {name}" in claimed, name
    for choice in subparsers()["report"]._option_string_actions["--format"].choices or ():
        assert f"--format {choice}" in claimed, choice


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()

    for name in cli.COMMANDS:
        assert f"`sonde {name}" in readme, name
