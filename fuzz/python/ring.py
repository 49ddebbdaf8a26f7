# SPDX-License-Identifier: Apache-2.0
"""What root reads out of a hostile process's shared memory: state, records, names, stacks."""

from __future__ import annotations

import os
import struct

from data import Data
from sonde.collect import inject_abi as abi
from sonde.collect.device_rows import row_of
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.inject_records import LONGEST_NS, MAX_WEIGHT, Ring

_NOW_NS = 1_000_000_000_000
_MAX_RECORDS = 64
_fd = os.memfd_create("input", os.MFD_CLOEXEC)
os.ftruncate(_fd, abi.BYTES)


def one(raw: bytes) -> None:
    """Write an input to the memory, then take what is there."""
    data = Data(raw)
    tail, ahead, right = data.number(64), data.number(32), data.byte()
    os.pwrite(_fd, data.part()[: abi.STATE.size], abi.STATE_AT)
    os.pwrite(_fd, data.part()[:4096], abi.NAMES_AT)
    for number in range(_MAX_RECORDS):
        record = bytearray(data.bytes(abi.RECORD_BYTES).ljust(abi.RECORD_BYTES, b"\0"))
        if right >> (number % 8) & 1:
            struct.pack_into("=Q", record, 0, (tail + number + 1) & (1 << 64) - 1)
        place = (tail + number) % abi.RING_RECORDS
        os.pwrite(_fd, record, abi.RING_AT + place * abi.RECORD_BYTES)
        if not data.left:
            break
    seen = InjectMemory(_fd, 1, 1).seen()
    assert isinstance(seen.why, str)
    ring = Ring(_fd, tail)
    taken = ring.take(tail + ahead, _NOW_NS)
    assert len(taken.runs) + taken.wrong + taken.skipped <= max(ahead, abi.RING_RECORDS)
    for run in taken.runs:
        row_of(run, (1, 1), run.tid, 0, 0)
        assert 0 <= run.end_ns - run.start_ns <= LONGEST_NS and 0 < run.weight <= MAX_WEIGHT
        assert len(run.name) <= abi.NAME_MAX
