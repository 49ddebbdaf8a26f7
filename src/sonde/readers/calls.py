# SPDX-License-Identifier: Apache-2.0
"""Classifies device API calls by function name: the tables of `sonde.apis`, else the patterns of
`sonde.model.call_kinds`."""

from __future__ import annotations

import re
from functools import cache

from sonde.apis import load
from sonde.model.call_kinds import kind_by_name
from sonde.model.timeline import CallKind

_KIND_OF_OP = {
    "launch": CallKind.LAUNCH,
    "graph-launch": CallKind.GRAPH_LAUNCH,
    "copy": CallKind.COPY,
    "set": CallKind.SET,
    "prefetch": CallKind.COPY,
    "sync": CallKind.SYNC,
    "alloc": CallKind.ALLOC,
    "free": CallKind.FREE,
    "pin": CallKind.PIN,
    "unpin": CallKind.PIN,
    "map": CallKind.COPY,  # of a buffer into the program's memory: may copy it there
    "unmap": CallKind.COPY,  # and back
    "build": CallKind.BUILD,
}
"""By `op`, which the tables of `sonde.apis` have for each function. Functions with no op, or one
that is not listed here, are found by name."""
_EVENTS = re.compile(r"StreamWaitEvent|EventRecord")


@cache
def _ops() -> dict[str, CallKind]:
    known: dict[str, CallKind] = {}
    for api in load():
        for call in api.calls:
            if call.op in _KIND_OF_OP:
                for symbol in (call.function, *call.symbols):
                    known[symbol] = _KIND_OF_OP[call.op]
    return known


def call_kind(name: str) -> CallKind:
    """The kind of a call by the name of its function."""
    if _EVENTS.search(name):  # queued in a stream, which waits or records: the thread does neither
        return CallKind.EVENT
    known = _ops().get(name)
    if known is not None:
        return known
    return kind_by_name(name)
