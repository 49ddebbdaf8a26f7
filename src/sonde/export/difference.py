# SPDX-License-Identifier: Apache-2.0
"""The difference of two recordings, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from sonde.export import strict_json
from sonde.export.layout import columns, duration, one_line

FORMAT = 1
"""Version of the JSON document."""
ROWS, WAIT_ROWS = 20, 10
"""Changes, and those of waits, that the text shows, at most."""


class Changed(Protocol):
    """One figure in both recordings (`sonde.analyze.difference.Change`).

    `before` and `after` are ns per unit: a step, call, run or second, which `per` names below.
    `cost` is the change as a share of the whole unit before ("weight" in the JSON), `relative` as a
    share of `before`, infinite where that is 0. `certain`: it is larger than the noise.
    """

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def before(self) -> float: ...
    @property
    def after(self) -> float: ...
    @property
    def cost(self) -> float: ...
    @property
    def certain(self) -> bool: ...
    @property
    def relative(self) -> float: ...


class Times(Protocol):
    """The time of one side, all threads together (`sonde.analyze.difference.Spent`), in ns."""

    @property
    def wall_ns(self) -> int: ...
    @property
    def cpu_ns(self) -> int: ...
    @property
    def blocked_ns(self) -> int: ...


def render(
    per: str,
    changes: Sequence[Changed],
    waits: Sequence[Changed] = (),
    spent: tuple[Times, Times] | None = None,
) -> str:
    """Tables of the first changes, and of the first ones of waits, in the order given, which is
    that of `sonde.analyze.difference.Difference`; above them the time of both sides, where more
    than its length is known."""
    lines: list[str] = []
    if spent is not None and any(side.cpu_ns or side.blocked_ns for side in spent):
        head = ("", "wall", "on CPU", "blocked, all threads")
        times = [(one.wall_ns, one.cpu_ns, one.blocked_ns) for one in spent]
        sides = [(name, *map(duration, part)) for name, part in zip("AB", times, strict=True)]
        lines += [*columns([head, *sides], (3, -8, -8, -20)), ""]
    lines += _table(per, changes, ROWS)
    if waits:
        lines += ["", "blocked, all threads together:", *_table(per, waits, WAIT_ROWS)]
    return "\n".join(lines)


def _table(per: str, changes: Sequence[Changed], limit: int) -> list[str]:
    head = ("", f"before/{per}", f"after/{per}", "change", f"of a {per}", "", "")
    rows: list[tuple[str, ...]] = [head]
    for one in changes[:limit]:
        relative = "new" if math.isinf(one.relative) else f"{100 * one.relative:+.1f} %"
        rows.append(
            (
                one.kind,
                duration(one.before),
                duration(one.after),
                relative,
                f"{100 * one.cost:+.1f} %",
                "" if one.certain else "(within noise)",
                one.name,
            )
        )
    lines = columns(rows, (12, -13, -12, -9, -10, 14, 0))
    if len(changes) > limit:
        lines.append(f"  {len(changes) - limit} smaller changes not shown")
    return lines


def worse(per: str, failed: Sequence[Changed]) -> list[str]:
    """One line for each figure that got worse by more than allowed."""
    return [
        one_line(f"worse by {100 * one.cost:.1f} % of a {per}: {one.kind} {one.name}")
        for one in failed
    ]


def to_json(
    per: str,
    changes: Sequence[Changed],
    failed: Sequence[Changed],
    above: float | None,
    notes: Sequence[str] = (),
    waits: Sequence[Changed] = (),
    spent: tuple[Times, Times] | None = None,
) -> str:
    """The document for scripts: ns, and shares of 1; an infinite change is null. `above`: the
    threshold of --fail-above, a share of 1. `notes`: what speaks
    against comparing the two. `waits`, `spent`: as of `render`."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "per": per,
        "before": _times(spent[0]) if spent is not None else None,
        "after": _times(spent[1]) if spent is not None else None,
        "changes": [_row(one) for one in changes],
        "waits": [_row(one) for one in waits],
        "fail_above": above,
        "failed": [_row(one) for one in failed],
        "notes": list(notes),
    }
    return strict_json.dumps(document, indent=1)


def _times(one: Times) -> dict[str, int]:
    return {"wall_ns": one.wall_ns, "cpu_ns": one.cpu_ns, "blocked_ns": one.blocked_ns}


def _row(one: Changed) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "name": one.name,
        "before_ns": one.before,
        "after_ns": one.after,
        "relative": None if math.isinf(one.relative) else one.relative,
        "weight": one.cost,
        "certain": one.certain,
    }
