# SPDX-License-Identifier: Apache-2.0
"""What the agent does for diagnosis: rows summed, facts of processes, the child that explains."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from test_diagnose import process, ticks, window

from sonde import procfs
from sonde.agent import job_finder, victim_facts
from sonde.agent.explainer import Explainer
from sonde.agent.moments import (
    MAX_PLACES_OF_PROCESS,
    MAX_PROCESSES,
    MAX_WAITS,
    MomentMaker,
    place_of,
)
from sonde.agent.victim_facts import FactReader
from sonde.collect.collector import Batch
from sonde.diagnose.incident import FaultCause
from sonde.diagnose.moments import Role
from sonde.model.code import Frame, KnownFrame
from sonde.model.rows import Rows
from sonde.procfs import process_groups

TICK_NS = 250_000_000


def frame(kind, function, binary="libpython3.11.so", file=""):
    return KnownFrame(1, Frame(kind, function, binary, file=file, line=8 if file else 0))


OWN = frame("python", "step", file="train.py")


@pytest.mark.parametrize(
    ("frames", "role"),
    [
        ([frame("user", "visit_decref"), frame("user", "gc_collect_main"), OWN], Role.GARBAGE),
        ([frame("user", "pthread_cond_timedwait", "libc.so.6"), frame("user", "take_gil"), OWN],
         Role.INTERPRETER_LOCK),
        ([frame("user", "sem_wait", "libc.so.6"), frame("user", "_queue_SimpleQueue_get"), OWN],
         Role.QUEUE),
        ([OWN], Role.CODE),
        # Names of the program's own functions decide nothing.
        ([frame("python", "gc_collect_main", file="train.py")], Role.CODE),
        ([frame("python", "take_gil", file="train.py")], Role.CODE),
    ],
)  # fmt: skip
def test_what_is_known_by_a_stack(frames, role):
    place = place_of(frames)
    assert place.role == role
    assert place.text.endswith("train.py:8")


def activity(kind, name, pid, count, ns, waker=0, op="", size=0):
    return (0, kind, name, "", op, "", 0, pid, 0, pid, count, ns, size, ns, waker, waker)


def test_rows_of_a_thread_are_summed_by_reason():
    rows = [
        activity("blocked", "read", 5, 1, 100, waker=7),
        activity("blocked", "read", 5, 2, 50),
        activity("runqueue", "read", 5, 2, 30),
        activity("block", "vda", 5, 3, 900, op="read", size=4096),
        activity("block-queue", "vda", 5, 3, 400, op="read"),
    ]
    usage = (0, 5, 0, 1000, 30, 1, 2, 3, 4, 0, 6, 7, 8, 0, 9, 0)
    moment = MomentMaker(lambda _: (), 1e7).make(
        0, TICK_NS, [Batch(rows=Rows(activity=rows, usage=[usage]))]
    )
    one = moment.processes[5]
    (wait,) = one.waits
    assert (wait.count, wait.blocked_ns, wait.ready_ns, wait.waker_pid) == (3, 150, 30, 7)
    assert (one.usage.cpu_ns, one.usage.major_faults, one.usage.reclaim_ns) == (1000, 6, 9)
    (disk,) = one.disk
    assert (disk.count, disk.ns, disk.queue_ns, disk.bytes) == (3, 900, 400, 4096)


def test_processes_beyond_the_bound_are_left_out_and_counted():
    rows = [activity("blocked", "read", pid, 1, pid) for pid in range(1, MAX_PROCESSES + 11)]
    moment = MomentMaker(lambda _: (), 1e7).make(0, TICK_NS, [Batch(rows=Rows(activity=rows))])
    assert (len(moment.processes), moment.left_out) == (MAX_PROCESSES, 10)
    assert min(moment.processes) == 11  # those that did least are left out


def test_waits_and_places_beyond_the_bound_are_left_out_and_counted():
    waits = [
        (0, "blocked", "read", "", "", "", 0, 5, 0, tid, 1, tid, 0, tid, 0, 0)
        for tid in range(1, MAX_WAITS + 11)
    ]
    samples = [
        (0, "blocked", "read", 5, 0, tid, 1, 1, tid, 0)
        for tid in range(1, MAX_PLACES_OF_PROCESS + 4)
    ]
    maker = MomentMaker(lambda _: (), 1e7)
    moment = maker.make(0, TICK_NS, [Batch(rows=Rows(activity=waits, sample=samples))])
    one = moment.processes[5]
    assert (len(one.waits), len(one.places)) == (MAX_WAITS, MAX_PLACES_OF_PROCESS)
    assert one.left_out == maker.rows_left_out == 10 + 3


def test_facts_of_a_stopped_process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while FactReader().read(child.pid).state != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        facts = FactReader().read(child.pid)
        assert facts.state == "T"
        assert facts.cpus_allowed == len(os.sched_getaffinity(child.pid))
    finally:
        child.kill()
        child.wait()


def test_facts_of_a_process_that_is_gone_are_empty():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert FactReader().read(child.pid).state == ""


def test_peers_are_those_that_a_process_asked_itself():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            "import socket, sys, time\n"
            f"one = socket.create_connection(('127.0.0.1', {port}))\n"
            "print('there', flush=True); time.sleep(60)"
        )
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        accepted, _ = server.accept()
        try:
            assert child.stdout is not None
            child.stdout.readline()
            here = [os.getpid()]
            asked = FactReader().read(child.pid, may_answer=here)
            me = FactReader().read(os.getpid())
        finally:
            child.kill()
            child.communicate()
            accepted.close()
    assert asked.peers == {f"127.0.0.1:{port}": "established"}
    assert asked.holders == {f"127.0.0.1:{port}": os.getpid()}
    assert not asked.listens
    assert me.listens
    assert f"127.0.0.1:{port}" not in {*me.peers, *me.holders}


HOLDS = (
    "import os, resource, sys\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
    "for _ in range(int(sys.argv[2])): os.dup(0)\n"
    "if sys.argv[1]: os.open(sys.argv[1], os.O_RDWR)\n"
    "print('there', flush=True); sys.stdin.read()"
)


@contextmanager
def holding(path, count):
    """A process with many descriptors, the last one of `path`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, path, str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == b"there\n"
        yield child.pid
        child.stdin.close()


