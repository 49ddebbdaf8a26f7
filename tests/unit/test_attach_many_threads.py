# SPDX-License-Identifier: Apache-2.0
"""What looking at a process before an attach costs, when it has many threads, each with a status of
0.7 MB."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde import procfs
from sonde.attach import process
from sonde.attach.glibc import mappings_of
from sonde.attach.policy import ProcessFacts
from sonde.attach.threads import sleepers
from sonde.errors import TargetRefused
from sonde.procfs import ids

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="sets 65,536 groups"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="attaching is for x86-64"),
]

THREADS = 400
PROGRAM = f"""
import os, sys, threading, time
os.setgroups(range(4000000000, 4000065536))
threading.stack_size(65536)
for _ in range({THREADS}):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("there", flush=True); sys.stdin.read(); os._exit(0)
"""


@pytest.fixture(scope="module")
def crowd():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as started:
        assert started.stdout.readline() == b"there\n"
        yield started.pid
        started.kill()


def test_it_is_refused_once_looking_at_its_threads_took_too_long(crowd, monkeypatch):
    monkeypatch.setattr(process, "THREADS_S", 0.5)
    began_s = time.monotonic()
    with pytest.raises(TargetRefused, match=rf"has {THREADS + 1:,} threads") as refused:
        process.require(crowd)
    assert time.monotonic() - began_s < 2
    assert "sonde record" in refused.value.remedy


def test_the_names_of_threads_that_time_does_not_suffice_for_are_counted(crowd, monkeypatch):
    monkeypatch.setattr(process, "THREADS_S", 0.5)
    began_s = time.monotonic()
    found, left_out = process.threads_of(crowd)
    assert time.monotonic() - began_s < 2
    assert found[crowd][0] == crowd
    assert len(found) + left_out == THREADS + 1
    assert left_out


def test_threads_to_borrow_are_looked_for_until_a_given_time(crowd):
    began_s = time.monotonic()
    found = list(sleepers(crowd, mappings_of(crowd), until_s=began_s + 0.3))
    assert time.monotonic() - began_s < 2
    assert len(found) < THREADS


def test_whose_it_is_takes_no_look_at_its_groups(crowd):
    if not ids._info_of(crowd):
        pytest.skip("before Linux 6.13")
    began_s = time.thread_time()
    assert all(ProcessFacts.of(crowd).user == "root" for _ in range(20))
    assert time.thread_time() - began_s < 0.1
    assert procfs.user_ids(crowd) == (0, 0, 0, 0)


def test_all_threads_of_an_ordinary_process_are_looked_at():
    found, left_out = process.threads_of(os.getpid())
    tids = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    assert (set(found), left_out) == (tids, 0)
    assert process.threads_of(2**22 + 1) == ({}, 0)
