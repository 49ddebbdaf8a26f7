# SPDX-License-Identifier: Apache-2.0
"""Bounds and escapes for what recorded programs chose: names of functions, processes, nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXT = 300
"""Characters of a text: of a longer one the middle is left out."""
ANSWER_BYTES = 48 << 10
"""Of the data of one answer, as JSON."""
_ENDS = TEXT // 2 - 2
MOST_BOXES = 400
DEEPEST = 30
"""Levels of a nested flame graph after chains of single children became one box."""


def escaped(text: str) -> str:
    """A text without control, format and other unprintable characters, at most `TEXT` long.

    Bidirectional overrides, zero-width characters and lone surrogates are among those; each is
    written as \\xNN, \\uNNNN or \\UNNNNNNNN.
    """
    if len(text) > TEXT:
        text = f"{text[:_ENDS]}…{text[-_ENDS:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _code(ord(c)) for c in text)


def _code(point: int) -> str:
    if point < 0x100:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def clean(value: Any) -> Any:
    """The same JSON value with every text and key escaped."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, Mapping):
        return {escaped(str(key)): clean(one) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [clean(one) for one in value]
    return value


def size_of(value: Any) -> int:
    """Bytes of a value as JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def fitting(rows: Sequence[Any], limit: int, what: str) -> tuple[list[Any], list[str]]:
    """(the first rows, cleaned, within `limit` and `ANSWER_BYTES`; a line where rows are left out).

    `what`: a plural for that line.
    """
    kept: list[Any] = []
    size = 0
    for row in rows[:limit]:
        one = clean(row)
        size += size_of(one) + 1
        if size > ANSWER_BYTES:
            break
        kept.append(one)
    left = len(rows) - len(kept)
    return kept, [f"{left:,} of {len(rows):,} {what} are left out"] if left else []


def flame(root: Mapping[str, Any], total: float, most: int) -> tuple[dict[str, Any], list[str]]:
    """(the heaviest boxes of a flame graph, nested; a line where some are left out).

    `root`: as the server's `flametree`. A box has `frames` (a chain of callers where each calls
    only the next one), `share` of `total`, `self_share`, `children`.
    """
    weights = sorted(_weights(root), reverse=True)
    most = max(1, min(most, MOST_BOXES))
    while True:
        least = weights[most - 1] if len(weights) > most else 0.0
        made = _box(root, total or 1.0, least, 0)
        if size_of(made) <= ANSWER_BYTES or most == 1:
            break
        most //= 2
    kept = _count(made)
    left = len(weights) - kept
    if left <= 0:
        return made, []
    return made, [f"{left:,} of {len(weights):,} boxes, the lightest and the deepest, are left out"]


def _weights(node: Mapping[str, Any]) -> list[float]:
    found, stack = [], [node]
    while stack:
        one = stack.pop()
        found.append(float(one["value"]))
        stack += one.get("children", ())
    return found


def _box(node: Mapping[str, Any], total: float, least: float, depth: int) -> dict[str, Any]:
    frames = [_frame(node)]
    children = _kept(node, least)
    while len(children) == 1 and not node["self"] and children[0]["value"] == node["value"]:
        node = children[0]
        frames.append(_frame(node))
        children = _kept(node, least)
    box: dict[str, Any] = {
        "frames": frames,
        "share": round(node["value"] / total, 4),
        "self_share": round(node["self"] / total, 4),
    }
    if children and depth < DEEPEST:
        box["children"] = [_box(child, total, least, depth + 1) for child in children]
    return box


def _kept(node: Mapping[str, Any], least: float) -> list[Mapping[str, Any]]:
    return [child for child in node.get("children", ()) if child["value"] >= least]


def _frame(node: Mapping[str, Any]) -> str:
    name, binary = escaped(str(node["name"])), escaped(str(node["binary"]))
    return f"{name} ({binary})" if binary and binary not in name else name


def _count(box: Mapping[str, Any]) -> int:
    return len(box["frames"]) + sum(_count(child) for child in box.get("children", ()))
