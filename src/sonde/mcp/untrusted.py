# SPDX-License-Identifier: Apache-2.0
"""Bounds and escapes for what recorded programs chose: names of functions, processes, nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

MAX_TEXT_CHARS = 300
"""Characters of a text: of a longer one the middle is left out."""
MAX_ANSWER_BYTES = 48 << 10
"""Of the data of one answer, as JSON."""
_ENDS = MAX_TEXT_CHARS // 2 - 2
"""Characters of its beginning, and of its end, that are kept."""
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
"""Invisible characters that count as printable: joiners, fillers, variation selectors."""
MAX_BOXES = 400
"""Functions of a flame graph in an answer."""
MAX_DEPTH = 30
"""Levels of a nested flame graph after chains of single children became one box."""


def escaped(text: str) -> str:
    """A text without control, format, invisible and other unprintable characters, at most
    `MAX_TEXT_CHARS` long.

    Bidirectional overrides, zero-width characters, variation selectors, fillers and lone surrogates
    are among those; each is written as \\xNN, \\uNNNN or \\UNNNNNNNN. Where a long text is cut,
    such an escape is kept or left out as a whole.
    """
    if len(text) <= MAX_TEXT_CHARS and text.isprintable() and not _INVISIBLE.search(text):
        return text
    is_long = len(text) > 2 * MAX_TEXT_CHARS
    parts = [
        _shown(c) for c in (text[:MAX_TEXT_CHARS] + text[-MAX_TEXT_CHARS:] if is_long else text)
    ]
    if not is_long and sum(map(len, parts)) <= MAX_TEXT_CHARS:
        return "".join(parts)
    return f"{_first(parts)}…{_first(parts[::-1], is_reversed=True)}"


def _first(parts: Sequence[str], is_reversed: bool = False) -> str:
    """As many of the parts as `_ENDS` characters take."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        if size > _ENDS:
            break
        kept.append(part)
    return "".join(kept[::-1] if is_reversed else kept)


def _shown(character: str) -> str:
    """A character, or its escape."""
    if character.isprintable() and not _INVISIBLE.match(character):
        return character
    point = ord(character)
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


def fitting(
    rows: Sequence[Any], limit: int, what: str, room: int = MAX_ANSWER_BYTES
) -> tuple[list[Any], list[str]]:
    """(the first `limit` rows, cleaned, that fit into `room` bytes; a line where some are left
    out).

    A row that does not fit is left out alone: smaller ones behind it may fit. `what`: what rows
    are, a plural for that line.
    """
    kept: list[Any] = []
    size = 0
    for row in rows[:limit]:
        one = clean(row)
        one_size = size_of(one) + 1
        if size + one_size <= room:
            size += one_size
            kept.append(one)
    left = len(rows) - len(kept)
    return kept, [f"{left:,} of {len(rows):,} {what} are left out"] if left else []


def fitting_lists(
    document: Mapping[str, Any], lists: Mapping[str, int]
) -> tuple[dict[str, Any], list[str]]:
    """(a document of few fields and some lists, cleaned, within `MAX_ANSWER_BYTES`; lines of what
    is left out).

    `lists`: names of its lists and most rows of each. Lists get room in this order, so that rows of
    the last ones are left out first.
    """
    made = {name: clean(value) for name, value in document.items() if name not in lists}
    cut: list[str] = []
    room = MAX_ANSWER_BYTES - size_of(made)
    for name, most in lists.items():
        made[name], more = fitting(document[name], most, name, room)
        room -= size_of(made[name]) + len(name) + 4
        cut += more
    return {name: made[name] for name in document}, cut


def flame(root: Mapping[str, Any], total: float, most: int) -> tuple[dict[str, Any], list[str]]:
    """(the heaviest boxes of a flame graph, nested; lines where some are left out).

    `root`: as the server's `flametree` has it; `total`: weight of the whole flame graph; `most`:
    functions. A box has `frames` (a chain of functions of which each calls only the next one),
    `share` of `total`, `self_share`, `children`. Even with the longest names some ten boxes fit.
    """
    # `_boxes` has callers before what they call, and sorting keeps that order for equal weights.
    heaviest = sorted(_boxes(root), key=lambda one: -float(one["value"]))
    asked = most = max(1, min(most, MAX_BOXES, len(heaviest)))
    while True:
        made = _box(root, total or 1.0, {id(one) for one in heaviest[:most]}, 0)
        if size_of(made) <= MAX_ANSWER_BYTES or most == 1:
            break
        most //= 2
    cut = []
    left = len(heaviest) - _count(made)
    if left > 0:
        cut.append(
            f"{left:,} of {len(heaviest):,} boxes, the lightest and the deepest, are left out"
        )
    if most < asked:
        cut.append(
            f"names are so long that no more than {most:,} boxes fit: choose one process, or ask"
            " for top_functions"
        )
    return made, cut


def _boxes(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A node and all below it, callers first."""
    found, stack = [], [node]
    while stack:
        one = stack.pop()
        found.append(one)
        stack += one.get("children", ())
    return found


def _box(node: Mapping[str, Any], total: float, chosen: Set[int], depth: int) -> dict[str, Any]:
    """A node with the chosen ones below it (`chosen`: their `id()`), nested up to `MAX_DEPTH`."""
    frames = [_frame(node)]
    children = _kept(node, chosen)
    while len(children) == 1 and not node["self"] and children[0]["value"] == node["value"]:
        node = children[0]
        frames.append(_frame(node))
        children = _kept(node, chosen)
    box: dict[str, Any] = {
        "frames": frames,
        "share": round(node["value"] / total, 4),
        "self_share": round(node["self"] / total, 4),
    }
    if children and depth < MAX_DEPTH:
        box["children"] = [_box(child, total, chosen, depth + 1) for child in children]
    return box


def _kept(node: Mapping[str, Any], chosen: Set[int]) -> list[Mapping[str, Any]]:
    return [child for child in node.get("children", ()) if id(child) in chosen]


def _frame(node: Mapping[str, Any]) -> str:
    name, binary = escaped(str(node["name"])), escaped(str(node["binary"]))
    return f"{name} ({binary})" if binary and binary not in name else name


def _count(box: Mapping[str, Any]) -> int:
    """Functions of a box and of those in it."""
    return len(box["frames"]) + sum(_count(child) for child in box.get("children", ()))
