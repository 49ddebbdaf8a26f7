# SPDX-License-Identifier: Apache-2.0
"""One JSON document for scripts: every question, every row, numbers in ns and bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

from sonde.model.answers import Wait
from sonde.model.profile import KERNEL, KINDS
from sonde.query import questions
from sonde.query.capture import CaptureInfo
from sonde.query.device_callers import device_callers
from sonde.query.device_runs import device_runs
from sonde.query.memory import growth, memory
from sonde.query.questions import EVERYTHING, Where
from sonde.query.session import Session

FORMAT = 1
"""Raised when a field is renamed or removed; new fields leave it as it is."""


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[str] = KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write the document. Fields are those of `sonde.model.answers`."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "capture": capture(session.info),
        "processes": [_flat(asdict(row)) for row in questions.processes(session, where)],
        "functions": {
            kind: [asdict(row) for row in questions.top_functions(session, kind, where)]
            for kind in kinds
        },
        "waits": [_wait(row) for row in questions.waits(session, where) if row.kind in kinds],
        "device_calls": [_flat(asdict(row)) for row in questions.device_calls(session, where)]
        if "device" in kinds
        else [],
        "usage": [_flat(asdict(row)) for row in questions.usage(session, where)],
        "device_runs": [
            {**_flat(asdict(row)), "mean_ns": row.mean_ns} for row in device_runs(session, where)
        ]
        if KERNEL in kinds
        else [],
        "device_callers": [_flat(asdict(row)) for row in device_callers(session, where)]
        if KERNEL in kinds
        else [],
        "memory": [_flat(asdict(row)) for row in memory(session, where)],
        "memory_growth": [_flat(asdict(row)) for row in growth(session, where)],
        "losses": [asdict(row) for row in questions.losses(session)],
        "notices": [asdict(row) for row in questions.notices(session)],
        "metrics": [asdict(row) for row in questions.metrics(session)],
    }
    text = json.dumps(document, indent=1)
    out.write(f"{text}\n".encode(errors="replace"))


def capture(info: CaptureInfo) -> dict[str, Any]:
    """What the document says about the capture itself."""
    return {
        **asdict(info),
        "path": str(info.path),
        "duration_ns": info.duration_ns,
        "wall_start_ns": info.start_ns + info.wall_offset_ns,
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose process is spelled out in fields of its own."""
    return {**row.pop("process"), **row}


def _wait(row: Wait) -> dict[str, Any]:
    fields = asdict(row)
    del fields["thread"]
    who = {"tid": row.thread.tid, "thread": row.thread.name}
    return {**asdict(row.thread.process), **who, **fields}
