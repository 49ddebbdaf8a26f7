# SPDX-License-Identifier: Apache-2.0
"""The table of thresholds in docs/design/explain.md has every constant, with its value."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+\.\w+)` \| ([^|]+) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
NO_THRESHOLDS = {"_CLEARS", "_DEFERS", "_STALLS"}


def numbers(path: Path) -> dict[str, str]:
    """Constants that are numbers, or two of them, by name."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        try:
            value = ast.literal_eval(node.value)
        except ValueError:
            if not isinstance(node.value, ast.BinOp):
                continue
            value = eval(compile(ast.Expression(node.value), "", "eval"), {"re": re})
        values = list(value) if isinstance(target, ast.Tuple) else [value]
        for name, one in zip(names, values, strict=True):
            pair = isinstance(one, tuple) and len(one) == 2 and all(type(x) is int for x in one)
            if not isinstance(name, ast.Name) or not (type(one) in (int, float) or pair):
                continue
            if name.id.isupper() and name.id not in NO_THRESHOLDS:
                found[name.id] = " to ".join(f"{x:,}" for x in (one if pair else (one,)))
    return found


def test_the_table_has_every_constant_with_its_value():
    query = [
        ROOT / f"src/sonde/query/{name}.py"
        for name in (
            *("thread_totals", "sample_totals", "run_totals", "wait_parts"),
            *("graph_builders", "pools"),
        )
    ]
    files = [*(ROOT / "src/sonde/analyze").glob("*.py"), *query]
    code = {f"{path.stem}.{name}": value for path in files for name, value in numbers(path).items()}
    table = dict(ROW.findall((ROOT / "docs/design/explain.md").read_text()))

    assert table == code
