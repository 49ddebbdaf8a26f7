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
ROWS = 20
"""Changes that the text shows, at most."""


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


def render(per: str, changes: Sequence[Changed], limit: int = ROWS) -> str:
    """A table of the first `limit` changes, in the order given, which is that of
    `sonde.analyze.difference.Difference`."""
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
    return "\n".join(lines)


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
) -> str:
    """The document for scripts: ns, and shares of 1; an infinite change is null. `above`: the
    threshold of --fail-above, a share of 1. `notes`: what speaks
    against comparing the two."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "per": per,
        "changes": [_row(one) for one in changes],
        "fail_above": above,
        "failed": [_row(one) for one in failed],
        "notes": list(notes),
    }
    return strict_json.dumps(document, indent=1)


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
