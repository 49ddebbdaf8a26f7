# SPDX-License-Identifier: Apache-2.0
"""The layout of the memory shared with the library in a profiled process: abi/inject.h in Python.

Generated from `abi/inject.h` by `scripts/inject_types.py`; a test checks that it is current. Of
each struct there is its layout (HEADER), its fields as a record (Header), and where each of them
lies (HEADER_FIELDS: offset, and type as in the module `struct`). An array is one field for each
element: `grid_0`, `grid_1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag
from struct import Struct
from typing import NamedTuple

MEMFD = "sonde-inject"
MAGIC = 3563590227604041331
ABI = 4
HEARTBEAT_NS = 250000000
IDLE_NS = 1000000000
AHEAD_NS = 5000000000
HEADER_AT = 0
CONTROL_AT = 4096
STATE_AT = 8192
RING_AT = 12288
RECORD_BYTES = 128
RING_RECORDS = 65536
NAMES_AT = 8400896
NAMES_BYTES = 4194304
FUNCTIONS_AT = 12595200
FUNCTIONS = 128
SLOTS_AT = 12599296
SLOTS_MOST = 4096
BYTES = 12697600
NAME_MAX = 2048
KILL = 1263094860
TYPES = 8
FRAMES_EACH = 12


class Request(IntFlag):
    """What the library is asked for."""

    EVENTS = 1
    """time sampled launches, replays, copies with events of our own"""
    OPENCL = 2
    """time sampled OpenCL commands by their profiling info"""
    WINDOWS = 4
    """CUPTI may be used (slows the program down until it ends)"""
    STACKS = 8
    """the library walks frame pointers at sampled launches (no root needed)"""
    SITE = 16
    """call sonde_inject_site at sampled launches, for a uprobe of the agent"""
    LEAVE = 32
    """detach: alone"""
    SLOTS = 64
    """slots come from the agent"""


class Status(IntEnum):
    """What the library does."""

    STARTING = 0
    IDLE = 1
    """no heartbeat, or nothing asked"""
    WAITING = 2
    """asked, but no device library is loaded yet"""
    TIMING = 3
    """hooks are armed"""
    WINDOW = 4
    """a CUPTI window is open; nothing is timed meanwhile"""
    YIELDED = 5
    """nothing is timed while somebody else traces by CUPTI"""
    REFUSED = 6
    """see reason"""
    LEFT = 7
    """detached; may come back"""
    KILLED = 8
    """for good"""


class Reason(IntEnum):
    """Why something asked for is not done."""

    OK = 0
    NO_LIBRARY = 1
    """neither libcuda nor OpenCL is loaded"""
    NO_HOOK = 2
    """loaded, but nothing that launches could be hooked"""
    DRIVER_OLD = 3
    """the driver lacks a function that is needed"""
    NO_EVENTS = 4
    """events could not be made in the context"""
    CUPTI_MISSING = 5
    """none loaded, none found beside the runtime"""
    CUPTI_TAKEN = 7
    """another user holds it"""
    CUPTI_DENIED = 8
    """profiling is restricted to administrators"""
    CUPTI_FAILED = 9
    """cupti_error has the error"""
    NO_MEMORY = 10


class Type(IntEnum):
    """What a record is of."""

    KERNEL = 1
    REPLAY = 2
    """one launch of a whole CUDA graph"""
    COPY = 3
    SET = 4
    SYNC = 5
    FRAMES = 6
    """struct inject_frames"""


class Source(IntEnum):
    """What a duration was measured by."""

    BY_EVENT = 1
    BY_OPENCL = 3
    BY_HOST = 4
    """not the device's time: that of the call, in the host's thread"""


class Flag(IntFlag):
    """Marks of a record."""

    GATED = 1
    """the pair was whole before the device came to it: no host time in it"""
    NO_STACK = 2


class Header(NamedTuple):
    """struct inject_header"""

    magic: int
    abi: int
    bytes: int
    """INJECT_BYTES"""
    pid: int
    """in the process's own pid namespace"""
    generation: int
    """1, and one more in each forked child that begins again"""
    born_ns: int


HEADER = Struct("=QIIIIQ")
HEADER_FIELDS: Mapping[str, tuple[int, str]] = {
    "magic": (0, "Q"),
    "abi": (8, "I"),
    "bytes": (12, "I"),
    "pid": (16, "I"),
    "generation": (20, "I"),
    "born_ns": (24, "Q"),
}


