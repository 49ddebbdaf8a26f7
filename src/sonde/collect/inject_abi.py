# SPDX-License-Identifier: Apache-2.0
"""The Python twin of abi/inject.h: the memory shared with the library in a profiled process."""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag

MEMFD = "sonde-inject"
MAPPED_AS = "/memfd:sonde-inject (deleted)"
"""How its mapping, and the link of its descriptor, read in /proc."""
MAGIC = 0x31746A6E69646E73
ABI = 1
BEAT_NS = 250_000_000
IDLE_NS = 1_000_000_000
AHEAD_NS = 5_000_000_000

HEADER_AT = 0
CONTROL_AT = 4096
STATE_AT = 8192
RING_AT = 12288
RECORD_BYTES = 128
RING_RECORDS = 65536
NAMES_AT = RING_AT + RING_RECORDS * RECORD_BYTES
NAMES_BYTES = 4 << 20
BYTES = NAMES_AT + NAMES_BYTES
NAME_MAX = 2048
KILL = 0x4B494C4C
FRAMES_EACH = 12

HEADER = struct.Struct("=QIIIIQ")
HEADER_FIELDS = ("magic", "abi", "bytes", "pid", "generation", "born_ns")

CONTROL = struct.Struct("=QIIQIIQII")
CONTROL_FIELDS = (
    "heartbeat_ns",
    "request",
    "off",
    "tail",
    "per_second",
    "every",
    "seed",
    "window",
    "window_us",
)

STATE = struct.Struct("=QIIQQ4Q2Q2QQQQ4QQQIIIIIIIIQQ")
STATE_FIELDS = (
    "beat_ns",
    "status",
    "reason",
    "head",
    "names_end",
    "launches",
    "replays",
    "copies",
    "commands",
    "sampled",
    "timed",
    "lost_ring",
    "lost_names",
    "lost_pool",
    "lost_order",
    "left_capturing",
    "windows",
    "window_records",
    "window_dropped",
    "window_cut",
    "host_ns",
    "self_ns",
    "cupti_version",
    "cupti_error",
    "driver_version",
    "hooks",
    "window_done",
    "every",
    "bias_ns",
    "yielded_ms",
    "armed_ns",
    "looks_cut",
)

RECORD = struct.Struct("=QHBBIQQQdQQQQIIIHHIIIIIIII")
RECORD_FIELDS = (
    "seq",
    "type",
    "source",
    "flags",
    "name",
    "correlation",
    "start_ns",
    "end_ns",
    "weight",
    "stream",
    "graph",
    "node",
    "bytes",
    "tid",
    "device",
    "window",
    "registers",
    "kind",
    "grid_x",
    "grid_y",
    "grid_z",
    "block_x",
    "block_y",
    "block_z",
    "shared_bytes",
    "unused",
)

FRAMES = struct.Struct("=QHBBIQII12Q")
FRAMES_FIELDS = ("seq", "type", "part", "parts", "frames", "correlation", "tid", "unused")

NAME = struct.Struct("=II")


class Request(IntFlag):
    """What the library is asked for: enum inject_request."""

    EVENTS = 1
    OPENCL = 2
    WINDOWS = 4
    STACKS = 8
    SITE = 16
    LEAVE = 32


class Status(IntEnum):
    """What the library does: enum inject_status."""

    STARTING = 0
    IDLE = 1
    WAITING = 2
    TIMING = 3
    WINDOW = 4
    YIELDED = 5
    REFUSED = 6
    LEFT = 7
    KILLED = 8


class Reason(IntEnum):
    """Why something asked for is not done: enum inject_reason."""

    OK = 0
    NO_LIBRARY = 1
    NO_HOOK = 2
    DRIVER_OLD = 3
    NO_EVENTS = 4
    CUPTI_MISSING = 5
    CUPTI_UNPROVED = 6
    CUPTI_TAKEN = 7
    CUPTI_DENIED = 8
    CUPTI_FAILED = 9
    NO_MEMORY = 10


REASON_TEXT = {
    Reason.OK: "",
    Reason.NO_LIBRARY: "no device library is loaded in this process",
    Reason.NO_HOOK: "nothing in this process launches device work in a way that can be seen",
    Reason.DRIVER_OLD: "the driver lacks a function that timing needs; update the driver",
    Reason.NO_EVENTS: "the device context has no room for timing events",
    Reason.CUPTI_MISSING: "this process has no CUPTI beside its CUDA runtime",
    Reason.CUPTI_UNPROVED: "its build of CUPTI is not among those proved to be safe",
    Reason.CUPTI_TAKEN: "another profiler in this process holds CUPTI",
    Reason.CUPTI_DENIED: "profiling is restricted to administrators (NVreg_RestrictProfiling)",
    Reason.CUPTI_FAILED: "CUPTI refused",
    Reason.NO_MEMORY: "no memory for records",
}


class Type(IntEnum):
    """What a record speaks of: enum inject_type."""

    KERNEL = 1
    REPLAY = 2
    COPY = 3
    SET = 4
    SYNC = 5
    FRAMES = 6
    WINDOW_EDGE = 7


class Source(IntEnum):
    """How a duration was come by: enum inject_source."""

    BY_EVENT = 1
    BY_CUPTI = 2
    BY_OPENCL = 3
    BY_HOST = 4


class Flag(IntFlag):
    """Marks of a record: enum inject_flags."""

    GATED = 1
    NO_STACK = 2
