# SPDX-License-Identifier: Apache-2.0
"""Encodes the chunks of a capture, each with its metadata: its number and times, and the
machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
import uuid

from sonde import _native
from sonde.config import Config
from sonde.model.program_run import ProgramRun
from sonde.sinks.chunk import ChunkBuilder


class ChunkEncoder:
    """Numbers the chunks of one capture, and encodes them with their metadata."""

    def __init__(self, config: Config) -> None:
        self.program: ProgramRun | None = None
        """What `sonde record` ran, once the recording has seen it from its start to its end."""
        self._config = config
        self._id = str(uuid.uuid4())
        self._seq = 0
        """Number of the next chunk."""

    def encode(self, chunk: ChunkBuilder, end_ns: int, paused_ns: int, *, last: bool) -> bytes:
        """The bytes of the next chunk, which ends at `end_ns` (CLOCK_MONOTONIC) and begins after a
        pause of `paused_ns`; `last`: the capture ends with it."""
        meta = {
            "seq": self._seq,
            "start_ns": chunk.start_ns,
            "end_ns": end_ns,
            "wall_offset_ns": time.time_ns() - time.monotonic_ns(),
            "paused_ns": paused_ns,
            "last": last,
            "capture": {"id": self._id, "version": _native.VERSION, "host": self._host()},
        }
        self._seq += 1
        return chunk.encode(meta)

    def _host(self) -> dict[str, object]:
        return {
            "kernel": platform.release(),
            "machine": platform.machine(),
            "cpus": os.cpu_count() or 0,
            "hz": self._config.hz,
            "whole_machine": self._config.pids is None,
            "recorder": os.getpid(),
            **({"program": dataclasses.asdict(self.program)} if self.program else {}),
        }