def test_wakers_with_many_descriptors_are_asked_once_each_and_cut(monkeypatch):
    """Each descriptor by itself takes 0.1 ms of the agent's tick."""
    asked = []
    ask = procfs.BROKER.ask
    monkeypatch.setattr(procfs.BROKER, "ask", lambda who, it: asked.append(it) or ask(who, it))
    with holding("", 3000) as pid:
        reader = FactReader()
        facts = reader.read(pid, [pid] * 8)
        assert facts.file_servers == []
        assert len([it for it in asked if "/fd" in str(it)]) == 9
        assert reader.cut == 9
    assert FactReader().read(pid, [pid]).file_servers == []  # gone


@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="no FUSE")
def test_a_waker_that_serves_files_is_found():
    with holding("/dev/fuse", 5) as pid, holding("/dev/null", 5) as other:
        reader = FactReader()
        assert reader.read(other, [other, pid]).file_servers == [pid]
        assert reader.cut == 0


def nested(depth, monkeypatch):
    """Files of /proc and /sys as a process sees them whose groups are nested; what was read."""
    read = []

    def read_file(path, limit=1 << 16):
        read.append(path)
        if path.endswith(f"{os.getpid()}/cgroup"):
            return f"0::/{'/'.join(f'g{level}' for level in range(depth))}\n".encode()
        return files.get(path)

    def look(folders, party_of, names, *, limit):
        found = []
        for folder, of_folder in zip(folders, names, strict=True):
            raws = {name: read_file(f"{folder}/{name}") for name in of_folder}
            known = {name: raw for name, raw in raws.items() if raw is not None}
            found.append(procfs.GroupFolder(0, 0, [], 0, known))
        return found, 0

    files = {}
    monkeypatch.setattr(procfs, "mounts_by_controller", lambda: {"v2": "/sys/x"})
    monkeypatch.setattr(procfs.GROUPS, "look", look)
    for module in (process_groups, procfs):
        monkeypatch.setattr(module, "read_file", read_file)
    return files, read


