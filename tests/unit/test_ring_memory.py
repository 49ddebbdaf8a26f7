# SPDX-License-Identifier: Apache-2.0
"""What is kept of the rings of profiled processes has a bound in bytes that were really taken, for
one ring and for all, whatever the processes write."""

from __future__ import annotations

import gc
import os
import random
import struct
import tracemalloc

import pytest

from sonde.collect import inject_abi as abi
from sonde.collect.device_time import DeviceTime
from sonde.collect.inject_records import (
    ADDRESS_BYTES,
    MAX_NAME_BYTES,
    MAX_STACK_BYTES,
    NUMBER_BYTES,
    STACK_BYTES,
    Ring,
)
from sonde.collect.stream_numbers import MAX_STREAMS, STREAM_BYTES, StreamNumbers
from sonde.procfs.party_memory import PartyMemory
from sonde.query.queries import LOSS_TEXT

NOW_NS = 10**12
WIDE = "\U0001f600"


@pytest.fixture
def memfd():
    fd = os.memfd_create("ring")
    os.ftruncate(fd, abi.BYTES)
    yield fd
    os.close(fd)


class Writer:
    """Writes records as the library does, or as somebody else would."""

    def __init__(self, fd, head=0):
        self.fd, self.head, self.raw = fd, head, bytearray()

    def frames(self, correlation, part, parts, addresses, count=None):
        seq = self.head + len(self.raw) // abi.RECORD_BYTES + 1
        padded = [*addresses, *[0] * (abi.FRAMES_EACH - len(addresses))]
        count = len(addresses) if count is None else count
        self.raw += abi.FRAMES.pack(
            seq, abi.Type.FRAMES, part, parts, count, correlation, 0, 0, *padded
        )

    def run(self, correlation, name=0):
        seq = self.head + len(self.raw) // abi.RECORD_BYTES + 1
        record = abi.Record._make([0] * len(abi.Record._fields))
        self.raw += abi.RECORD.pack(
            *record._replace(
                seq=seq, type=abi.Type.KERNEL, correlation=correlation, name=name,
                start_ns=NOW_NS, end_ns=NOW_NS + 10, weight=1.0,
            )
        )  # fmt: skip

    def names(self, texts):
        """Returns where each one is."""
        area, offsets, at = bytearray(abi.NAMES_BYTES), [], 8
        for text in texts:
            raw = text.encode()
            struct.pack_into("=I", area, at, len(raw))
            area[at + abi.NAME.size : at + abi.NAME.size + len(raw)] = raw
            offsets.append(at)
            at += (abi.NAME.size + len(raw) + 7) // 8 * 8
        os.pwrite(self.fd, area, abi.NAMES_AT)
        return offsets

    def taken(self, ring):
        """What the ring takes of all that was written since the last time."""
        os.pwrite(self.fd, self.raw, abi.RING_AT)  # fits, and begins at the ring's begin
        self.head += len(self.raw) // abi.RECORD_BYTES
        found = []
        while ring.tail < self.head:
            found.append(ring.take(self.head, NOW_NS))
        return found