class Control(NamedTuple):
    """struct inject_control"""

    heartbeat_ns: int
    request: int
    """enum inject_request"""
    off: int
    """INJECT_KILL: stop for good"""
    tail: int
    """records taken out of the ring, ever"""
    per_second: int
    """about how many launches a second to time; 0: none"""
    every: int
    """if not 0: one launch in `every` instead"""
    seed: int
    """of the sampling; 0: the library's choice"""
    window: int
    """number of the CUPTI window wanted; a new one opens it"""
    window_us: int
    """its length"""
    slots_count: int
    """written before slots_seq"""
    slots_seq: int
    """one more with each list"""
    window_calls: int
    """1: all calls of the driver, 0: those that launch or copy"""
    window_taken: int
    """1: somebody held CUPTI's subscription when it was asked for"""


CONTROL = Struct("=QIIQIIQIIIIII")
CONTROL_FIELDS: Mapping[str, tuple[int, str]] = {
    "heartbeat_ns": (0, "Q"),
    "request": (8, "I"),
    "off": (12, "I"),
    "tail": (16, "Q"),
    "per_second": (24, "I"),
    "every": (28, "I"),
    "seed": (32, "Q"),
    "window": (40, "I"),
    "window_us": (44, "I"),
    "slots_count": (48, "I"),
    "slots_seq": (52, "I"),
    "window_calls": (56, "I"),
    "window_taken": (60, "I"),
}


class State(NamedTuple):
    """struct inject_state"""

    polled_ns: int
    """when the library's thread last read the control"""
    status: int
    """enum inject_status"""
    reason: int
    """enum inject_reason"""
    head: int
    """records put into the ring, ever; written after them"""
    names_end: int
    """bytes of names in use"""
    launches: int
    replays: int
    copies: int
    commands: int
    """not written: 0"""
    sampled: int
    """chosen to be timed"""
    timed: int
    """of those chosen, with a duration"""
    lost_ring: int
    """no room in the ring"""
    lost_names: int
    """no room for the name"""
    lost_pool: int
    """chosen, but no pair or token was free, or no gate"""
    lost_order: int
    """gate timed out; events not recorded or read; thread ended"""
    left_capturing: int
    """not timed: its stream was being captured"""
    windows: int
    """in which CUPTI recorded"""
    window_records: int
    window_dropped: int
    """records that CUPTI dropped, or that found no room"""
    window_cut: int
    """windows that ended early"""
    host_ns: int
    """time spent by us in the host's threads, in sampled calls"""
    self_ns: int
    """CPU time of our own thread"""
    cupti_version: int
    cupti_error: int
    driver_version: int
    hooks: int
    """slots that lead to us now"""
    window_done: int
    """number of the last window that is over, traced or not"""
    every: int
    """the mean stride of the sampling now"""
    bias_ns: int
    """what a pair with a gate measures of an empty kernel; taken off"""
    yielded_ms: int
    """how long nothing was timed, because another tool traced"""
    armed_ns: int
    """when hooks were last armed; 0: never"""
    looks_cut: int
    modules: int
    """changes when modules were loaded or unloaded"""
    slots_refused: int
    """of the agent's lists: not what it expected"""
    functions_count: int
    functions_seq: int
    """one more whenever they change; 0: none yet"""
    slots_done: int
    """slots_seq of the list that was taken over last"""
    window_reason: int
    """enum inject_reason, of window_done"""


STATE = Struct("=QIIQQQQQQQQQQQQQQQQQQQIIIIIIIIQQQQIIII")
STATE_FIELDS: Mapping[str, tuple[int, str]] = {
    "polled_ns": (0, "Q"),
    "status": (8, "I"),
    "reason": (12, "I"),
    "head": (16, "Q"),
    "names_end": (24, "Q"),
    "launches": (32, "Q"),
    "replays": (40, "Q"),
    "copies": (48, "Q"),
    "commands": (56, "Q"),
    "sampled": (64, "Q"),
    "timed": (72, "Q"),
    "lost_ring": (80, "Q"),
    "lost_names": (88, "Q"),
    "lost_pool": (96, "Q"),
    "lost_order": (104, "Q"),
    "left_capturing": (112, "Q"),
    "windows": (120, "Q"),
    "window_records": (128, "Q"),
    "window_dropped": (136, "Q"),
    "window_cut": (144, "Q"),
    "host_ns": (152, "Q"),
    "self_ns": (160, "Q"),
    "cupti_version": (168, "I"),
    "cupti_error": (172, "I"),
    "driver_version": (176, "I"),
    "hooks": (180, "I"),
    "window_done": (184, "I"),
    "every": (188, "I"),
    "bias_ns": (192, "I"),
    "yielded_ms": (196, "I"),
    "armed_ns": (200, "Q"),
    "looks_cut": (208, "Q"),
    "modules": (216, "Q"),
    "slots_refused": (224, "Q"),
    "functions_count": (232, "I"),
    "functions_seq": (236, "I"),
    "slots_done": (240, "I"),
    "window_reason": (244, "I"),
}


