# SPDX-License-Identifier: Apache-2.0
"""The tables that all profiles of an OTLP request refer to, each entry read once, within bounds.

A few bytes of a request can refer to an entry any number of times, so the work for a request is not
bounded by its size: it is counted while the request is read (`RequestBudget`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sonde.server.service import RefusedRequestError

MAX_STEPS = 1_500_000
"""Entries of tables, and frames of stacks, that are read for one request: about a microsecond
each."""
MAX_MADE_BYTES = 16 << 20
"""Of the rows and texts of dictionaries (frames, processes, threads) that are made of a request."""
MAX_FRAMES = 1_024
"""Of a stack; the outermost are left out."""
MAX_LINES = 64
"""Functions of a location, of which all but the last are inlined; more are left out."""
MAX_TEXT = 512
"""Characters of a text; longer ones are cut."""
_KINDS = {"kernel": "kernel", "cpython": "python", "native": "user", "go": "user", "rust": "user"}
"""By the attribute `profile.frame.type`: `kind` in the table `frame`; others are jit."""
_FRAME_TYPE = "profile.frame.type"

FrameRow = tuple[str, str, str, str, int, str, int, str]
"""kind, function, binary, build id, offset, file, line, origin (unknown)."""
Attributes = Mapping[str, tuple[str, int]]
"""By key: text and integer of each attribute that is used (`value_of`)."""


class RequestBudget:
    """The work and memory that one request may still take."""

    __slots__ = ("_made_bytes", "_steps")

    def __init__(self) -> None:
        self._steps, self._made_bytes = MAX_STEPS, MAX_MADE_BYTES

    def charge_entries(self, count: int) -> None:
        """Count entries that are about to be read. Raises RefusedRequestError."""
        self._steps -= count
        if self._steps < 0:
            raise _too_much()

    def charge_row(self, row_bytes: int, texts: Iterable[str]) -> None:
        """Count a row that is about to be made. Raises RefusedRequestError."""
        self._made_bytes -= row_bytes + sum(len(text.encode()) for text in texts)
        if self._made_bytes < 0:
            raise _too_much()


def _too_much() -> RefusedRequestError:
    return RefusedRequestError(
        413, "the profiles of one request refer to too much", "send them more often"
    )


@dataclass(slots=True)
class OtlpDictionary:
    """The tables of a request. For references to no entry the methods return empty values."""

    tables: Any
    keys: frozenset[str]
    """Of attributes that are used; others are ignored."""
    budget: RequestBudget
    cut_locations: set[int] = field(default_factory=set)
    """Those with more than MAX_LINES functions, among the ones that were read."""
    _strings: dict[int, str] = field(default_factory=dict)
    _attributes: dict[int, tuple[str, tuple[str, int]]] = field(default_factory=dict)
    _locations: dict[int, Sequence[FrameRow]] = field(default_factory=dict)

    def string(self, at: int) -> str:
        """A text, cut to `MAX_TEXT`."""
        known = self._strings.get(at)
        if known is None:
            table = self.tables.string_table
            known = self._strings[at] = table[at][:MAX_TEXT] if 0 <= at < len(table) else ""
        return known

    def attributes(self, indices: Sequence[int]) -> Attributes:
        """The attributes with these indices that are used."""
        self.budget.charge_entries(len(indices))
        found = {}
        for at in indices:
            key, value = self._attributes.get(at) or self._attribute(at)
            if key:
                found[key] = value
        return found

    def _attribute(self, at: int) -> tuple[str, tuple[str, int]]:
        table = self.tables.attribute_table
        key, value = "", ("", 0)
        if 0 <= at < len(table):
            key = self.string(table[at].key_strindex)
            key = key if key in self.keys or key == _FRAME_TYPE else ""
            if key:
                value = value_of(table[at].value)
        self._attributes[at] = key, value
        return key, value

    def stack(self, at: int) -> tuple[Sequence[int], bool]:
        """Indices of the locations of a stack, leaf first, and whether it has more of them."""
        table = self.tables.stack_table
        if not 0 <= at < len(table):
            return (), False
        indices = table[at].location_indices
        return indices[:MAX_FRAMES], len(indices) > MAX_FRAMES

    def location(self, at: int) -> Sequence[FrameRow]:
        """Frames of a location, innermost first: several where functions are inlined."""
        known = self._locations.get(at)
        if known is None:
            known = self._locations[at] = self._frames(at)
        return known

    def _frames(self, at: int) -> Sequence[FrameRow]:
        tables = self.tables
        if not 0 <= at < len(tables.location_table):
            return ()
        location = tables.location_table[at]
        kind = self.attributes(location.attribute_indices).get(_FRAME_TYPE, ("", 0))[0].lower()
        kind = _KINDS.get(kind, "jit" if kind else "user")
        binary = "[kernel]" if kind == "kernel" else ""
        if 0 < location.mapping_index < len(tables.mapping_table):
            mapping = tables.mapping_table[location.mapping_index]
            binary = self.string(mapping.filename_strindex).rpartition("/")[2] or binary
        offset = location.address if 0 <= location.address < 1 << 63 else 0
        lines = location.lines[:MAX_LINES]
        if len(location.lines) > MAX_LINES:
            self.cut_locations.add(at)
        self.budget.charge_entries(4 + 4 * len(lines))
        found: list[FrameRow] = []
        for line in lines or [None]:
            function, file, number = "", "", 0
            if line is not None and 0 <= line.function_index < len(tables.function_table):
                entry = tables.function_table[line.function_index]
                function = self.string(entry.name_strindex)
                file = self.string(entry.filename_strindex)
                number = line.line if 0 <= line.line < 1 << 31 else 0
            named = (kind, function, binary, "", 0 if function else offset)
            found.append((*named, file, number, ""))
        return found


def value_of(value: Any) -> tuple[str, int]:
    """(text, integer) of a value, of which at most one is not empty."""
    return str(value.string_value)[:MAX_TEXT], int(value.int_value)
