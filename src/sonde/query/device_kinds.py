# SPDX-License-Identifier: Apache-2.0
"""Texts in a capture's columns about devices, and what they are in a timeline."""

from __future__ import annotations

from sonde.model.timeline import CallKind, CopyDirection

DIRECTIONS = {
    "h2d": CopyDirection.H2D,
    "d2h": CopyDirection.D2H,
    "d2d": CopyDirection.D2D,
    "h2h": CopyDirection.H2H,
    "p2p": CopyDirection.P2P,
}
"""By the text of the column `direction`."""
CALL_KIND_OF_OPERATION = {
    "launch": CallKind.LAUNCH,
    "graph-launch": CallKind.GRAPH_LAUNCH,
    "copy": CallKind.COPY,
    "map": CallKind.COPY,
    "unmap": CallKind.COPY,
    "prefetch": CallKind.COPY,
    "set": CallKind.SET,
    "sync": CallKind.SYNC,
    "alloc": CallKind.ALLOC,
    "free": CallKind.FREE,
    "pin": CallKind.PIN,
    "unpin": CallKind.PIN,
    "build": CallKind.BUILD,
}
"""By the text of the column `op` of a device call."""
CALL_KIND_OF_RUN = {
    "kernel": CallKind.LAUNCH,
    "replay": CallKind.GRAPH_LAUNCH,
    "copy": CallKind.COPY,
    "set": CallKind.SET,
}
"""By the text of the column `kind` of `device_run`: the call that launches such work."""
