# SPDX-License-Identifier: Apache-2.0
"""Classifies device API calls by function name: the tables of `sonde.apis`, and a few patterns."""

from __future__ import annotations

import re
from functools import cache

from sonde.apis import load
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
    "map": CallKind.COPY,
    "unmap": CallKind.COPY,
    "build": CallKind.BUILD,
}
_RULES = (
    (re.compile(r"GraphLaunch"), CallKind.GRAPH_LAUNCH),
    (re.compile(r"Launch(Cooperative)?(Kernel|Host)"), CallKind.LAUNCH),
    (re.compile(r"Memcpy"), CallKind.COPY),
    (re.compile(r"Memset"), CallKind.SET),
    (re.compile(r"Synchronize|clFinish|clWaitForEvents"), CallKind.SYNC),
    (re.compile(r"Malloc|MemAlloc|MemCreate|MemMap|MemSetAccess"), CallKind.ALLOC),
    (re.compile(r"Free|MemRelease|MemUnmap"), CallKind.FREE),
    (re.compile(r"ModuleLoad|LibraryLoad"), CallKind.BUILD),
)
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


def kind_of_op(op: str) -> CallKind:
    """The kind of a call by its operation in the tables of `sonde.apis`."""
    return _KIND_OF_OP.get(op, CallKind.OTHER)


def call_kind(name: str) -> CallKind:
    """The kind of a call by the name of its function."""
    if _EVENTS.search(name):  # a stream waits, the thread does not
        return CallKind.EVENT
    known = _ops().get(name)
    if known is not None:
        return known
    return next((kind for rule, kind in _RULES if rule.search(name)), CallKind.OTHER)
