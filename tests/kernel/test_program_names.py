# SPDX-License-Identifier: Apache-2.0
"""A recording knows programs by their script, and nothing else of their command lines."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sonde.query.capture import read

pytestmark = pytest.mark.bpf

WORK = """
import ctypes, os, time
worker = not os.fork()
if worker:
    ctypes.CDLL(None).prctl(15, b"pt_data_worker", 0, 0, 0)
os.write(1, b"%d\\n" % os.getpid())  # one write: both print into one pipe
until = time.monotonic() + 60
while time.monotonic() < until:
    sum(range(2000))
    time.sleep(0.001)
"""


@pytest.fixture
def ranks(tmp_path):
    """(pid, pid of its worker) of two ranks."""
    script = tmp_path / "train_here.py"
    script.write_text(WORK)
    started = [
        subprocess.Popen(
            [sys.executable, "-u", script, "--password=hunter2"],
            stdout=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank), "TOKEN": "hunter2"},
        )
        for rank in range(2)
    ]
    pids = []
    for one in started:
        both = {int(one.stdout.readline()) for _ in range(2)}
        pids.append((one.pid, *(both - {one.pid})))
    yield pids
    subprocess.run(["kill", "-9", *(str(pid) for both in pids for pid in both)], check=True)
    for one in started:
        one.wait()


def test_programs_are_called_by_their_script_and_rank(record, ranks):
    with record(
        *(word for both in ranks for pid in both for word in ("-p", str(pid))),
        *("-d", "4", "--no-device"),
    ) as recorder:
        recorder.process.wait(60)
    names = {one.pid: one.name for one in recorder.session.processes}
    for rank, (pid, worker) in enumerate(ranks):
        assert names[pid] == f"train_here.py rank {rank}"
        assert names[worker] == f"pt_data_worker of train_here.py rank {rank}"
    unread = recorder.rows("SELECT max(value) FROM metric WHERE series LIKE '%commands_unread'")
    assert not unread[0][0]
    texts = [str(table.to_pylist()) for table in read(recorder.path).tables.values()]
    assert not [text for text in texts if "hunter2" in text]
