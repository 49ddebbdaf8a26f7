# SPDX-License-Identifier: Apache-2.0
"""A recording has the names that a Python program gives its threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bpf

WORK = """
import sys, threading, time
def work(until):
    while time.monotonic() < until:
        sum(range(2000))
        time.sleep(0.001)
def begin(seconds, **how):
    threading.Thread(target=work, args=(time.monotonic() + seconds,), **how).start()
begin(60, name="decoder")
begin(60)
renamed = threading.Thread(target=work, args=(time.monotonic() + 60,), name="before")
renamed.start()
print("ready", flush=True)
time.sleep(3)
begin(60, name="late")
renamed.name = "after"
work(time.monotonic() + 60)
"""


@pytest.fixture(params=["directly", "in a pid namespace"])
def program(request):
    inside = ["unshare", "--pid", "--fork"] if request.param != "directly" else []
    started = subprocess.Popen([*inside, sys.executable, "-c", WORK], stdout=subprocess.PIPE)
    started.stdout.readline()
    pid = started.pid
    if inside:
        done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=True, text=True)
        pid = int(done.stdout)
    yield pid
    subprocess.run(["kill", "-9", str(pid)], check=True)
    started.wait()


def test_a_recording_has_the_names_that_the_program_gave_its_threads(record, program):
    with record("-p", str(program), "-d", "8", "--no-device") as recorder:
        recorder.process.wait(60)
    threads = recorder.session.threads
    names = dict(zip(threads.tid.tolist(), map(threads.name_of, range(len(threads))), strict=True))
    assert names.pop(program) == Path(f"/proc/{program}/comm").read_text().strip()
    assert {"decoder", "Thread-1 (work)", "late", "after"} <= set(names.values())
    unread = recorder.rows("SELECT max(value) FROM metric WHERE series LIKE '%thread_names_unread'")
    assert not unread[0][0]
