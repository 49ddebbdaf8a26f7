# SPDX-License-Identifier: Apache-2.0
"""`sonde dump`: every thread's whole stack, whatever the thread is doing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde.agent import dump as agent_dump
from sonde.collect import dump

pytestmark = pytest.mark.bpf

DUMP = [sys.executable, "-m", "sonde", "dump"]

THREADS = """
import queue, threading, time
def spin():
    while True:
        sum(i * i for i in range(1000))
def wait_for_work(jobs):
    jobs.get()
def sleeper():
    time.sleep(1000)
threading.Thread(target=spin, name="spinner").start()
threading.Thread(target=wait_for_work, args=(queue.Queue(),)).start()
print("ready", flush=True)
sleeper()
"""


@pytest.fixture(scope="module")
def threads():
    process = subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(0.2)
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def dumped(threads):
    done = subprocess.run(
        [*DUMP, str(threads.pid), "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["threads"]


def python_of(thread):
    return [frame["function"] for frame in thread["frames"] if frame["kind"] == "python"]


def test_every_thread_is_whole(threads, dumped):
    tasks = Path(f"/proc/{threads.pid}/task").iterdir()
    assert [it["tid"] for it in dumped] == sorted(int(task.name) for task in tasks)
    assert all(it["is_whole"] for it in dumped)


def test_threads_have_the_names_that_the_program_gave_them(threads, dumped):
    comm = Path(f"/proc/{threads.pid}/comm").read_text().strip()
    names = [it["name"] for it in dumped]
    assert names[0] == comm
    assert sorted(names[1:]) == ["Thread-1 (wait_for_work)", "spinner"]


def test_a_sleeping_thread_shows_the_call_and_the_line_it_is_in(dumped):
    main = dumped[0]
    assert main["state"] == "S"
    assert python_of(main) == ["sleeper", "<module>"]
    names = [frame["function"] for frame in main["frames"]]
    assert names.index("clock_nanosleep") < names.index("sleeper") < names.index("_start")
    lines = {it["function"]: it["line"] for it in main["frames"] if it["kind"] == "python"}
    assert THREADS.splitlines()[lines["sleeper"] - 1].strip() == "time.sleep(1000)"


def test_a_thread_that_waits_for_another_shows_what_for(dumped):
    waiting = [python_of(it) for it in dumped if "wait_for_work" in python_of(it)]
    assert waiting == [
        [
            *("Condition.wait", "Queue.get", "wait_for_work"),
            *("Thread.run", "Thread._bootstrap_inner", "Thread._bootstrap"),
        ]
    ]


def test_a_running_thread_is_seen_too(dumped):
    running = [it for it in dumped if "spin" in python_of(it)]
    assert len(running) == 1
    assert running[0]["state"] == "R"


def test_people_can_read_it(threads):
    done = subprocess.run(
        [*DUMP, str(threads.pid), "--python"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(f"process {threads.pid} (")
    assert "    sleeper (<string>:9)\n    <module> (<string>:13)" in done.stdout
    assert "[kernel]" not in done.stdout


WAITS = """
import os, queue, socket, subprocess, threading, time
lock, jobs, pipe = threading.Lock(), queue.Queue(), os.pipe()
one, other = socket.socketpair()
server = socket.create_server(("127.0.0.1", 0))
lock.acquire()
calls = {
    "lock": lock.acquire, "thread": jobs.get, "pipe read": lambda: os.read(pipe[0], 1),
    "socket read": lambda: one.recv(1), "connection": server.accept,
    "sleep": lambda: time.sleep(1000), "child": lambda: subprocess.run(["sleep", "1000"]),
}
for name, call in calls.items():
    threading.Thread(target=call, name=name, daemon=True).start()
print("ready", flush=True)
input()
"""


def test_what_each_thread_waits_for_is_shown():
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        time.sleep(0.5)
        done = subprocess.run(
            [*DUMP, str(process.pid), "--json"], capture_output=True, text=True, timeout=60
        )
        subprocess.run(["pkill", "-P", str(process.pid)], check=False)
        process.stdin.close()

    assert done.returncode == 0, done.stderr
    found = {it["name"]: it["doing"] for it in json.loads(done.stdout)["threads"][1:]}
    assert found == {name: name for name in found}
    assert len(found) == 7


CROWD = """
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void *sleeper(void *x) { for (;;) pause(); return x; }
int main(int n, char **v)
{
    pthread_attr_t a; pthread_t t;
    pthread_attr_init(&a); pthread_attr_setstacksize(&a, 16384);
    for (int i = atoi(v[1]); i--;) if (pthread_create(&t, &a, sleeper, 0)) return 1;
    puts("ready"); fflush(stdout);
    getchar();
}
"""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """Starts a process with a number of threads more than its first one: its pid."""
    program = tmp_path_factory.mktemp("crowd") / "crowd"
    subprocess.run(["gcc", "-O1", "-pthread", "-xc", "-", "-o", program], input=CROWD, text=True,
                   check=True)  # fmt: skip
    started = []

    def crowd(threads):
        one = subprocess.Popen([program, str(threads)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)  # fmt: skip
        started.append(one)
        assert one.stdout.readline() == b"ready\n"
        return one.pid

    yield crowd
    for one in started:
        one.kill()
        one.wait()


def test_five_thousand_threads_are_all_there(crowd):
    """The map had room for 4,096; nothing reported the others."""
    done = subprocess.run(
        [*DUMP, str(crowd(5000)), "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (len(answer["threads"]), answer["left_out"]["threads"]) == (5001, 0)
    pausing = [it for it in answer["threads"] if "sleeper" in str(it["frames"])]
    assert len(pausing) == 5000


def test_threads_without_room_are_counted(crowd, monkeypatch):
    monkeypatch.setattr(dump, "room_for", lambda _: 64)
    found = agent_dump.dump(crowd(99))
    assert (len(found.threads), found.threads_left_out) == (64, 36)


def test_names_that_there_is_no_time_for_are_counted_and_there_the_next_time(threads, monkeypatch):
    """A process decides how many functions there are, and how long each takes to be read."""
    monkeypatch.setattr(agent_dump, "NAMING_S", 0.0)
    dumper = agent_dump.Dumper([threads.pid])
    try:
        found = dumper.take(threads.pid)
        named = [it.function for it in found.threads[0].frames if it.kind != "kernel"]
        assert not any(named)
        assert found.names_left_out > 5
        monkeypatch.setattr(agent_dump, "NAMING_S", 10.0)
        found = dumper.take(threads.pid)
        assert [it.function for it in found.threads[0].frames if it.kind == "python"] == [
            "sleeper", "<module>"
        ]  # fmt: skip
        assert found.names_left_out == 0
    finally:
        dumper.close()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("4194303", "there is no process 4194303"),
        ("no-such-program", "no process that runs is called no-such-program"),
        ("-3", ""),
    ],
)
def test_what_is_no_process_is_reported_in_one_line(argument, message):
    done = subprocess.run([*DUMP, argument], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_without_privileges_it_names_the_missing_ones(threads):
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run([*bare, *DUMP, str(threads.pid)], capture_output=True, text=True)
    assert done.returncode == 3
    assert "remedy" in done.stderr
    assert "Traceback" not in done.stderr
