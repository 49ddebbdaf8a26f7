# SPDX-License-Identifier: Apache-2.0
"""Writes docs/health.md from the tables of checks: `python scripts/health_docs.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from sonde.health.results import table

TARGET = Path(__file__).parents[1] / "docs" / "health.md"

HEAD = """\
# Whether a node is fit

Made by `scripts/health_docs.py` from the tables in `src/sonde/health`; a test holds it. `sonde
health` runs these checks; each result has its figure, what was expected and, unless it passed, a
remedy. A failure takes the node out (exit code 1, Slurm drains it, the Kubernetes condition is
False); a warning is for a person to look at. Nothing on a device is changed. What a device does not
tell is left out.

`tests/unit/test_health_states.py` has every check pass, warn and fail, from what a stub of NVML
answers and from files in the kernel's shape. Bandwidth is copied by a stub of libcuda there.

| check | asks | passes | warns | fails |
|---|---|---|---|---|
"""


def text() -> str:
    """The whole page."""
    lines = []
    for name, check in table("checks").items():
        cannot = check.get("cannot", {})
        states = [check.get(state) or f"never: {cannot[state]}" for state in STATES]
        lines.append(f"| {name} | {check['asks']} | {' | '.join(states)} |\n")
    return HEAD + "".join(lines) + _failures() + _models()


STATES = ("pass", "warn", "fail")


def _failures() -> str:
    lines = [
        f"| {one['what']} | {', '.join(one['checks'])} | {one['remedy']} |\n"
        for one in table("failures").values()
    ]
    head = "| failure | checks | remedy |\n|---|---|---|\n"
    return f"\n## How large runs fail, and what sees it\n\n{head}{''.join(lines)}"


def _models() -> str:
    names = ", ".join(f"{one['match']} ({one['source']})" for one in table("skus")["sku"])
    return (
        "\n## Models with expected values\n\n"
        f"{names}. Any other model is judged by what it says itself.\n"
    )


def main() -> int:
    """Write it, or with --check compare."""
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text("utf-8") != text())
    TARGET.write_text(text(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
