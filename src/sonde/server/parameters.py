# SPDX-License-Identifier: Apache-2.0
"""The parameters of a question over HTTP: which there are, and what a query string asks for."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sonde.errors import UsageError
from sonde.query import stored
from sonde.query.selection import OWNERS, Selection

HOUR_S = 3_600
_MAX_S = 4e9
"""Before and after 1970: the difference of two times in ns must fit into 64 bits."""
_MAX_VALUES = 1_000
"""Parameters of one request."""
MEMORY_KINDS = ("mapped", "unmapped", "faulted")
"""Kinds of samples whose weight is bytes."""
KINDS = ("cpu", "blocked", "runqueue", "device", "kernel", *MEMORY_KINDS)
"""Kinds of samples."""
_OTHER_KINDS = ("block", "block-queue", "syscall")
"""Of the table `activity`, beside those of samples."""
_TRACE = re.compile("[0-9a-fA-F]{32}")
PARAMETERS: Mapping[str, str] = {
    "from": "seconds since 1970; default an hour before `to`",
    "to": "seconds since 1970, exclusive; default now",
    "kind": ", ".join(KINDS),
    "node": "name of a node; may be repeated, as pid and name",
    "pid": "number of a process",
    "name": "kernel, reason of a wait, or function of a call",
    "trace": "32 hexadecimal digits: trace id (W3C) of a request; kind cpu, blocked or runqueue",
    **dict.fromkeys(OWNERS, "as in the table of processes"),
    "series": "name of a metric; of charts may be repeated",
    "points": "the most points of a series; of lanes: steps; up to 1440",
    "limit": "the most rows; of lanes: lanes",
    "group": "of flamegraph: process or thread, which become the outermost frames",
    "by": "of owners, holders: user, job, pod, namespace, container, unit, comm, exe; default user",
    "before_from": "of diff: the earlier time",
    "before_to": "of diff: its end",
    "format": "json or arrow; of timeline and of tables also columns (docs/design/web.md)",
}


class Form(StrEnum):
    """Formats of an answer (the parameter `format`)."""

    JSON = "json"
    ARROW = "arrow"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of a question: see `PARAMETERS`."""

    selection: Selection
    before: Selection
    """Of `diff`: the same selection of an earlier time."""
    series: Sequence[str]
    points: int
    limit: int
    form: Form
    by: str
    group: str


def parse(items: Iterable[tuple[str, str]]) -> Options:
    """The options of a query string. Raises UsageError."""
    given: dict[str, list[str]] = {}
    for number, (name, value) in enumerate(items):
        if name not in PARAMETERS:
            raise UsageError(f"no parameter is called {name[:40]!r}", "see /openapi.json")
        if number >= _MAX_VALUES:
            raise UsageError("too many parameters", f"give at most {_MAX_VALUES}")
        given.setdefault(name, []).append(value)

    def one(name: str, default: str) -> str:
        return given.get(name, [default])[-1]

    end = _ns("to", one("to", str(time.time())))
    start = _ns("from", one("from", str(end / 1e9 - HOUR_S)))
    kind = one("kind", "cpu")
    if kind not in (*KINDS, *_OTHER_KINDS):
        raise UsageError(f"no kind of sample is called {kind[:40]!r}", f"use {', '.join(KINDS)}")
    common: dict[str, Any] = {
        "kind": kind,
        "nodes": given.get("node", []),
        "pids": [_whole("pid", text, 1 << 32) for text in given.get("pid", [])],
        "names": given.get("name", []),
        "owners": {name: given[name][-1] for name in OWNERS if name in given},
        "trace": _trace(one("trace", "")),
    }
    before_end = _ns("before_to", one("before_to", str(start / 1e9)))
    before = _ns("before_from", one("before_from", str((before_end - (end - start)) / 1e9)))
    try:
        form = Form(one("format", "json"))
    except ValueError:
        raise UsageError("no such format", "use json, arrow or columns") from None
    return Options(
        Selection(start, end, **common),
        Selection(before, before_end, **common),
        given.get("series", []),
        _whole("points", one("points", str(stored.MAX_POINTS)), 1 << 31),
        _whole("limit", one("limit", "50"), 1 << 31),
        form,
        one("by", "user"),
        one("group", ""),
    )


def _ns(name: str, text: str) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not -_MAX_S <= seconds <= _MAX_S:
        raise UsageError(f"{name} is no time", "give seconds since 1970")
    return round(seconds * 1e9)


def _trace(text: str) -> str:
    if text and not _TRACE.fullmatch(text):
        raise UsageError("trace is no trace id", "give its 32 hexadecimal digits")
    return text.lower()


def _whole(name: str, text: str, below: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < below):
        raise UsageError(f"{name} is no number", "give a whole number")
    return int(text)
