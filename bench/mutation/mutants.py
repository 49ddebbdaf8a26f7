# SPDX-License-Identifier: Apache-2.0
"""Which changes could be made: cosmic-ray's to Python, cargo-mutants' to Rust.

Of the many operators that fit one place in the code, one is drawn, so that a line of arithmetic
does not count eleven times. Changes that cannot alter what the program does are left out: those in
annotations (never evaluated here) and in docstrings, whether a dataclass is frozen or has slots
(mypy holds that nothing is assigned), and how much a cache keeps.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

_UNFAIR = re.compile(
    r"core/(VariableReplacer|VariableInserter|RemoveDecorator|ExceptionReplacer"
    r"|ReplaceComparisonOperator_(?!Is_|IsNot_)\w+_(Is|IsNot)"
    r"|ReplaceBinaryOperator_(Add|Sub|Mul|Div|FloorDiv|Mod|Pow)_(RShift|LShift|Bit\w+|Pow)"
    r"|ReplaceUnaryOperator_\w+_(Not|UAdd))$"
)
"""Operators whose mutants die of a TypeError or lint, or depend on names that are not in scope."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one file."""

    file: str
    """Relative to the checkout."""
    place: str
    """Line and column."""
    change: str
    """What was done, for people."""
    code: str
    """The whole file, changed."""

    @property
    def name(self) -> str:
        """Stable between runs over the same code."""
        return f"{self.file}:{self.place} {self.change}"


def drawn(mutants: Iterable[Mutant], count: int, seed: str) -> list[Mutant]:
    """`count` of one file's mutants, each at another place, drawn by `seed`, and behind them one of
    each other place, to take instead of those that cannot be compiled."""
    by_place: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_place[mutant.place].append(mutant)
    chance = random.Random(f"{seed} {next(iter(by_place.values()))[0].file}")
    places = chance.sample(sorted(by_place), min(count, len(by_place)))
    first = [chance.choice(by_place[place]) for place in places]
    others = sorted(set(by_place) - set(places))
    chance.shuffle(others)
    return first + [chance.choice(by_place[place]) for place in others]


def possible(root: Path, file: str, cache: Path) -> list[Mutant]:
    """Every mutant of a file (.py or .rs); kept in `cache`, as listing all takes some minutes."""
    source = (root / file).read_text()
    kept = cache / f"{hashlib.sha256(f'{file} {source}'.encode()).hexdigest()[:24]}.json"
    if kept.exists():
        return [Mutant(*fields) for fields in json.loads(kept.read_text())]
    found = _of_rust(root, file, source) if file.endswith(".rs") else _of_python(file, source)
    mutants = list(found)
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([astuple(mutant) for mutant in mutants]))
    return mutants


_NO_BEHAVIOUR = ("frozen", "slots", "maxsize")
"""Arguments of decorators: of `dataclass` and `lru_cache`."""


def _meaning(code: str) -> str | None:
    """The syntax tree without what alters nothing; None where there is none."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call):
                given = decorator.keywords
                decorator.keywords = [it for it in given if it.arg not in _NO_BEHAVIOUR]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                it
                for it in body
                if not (isinstance(it, ast.Expr) and isinstance(it.value, ast.Constant))
            ] or [ast.Pass()]
    return ast.dump(tree)


def _of_python(file: str, source: str) -> Iterator[Mutant]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    original = _meaning(source)
    for name in sorted(operator_names()):
        if _UNFAIR.match(name):
            continue
        operator = get_operator(name)()
        occurrence = 0
        while (code := mutate_code(source, operator, occurrence)) is not None:
            occurrence += 1
            changed = _meaning(code)
            if changed is None or changed == original:
                continue
            line = next(
                number
                for number, (old, new) in enumerate(
                    zip(source.splitlines(), [*code.splitlines(), ""], strict=False), 1
                )
                if old != new
            )
            old, new = source.splitlines()[line - 1], code.splitlines()[line - 1]
            column = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
            short = name.removeprefix("core/")
            yield Mutant(file, f"{line}:{column}", f"{short}: {new.strip()}", code)


def _of_rust(root: Path, file: str, source: str) -> Iterator[Mutant]:
    command = [
        *("build/tools/cargo/bin/cargo-mutants", "mutants", "--list", "--json"),
        *("--dir", "native", "--workspace", "--file", file.removeprefix("native/")),
    ]
    listed: list[dict[str, Any]] = json.loads(
        subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    )
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for it in listed:
        begin, end = it["span"]["start"], it["span"]["end"]
        first = starts[begin["line"] - 1] + begin["column"] - 1
        last = starts[end["line"] - 1] + end["column"] - 1
        code = source[:first] + it["replacement"] + source[last:]
        what = it["name"].split(": ", 1)[-1]
        yield Mutant(file, f"{begin['line']}:{begin['column']}", what, code)
