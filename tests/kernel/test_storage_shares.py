# SPDX-License-Identifier: Apache-2.0
"""Threads and connections of one user take a bounded part of the recorder's kernel memory, and
leave others theirs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from sonde import procfs
from sonde.collect.collector import Batch
from sonde.collect.flows import FlowCollector
from sonde.collect.kernel import BpfObject, Kernel
from sonde.collect.syscalls import SyscallCollector
from sonde.collect.tasks import TaskCollector
from sonde.collect.waits import WaitCollector

pytestmark = pytest.mark.bpf
FLOODER, OTHER = 48_123, 48_124
"""Users without other processes."""
MOST = 256

NAPPERS = """
import sys, threading, time
threading.stack_size(65536)
def nap():
    while True: time.sleep(0.05)
for _ in range(int(sys.argv[1])): threading.Thread(target=nap, daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
"""
BURNER = """
import sys, threading, time
def burn():
    end = time.thread_time() + 0.01
    while time.thread_time() < end: pass
    time.sleep(60)
for _ in range(int(sys.argv[1])): threading.Thread(target=burn, daemon=True).start()
time.sleep(0.012 * int(sys.argv[1]) + 0.5)
print("ready", flush=True)
sys.stdin.readline()
"""
UNUSED = """
import socket, sys
all = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in all[:50]: one.bind(("127.0.0.1", 0)); one.listen()
print("ready", flush=True)
sys.stdin.readline()
"""
PAIRS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
held = []
for _ in range(int(sys.argv[1])):
    client = socket.create_connection(server.getsockname())
    peer, _ = server.accept()
    held += [client, peer]
print("ready", flush=True)
sys.stdin.readline()
for client in held[::2]: client.sendall(bytes(1000))
print("sent", flush=True)
sys.stdin.readline()
for one in held: one.close()
print("closed", flush=True)
sys.stdin.readline()
"""
COPIES = PAIRS.replace("held = []", "held, copies = [], []").replace(
    "held += [client, peer]", "held += [client, peer]; copies += [client.dup() for _ in range(9)]"
)
REFUSED = """
import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in held: one.connect_ex(("127.0.0.1", 1))
print("ready", flush=True)
sys.stdin.readline()
"""


class Program:
    """A user's program that prints a word at each step and waits for a line."""

    def __init__(self, user: int, source: str, number: int) -> None:
        self.it = subprocess.Popen(
            ["/usr/bin/python3", "-I", "-c", source, str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            user=user, group=user, extra_groups=[],
        )  # fmt: skip
        self.pid = self.it.pid
        self._read()

    def _read(self) -> None:
        assert self.it.stdout is not None
        assert self.it.stdout.readline()

    def go_on(self) -> None:
        assert self.it.stdin is not None
        self.it.stdin.write("\n")
        self.it.stdin.flush()
        self._read()

    def end(self) -> None:
        self.it.kill()
        self.it.communicate()


@contextmanager
def running(user: int, source: str, number: int) -> Iterator[Program]:
    program = Program(user, source, number)
    try:
        yield program
    finally:
        program.end()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects keep MOST storages."""
    load = Kernel.load

    def loaded(self: Kernel, wanted: BpfObject) -> Any:
        constants = {**wanted.constants, "most_storages": MOST}
        with suppress(KeyError, ValueError):  # other objects have none
            return load(self, BpfObject(wanted.name, constants, wanted.skip, wanted.max_entries,
                                        wanted.takes_stacks))  # fmt: skip
        return load(self, wanted)

    monkeypatch.setattr(Kernel, "load", loaded)


def threads_seen(batch: Batch, pid: int) -> int:
    """But for its first one: root forked that, so it has room only where root's threads, of all
    programs of the machine, leave some."""
    rows = batch.rows.get("activity", ())
    return len({row[-7] for row in rows if row[-9] == pid} - {0, pid})


@pytest.fixture
def waits(few: None) -> Iterator[WaitCollector]:
    it = WaitCollector(Kernel(None), span_min_ns=10**10, stack_gap_ns=10**7)
    it.start()
    yield it
    it.stop()


def test_threads_of_one_user_leave_others_theirs(waits: WaitCollector) -> None:
    with running(FLOODER, NAPPERS, 600) as flood, running(OTHER, NAPPERS, 10) as other:
        waits.drain(0, True)
        time.sleep(1.5)
        batch = waits.drain(0, True)
        assert threads_seen(batch, other.pid) == 10
        assert MOST // 2 < threads_seen(batch, flood.pid) <= MOST * 3 // 4
        assert waits.losses()["task_storage"] > 400
    waits.drain(0, True)
    waits.drain(0, True)  # those that have ended are counted no more
    with running(OTHER, NAPPERS, 150) as other:
        time.sleep(1.5)
        assert threads_seen(waits.drain(0, True), other.pid) == 150


def test_who_is_alone_has_what_is_free_and_a_share_has_an_end(waits: WaitCollector) -> None:
    with running(FLOODER, NAPPERS, 180) as flood:
        time.sleep(1)
        assert threads_seen(waits.drain(0, True), flood.pid) == 180
        with running(OTHER, NAPPERS, 100) as other:
            time.sleep(1.5)
            assert MOST // 16 <= threads_seen(waits.drain(0, True), other.pid) < 40


def test_subordinate_ids_have_the_share_of_their_user(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose owner is such an id, and that sets it when executed, has it as its real id in
    the machine's own user namespace."""
    ranges = [(700_000, 65_536, FLOODER)]
    monkeypatch.setattr(procfs, "subordinate_ids", lambda: ranges)
    waits = WaitCollector(Kernel(None), span_min_ns=10**10, stack_gap_ns=10**7)
    waits.start()
    try:
        with (
            running(FLOODER, NAPPERS, 200),
            running(700_001, NAPPERS, 50) as second,
            running(765_535, NAPPERS, 50) as third,
            running(765_536, NAPPERS, 10) as other,
        ):
            time.sleep(1.5)
            batch = waits.drain(0, True)
            assert threads_seen(batch, other.pid) == 10
            assert threads_seen(batch, second.pid) + threads_seen(batch, third.pid) == 0
    finally:
        waits.stop()


def test_root_has_as_many_again(waits: WaitCollector) -> None:
    with running(FLOODER, NAPPERS, 600), running(0, NAPPERS, 20) as own:
        time.sleep(1.5)
        assert threads_seen(waits.drain(0, True), own.pid) == 20


@pytest.mark.usefixtures("few")
def test_a_thread_without_room_does_not_count_from_before_the_recording() -> None:
    with running(FLOODER, BURNER, 500) as old:
        tasks = TaskCollector(Kernel(None))
        tasks.start()
        try:
            used = [row for row in tasks.drain(0, False).rows["usage"] if row[1] == old.pid]
            old.end()
            used += [row for row in tasks.drain(0, False).rows["usage"] if row[1] == old.pid]
            with running(OTHER, BURNER, 100) as new:
                new_used = [row for row in tasks.drain(0, False).rows["usage"] if row[1] == new.pid]
                new.end()
                new_used += [
                    row for row in tasks.drain(0, False).rows["usage"] if row[1] == new.pid
                ]
        finally:
            tasks.stop()
    assert sum(row[3] for row in used) < 1_000_000_000
    assert tasks.losses()["task_storage"] > 200
    assert sum(row[3] for row in new_used) > 1_000_000_000


@pytest.mark.usefixtures("few")
def test_calls_of_threads_that_have_ended_take_no_share() -> None:
    calls = SyscallCollector(Kernel(None))
    calls.start()
    try:
        for _ in range(3):
            with running(FLOODER, NAPPERS, 150):
                calls.drain(0, True)
            calls.drain(0, True)
            calls.drain(0, True)
        assert "task_storage" not in calls.losses()
    finally:
        calls.stop()


@pytest.fixture(params=["an iterator over them counts them", "scans of files count them"])
def flows(
    few: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FlowCollector]:
    if request.param.startswith("scans"):
        wanted = FlowCollector.bpf_object(scans_recount=True)
        monkeypatch.setattr(FlowCollector, "bpf_object", lambda *_, **__: wanted)
    it = FlowCollector(Kernel(None))
    if request.param.startswith("an iterator") and it.scans_recount:
        it.stop()
        pytest.skip("this kernel refuses iterators over the storages of sockets")
    it.scans_recount = request.param.startswith("scans")
    it.start()
    yield it
    it.stop()


def moved(flows: FlowCollector, program: Program, *, closing: bool = False) -> int:
    """Bytes that a program sent or received, as recorded by a scan, or until they are closed."""
    flows._next_scan_s = flows._next_recount_s = 0.0
    batch = flows.drain(0, True)
    return sum(row[-4] for row in batch.rows.get("activity", ()) if program.pid in row[7:10])


def test_sockets_without_a_connection_take_no_room(flows: FlowCollector) -> None:
    with running(FLOODER, UNUSED, 900), running(FLOODER, PAIRS, 40) as pairs:
        moved(flows, pairs)
        pairs.go_on()
        assert moved(flows, pairs) == 2 * 40_000
    moved(flows, pairs)
    assert "socket_storage" not in flows.losses()


def test_connections_of_one_user_leave_others_theirs(flows: FlowCollector) -> None:
    with running(FLOODER, PAIRS, 400), running(OTHER, PAIRS, 5) as other:
        moved(flows, other)
        other.go_on()
        assert moved(flows, other) == 2 * 5_000
        assert flows.losses()["socket_storage"] > 400
    moved(flows, other)
    moved(flows, other)
    with running(OTHER, PAIRS, 60) as later:  # closed connections are counted no more
        moved(flows, later)
        later.go_on()
        assert moved(flows, later) == 2 * 60_000


def test_a_connection_that_is_open_several_times_takes_one_place(flows: FlowCollector) -> None:
    with running(FLOODER, COPIES, 30) as copies, running(FLOODER, PAIRS, 30) as pairs:
        for _ in range(3):
            moved(flows, copies)
        with running(FLOODER, PAIRS, 20) as later:
            later.go_on()
            assert moved(flows, later) == 2 * 20_000
        assert moved(flows, pairs) == 0
        assert "socket_storage" not in flows.losses()


def test_a_socket_that_lives_on_has_no_room_after_its_connection(flows: FlowCollector) -> None:
    with running(FLOODER, REFUSED, 600) as many:
        moved(flows, many)
        with running(FLOODER, PAIRS, 60) as pairs:
            moved(flows, pairs)
            pairs.go_on()
            assert moved(flows, pairs) == 2 * 60_000


@pytest.mark.usefixtures("few")
def test_a_connection_without_room_does_not_count_from_before_the_recording() -> None:
    with running(FLOODER, PAIRS, 300) as old:
        old.go_on()
        flows = FlowCollector(Kernel(None))
        flows.start()
        try:
            seen = moved(flows, old)
            old.go_on()
            seen += moved(flows, old)
        finally:
            flows.stop()
    assert seen <= 300  # the end of a stream counts as one byte
    assert flows.losses()["socket_storage"] > 0
