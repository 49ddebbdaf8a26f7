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


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("4194303", "there is no process 4194303"),
        ("python", "'python' is no process id"),
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
