# SPDX-License-Identifier: Apache-2.0
"""Names, comments and documents use the terms of the field: words that a reader would have to look
up are not there (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[2]

CHECKED = (
    *(f"src/sonde/{package}/" for package in (
        "agent", "analyze", "apis", "attach", "cli", "collect", "diagnose", "export", "fleet",
        "health", "host", "mcp", "metrics", "model", "notify", "procfs", "query", "readers",
        "recording", "resolve", "server", "sinks", "store", "unwind",
    )),
    *("src/sonde/config.py", "src/sonde/errors.py", "src/sonde/http_client.py"),
    *("src/sonde/interpreter.py", "src/sonde/limits.py", "src/sonde/ownership.py"),
    *("src/sonde/private_files.py", "src/sonde/protobuf_size.py",
      "src/sonde/system_libraries.py", "src/sonde/_native.pyi"),
    *("abi/", "bench/", "bpf/", "demo/", "deploy/", "fuzz/", "inject/", "native/"),
    *("scripts/", "tests/", "web/"),
    *("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "README.md", "RELEASING.md"),
    *("SECURITY.md", "docs/"),
)  # fmt: skip
"""Where the words are held to: folders that end with a slash, or files."""

KEPT = (
    *("bench/explain/exam_programs/", "bench/explain/results/", "bench/explain/programs.py"),
    *("bench/mutation/results/", "bench/mutation/survivors.toml"),
    "tests/unit/test_words.py",
)
"""Below those, what stays as it is: programs as they ran, results, names that results have, and the
list of the words itself."""

INSTEAD = {
    "told|tells?|telling": "report, return, known, identified by",
    "says?|said|saying": "have, be, report",
    "hears?|heard|hearing": "receive, drain, on_...",
    "anew": "again",
    "mend|mends|mended": "fix",
    "whoever": "the caller, anybody",
    "so many": "N, this many, the parameter's name",
    "of (?:its|their) own": "separate",
    "knobs?": "constant",
    "rivals?": "co-tenant",
    "askers?": "poller, caller",
    "unkept": "keep_last_only",
    "outlets?": "exporter",
    "odds": "divisor",
    "lumber|foresee|dull|governor": "the field's term",
}
"""A pattern of words, and what to write."""

_TEXT = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)
_NAMES = {
    *("told", "tell", "tells", "telling", "says", "said", "saying", "hear", "hears", "heard"),
    *("anew", "mend", "mends", "mended", "whoever", "knob", "knobs", "rival", "rivals", "asker"),
    *("askers", "unkept", "outlet", "outlets", "odds", "lumber", "foresee", "dull", "governor"),
}
"""The same as parts of names."""
_PARTS = re.compile(r"[A-Z]?[a-z]+")
_PYTHON, _C = (
    (".py", ".pyi"),
    (".rs", ".c", ".cpp", ".cu", ".cl", ".S", ".go", ".java", ".h", ".js"),
)
_SCRIPT = (".ts", ".tsx", ".mjs")
"""Searched as text and for names: markup stands between its strings."""
_PLAIN = (".toml", ".json", ".md", ".css", ".html", ".yaml", ".yml", ".service")
_SUFFIXES = (*_PYTHON, *_C, *_SCRIPT, *_PLAIN)
_WITHOUT_SUFFIX = ("scripts/", "deploy/")
"""Where files without one are text, too: scripts."""
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
"""Of Markdown: blocks of code, and code within a line."""
_C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"", re.DOTALL)
_C_NAME = re.compile(r"[A-Za-z_]\w*")


def tracked() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [it for it in sorted(set(listing.stdout.split("\0"))) if (ROOT / it).is_file()]


def held(path: str) -> bool:
    is_text = path.endswith(_SUFFIXES) or (
        path.startswith(_WITHOUT_SUFFIX) and not PurePath(path).suffix
    )
    if path.startswith(KEPT) or not is_text:
        return False
    return any(path == it or (it.endswith("/") and path.startswith(it)) for it in CHECKED)


def in_names(names: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for line, name in names:
        if {part.lower() for part in _PARTS.findall(name)} & _NAMES:
            yield line, name


def python_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute) and node.attr != "tell":  # the method of files
            yield line, node.attr


def found_in(path: str, text: str) -> list[tuple[int, str]]:
    """(line, word) of what is left in names, comments and texts."""
    found = []
    if path.endswith(_PYTHON):
        found += in_names(python_names(ast.parse(text)))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                found += [(token.start[0], it) for it in _TEXT.findall(token.string)]
        return found
    if path.endswith(".md"):
        text = _CODE.sub(lambda it: "\n" * it[0].count("\n"), text)
    if not path.endswith(_C):
        lines = list(enumerate(text.splitlines(), 1))
        found += [(number, it) for number, line in lines for it in _TEXT.findall(line)]
        if path.endswith(_SCRIPT):
            found += in_names((n, it) for n, line in lines for it in _C_NAME.findall(line))
        return found
    for it in _C_COMMENT.finditer(text):
        line = text.count("\n", 0, it.start()) + 1
        found += [(line, word) for word in _TEXT.findall(it[0])]
    code = _C_COMMENT.sub(lambda it: "\n" * it[0].count("\n"), text)
    names = ((code.count("\n", 0, it.start()) + 1, it[0]) for it in _C_NAME.finditer(code))
    return found + list(in_names(names))


@pytest.mark.parametrize("part", CHECKED)
def test_only_the_words_of_the_field(part: str) -> None:
    paths = [it for it in tracked() if held(it) and it.startswith(part)]
    left = {it: found for it in paths if (found := found_in(it, (ROOT / it).read_text()))}

    assert paths
    assert left == {}, "see INSTEAD"


def test_exceptions_are_still_needed() -> None:
    paths = [it for it in tracked() if it.startswith(KEPT) and it.endswith(_SUFFIXES)]
    with_some = [it for it in paths if found_in(it, (ROOT / it).read_text())]
    assert [it for it in KEPT if not any(path.startswith(it) for path in with_some)] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        *(("a.py", it) for it in ("told = 1", "def tell_all(): ...", "it.hear()", "# so many")),
        *(("a.py", it) for it in ('"""Whoever asks."""', "class Asker: ...", "def f(knobs): ...")),
        *(("a.rs", it) for it in ("fn tells() {}", "/// a row of its own", "let x = 1; // anew")),
        ("a.c", "/* what it\n says */"),
        *(("a.tsx", it) for it in ("<p>It says so.</p>", "setSaid(it)", "// told")),
        *(("deploy/a", "# it says"), ("a.yaml", "about: it tells"), ("a.css", ".said {}")),
        ("a.toml", 'text = "mend it"'),
        ("a.md", "The page says so."),
    ],
)
def test_such_words_are_seen(path: str, text: str) -> None:
    assert found_in(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", "essay = 1  # a foretold end"),
        ("a.rs", "let intellect = 1;"),
        ("a.py", "x = 'so'"),
        ("a.md", "`sonde tell`\n```\nit says\n```\n"),
        ("a.py", "file.tell()"),
    ],
)
def test_others_are_not(path: str, text: str) -> None:
    assert not found_in(path, text)
