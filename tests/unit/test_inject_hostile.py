# SPDX-License-Identifier: Apache-2.0
"""A profiled process that writes whatever it likes into the memory that the agent reads: nothing
but counts of what was wrong comes of it, and it takes no longer."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import random
import struct
import time

import pytest

from sonde.collect import inject_abi as abi
from sonde.collect.collector import Batch
from sonde.collect.device_process import (
    BEFORE_S,
    MAX_LOST_A_SECOND,
    MOST_AT_ONCE,
    SHORTEST_NS,
    DeviceProcess,
)
from sonde.collect.device_records import RunReader
from sonde.collect.device_time import DeviceTime
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.inject_records import MAX_A_TURN, Ring
from sonde.collect.overhead_controller import OverheadController
from sonde.collect.ring_budget import RECORDS_A_SECOND
from sonde.sinks.chunk import ChunkBuilder

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
HERE = os.getpid()


@pytest.fixture
def library(tmp_path):
    """A file mapped here as the library is, by its name."""
    path = tmp_path / "sonde-inject-0.so"
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    with view:
        yield


@pytest.fixture
def memory(library):
    """Memory as the library makes it, in this very process."""
    fd = os.memfd_create(abi.MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 600)
    os.close(fd)
    os.ftruncate(high, abi.BYTES)
    fcntl.fcntl(high, fcntl.F_ADD_SEALS, SEALS)
    header = abi.HEADER.pack(abi.MAGIC, abi.ABI, abi.BYTES, HERE, 1, time.monotonic_ns())
    os.pwrite(high, header, abi.HEADER_AT)
    with mmap.mmap(high, 0):
        yield high
    os.close(high)


def state(**fields):
    known = dict.fromkeys(abi.State._fields, 0) | fields
    return abi.STATE.pack(*(known[name] for name in abi.State._fields))


def likely(rng, seq):
    """A record whose fields are at the edges of what they may be, the sequence number right."""
    edges = (0, 1, 7, 8, 120, 1 << 31, (1 << 32) - 1, time.monotonic_ns(), 1 << 62, (1 << 64) - 1)
    raw = bytearray(abi.RECORD_BYTES)
    struct.pack_into("=QHBB", raw, 0, seq, rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 99)),
                     rng.randrange(256), rng.randrange(256))  # fmt: skip
    struct.pack_into("=I", raw, 12, rng.choice((0, 4, 8, 16, abi.NAMES_BYTES - 8, 1 << 31)))
    for at in range(16, abi.RECORD_BYTES, 8):
        struct.pack_into("=Q", raw, at, rng.choice(edges))
    if rng.random() < 0.7:
        now = time.monotonic_ns()
        struct.pack_into("=QQ", raw, 24, now, now + rng.choice((0, 1, 1 << 40)))
        weight = rng.choice((1.0, 0.5, 1e7, 1e300, float("nan"), float("inf"), -1.0))
        struct.pack_into("=d", raw, 40, weight)
    return bytes(raw)


@pytest.mark.parametrize("seed", range(8))
def test_records_of_any_bytes_cost_a_count(memory, seed):
    rng = random.Random(seed)
    ring = Ring(memory, 0)
    os.pwrite(memory, rng.randbytes(1 << 16), abi.NAMES_AT)
    head, wrong = 0, 0
    began = time.monotonic()
    for _ in range(10):
        count = rng.randrange(1, 3_000)
        for number in range(count):
            record = likely(rng, head + number + 1)
            if rng.random() < 0.2:
                record = rng.randbytes(abi.RECORD_BYTES)
            at = (head + number) % abi.RING_RECORDS
            os.pwrite(memory, record, abi.RING_AT + at * abi.RECORD_BYTES)
        head += count
        taken = ring.take(head, time.monotonic_ns())
        wrong += taken.wrong + taken.skipped
        assert ring.tail == head
        for run in taken.runs:
            assert run.end_ns - run.start_ns >= 0
            assert 0 < run.weight <= 1e7
            assert run.name.isprintable()
    assert wrong > 0
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("head", [1, MAX_A_TURN, abi.RING_RECORDS, 1 << 40, (1 << 64) - 1])
def test_a_head_of_any_value_takes_one_turn(memory, head):
    ring = Ring(memory, 0)
    for _ in range(3):
        ring.take(head, time.monotonic_ns())
        assert 0 <= ring.tail <= head
    ring.take(0, time.monotonic_ns())
    assert ring.tail == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_collector_and_the_encoder_stand_it(memory, seed):
    rng = random.Random(seed)
    collector = DeviceTime([HERE], 0.01)
    os.pwrite(memory, state(names_end=8), abi.STATE_AT)
    collector.start()
    chunk = ChunkBuilder(0)
    tail = 0
    for turn in range(20):
        os.pwrite(memory, rng.randbytes(4096), abi.NAMES_AT)
        head = tail + 500
        for number in range(500):
            at = (tail + number) % abi.RING_RECORDS
            record = likely(rng, tail + number + 1)
            os.pwrite(memory, record, abi.RING_AT + at * abi.RECORD_BYTES)
        anything = {
            name: rng.choice((0, 1, 1 << 31, (1 << 32) - 1))
            for name in abi.State._fields
            if name not in ("head", "polled_ns")
        }
        if turn % 3 == 2:  # what the agent wrote is the process's to change, too
            os.pwrite(memory, rng.randbytes(abi.CONTROL.size), abi.CONTROL_AT)
        os.pwrite(memory, state(**anything | {"head": head}), abi.STATE_AT)
        batch = collector.drain(0, True)
        for table, rows in batch.rows.items():
            chunk.add(table, rows)
        assert len(batch.threads) <= 600
        tail = head
    losses = collector.losses()
    assert losses["records_wrong"] > 0
    collector.stop()
    chunk.encode({"seq": 0, "start_ns": 0, "end_ns": 1})


@pytest.fixture
def process(memory):
    """This process as one whose memory was found, without its lock, for which others may ask."""
    found = InjectMemory.find(HERE)
    start_ns = time.monotonic_ns() - 3_600_000_000_000
    no_counts = dict.fromkeys(abi.State._fields, 0)
    controller = OverheadController(0.01)
    with found:
        yield DeviceProcess(
            found, Ring(memory, 0), (HERE, start_ns), no_counts, True, controller, abi.Request(0)
        )


def drain(process):
    reader, batch = RunReader(), Batch()
    seen = {HERE: process.memory.seen()}
    reader.drain_all({HERE: process}, seen, 0, time.monotonic_ns(), batch)
    return reader.losses, batch


def test_losses_that_cannot_be_are_refused_and_counted(memory, process):
    os.pwrite(memory, state(lost_ring=105_000_000_000, lost_pool=1_000), abi.STATE_AT)
    losses, _ = drain(process)
    assert losses == {
        "lost_ring": MAX_LOST_A_SECOND * BEFORE_S,
        "lost_pool": 1_000,
        "losses_wrong": 1,
    }


def test_runs_without_a_length_stand_for_no_more_launches_than_can_be(memory, process):
    now_ns, count = time.monotonic_ns(), 2_000
    record = abi.Record._make([0] * len(abi.Record._fields))
    for number in range(count):
        at = record._replace(seq=number + 1, type=abi.Type.KERNEL, start_ns=now_ns, end_ns=now_ns,
                             weight=1e7)  # fmt: skip
        os.pwrite(memory, abi.RECORD.pack(*at), abi.RING_AT + number * abi.RECORD_BYTES)
    os.pwrite(memory, state(head=count), abi.STATE_AT)
    losses, batch = drain(process)
    launches = sum(row[7] for row in batch.rows["sample"])
    assert 0 < launches * SHORTEST_NS <= MOST_AT_ONCE * BEFORE_S * 1e9
    assert losses["records_wrong"] == count - len(batch.rows["device_run"])


def test_the_library_s_file_may_be_gone(memory, tmp_path):
    (tmp_path / "sonde-inject-0.so").unlink()
    found = InjectMemory.find(HERE)
    assert found is not None
    found.close()


@pytest.mark.parametrize("at", [0, 8, 12])
def test_a_header_that_is_none_is_passed_over(memory, at):
    os.pwrite(memory, b"\xff\xff\xff\xff", abi.HEADER_AT + at)
    assert InjectMemory.find(HERE) is None


def test_memory_that_was_not_sealed_is_passed_over(library):
    fd = os.memfd_create(abi.MEMFD, os.MFD_CLOEXEC)
    os.ftruncate(fd, abi.BYTES)
    header = abi.HEADER.pack(abi.MAGIC, abi.ABI, abi.BYTES, HERE, 1, 0)
    os.pwrite(fd, header, abi.HEADER_AT)
    try:
        with mmap.mmap(fd, 0):
            assert InjectMemory.find(HERE) is None
    finally:
        os.close(fd)


def test_programs_that_are_replaced_at_once_are_read_as_one_turn(memory, process):
    """Each had a turn for itself: two hundred of one user brought 800,000 rows in one tick."""
    now_ns, count = time.monotonic_ns(), 4_000
    record = abi.Record._make([0] * len(abi.Record._fields))
    for number in range(count):
        at = record._replace(seq=number + 1, type=abi.Type.KERNEL, start_ns=now_ns,
                             end_ns=now_ns + 1, weight=1.0)  # fmt: skip
        os.pwrite(memory, abi.RECORD.pack(*at), abi.RING_AT + number * abi.RECORD_BYTES)
    os.pwrite(memory, state(head=count), abi.STATE_AT)
    replaced = [
        DeviceProcess(
            process.memory, Ring(memory, 0), process.key, process.before, True,
            OverheadController(0.01), abi.Request(0), party=1 + (number > 0),
        )
        for number in range(20)
    ]  # fmt: skip
    reader, batch = RunReader(), Batch()
    reader.drain_replaced(replaced, 0, now_ns, batch)
    assert len(batch.rows["device_run"]) <= RECORDS_A_SECOND
    assert replaced[0].ring.tail > 2 * replaced[1].ring.tail
    assert reader.losses["records_unread"] >= 20 * count - RECORDS_A_SECOND


def test_one_users_rings_use_no_more_than_its_part_of_the_time(memory, process, monkeypatch):
    """Where time is short, the rings of one user, all read before it, left another's unread."""
    taken_s = itertools.count(0.0, 0.01)
    monkeypatch.setattr("sonde.collect.device_records.time.thread_time", lambda: next(taken_s))
    now_ns, count = time.monotonic_ns(), 4_000
    os.pwrite(memory, state(head=count), abi.STATE_AT)
    replaced = [
        DeviceProcess(
            process.memory, Ring(memory, 0), process.key, process.before, True,
            OverheadController(0.01), abi.Request(0), party=party,
        )
        for party in (1, *[2] * 19)
    ]  # fmt: skip
    limits = {}
    reader = RunReader()

    def drained(which, _seen, _since, _now, _batch, limit, _turn):
        limits.setdefault(which.party, []).append(limit)

    monkeypatch.setattr(reader, "_drain", drained)
    reader.drain_replaced(replaced, 0, now_ns, Batch())
    assert min(limits[1]) > 0
    assert min(limits[2]) == 0 < max(limits[2])
