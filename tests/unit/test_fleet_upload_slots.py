# SPDX-License-Identifier: Apache-2.0
"""Uploads that come slowly, however steadily, keep nobody else out."""

import asyncio
import contextlib
import os
from dataclasses import replace

import pytest

from leader import listening
from sonde.fleet import request_body, service, upload_slots
from sonde.fleet.evaluation.local_deployment import LocalDeployment, small_task
from sonde.fleet.node import sign
from sonde.fleet.upload_slots import NoFreeSlot, UploadSlots
from sonde.fleet.wire import first_length_prefixed, length_prefixed


@pytest.fixture
def fleet(tmp_path):
    made = LocalDeployment(tmp_path, small_task(), ["a"] * 4)
    yield made
    made.close()


def head(fleet, path, size):
    return (
        f"POST /tasks/{fleet.task.id.hex()}/{path} HTTP/1.1\r\nHost: x\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()


async def steady(port, request, first, more):
    """A stranger who sends as fast as must be, ten times a second, and comes again."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request + bytes(first))
            hung_up = asyncio.create_task(reader.read(1))
            try:
                while not hung_up.done():
                    await asyncio.sleep(0.1)
                    writer.write(bytes(more))
            finally:
                hung_up.cancel()
                writer.close()


@pytest.mark.parametrize("path", ["reports", "reports/batch"])
def test_slow_strangers_block_no_relay_and_no_node(fleet, monkeypatch, path):
    monkeypatch.setattr(service, "_REPORT_SLOTS", 24)
    is_batch = path.endswith("batch")
    report = fleet.report(0, [1]).encode()
    body = length_prefixed(report) if is_batch else report
    size, first = (8_000_000, request_body.FIRST_BYTES) if is_batch else (9000, 10)
    slow = 5000 if is_batch else 50

    async def send():
        runner, port = await listening(fleet.leader)
        strangers = [
            asyncio.create_task(steady(port, head(fleet, path, size), first, slow))
            for _ in range(120)
        ]
        await asyncio.sleep(0.7)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(fleet, path, len(body)) + body)
        status = await asyncio.wait_for(reader.readline(), 8)
        for stranger in strangers:
            stranger.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
        writer.close()
        await runner.cleanup()
        return status

    assert asyncio.run(send()).split()[1] == (b"200" if is_batch else b"201")
    assert fleet.leader.store.refusals()["too slow"] > 0


def test_a_batch_is_known_by_its_first_report_whenever_that_was_made(fleet):
    report = fleet.report(0, [1])
    known = fleet.leader.is_from_enrolled_node
    assert known(first_length_prefixed(length_prefixed(report.encode()) + b"more"))
    fleet.send(report)
    assert known(report.encode())  # sent again, after an answer that was lost
    assert not known(replace(report, id=os.urandom(16)).encode())
    assert not known(sign(fleet.nodes[0], replace(report, task=bytes(32))).encode())
    stranger = type(fleet.nodes[0])()
    assert not known(sign(stranger, replace(report, node=stranger.public)).encode())
    for cut in (
        b"",
        b"\x00",
        b"\xff" * 5,
        length_prefixed(b""),
        length_prefixed(report.encode())[:-1],
    ):
        assert not known(first_length_prefixed(cut))


@contextlib.asynccontextmanager
async def reading(slots, size=0, is_from_node=False):
    """A slot whose body has received `size` bytes."""
    async with slots.acquire(is_from_node) as slot, asyncio.timeout(5) as deadline:
        slot.start_reading(deadline)
        slot.received_bytes = size
        yield slot


async def lost(slots, size=0, is_from_node=False):
    """Whether the slot of a body that never completes is revoked."""
    try:
        async with reading(slots, size, is_from_node) as slot:
            await asyncio.Event().wait()
    except TimeoutError:
        return slot.is_revoked


def test_no_slot_is_revoked_while_others_are_free():
    async def stay():
        slots = UploadSlots(2)
        async with reading(slots) as one, reading(slots) as other:
            await asyncio.sleep(3 * upload_slots.MIN_HOLD_S)
            return one.is_revoked, other.is_revoked

    assert asyncio.run(stay()) == (False, False)


def test_the_slowest_is_revoked_but_not_a_fast_or_complete_one():
    async def turn():
        slots = UploadSlots(3)
        slow, fast = (asyncio.create_task(lost(slots, size)) for size in (1000, 50 << 20))
        await asyncio.sleep(0)
        async with slots.acquire() as whole:
            whole.complete()
            loop = asyncio.get_running_loop()
            came_s = loop.time()
            async with slots.acquire():
                waited_s = loop.time() - came_s
        assert await slow
        assert not fast.done()
        assert not whole.is_revoked
        fast.cancel()
        return waited_s

    assert upload_slots.MIN_HOLD_S * 0.9 <= asyncio.run(turn()) < 2


def test_requests_of_unknown_origin_wait_behind_those_of_nodes():
    async def turns():
        slots = UploadSlots(1)
        order = []

        async def take(name, is_from_node):
            async with slots.acquire(is_from_node):
                order.append(name)

        holder = asyncio.create_task(lost(slots, 1000, True))
        await asyncio.sleep(0.01)
        stranger = asyncio.create_task(take("stranger", False))
        await asyncio.sleep(2 * upload_slots.MIN_HOLD_S)
        assert not holder.done()
        node = asyncio.create_task(take("node", True))
        await asyncio.gather(stranger, node)
        assert await holder
        return order

    assert asyncio.run(turns()) == ["node", "stranger"]


def test_the_number_of_waiting_requests_is_bounded_and_nodes_have_priority(monkeypatch):
    monkeypatch.setattr(upload_slots, "MAX_WAITING", 2)

    async def crowd():
        slots = UploadSlots(1)
        async with slots.acquire() as first:
            first.complete()
            waiting = [asyncio.create_task(lost(slots)) for _ in range(2)]
            await asyncio.sleep(0.01)
            with pytest.raises(NoFreeSlot):
                await slots.acquire().__aenter__()
            node = asyncio.create_task(lost(slots, 0, True))
            await asyncio.sleep(0.01)
            with pytest.raises(NoFreeSlot):
                await waiting[1]
        await asyncio.sleep(0.01)
        for one in (waiting[0], node):
            one.cancel()
        await asyncio.gather(waiting[0], node, return_exceptions=True)
        async with slots.acquire(), asyncio.timeout(1):
            return True

    assert asyncio.run(crowd())


def test_a_slot_granted_to_a_cancelled_request_is_not_lost():
    async def gone():
        slots = UploadSlots(1)
        async with slots.acquire():
            waiting = asyncio.create_task(lost(slots))
            await asyncio.sleep(0.01)
        waiting.cancel()  # after the grant, before it has run
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), slots.acquire():
            return True

    assert asyncio.run(gone())
