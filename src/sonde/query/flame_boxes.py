# SPDX-License-Identifier: Apache-2.0
"""The boxes of a flame graph: stacks merged from their roots. In columns, as an object for each box
would take more than all stacks."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sonde.query.stored_flame import FlameStacks

MAX_NODES = 20_000
"""Boxes of a flame graph in an answer, the heaviest."""
MAX_MADE = 200_000
"""Boxes that are made, heaviest stacks first, before `MAX_NODES` of them are chosen. Once this many
are made, the weight of a stack counts for the innermost of its boxes that there is."""
DEEPEST = 256
"""Levels of a flame graph; what lies deeper counts for the last one."""

Texts = tuple[str, str, str]
"""Name, binary and kind."""


@dataclass
class Boxes:
    """Each lies behind the box that it is in; the first is the root, and in itself."""

    parents: Sequence[int]
    names: Sequence[int]
    """Numbers in `texts`."""
    values: Sequence[float]
    own: Sequence[float]
    """Without the boxes in it."""
    texts: list[Texts]
    left_out: int
    """Boxes that there are besides."""

    def counts(self) -> list[int]:
        """How many boxes have each of `texts`."""
        found: list[int] = np.bincount(self.names, minlength=len(self.texts)).tolist()
        return found

    def within(self) -> list[list[int]]:
        """The boxes in each box, heaviest first."""
        found: list[list[int]] = [[] for _ in self.parents]
        for number, parent in enumerate(self.parents[1:], 1):
            found[parent].append(number)
        for numbers in found:
            if len(numbers) > 1:
                numbers.sort(key=lambda it: (-self.values[it], self.texts[self.names[it]][0]))
        return found

    def nested(self) -> dict[str, Any]:
        """The root, with name, binary, kind, value, self and, where there are any, children."""
        boxes: list[dict[str, Any]] = [
            dict(zip(("name", "binary", "kind"), self.texts[name], strict=True))
            | {"value": value, "self": own}
            for name, value, own in zip(self.names, self.values, self.own, strict=True)
        ]
        for box, numbers in zip(boxes, self.within(), strict=True):
            if numbers:
                box["children"] = [boxes[number] for number in numbers]
        return boxes[0]

    def as_json(self) -> str:
        """The same, written."""
        if not (np.isfinite(self.values).all() and np.isfinite(self.own).all()):
            return msgspec.json.encode(self.nested()).decode()  # null for what is no number
        heads = [
            f'{{"name":{json.dumps(name)},"binary":{json.dumps(binary)},"kind":{json.dumps(kind)},'
            for name, binary, kind in self.texts
        ]
        within = self.within()
        pieces: list[str] = []

        def write(number: int) -> None:
            head, value, own = heads[self.names[number]], self.values[number], self.own[number]
            pieces.append(f'{head}"value":{value!r},"self":{own!r}')
            between = ',"children":['
            for child in within[number]:
                pieces.append(between)
                write(child)
                between = ","
            pieces.append("]}" if within[number] else "}")

        write(0)
        return "".join(pieces)


def merged(
    rows: Iterable[Mapping[str, Any]], frames: Mapping[int, Mapping[str, Any]], value: str
) -> Boxes:
    """`rows`: frame_keys (leaf first) and weights, heaviest first; `frames`: by key; `value`: the
    column of `rows` that is the weight."""
    numbers: dict[str, int] = {}
    shown: dict[int, int] = {}
    inside: dict[int, int] = {}
    parents, names = array("i", (0,)), array("i", (0,))
    values, own = [0.0], [0.0]
    for row in rows:
        weight = float(row[value])
        if not weight:
            continue
        at = 0
        values[0] += weight
        for key in row["frame_keys"][: -DEEPEST - 1 : -1]:
            if (number := shown.get(key)) is None:
                number = numbers.setdefault(_joined(*_named(frames.get(key))), len(numbers))
                shown[key] = number
            place = at << 32 | number
            if (child := inside.get(place)) is None:
                if len(parents) > MAX_MADE:
                    break
                child = inside[place] = len(parents)
                parents.append(at)
                names.append(number)
                values.append(0.0)
                own.append(0.0)
            values[child] += weight
            at = child
        own[at] += weight
    inside.clear()
    return _heaviest(
        np.array(parents, np.int64),
        np.array(names, np.int64),
        np.array(values),
        np.array(own),
        list(numbers),
    )


def merged_by_level(stacks: FlameStacks, value: str) -> Boxes:
    """The same of stacks and their frames, level by level, where no more boxes can be made than
    `MAX_MADE`. Raises CaptureError."""
    if stacks.frame_count > MAX_MADE:
        return merged(stacks, stacks.frames(), value)
    numbers: dict[str, int] = {}
    found = map(_named, stacks.locations("function", "binary", "kind"))
    shown = np.array([numbers.setdefault(_joined(*it), len(numbers)) for it in found], np.int64)
    flat, begins, ends, weights = stacks.columns(value)
    flat = shown[flat]
    begins = np.maximum(begins, ends - DEEPEST)
    rows = np.flatnonzero(weights)
    at = np.zeros(len(weights), np.int64)
    parents, names = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    values = [np.array((float(weights.sum()),))]
    made = 1
    for level in range(1, DEEPEST + 1):  # from the roots of the stacks, which are their ends
        rows = rows[ends[rows] - level >= begins[rows]]
        if not len(rows):
            break
        stacks.check()
        place, which = np.unique(at[rows] << 32 | flat[ends[rows] - level], return_inverse=True)
        at[rows] = made + which
        parents.append(place >> 32)
        names.append(place & (1 << 32) - 1)
        values.append(np.bincount(which, weights[rows], len(place)))
        made += len(place)
    return _heaviest(
        np.concatenate(parents),
        np.concatenate(names),
        np.concatenate(values),
        np.bincount(at, weights, made).astype(np.float64),
        list(numbers),
    )


def _heaviest(
    parents: npt.NDArray[np.int64],
    names: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    own: npt.NDArray[np.float64],
    listed: Sequence[str],
) -> Boxes:
    """Of all boxes as many as an answer has. `listed`: their texts, as `_joined`."""
    # A box is never lighter than those in it, and was made before them: with a box there are those
    # that it is in.
    kept = np.sort(np.argsort(-values[1:], kind="stable")[: MAX_NODES + 1]) + 1
    kept = np.concatenate((np.zeros(1, np.int64), kept))
    used, numbered = np.unique(names[kept[1:]], return_inverse=True)
    return Boxes(
        np.searchsorted(kept, parents[kept]).tolist(),
        [0, *(numbered + 1).tolist()],
        values[kept].tolist(),
        own[kept].tolist(),
        [("all", "", ""), *(_apart(listed[number]) for number in used.tolist())],
        len(values) - len(kept),
    )


def _named(frame: Mapping[str, Any] | None) -> Texts:
    """(name, binary, kind) that a frame is shown as."""
    if frame is None:
        return "[unknown]", "", "unknown"
    binary = str(frame["binary"])
    bare = binary if binary.startswith("[") else f"[{binary or 'unknown'}]"
    return frame["function"] or bare, binary, frame["kind"]


def _joined(name: str, binary: str, kind: str) -> str:
    """One text of three: Python's collector of cycles does not visit it, as it would a tuple."""
    return f"{len(name)},{len(binary)},{name}{binary}{kind}"


def _apart(joined: str) -> Texts:
    """What `_joined` joined."""
    name, binary, texts = joined.split(",", 2)
    middle, end = int(name), int(name) + int(binary)
    return texts[:middle], texts[middle:end], texts[end:]