def kept_after(fill):
    """Bytes that `fill` allocates and its result keeps, without what the allocator holds back."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = fill()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, kept
    finally:
        tracemalloc.stop()


def test_stacks_of_single_addresses_take_no_more_than_is_counted(memfd):
    writer, ring = Writer(memfd), Ring(memfd, 0)
    for correlation in range(1, 4_097):
        for part in range(8):
            writer.frames(correlation, part, 255, [(1 << 60) + part])
    used, dropped = kept_after(lambda: sum(it.stacks_dropped for it in writer.taken(ring)))
    assert used <= 1.1 * ring.held_bytes
    assert ring.held_bytes <= MAX_STACK_BYTES
    assert dropped > 1_000


def test_parts_without_addresses_are_refused(memfd):
    writer, ring = Writer(memfd), Ring(memfd, 0)
    for correlation in range(1, 1_001):
        writer.frames(correlation, 0, 255, [])
    (taken,) = writer.taken(ring)
    assert (taken.wrong, ring.held_bytes) == (1_000, 0)


def test_a_stack_comes_in_parts_before_its_run(memfd):
    writer, ring = Writer(memfd), Ring(memfd, 0)
    addresses = list(range(1 << 40, (1 << 40) + 30))
    for part in range(3):
        writer.frames(7, part, 3, addresses[12 * part : 12 * part + 12])
    writer.run(7)
    (taken,) = writer.taken(ring)
    assert taken.runs[0].stack == tuple(addresses)
    assert (ring.held_bytes < 1_000, taken.stacks_dropped) == (True, 0)


def test_wide_names_take_no_more_than_is_counted(memfd):
    writer, ring = Writer(memfd), Ring(memfd, 0)
    for number, at in enumerate(writer.names(f"{WIDE}k{it:06}{'x' * 44}" for it in range(15_000))):
        writer.run(number, at)
    used, _ = kept_after(lambda: writer.taken(ring) and None)
    assert used <= 1.1 * ring.held_bytes
    assert MAX_NAME_BYTES / 2 < ring.held_bytes <= MAX_NAME_BYTES


def test_the_rings_of_one_party_take_nothing_from_those_of_another(memfd):
    memory = PartyMemory(4 * MAX_STACK_BYTES)
    honest = Ring(memfd, 0, memory, party=1)
    writer = Writer(memfd)
    writer.frames(3, 0, 1, [1 << 40])
    writer.taken(honest)
    before = honest.held_bytes
    writer = Writer(memfd)
    for correlation in range(1, 2_001):
        writer.frames(correlation, 0, 255, [1 << 60] * abi.FRAMES_EACH)
    os.pwrite(memfd, writer.raw, abi.RING_AT)
    hostile = [Ring(memfd, 0, memory, party=2) for _ in range(64)]
    dropped = 0
    for ring in hostile:
        dropped += ring.take(2_000, NOW_NS).stacks_dropped
        assert memory.bytes <= 4 * MAX_STACK_BYTES
    assert honest.held_bytes == before
    assert memory.emptied > 10
    # Which of those that hold as much is emptied is not stated: it may be the one that was read.
    dropped += sum(it.take(2_000, NOW_NS).stacks_dropped for it in hostile)
    held = sum(it.held_bytes for it in hostile) // (STACK_BYTES + ADDRESS_BYTES * abi.FRAMES_EACH)
    assert dropped == 64 * 2_000 - held


def test_numbers_of_streams_and_stacks_count(memfd):
    memory = PartyMemory(1 << 30)
    ring = Ring(memfd, 0, memory)
    numbers = [ring.stream(handle) for handle in range(1, MAX_STREAMS + 100)]
    assert numbers == [*range(1, MAX_STREAMS + 1), *[0] * 99]
    assert ring.stream(5) == 5
    for correlation in range(100_000):
        ring.keep_stack_id(correlation, 8)
    assert ring.stack_id(99_999) == 8
    assert ring.stack_id(99_999) == 0
    assert memory.bytes == ring.held_bytes <= NUMBER_BYTES * 16_384
    ring.empty()
    assert (ring.held_bytes, ring.stack_id(99_998)) == (0, 0)
    assert [ring.stream(handle) for handle in (5, MAX_STREAMS, 1)] == [5, MAX_STREAMS, 1]


def test_a_stream_stays_one_stream_when_its_ring_is_emptied(memfd):
    ring = Ring(memfd, 0)
    handles = random.Random(7).sample(range(1 << 62), 300)
    numbers = [ring.stream(handle) for handle in handles]
    assert numbers == list(range(1, 301))
    ring.empty()
    assert [ring.stream(handle) for handle in reversed(handles)] == numbers[::-1]
    assert ring.stream((1 << 64) - 1) == 301


def test_numbers_of_streams_take_little():
    handles = random.Random(7).sample(range(1 << 62), 2 * MAX_STREAMS)

    def fill():
        numbers = StreamNumbers()
        for handle in handles:
            numbers.of(handle)
        return numbers

    used, kept = kept_after(fill)
    assert len(kept) == MAX_STREAMS
    assert used < STREAM_BYTES * MAX_STREAMS + 1_000


def test_emptied_caches_are_a_loss_of_their_collector(memfd):
    collector = DeviceTime([1], 0.05)
    assert "caches_emptied" not in collector.losses()
    hostile = Ring(memfd, 0, collector._kept, party=2)
    hostile.keep_stack_id(1, 8)
    collector._kept.grew(1 << 30)  # a bound that is reached
    assert "caches_emptied" not in collector.losses()  # counted again, it was not
    collector._kept._most = 1
    collector._kept.grew(1)
    assert collector.losses()["caches_emptied"] == 1
    assert "caches_emptied" in LOSS_TEXT
