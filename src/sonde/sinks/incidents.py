# SPDX-License-Identifier: Apache-2.0
"""Incidents on their way to a Sonde server: a chunk each, with one row of `event`, kind notice,
name incident, whose text is the incident as JSON. So the server needs to know nothing of them."""

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


class IncidentUploader:
    """Sends them until the server has them; what it has not taken waits in a spool."""

    def __init__(self, url: str, node: str, spool: Path, token_file: Path | None) -> None:
        """Raises UsageError for a bad URL or name, SinkError where the token cannot be read."""
        self._sink = ServerSink(url, node, Spool(spool, SPOOL_BYTES), token_file)
        self._id = str(uuid.uuid4())
        self._seq = 0

    def take(self, row: EventRow, start_ns: int, end_ns: int, wall_offset_ns: int) -> None:
        """Hand one over. `start_ns`, `end_ns`: of CLOCK_MONOTONIC; `wall_offset_ns`: of 1970 before
        its start."""
        self._sink.write(chunk_of(row, start_ns, end_ns, wall_offset_ns, self._id, self._seq))
        self._seq += 1

    def close(self) -> None:
        """The rest waits in the spool for the next start."""
        self._sink.close()

    @property
    def losses(self) -> Mapping[str, int]:
        """Chunks that the server will not get."""
        return self._sink.losses()


def chunk_of(
    row: EventRow, start_ns: int, end_ns: int, wall_offset_ns: int, capture: str, seq: int
) -> bytes:
    """A chunk of one event; `capture` and `seq` name it."""
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
