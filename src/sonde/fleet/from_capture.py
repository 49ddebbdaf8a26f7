# SPDX-License-Identifier: Apache-2.0
"""Reads a recording as the kernel records that a node samples from."""

from __future__ import annotations

from pathlib import Path

from sonde.fleet.sampling import KernelRecord, Period
from sonde.query.capture import read
from sonde.query.device_use import Source, device_uses


def period_of(path: Path, source: Source | None = None) -> Period:
    """Kernel records of the recording at `path`, from `source` or from the best one that it has.
    Raises CaptureError or UsageError.
    """
    capture = read(path)
    info = capture.info
    used_source, uses = device_uses(capture, source)
    return Period(
        [KernelRecord(use.name, use.start_ns, use.duration_ns) for use in uses],
        info.start_ns,
        max(1, info.duration_ns),
        (info.end_ns + info.wall_offset_ns) // 1_000_000_000,
        used_source,
    )
