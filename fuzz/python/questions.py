# SPDX-License-Identifier: Apache-2.0
"""Captures whose framing is right and whose rows contradict one another: every question, every way
to write the answers, the timeline and its verdict."""

from __future__ import annotations

import io

import hostile_rows
from captures import chunk, file_header
from data import Data, MemoryFile
from sonde.analyze.bound import explain
from sonde.export import folded, html, json_report, pprof, speedscope, summary, table, verdict
from sonde.query import device_callers, memory, queries
from sonde.query.capture import read
from sonde.query.device_runs import device_runs, kinds_seen
from sonde.query.session import Session
from sonde.query.timeline import of_capture
from timeline_checks import check

_file = MemoryFile()
_QUESTIONS = (
    *(queries.processes, queries.usage, queries.waits, queries.idle_threads),
    *(queries.device_calls, queries.losses, queries.stack_ends, queries.notices),
    *(queries.metrics, device_callers.device_callers, device_runs, memory.memory, memory.growth),
)
_WRITERS = (folded, html, json_report, pprof, speedscope, table, summary)


def one(raw: bytes) -> None:
    """Make a capture, and ask it one thing after another as the input chose."""
    data = Data(raw)
    asked, written = data.byte(), data.byte()
    content = file_header()
    for number in range(1 + data.byte() % 2):
        content += chunk(hostile_rows.tables(data), **hostile_rows.meta(data, number))
    capture = read(_file.holding(content))
    session = Session(capture)
    for number, question in enumerate(_QUESTIONS):
        if (asked + number) % 3 == 0:
            question(session)
    kinds = kinds_seen(session)
    for kind in kinds:
        queries.top_functions(session, kind)
    writer = _WRITERS[written % len(_WRITERS)]
    writer.write(session, kinds=kinds, where=queries.EVERYTHING, out=io.BytesIO())
    if asked & 128:
        timeline = of_capture(capture)
        check(timeline)
        verdict.to_json(explain(timeline))
