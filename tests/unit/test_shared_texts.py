# SPDX-License-Identifier: Apache-2.0
"""Names that other programs choose are shared within a bound, and nothing keeps them for ever."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sonde.resolve.shared_texts import SharedTexts
from sonde.resolve.source_lines import short_path

SOURCES = Path(__file__).parents[2] / "src/sonde"


def test_equal_texts_are_one_object():
    shared = SharedTexts()
    first, second = ("".join(["na", "me"]) for _ in range(2))
    assert first is not second
    assert shared(first) is first
    assert shared(second) is first


def test_endless_names_take_no_more_than_the_bound_and_those_in_use_stay():
    shared = SharedTexts(100_000)
    kept = shared("".join(["ke", "pt"]))
    for number in range(10_000):
        shared(f"{number:0500}")
        if number % 20 == 0:
            assert shared("".join(["ke", "pt"])) is kept
            assert shared.bytes <= 100_000
    assert shared(f"{1:0500}") == f"{1:0500}"


def test_a_text_longer_than_the_bound_is_itself():
    shared = SharedTexts(1_000)
    assert shared("x" * 5_000) == "x" * 5_000
    shared("y")
    shared("z" * 900)
    assert shared.bytes < 2_000


def test_nothing_interns_names():
    """On CPython 3.12 an interned string is kept until the process ends."""
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}"
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "intern")
        or (isinstance(node, ast.alias) and node.name == "intern")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("file", "short"),
    [
        ("/src/project/module/main.c", "module/main.c"), ("main.c", "main.c"),
        ("/main.c", "main.c"),
        ("//a//./b/c.c", "b/c.c"), ("", ""), ("/", ""), ("./x.c", "x.c"), ("../x.c", "../x.c"),
    ],
)  # fmt: skip
def test_source_files_are_shown_by_their_last_folder(file, short):
    assert short_path(file) == short
