# SPDX-License-Identifier: Apache-2.0
"""A reader finds words: each package names its terms, and what points to the glossary is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/sonde"
GLOSSARY = ROOT / "docs/reference/glossary.md"
PACKAGES = sorted(path.parent for path in PACKAGE.rglob("*/__init__.py"))
HEADS = (
    *("bpf/README.md", "inject/internal.h", "web/src/README.md"),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("native/*/src/lib.rs")),
    "native/src/lib.rs",
)
"""The same for what is not Python."""
_TERM = re.compile(r"- [^:\n]+: \S")


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda it: str(it.relative_to(PACKAGE)))
def test_each_package_names_its_terms(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    _, _, terms = text.partition("\n\nTerms:\n")

    assert _TERM.match(terms), "a paragraph 'Terms:' at the end, a line '- word: meaning' each"


@pytest.mark.parametrize("path", HEADS)
def test_so_does_the_head_of_what_is_not_python(path: str) -> None:
    _, _, terms = (ROOT / path).read_text().partition("Terms:\n")

    assert _TERM.match(terms.lstrip("/!* \n"))


def in_bold(text: str) -> set[str]:
    """Words of the first column of tables, in bold; several in one cell are separated by commas."""
    cells = re.findall(r"^\| \*\*([^*]+)\*\* \|", text, re.MULTILINE)
    return {word.strip() for cell in cells for word in cell.split(",")}


def test_words_of_the_architecture_are_in_the_glossary() -> None:
    _, _, rest = (ROOT / "docs/architecture.md").read_text().partition("\n## Words\n")
    words = in_bold(rest.partition("\n## ")[0])

    assert len(words) == 10
    assert words <= in_bold(GLOSSARY.read_text())


def test_the_glossary_has_each_word_once() -> None:
    cells = re.findall(r"^\| \*\*([^*]+)\*\* \|", GLOSSARY.read_text(), re.MULTILINE)

    assert sorted(cells) == sorted(set(cells))


def test_paths_of_the_glossary_are_there() -> None:
    missing = []
    for path in re.findall(r"`([\w./*-]+/[\w.*-]+)`", GLOSSARY.read_text()):
        found = [it for at in (ROOT, PACKAGE) for it in at.glob(path.rstrip("/"))]
        missing += [] if found else [path]

    assert missing == []
