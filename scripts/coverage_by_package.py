#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints how much of each package the tests run, from coverage.py's JSON report."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path, PurePath


def package_of(path: str) -> str:
    """`sonde.query` for src/sonde/query/plan/tree.py; `sonde` for a module in no package."""
    parts = PurePath(path).parts
    inside = parts[parts.index("sonde") :]
    return ".".join(inside[:2]) if len(inside) > 2 else "sonde"


def table(report: dict[str, dict[str, dict[str, dict[str, int]]]]) -> str:
    """A row for each package and one for all of them: statements, those that ran, their share."""
    statements: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for path, file in report["files"].items():
        for name in (package_of(path), "all"):
            statements[name] += file["summary"]["num_statements"]
            ran[name] += file["summary"]["covered_lines"]
    lines = [f"{'package':<20}{'statements':>12}{'ran':>9}{'share':>9}"]
    for name in [*sorted(statements.keys() - {"all"}), "all"]:
        share = ran[name] / statements[name] if statements[name] else 1.0
        lines.append(f"{name:<20}{statements[name]:>12,}{ran[name]:>9,}{share:>9.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
