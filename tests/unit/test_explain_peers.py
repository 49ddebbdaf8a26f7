# SPDX-License-Identifier: Apache-2.0
"""The verdict on a service crosses the socket on which its requests wait, and advice on I/O is by
its kind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from captures import Writer
from sonde.analyze.bound import explain
from sonde.export.verdict import document, headline, render
from sonde.model.causes import Cause, CauseDetail
from sonde.recording.timelines import open_timeline

THREAD = ("ThreadingMixIn.process_request_thread", "[python]", "socketserver.py", 691, "python")
ONE = ("BaseHTTPRequestHandler.handle_one_request", "[python]", "http/server.py", 408, "python")
READ = ("SocketIO.readinto", "[python]", "socket.py", 706, "python")
DO_GET = ("Handler.do_GET", "[python]", "orders.py", 30, "python")
BOOK = ("LedgerClient.book", "[python]", "orders.py", 19, "python")
LOOP = ("BaseEventLoop._run_once", "[python]", "asyncio/base_events.py", 1919, "python")
SELECT = ("EpollSelector.select", "[python]", "selectors.py", 468, "python")
SERVE = ("Ledger.serve", "[python]", "ledger.py", 25, "python")
COMMIT = ("Ledger.commit", "[python]", "ledger.py", 18, "python")
READ_PAGE = ("Store.page", "[python]", "store.py", 7, "python")
ORDERS, LEDGER, STORE = 42, 77, 88
AT, STORE_AT = "127.0.0.1:9301", "store.sock"


@pytest.fixture
def writer():
    return Writer(seconds=5)


@pytest.fixture
def explained(writer, tmp_path):
    def found():
        return explain(open_timeline([writer.write(tmp_path / "a.sonde")]))

    return found


def orders(writer):
    """A service whose four threads wait for an answer on a socket for 4 of 5 s."""
    tids = range(ORDERS + 1, ORDERS + 5)
    threads = [{"tid": tid, "comm": f"t{tid}"} for tid in (ORDERS, *tids)]
    key = writer.process(ORDERS, "python", threads=threads, command="orders.py")
    for tid in tids:
        idle = writer.stack(THREAD, ONE, READ, "recv")
        writer.wait(key, tid, "socket", 0.9, count=300, stack=idle)
        asks = writer.stack(THREAD, ONE, DO_GET, BOOK, "recv")
        writer.wait(key, tid, "socket", 4.0, count=300, stack=asks)
    return key, tids


def looked(writer, key, tid, address, pid, name, looks=3, kind="peer"):
    """What looks at a thread found."""
    row = {"kind": kind, "name": address, "api": "tcp", "op": name, "waker_pid": pid}
    writer.add("activity", key, tid=tid, count=looks, **row)


def ledger(writer, syncs=2.0, queued=1.0, asks=0.0):
    key = writer.process(
        LEDGER, "python", threads=[{"tid": LEDGER, "comm": "python"}], command="ledger.py"
    )
    writer.wait(key, LEDGER, "poll", 1.0, count=500, stack=writer.stack(LOOP, SELECT, "epoll_wait"))
    commits = writer.stack(LOOP, SERVE, COMMIT, "fsync")
    writer.wait(key, LEDGER, "sync to disk", syncs, count=1000, stack=commits)
    if queued:
        writer.wait(key, LEDGER, "preempted", queued, count=99, kind="runqueue", stack=commits)
    if asks:
        store = writer.stack(LOOP, SERVE, COMMIT, "recv")
        writer.wait(key, LEDGER, "socket", asks, count=1000, stack=store)
    writer.usage(key, written_bytes=500_000_000)
    return key


def test_who_answers_and_what_that_process_does_is_named(writer, explained):
    key, tids = orders(writer)
    for tid in tids:
        looked(writer, key, tid, AT, LEDGER, "ledger.py")
    ledger(writer)
    explanation = explained()
    first = explanation.verdicts[0]
    io = next(one for one in first.causes if one.key == Cause.IO)

    assert first.service == "Handler.do_GET orders.py"
    assert io.detail == CauseDetail.SOCKETS
    (fact,) = io.facts
    assert f"100 % of it for ledger.py ({LEDGER}) at {AT}" in fact
    assert "67 % sync to disk in Ledger.commit ledger.py:18" in fact
    assert "33 % waiting for a CPU" in fact
    assert io.culprit is not None
    assert (io.culprit.pid, io.culprit.doing) == (LEDGER, "sync to disk")
    assert first.advice[0].text.startswith(
        f"look at ledger.py ({LEDGER}) at {AT}, which answers LedgerClient.book orders.py:19, "
        "at Ledger.commit ledger.py:18 (sync to disk)"
    )
    assert AT in render(explanation)
    written = json.loads(json.dumps(document(explanation)))["verdicts"][0]
    assert written["causes"][0]["culprit"]["pid"] == LEDGER


def test_the_service_that_is_asked_comes_second_though_it_is_larger(writer, explained):
    key, tids = orders(writer)
    looked(writer, key, tids[0], AT, LEDGER, "ledger.py")
    writer.wait(ledger(writer), LEDGER, "sync to disk", 99.0, stack=writer.stack(
        LOOP, SERVE, COMMIT, "fsync"))  # fmt: skip
    names = [one.service for one in explained().verdicts]
    assert names[:2] == ["Handler.do_GET orders.py", "Ledger.serve ledger.py"]


def test_the_chain_goes_on_and_ends_where_processes_wait_for_each_other(writer, explained):
    key, tids = orders(writer)
    for tid in tids:
        looked(writer, key, tid, AT, LEDGER, "ledger.py")
    middle = ledger(writer, syncs=0.1, queued=0.0, asks=3.0)
    looked(writer, middle, LEDGER, STORE_AT, STORE, "store.py")
    threads = [{"tid": STORE, "comm": "python"}]
    last = writer.process(STORE, "python", threads=threads, command="store.py")
    writer.wait(last, STORE, "read", 4.0, count=9, stack=writer.stack(READ_PAGE, "pread64"))
    io = explained().verdicts[0].causes[0]
    assert f"that is for store.py ({STORE}) at {STORE_AT}" in io.facts[0]
    assert io.culprit is not None
    assert io.culprit.code == "Store.page store.py:7"

    back = writer.stack(READ_PAGE, "recv")
    writer.wait(last, STORE, "socket", 90.0, count=9, stack=back)
    looked(writer, last, STORE, AT, LEDGER, "ledger.py")
    io = explained().verdicts[0].causes[0]
    assert io.culprit is not None
    assert io.culprit.pid == STORE


def test_of_a_process_that_was_not_recorded_the_name_and_the_command_are_given(writer, explained):
    key, tids = orders(writer)
    looked(writer, key, tids[0], AT, 0, "", looks=5)
    looked(writer, key, tids[1], AT, LEDGER, "ledger.py", looks=1)
    first = explained().verdicts[0]
    assert first.advice[0].text == (
        f"look at ledger.py ({LEDGER}) at {AT}, which answers LedgerClient.book orders.py:19: "
        f"sonde explain --pid {LEDGER}"
    )
    assert first.causes[0].facts[0].endswith("which was not recorded")


def test_the_same_address_in_another_process_is_another_end(writer, explained):
    """Another network namespace has the same addresses: its server took the place of the real."""
    key, tids = orders(writer)
    for tid in tids:
        looked(writer, key, tid, AT, LEDGER, "ledger.py")
    ledger(writer)
    other = writer.process(500, "python", threads=[{"tid": 500, "comm": "python"}], command="x.py")
    looked(writer, other, 500, AT, 600, "evil.py", looks=99)
    fact = explained().verdicts[0].causes[0].facts[0]
    assert f"100 % of it for ledger.py ({LEDGER}) at {AT}" in fact
    assert "evil.py" not in fact


def test_of_another_machine_the_address_is_named(writer, explained):
    key, tids = orders(writer)
    looked(writer, key, tids[0], "10.0.0.7:443", 0, "")
    first = explained().verdicts[0]
    assert first.advice[0].text.startswith("look at what answers at 10.0.0.7:443, for which Ledger")
    assert "10.0.0.7:443" in first.causes[0].facts[0]


def test_of_many_peers_none_is_named(writer, explained):
    key, tids = orders(writer)
    for number, tid in enumerate(tids):
        looked(writer, key, tid, f"10.0.0.{number}:443", 0, "")
    first = explained().verdicts[0]
    assert first.advice[0].text.startswith("look at what answers LedgerClient.book orders.py:19;")
    assert not first.causes[0].facts


def test_an_fsync_on_an_event_loop_has_advice_of_its_kind(writer, explained):
    ledger(writer, syncs=3.0, queued=0.2)
    first = explained().verdicts[0]
    io = next(one for one in first.causes if one.key == Cause.IO)
    assert io.detail == CauseDetail.SYNC
    assert "100.0 MB written a second" in io.facts
    assert "it holds up an event loop: all that this serves waits meanwhile" in io.facts
    assert first.advice[0].text.startswith("sync to disk less often in Ledger.commit ledger.py:18:")
    assert "asyncio.to_thread" in first.advice[0].text
    assert "look at what answers" not in first.advice[0].text


@pytest.mark.parametrize(
    ("reason", "frame", "detail", "text"),
    [
        ("read", "pipe_read", CauseDetail.PIPES, "look at the process at the other"),
        ("read", "sock_read_iter", CauseDetail.SOCKETS, "look at what answers"),
        ("read", "ext4_file_read_iter", CauseDetail.NONE, "read and write in Ledger.commit"),
        ("file", "vfs_open", CauseDetail.FILES, "open, list and close files less often"),
        ("poll", "do_poll", CauseDetail.EVENTS, "look at what is polled for in Ledger.commit"),
    ],
)
def test_advice_by_kind_of_io(writer, explained, reason, frame, detail, text):
    key = writer.process(LEDGER, "python", threads=[{"tid": LEDGER, "comm": "python"}])
    stack = writer.stack(SERVE, COMMIT, "read", (frame, "[kernel]", "", 0, "kernel"))
    writer.wait(key, LEDGER, reason, 4.5, count=500, stack=stack)
    first = explained().verdicts[0]
    assert first.causes[0].key == Cause.IO
    assert first.causes[0].detail == detail
    assert first.advice[0].text.startswith(text)


def client(writer):
    """A handler whose thread waits in poll for 4.5 of 5 s."""
    threads = [{"tid": ORDERS, "comm": "python"}]
    key = writer.process(ORDERS, "python", threads=threads, command="orders.py")
    asks = writer.stack(THREAD, ONE, DO_GET, BOOK, "poll")
    writer.wait(key, ORDERS, "poll", 4.5, count=300, stack=asks)
    return key


def test_a_client_that_waits_in_poll_leads_to_who_answers(writer, explained):
    looked(writer, client(writer), ORDERS, AT, LEDGER, "ledger.py")
    ledger(writer)
    first = explained().verdicts[0]
    assert first.causes[0].detail == CauseDetail.SOCKETS
    assert first.causes[0].culprit is not None
    assert first.causes[0].culprit.doing == "sync to disk"
    assert f"100 % of it for ledger.py ({LEDGER}) at {AT}" in first.causes[0].facts[0]
    assert f"look at ledger.py ({LEDGER}) at {AT}" in first.advice[0].text


def test_of_several_sockets_at_once_all_are_named_and_none_is_blamed(writer, explained):
    key = client(writer)
    looked(writer, key, ORDERS, AT, LEDGER, "ledger.py", kind="peer-candidate")
    looked(writer, key, ORDERS, STORE_AT, STORE, "store.py", kind="peer-candidate")
    ledger(writer)
    cause = explained().verdicts[0].causes[0]
    assert cause.culprit is None
    assert (
        "it waits for any of several sockets; it asked "
        f"ledger.py ({LEDGER}) at {AT} and store.py ({STORE}) at {STORE_AT}"
    ) in cause.facts


def test_what_looks_found_alone_counts_by_its_part(writer, explained):
    """Three looks found one socket; one found two of which any could be waited for."""
    key = client(writer)
    looked(writer, key, ORDERS, AT, LEDGER, "ledger.py")
    for at, pid, name in ((AT, LEDGER, "ledger.py"), (STORE_AT, STORE, "store.py")):
        looked(writer, key, ORDERS, at, pid, name, looks=1, kind="peer-candidate")
    cause = explained().verdicts[0].causes[0]
    assert f"75 % of it for ledger.py ({LEDGER}) at {AT}" in cause.facts[0]


def test_an_event_loop_names_what_its_handlers_may_await(writer, explained):
    key = ledger(writer, syncs=1.0, queued=0.0)
    looked(writer, key, LEDGER, STORE_AT, STORE, "store.py", kind="peer-candidate")
    text = render(explained())
    assert "or for what handlers await, such as an answer of store.py (88) at" in text
    assert "store.sock" in text


def test_shares_of_the_kinds_of_io_are_of_no_more_than_there_was(writer, explained):
    """A wait that began before the record counts whole: there is more of waits than of time."""
    key = writer.process(ORDERS, "python", threads=[{"tid": ORDERS, "comm": "python"}])
    writer.wait(key, ORDERS, "socket", 5.4, count=99, stack=writer.stack(BOOK, "recv"))
    writer.wait(key, ORDERS, "sync to disk", 0.6, count=99, stack=writer.stack(COMMIT, "fsync"))
    assert "of it socket 90 %, sync to disk 10 %" in render(explained())


def test_the_headline_has_a_line_for_each_further_verdict(writer, explained):
    key, tids = orders(writer)
    looked(writer, key, tids[0], AT, LEDGER, "ledger.py")
    ledger(writer)
    explanation = explained()
    first, second = explanation.verdicts
    lines = headline(explanation, "sonde explain a.sonde").splitlines()
    assert lines[0].startswith("VERDICT  requests of Handler.do_GET orders.py, in 4 threads — ")
    assert lines[-2:] == [
        "  also: requests of Ledger.serve ledger.py, in thread ledger.py (77) — I/O-bound 67 %, "
        "CPU contention 33 %",
        "  the rest: sonde explain a.sonde",
    ]
    alone = headline(replace(explanation, verdicts=[first]), "sonde explain a.sonde")
    assert "also: " not in alone
    assert "the rest: " not in alone
    many = headline(replace(explanation, verdicts=[first, *[second] * 7])).splitlines()
    assert [line for line in many if line.startswith("  also: ")][-1] == "  also: 3 more"
    assert "the rest: " not in many[-1]


def test_whom_an_event_loop_that_answers_may_wait_for_is_named(writer, explained):
    key, tids = orders(writer)
    looked(writer, key, tids[0], AT, LEDGER, "ledger.py")
    middle = ledger(writer)
    looked(writer, middle, LEDGER, STORE_AT, STORE, "store.py", kind="peer-candidate")
    io = explained().verdicts[0].causes[0]
    assert f"; its handlers may await store.py ({STORE}) at {STORE_AT}" in io.facts[0]
    assert io.culprit is not None
    assert io.culprit.pid == LEDGER
