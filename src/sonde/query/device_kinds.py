# SPDX-License-Identifier: Apache-2.0
"""What the texts of a capture's columns about devices mean in a timeline."""

from __future__ import annotations

from sonde.model.timeline import CallKind, CopyDirection

DIRECTIONS = {
    "h2d": CopyDirection.H2D,
    "d2h": CopyDirection.D2H,
    "d2d": CopyDirection.D2D,
    "h2h": CopyDirection.H2H,
    "p2p": CopyDirection.P2P,
}
"""Of `direction`."""
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
"""Of `op`, of device calls."""
CALL_KIND_OF_RUN = {
    "kernel": CallKind.LAUNCH,
    "replay": CallKind.GRAPH_LAUNCH,
    "copy": CallKind.COPY,
    "set": CallKind.SET,
}
"""Of `kind`, of rows of `device_run`: the call that asks for such work."""