def test_groups_nested_as_deeply_as_a_path_allows_cost_no_more_than_sixteen(monkeypatch):
    """2,015 levels took 6 s of the loop at each look. Limits near the root and near the process
    count; what is in between does not, and is counted."""
    files, read = nested(2015, monkeypatch)
    whole = "/sys/x/" + "/".join(f"g{level}" for level in range(2015))
    files["/sys/x/g0/g1/cpu.max"] = b"50000 100000"
    files[f"{whole}/memory.max"], files[f"{whole}/memory.current"] = b"4096", b"1024"
    reader = FactReader()
    facts = reader.read(os.getpid(), asks_peers=False)
    assert (facts.quota, facts.memory_limit, facts.memory_usage) == (0.5, 4096, 1024)
    assert reader.groups_left_out == 2015 - 16
    assert len(read) < 16 * 20 + 10


def test_groups_as_they_are_in_practice_are_all_read(monkeypatch):
    _, read = nested(16, monkeypatch)
    reader = FactReader()
    reader.read(os.getpid(), asks_peers=False)
    assert reader.groups_left_out == 0
    levels = {path.count("/") - 4 for path in read if path.startswith("/sys/x/g0")}
    assert levels == set(range(16))


def test_groups_that_do_not_answer_are_left_out_and_counted(monkeypatch):
    nested(10, monkeypatch)
    look = lambda folders, *_, **__: ([None] * len(folders), len(folders))  # noqa: E731
    monkeypatch.setattr(procfs.GROUPS, "look", look)
    reader = FactReader()
    assert reader.read(os.getpid(), asks_peers=False).quota == 0.0
    assert reader.groups_left_out == 10


def test_connections_beyond_the_bound_are_counted(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)):
        reader = FactReader()
        reader.read(os.getpid())
        assert reader.connections_cut == 0
        cut_before = job_finder.CutLooks.count
        job_finder.connections(os.getpid())
        assert job_finder.CutLooks.count == cut_before
        for module in (victim_facts, job_finder):
            monkeypatch.setattr(module, "MAX_CONNECTIONS", 0)
        reader.read(os.getpid())
        assert reader.connections_cut == 1
        assert job_finder.connections(os.getpid()) == []
        assert job_finder.CutLooks.count > cut_before


def test_sockets_beyond_the_bound_are_counted(monkeypatch):
    cut_before = job_finder.CutLooks.count
    job_finder.sockets_of(os.getpid())
    assert job_finder.CutLooks.count == cut_before
    monkeypatch.setattr(job_finder, "MAX_DESCRIPTORS", 1)
    job_finder.sockets_of(os.getpid())
    assert job_finder.CutLooks.count == cut_before + 1


def test_the_child_explains():
    explainer = Explainer()
    explainer.start()
    answers = []
    answered = threading.Event()

    def answer(verdict):
        answers.append(verdict)
        answered.set()

    try:
        one = window(ticks(p100=process(0.5, 0.4), p200=process(0.9)))
        explainer.ask(one, is_last_look=True, answer=answer)
        assert answered.wait(20)
        assert answers[0].cause == FaultCause.CPU_CONTENTION
        assert explainer.pids
        # One that dies is replaced.
        answered.clear()
        os.kill(next(iter(explainer.pids)), signal.SIGKILL)
        time.sleep(0.1)
        explainer.ask(one, is_last_look=True, answer=answer)
        assert answered.wait(20)
        assert answers[1] == answers[0]
        assert explainer.left_out == 0
    finally:
        explainer.close()
