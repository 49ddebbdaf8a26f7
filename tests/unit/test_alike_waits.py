# SPDX-License-Identifier: Apache-2.0
"""Waits in a table: threads that wait alike have a row together, idle ones come last."""

from __future__ import annotations

import io

import pytest

from captures import Writer
from sonde.export import table
from sonde.model.profile import ProfileKind
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.session import Session
from sonde.recording.timelines import open_timeline

HANDLE = ("BaseHTTPRequestHandler.handle_one_request", "[python]", "http/server.py", 408, "python")
READ = ("SocketIO.readinto", "[python]", "socket.py", 706, "python")
BOOK = ("Client.book", "[python]", "orders.py", 19, "python")
TIMER = ("refresh", "[python]", "orders.py", 40, "python")
SHOP = ("shop", "[python]", "shoppers.py", 20, "python")
RECV = ("recv", "libc.so.6")


@pytest.fixture
def rows(tmp_path):
    """The table of waits of a service with 16 handlers and a timer, and of its customers."""
    writer = Writer(seconds=10)
    tids = [*range(101, 118)]
    key = writer.process(
        100, "orders", threads=[{"tid": t, "comm": "orders"} for t in (100, *tids)]
    )
    books = writer.stack(HANDLE, BOOK, READ, RECV)
    for tid in tids[:16]:
        writer.wait(key, tid, "socket", 2.0, count=100, call="recvfrom", stack=books, waker=(9, 9))
        idle = writer.stack(HANDLE, READ, RECV)
        writer.wait(key, tid, "poll", 6.0, count=50, call="poll", stack=idle)
    sleeps = writer.stack(TIMER, ("nanosleep", "libc.so.6"))
    writer.wait(key, tids[16], "sleep", 9.5, count=10, call="clock_nanosleep", stack=sleeps)
    shop = writer.process(50, "shoppers")
    sleeps = writer.stack(SHOP, ("nanosleep", "libc.so.6"))
    writer.wait(shop, 50, "sleep", 9.0, count=90, call="clock_nanosleep", stack=sleeps)
    out = io.BytesIO()
    session = Session(read(writer.write(tmp_path / "a.sonde")))
    table.write(session, out, [ProfileKind.OFF_CPU])
    lines = out.getvalue().decode().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("OFF-CPU"))
    return lines[first + 1 : lines.index("", first)]


def test_threads_that_wait_alike_have_one_row(rows):
    (book,) = (row for row in rows if "Client.book" in row)
    assert rows[0] == book
    assert "+15" in book
    assert book.split()[3:6] == ["32.0", "s", "1,600"]
    assert "unknown thread (9)" in book


def test_idle_waits_come_last_and_are_marked(rows):
    assert "shop shoppers.py:20" in rows[1]
    assert not rows[1].endswith("(idle)")
    last = rows[2:]
    assert len(last) == 2
    assert "+15" in last[0]
    assert all(row.endswith("(idle)") for row in last)
    assert any("refresh orders.py:40" in row for row in last)


def test_code_without_names_is_explained(tmp_path):
    writer = Writer(seconds=10)
    key = writer.process(100, "orders")
    nameless = ("[libc.so.6]", "libc.so.6")
    writer.on_cpu(key, 100, writer.stack(nameless, BOOK), 300)
    out = io.BytesIO()
    table.write(Session(read(writer.write(tmp_path / "a.sonde"))), out, [ProfileKind.ON_CPU])
    assert "[libc.so.6]: all code without names of that file; its total" in out.getvalue().decode()


def test_who_ended_waits_and_was_not_recorded_is_no_number_alone(tmp_path):
    writer = Writer(seconds=10, host={"whole_machine": False})
    key = writer.process(100, "orders")
    writer.rows["process"].append({"pid": 22, "start_ns": 5, "ppid": 1, "comm": "shop", "exe": ""})
    for waker in (22, 23):
        stack = writer.stack(("book", "[python]", "orders.py", waker, "python"), RECV)
        writer.wait(key, 100, f"reason {waker}", 2.0, waker=(waker, waker), stack=stack)
    waits = queries.waits(Session(read(writer.write(tmp_path / "a.sonde"))))
    assert {one.waker for one in waits} == {"shop (22)", "another process (23)"}


def test_a_kernel_thread_that_was_not_recorded_has_its_name(tmp_path):
    writer = Writer(seconds=10, host={"whole_machine": False})
    key = writer.process(100, "orders")
    writer.wait(key, 100, "socket", 2.0, waker=(14, 14), stack=writer.stack(BOOK, RECV))
    name = {"kind": "process", "name": "kernel_thread", "text": "ksoftirqd/0"}
    writer.add("event", {"pid": 14, "start_ns": 0}, **name)
    path = writer.write(tmp_path / "a.sonde")
    waits = queries.waits(Session(read(path)))
    assert {one.waker for one in waits} == {"kernel: ksoftirqd/0 (14)"}
    tracks = open_timeline([path]).tracks
    assert "kernel: ksoftirqd/0 (14)" in [one.label for one in tracks]
