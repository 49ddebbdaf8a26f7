# SPDX-License-Identifier: Apache-2.0
"""The layout of the memory shared with the library in a profiled process: abi/inject.h in Python.

Generated from `abi/inject.h` by `scripts/inject_types.py`; a test checks that it is current. Of
each struct there is its layout (HEADER), its fields as a record (Header), and where each of them
lies (HEADER_FIELDS: offset, and type as in the module `struct`). An array is one field for each
element: `grid_0`, `grid_1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

TRACE_MEMFD = "sonde-trace"
TRACE_MAGIC = 3558795274759730030
TRACE_AT = 4096
TRACE_RECORDS = 2097152
TRACED_BYTES = 88
TRACE_BYTES = 184553472
TRACE_MOST_US = 10000000


class TracedKind(IntEnum):
    """What a record of a trace is of."""

    TRACED_KERNEL = 1
    TRACED_COPY = 2
    TRACED_SET = 3
    TRACED_RUNTIME = 4
    """a call of the runtime"""
    TRACED_DRIVER = 5
    """a call of the driver"""


class Trace(NamedTuple):
    """struct inject_trace"""

    magic: int
    """written last"""
    abi: int
    pid: int
    """in the process's own pid namespace"""
    window: int
    cut: int
    """1: it ended early"""
    opened_ns: int
    opened_cupti_ns: int
    closed_ns: int
    closed_cupti_ns: int
    records: int
    """of INJECT_TRACE_RECORDS"""
    left_out: int
    """found no room there; the rest of a buffer after the end is one"""
    dropped: int
    """by CUPTI's own count"""
    unknown: int
    """of kinds that were not asked for"""
    no_buffer: int
    """CUPTI wanted one more than there are"""
    foreign: int
    """buffers that another tool gave to CUPTI, handed to us; left alone"""
    held: int
    """buffers that CUPTI had not given back in the end"""
    off_cupti_ns: int
    switch_ns: int
    """how long switching on took"""
    drained_ns: int
    """how long switching off and fetching what was left took"""


TRACE = Struct("=QIIIIQQQQQQQQQQQQQQ")
TRACE_FIELDS: Mapping[str, tuple[int, str]] = {
    "magic": (0, "Q"),
    "abi": (8, "I"),
    "pid": (12, "I"),
    "window": (16, "I"),
    "cut": (20, "I"),
    "opened_ns": (24, "Q"),
    "opened_cupti_ns": (32, "Q"),
    "closed_ns": (40, "Q"),
    "closed_cupti_ns": (48, "Q"),
    "records": (56, "Q"),
    "left_out": (64, "Q"),
    "dropped": (72, "Q"),
    "unknown": (80, "Q"),
    "no_buffer": (88, "Q"),
    "foreign": (96, "Q"),
    "held": (104, "Q"),
    "off_cupti_ns": (112, "Q"),
    "switch_ns": (120, "Q"),
    "drained_ns": (128, "Q"),
}


class Traced(NamedTuple):
    """struct inject_traced"""

    start_ns: int
    end_ns: int
    node: int
    """of a graph"""
    bytes: int
    """moved or set"""
    correlation: int
    """of a call, and of what it launched"""
    name: int
    """offset of an inject_name in names, 0 unknown"""
    device: int
    stream: int
    graph: int
    tid: int
    """of a call, in the process's own pid namespace"""
    result: int
    """of a call"""
    kind: int
    """enum inject_traced_kind"""
    direction: int
    memory: int
    """of a copy, by CUPTI's numbers; memory: source | target << 4"""
    grid_0: int
    grid_1: int
    grid_2: int
    block_0: int
    block_1: int
    block_2: int
    registers: int
    shared_bytes: int


TRACED = Struct("=QQQQIIIIIIIHBBIIIHHHHI")
TRACED_FIELDS: Mapping[str, tuple[int, str]] = {
    "start_ns": (0, "Q"),
    "end_ns": (8, "Q"),
    "node": (16, "Q"),
    "bytes": (24, "Q"),
    "correlation": (32, "I"),
    "name": (36, "I"),
    "device": (40, "I"),
    "stream": (44, "I"),
    "graph": (48, "I"),
    "tid": (52, "I"),
    "result": (56, "I"),
    "kind": (60, "H"),
    "direction": (62, "B"),
    "memory": (63, "B"),
    "grid_0": (64, "I"),
    "grid_1": (68, "I"),
    "grid_2": (72, "I"),
    "block_0": (76, "H"),
    "block_1": (78, "H"),
    "block_2": (80, "H"),
    "registers": (82, "H"),
    "shared_bytes": (84, "I"),
}
