# SPDX-License-Identifier: Apache-2.0
"""Tables and descriptions of chunks whose values an input chose: framing right, rows hostile."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from captures import filled
from data import Data
from sonde.query.schema import TABLES

_KINDS = (
    *("cpu", "blocked", "runqueue", "device", "kernel", "copy", "set", "sync", "replay", "mapped"),
    *("faulted", "held", "unmapped", "loss", "notice", "start", "exec", "exit", "window", "user"),
    *("python", "h2d", "d2h", "futex", "cuLaunchKernel", "count_map_full", "stack_end", "event"),
    *("cuda", "launch", "1,1,1", "gpu.utilization", '{"gpu": "0"}', "[]", "", "{}", "\x00'\"%s"),
)
_MAX_ROWS = 6


def tables(data: Data) -> dict[str, pa.Table]:
    """A few rows of some tables."""
    found = {}
    for name in TABLES:
        count = data.byte() % _MAX_ROWS
        columns = {field.name: field.type for field in TABLES[name]}
        rows = [{it: _value(data, kind) for it, kind in columns.items()} for _ in range(count)]
        if rows:
            found[name] = filled(name, rows)
    return found


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


def meta(data: Data, number: int) -> dict[str, Any]:
    """What a chunk states of itself."""
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
