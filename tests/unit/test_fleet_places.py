# SPDX-License-Identifier: Apache-2.0
"""Uploads that come slowly, however steadily, keep nobody else out."""

import asyncio
import contextlib
import os
from dataclasses import replace

import pytest

from leader import listening
from sonde.fleet import places, service
from sonde.fleet.node import sign
from sonde.fleet.places import NoPlace, Places
from sonde.fleet.rehearsal import Rehearsal, small_task
from sonde.fleet.wire import first_lp, lp


@pytest.fixture
def fleet(tmp_path):
    made = Rehearsal(tmp_path, small_task(), ["a"] * 4)
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
def test_strangers_that_send_slowly_but_steadily_keep_no_relay_and_no_node_out(
    fleet, monkeypatch, path
):
    monkeypatch.setattr(service, "_SINGLES", 24)
    is_batch = path.endswith("batch")
    report = fleet.report(0, [1]).encode()
    body = lp(report) if is_batch else report
    size, first = (8_000_000, service._FIRST_BYTES) if is_batch else (9000, 10)
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
    known = fleet.leader.is_of_a_node
    assert known(first_lp(lp(report.encode()) + b"more"))
    fleet.send(report)
    assert known(report.encode())  # sent again, after an answer that was lost
    assert not known(replace(report, id=os.urandom(16)).encode())
    assert not known(sign(fleet.nodes[0], replace(report, task=bytes(32))).encode())
    stranger = type(fleet.nodes[0])()
    assert not known(sign(stranger, replace(report, node=stranger.public)).encode())
    for cut in (b"", b"\x00", b"\xff" * 5, lp(b""), lp(report.encode())[:-1]):
        assert not known(first_lp(cut))


@contextlib.asynccontextmanager
async def reading(of, size=0, is_known=False):
    """A place in which a body of so many bytes has come so far."""
    async with of.take(is_known) as place, asyncio.timeout(5) as deadline:
        place.until(deadline)
        place.size = size
        yield place


async def lost(of, size=0, is_known=False):
    """Whether a body that never comes to its end loses its place."""
    try:
        async with reading(of, size, is_known) as place:
            await asyncio.Event().wait()
    except TimeoutError:
        return place.is_lost


def test_nobody_loses_a_place_while_there_are_others():
    async def stay():
        of = Places(2)
        async with reading(of) as one, reading(of) as other:
            await asyncio.sleep(3 * places.HOLD_S)
            return one.is_lost, other.is_lost

    assert asyncio.run(stay()) == (False, False)


def test_the_slowest_goes_and_who_is_fast_or_whole_stays():
    async def turn():
        of = Places(3)
        slow, fast = (asyncio.create_task(lost(of, size)) for size in (1000, 50 << 20))
        await asyncio.sleep(0)
        async with of.take() as whole:
            whole.whole()
            loop = asyncio.get_running_loop()
            came_s = loop.time()
            async with of.take():
                waited_s = loop.time() - came_s
        assert await slow
        assert not fast.done()
        assert not whole.is_lost
        fast.cancel()
        return waited_s

    assert places.HOLD_S * 0.9 <= asyncio.run(turn()) < 2


def test_what_may_be_anybodys_waits_behind_what_is_known_and_takes_nothing_from_it():
    async def turns():
        of = Places(1)
        order = []

        async def take(name, is_known):
            async with of.take(is_known):
                order.append(name)

        holder = asyncio.create_task(lost(of, 1000, True))
        await asyncio.sleep(0.01)
        stranger = asyncio.create_task(take("stranger", False))
        await asyncio.sleep(2 * places.HOLD_S)
        assert not holder.done()
        node = asyncio.create_task(take("node", True))
        await asyncio.gather(stranger, node)
        assert await holder
        return order

    assert asyncio.run(turns()) == ["node", "stranger"]


def test_no_more_than_so_many_wait_and_strangers_make_room_for_nodes(monkeypatch):
    monkeypatch.setattr(places, "MOST_WAITING", 2)

    async def crowd():
        of = Places(1)
        async with of.take() as first:
            first.whole()
            waiting = [asyncio.create_task(lost(of)) for _ in range(2)]
            await asyncio.sleep(0.01)
            with pytest.raises(NoPlace):
                await of.take().__aenter__()
            node = asyncio.create_task(lost(of, 0, True))
            await asyncio.sleep(0.01)
            with pytest.raises(NoPlace):
                await waiting[1]
        await asyncio.sleep(0.01)
        for one in (waiting[0], node):
            one.cancel()
        await asyncio.gather(waiting[0], node, return_exceptions=True)
        async with of.take(), asyncio.timeout(1):
            return True

    assert asyncio.run(crowd())


def test_a_place_that_is_granted_to_one_who_has_just_gone_is_not_lost():
    async def gone():
        of = Places(1)
        async with of.take():
            waiting = asyncio.create_task(lost(of))
            await asyncio.sleep(0.01)
        waiting.cancel()  # after the grant, before it has run
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), of.take():
            return True

    assert asyncio.run(gone())
