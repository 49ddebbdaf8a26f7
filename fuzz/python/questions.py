# SPDX-License-Identifier: Apache-2.0
"""Captures whose framing is right and whose rows contradict one another: every question, every way
to write the answers, the timeline and its verdict."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa

from captures import chunk, file_header, filled
from data import Data, MemoryFile
from sonde.analyze.bound import explain
from sonde.export import folded, html, json_report, pprof, speedscope, summary, table, verdict
from sonde.query import device_callers, memory, queries
from sonde.query.capture import read
from sonde.query.device_runs import device_runs, kinds_seen
from sonde.query.schema import TABLES
from sonde.query.session import Session
from sonde.query.timeline import of_capture
from timeline_checks import check

_file = MemoryFile()
_KINDS = (
    *("cpu", "blocked", "runqueue", "device", "kernel", "copy", "set", "sync", "replay", "mapped"),
    *("faulted", "held", "unmapped", "loss", "notice", "start", "exec", "exit", "window", "user"),
    *("python", "h2d", "d2h", "futex", "cuLaunchKernel", "count_map_full", "stack_end", "event"),
    *("cuda", "launch", "1,1,1", "gpu.utilization", '{"gpu": "0"}', "[]", "", "{}", "\x00'\"%s"),
)
_MOST_ROWS = 6
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
        content += chunk(_tables(data), **_meta(data, number))
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


def _tables(data: Data) -> dict[str, pa.Table]:
    tables = {}
    for name in TABLES:
        count = data.byte() % _MOST_ROWS
        columns = {field.name: field.type for field in TABLES[name]}
        rows = [{it: _value(data, kind) for it, kind in columns.items()} for _ in range(count)]
        if rows:
            tables[name] = filled(name, rows)
    return tables


def _value(data: Data, kind: pa.DataType) -> Any:
    if pa.types.is_list(kind):
        return [data.number(64) for _ in range(data.byte() % 4)]
    if pa.types.is_boolean(kind):
        return data.byte() & 1 == 1
    if pa.types.is_floating(kind):
        return data.real()
    if pa.types.is_integer(kind):
        value = data.number(kind.bit_width)
        signed = pa.types.is_signed_integer(kind) and value >> (kind.bit_width - 1)
        return value - (1 << kind.bit_width) if signed else value
    return data.text(_KINDS)


def _meta(data: Data, number: int) -> dict[str, Any]:
    host = {"name": "n", "cpus": _odd(data), "hz": _odd(data), "kernel": _odd(data)}
    start_ns = data.number(64)
    return {
        "seq": number,
        "start_ns": start_ns,
        "end_ns": start_ns + data.number(32),
        "wall_offset_ns": data.number(64),
        "paused_ns": data.number(32),
        "capture": {"id": _odd(data), "version": "0", "host": host},
        "last": True,
    }


def _odd(data: Data) -> Any:
    head = data.byte()
    if head < 192:
        return head
    return data.pick((None, "", [], {}, -1, 1e300, json.loads("NaN"), True, 1 << 80))
