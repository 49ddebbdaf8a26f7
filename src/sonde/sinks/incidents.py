# SPDX-License-Identifier: Apache-2.0
"""Sends incidents to a Sonde server. Each is a chunk with one row of `event`, kind notice, name
incident, whose text is the incident as JSON: to the server it is a chunk as any other."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sonde import _native
from sonde.model.rows import EventRow
from sonde.sinks.chunk import ChunkBuilder
from sonde.sinks.server import ServerSink
from sonde.sinks.spool import Spool

SPOOL_BYTES: Final = 8 << 20
"""Of chunks that the server has not acknowledged; beyond it the oldest are dropped and counted."""


class IncidentUploader:
    """Sends incidents until the server has acknowledged them; until then they are in a spool."""

    def __init__(self, url: str, node: str, spool: Path, token_file: Path | None) -> None:
        """`node`: the name of this machine; `spool`: the folder. Raises UsageError for a bad URL or
        name, SinkError where the spool cannot be used or the token cannot be read."""
        self._sink = ServerSink(url, node, Spool(spool, SPOOL_BYTES), token_file)
        self._id = str(uuid.uuid4())
        self._seq = 0

    def take(self, row: EventRow, start_ns: int, end_ns: int, wall_offset_ns: int) -> None:
        """Hand an incident over; returns at once. `start_ns`, `end_ns`: CLOCK_MONOTONIC;
        `wall_offset_ns`: what to add to those for ns since 1970."""
        self._sink.write(chunk_of(row, start_ns, end_ns, wall_offset_ns, self._id, self._seq))
        self._seq += 1

    def close(self) -> None:
        """Try to send for some seconds; the rest waits in the spool for the next start."""
        self._sink.close()

    @property
    def losses(self) -> Mapping[str, int]:
        """Chunks that the server will not get, by the name of the loss."""
        return self._sink.losses()


def chunk_of(
    row: EventRow, start_ns: int, end_ns: int, wall_offset_ns: int, capture: str, seq: int
) -> bytes:
    """A chunk of one event; `capture` (an id) and `seq` identify it."""
    chunk = ChunkBuilder(start_ns)
    chunk.add("event", [row])
    meta = {
        "seq": seq,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "wall_offset_ns": wall_offset_ns,
        "paused_ns": 0,
        "last": False,
        "capture": {
            "id": capture,
            "version": _native.VERSION,
            "host": {
                "kernel": platform.release(),
                "machine": platform.machine(),
                "cpus": os.cpu_count() or 0,
                "hz": 0,
                "whole_machine": True,
            },
        },
    }
    return chunk.encode(meta)
