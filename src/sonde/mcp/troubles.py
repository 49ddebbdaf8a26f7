# SPDX-License-Identifier: Apache-2.0
"""What is wrong with nodes, worst first: the rules of the page's overview (web/src/devices.ts)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_HARMLESS = {"gpu_idle", "idle", "application_clocks", "display_clock", "sync_boost", "none"}
"""Reasons of a lower clock that are no trouble."""
SILENT_S = 120.0
"""A node that has sent nothing for this long is a trouble."""
_LEAST_THROTTLED = 0.05
"""Share of the time from which throttling is a trouble."""
_LEAST_USED = 0.5
"""Share of the time below which the use of a GPU is a trouble."""


@dataclass(slots=True)
class _Device:
    """Mean shares of the time, 0 to 1; None: not measured."""

    utilization: float | None = None
    sm_active: float | None = None

    @property
    def used(self) -> float | None:
        return self.utilization if self.sm_active is None else self.sm_active


@dataclass(slots=True)
class _Node:
    """`devices` by id; `throttled`: share of the time by reason; `errors`: uncorrected ones."""

    devices: dict[str, _Device] = field(default_factory=lambda: defaultdict(_Device))
    throttled: dict[str, float] = field(default_factory=dict)
    errors: float = 0.0


def ranked(
    overview: Iterable[Mapping[str, Any]], devices: Iterable[Mapping[str, Any]], now_s: float
) -> list[dict[str, Any]]:
    """Nodes with `problems` (worst first) and figures, the node in the worst state first.

    `overview`, `devices`: rows of these questions. `now_s`: the time that a silent node is measured
    against, seconds since 1970.
    """
    found: dict[str, _Node] = defaultdict(_Node)
    for row in devices:
        _note(found[row["node"]], row)
    listed = [_state(row, found[row["node"]], now_s) for row in overview]
    listed.sort(key=lambda one: (-one[0], one[1]["node"]))
    return [row for _, row in listed]


def _labels(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _note(node: _Node, row: Mapping[str, Any]) -> None:
    """Add a row of `devices` to its node."""
    labels = _labels(row["labels"])
    name = str(labels.get("hw.id", ""))
    if not name:
        return
    device = node.devices[name]
    series = row["series"]
    if series == "hw.gpu.utilization" and labels.get("hw.gpu.task") == "general":
        device.utilization = row["mean"]
    elif series == "sonde.gpu.sm.active":
        device.sm_active = row["mean"]
    elif series == "sonde.gpu.throttled":
        reason = str(labels.get("sonde.gpu.throttle.reason", ""))
        if row["mean"] > 0 and reason not in _HARMLESS:
            node.throttled[reason] = max(row["mean"], node.throttled.get(reason, 0.0))
    elif series == "hw.errors" and labels.get("error.type") == "uncorrected":
        node.errors += row["most"]


def _state(row: Mapping[str, Any], node: _Node, now_s: float) -> tuple[float, dict[str, Any]]:
    """(sum of the scores of its problems, the node's entry). Scores are those of the page."""
    problems: list[tuple[float, str]] = []
    last_s, lost = row["last_ns"] / 1e9, row["lost"]
    if node.errors > 0:
        problems.append((100, f"{node.errors:g} uncorrected memory errors"))
    if now_s - last_s > SILENT_S:
        problems.append((30, f"nothing sent for {now_s - last_s:,.0f} s"))
    for reason, share in node.throttled.items():
        if share >= _LEAST_THROTTLED:
            problems.append((40 * share, f"throttled {100 * share:.0f} % of the time: {reason}"))
    used = {name: one.used for name, one in node.devices.items() if one.used is not None}
    for name, share in used.items():
        if share is not None and share < _LEAST_USED:
            problems.append((60 * (1 - share), f"{name}: idle {100 * (1 - share):.0f} %"))
    if lost > 0:
        problems.append((3, f"{lost:,.0f} events not observed"))
    problems.sort(reverse=True)
    shares = [share for share in used.values() if share is not None]
    figures = {
        "node": row["node"],
        "problems": [text for _, text in problems],
        "gpus": len(node.devices),
        "gpu_used_share": round(sum(shares) / len(shares), 4) if shares else None,
        "observed_s": round(row["seconds"], 3),
        "last_sent_s_ago": round(now_s - last_s, 1),
        **{
            f"{kind}_s": round((row[f"{kind}_ns"] or 0) / 1e9, 3)
            for kind in ("cpu", "blocked", "runqueue", "device", "kernel")
        },
    }
    return sum(score for score, _ in problems), figures