class Function(NamedTuple):
    """struct inject_function"""

    address: int
    name: int
    """offset of an inject_name in names"""
    unused: int


FUNCTION = Struct("=QII")
FUNCTION_FIELDS: Mapping[str, tuple[int, str]] = {
    "address": (0, "Q"),
    "name": (8, "I"),
    "unused": (12, "I"),
}


class Slot(NamedTuple):
    """struct inject_slot"""

    address: int
    value: int
    """what it held"""
    relocation: int
    """index in DT_JMPREL + 1, of an import that is not bound; else 0"""
    unused: int


SLOT = Struct("=QQII")
SLOT_FIELDS: Mapping[str, tuple[int, str]] = {
    "address": (0, "Q"),
    "value": (8, "Q"),
    "relocation": (16, "I"),
    "unused": (20, "I"),
}


class Record(NamedTuple):
    """struct inject_record"""

    seq: int
    """index in the ring's whole history + 1"""
    type: int
    source: int
    flags: int
    name: int
    """offset of an inject_name in names, 0 unknown"""
    correlation: int
    """number of the launch: the same in its frames"""
    start_ns: int
    end_ns: int
    weight: float
    """how many launches it stands for, with those carried that were not timed"""
    stream: int
    graph: int
    node: int
    """handles; 0: none, or the default stream"""
    bytes: int
    """moved or set"""
    tid: int
    """who launched, in the process's own pid namespace"""
    device: int
    window: int
    """number of the CUPTI window it was recorded in, or 0"""
    registers: int
    kind: int
    """of a copy, as CUPTI numbers it (1 h2d, 2 d2h, 8 d2d)"""
    grid_0: int
    grid_1: int
    grid_2: int
    block_0: int
    block_1: int
    block_2: int
    shared_bytes: int
    unused: int


RECORD = Struct("=QHBBIQQQdQQQQIIIHHIIIIIIII")
RECORD_FIELDS: Mapping[str, tuple[int, str]] = {
    "seq": (0, "Q"),
    "type": (8, "H"),
    "source": (10, "B"),
    "flags": (11, "B"),
    "name": (12, "I"),
    "correlation": (16, "Q"),
    "start_ns": (24, "Q"),
    "end_ns": (32, "Q"),
    "weight": (40, "d"),
    "stream": (48, "Q"),
    "graph": (56, "Q"),
    "node": (64, "Q"),
    "bytes": (72, "Q"),
    "tid": (80, "I"),
    "device": (84, "I"),
    "window": (88, "I"),
    "registers": (92, "H"),
    "kind": (94, "H"),
    "grid_0": (96, "I"),
    "grid_1": (100, "I"),
    "grid_2": (104, "I"),
    "block_0": (108, "I"),
    "block_1": (112, "I"),
    "block_2": (116, "I"),
    "shared_bytes": (120, "I"),
    "unused": (124, "I"),
}


class Frames(NamedTuple):
    """struct inject_frames"""

    seq: int
    type: int
    """INJECT_FRAMES"""
    part: int
    parts: int
    frames: int
    """in this part"""
    correlation: int
    tid: int
    unused: int
    address_0: int
    address_1: int
    address_2: int
    address_3: int
    address_4: int
    address_5: int
    address_6: int
    address_7: int
    address_8: int
    address_9: int
    address_10: int
    address_11: int


FRAMES = Struct("=QHBBIQIIQQQQQQQQQQQQ")
FRAMES_FIELDS: Mapping[str, tuple[int, str]] = {
    "seq": (0, "Q"),
    "type": (8, "H"),
    "part": (10, "B"),
    "parts": (11, "B"),
    "frames": (12, "I"),
    "correlation": (16, "Q"),
    "tid": (24, "I"),
    "unused": (28, "I"),
    "address_0": (32, "Q"),
    "address_1": (40, "Q"),
    "address_2": (48, "Q"),
    "address_3": (56, "Q"),
    "address_4": (64, "Q"),
    "address_5": (72, "Q"),
    "address_6": (80, "Q"),
    "address_7": (88, "Q"),
    "address_8": (96, "Q"),
    "address_9": (104, "Q"),
    "address_10": (112, "Q"),
    "address_11": (120, "Q"),
}


class Name(NamedTuple):
    """struct inject_name"""

    length: int
    """of the text"""
    hash: int
    """FNV-1a of the text"""


NAME = Struct("=II")
NAME_FIELDS: Mapping[str, tuple[int, str]] = {
    "length": (0, "I"),
    "hash": (4, "I"),
}
