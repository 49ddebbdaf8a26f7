# SPDX-License-Identifier: Apache-2.0
"""On-CPU samples against programs that know where they spent their time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time

import pytest

from sonde.model.profile import ProfileKind
from sonde.query import queries

pytestmark = pytest.mark.bpf

HZ = 997
"""Ten times the default, so that seconds hold as many samples as the default's minute and more."""


def cpu_samples(recorder, pid):
    """(samples, seconds) of a process."""
    sql = (
        "SELECT sum(weight_count), sum(weight_ns) / 1e9 FROM sample WHERE kind = 'cpu' AND pid = ?"
    )
    return recorder.rows(sql, pid)[0]


def run(*command):
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)


def test_two_functions_that_share_a_cpu_get_their_shares(record, program):
    with record("-F", str(HZ)) as recorder:
        share = run(program("truth/share"), 8)
        truth = json.loads(share.communicate()[0])
    used = {
        use.function: use.total_count
        for use in queries.top_functions(
            recorder.session, ProfileKind.ON_CPU, queries.Where(pids=[share.pid])
        )
    }
    ours = used["three_quarters"] + used["one_quarter"]
    samples, seconds = cpu_samples(recorder, share.pid)
    true_share = truth["three_quarters"] / (truth["three_quarters"] + truth["one_quarter"])
    # Four standard deviations of a count of that many: stays below the 2.5 points promised.
    tolerance = 4 * math.sqrt(0.75 * 0.25 / ours)
    assert tolerance < 0.025
    assert used["three_quarters"] / ours == pytest.approx(true_share, abs=tolerance)
    assert ours / samples > 0.95
    assert seconds == pytest.approx(truth["three_quarters"] + truth["one_quarter"], rel=0.03)


def test_the_callers_are_in_the_stack(record, program):
    with record("-F", str(HZ)) as recorder:
        share = run(program("truth/share"), 1)
        share.communicate()
    where = queries.Where(pids=[share.pid])
    total = {
        use.function: use.total_count
        for use in queries.top_functions(recorder.session, ProfileKind.ON_CPU, where)
    }
    leaves = total["three_quarters"] + total["one_quarter"]
    assert total["main"] >= 0.95 * leaves


def test_kernel_frames_come_before_user_frames(record):
    with record("-F", str(HZ)) as recorder:
        copy = run("dd", "if=/dev/zero", "of=/dev/null", "bs=1M", "count=40000", "status=none")
        copy.wait()
    where = queries.Where(pids=[copy.pid])
    profile = queries.profile(recorder.session, ProfileKind.ON_CPU, where)
    stacks = [
        [profile.stacks.frames[i].kind for i in profile.stacks.indices(stack)]
        for stack in profile.row_stack
    ]
    both = [kinds for kinds in stacks if "kernel" in kinds and "user" in kinds]
    assert both
    for kinds in stacks:
        assert kinds == sorted(kinds, key=lambda kind: kind != "kernel")


def test_a_process_that_sleeps_gets_no_samples(record):
    with record("-F", str(HZ)) as recorder:
        sleeper = run("sleep", "1")
        sleeper.wait()
    samples, _ = cpu_samples(recorder, sleeper.pid)
    assert (samples or 0) < 0.05 * HZ  # its start and its end


def test_idle_cpus_get_no_samples(record):
    with record("-F", str(HZ)) as recorder:
        subprocess.run(["sleep", "1"], check=True)
    assert recorder.rows("SELECT count(*) FROM sample WHERE kind = 'cpu' AND pid = 0") == [(0,)]


def test_threads_are_distinguished(record):
    source = (
        "import threading, time\n"
        "def burn(seconds):\n"
        "    began = time.thread_time()\n"
        "    while time.thread_time() - began < seconds: pass\n"
        "threads = [threading.Thread(target=burn, args=(s,)) for s in (0.5, 1.5)]\n"
        "[t.start() for t in threads]\n"
        "print([t.native_id for t in threads])\n"
        "[t.join() for t in threads]\n"
    )
    with record("-F", str(HZ)) as recorder:
        process = run(sys.executable, "-c", source)
        light, heavy = json.loads(process.communicate()[0])
    seconds = dict(
        recorder.rows(
            "SELECT tid, sum(weight_ns) / 1e9 FROM sample WHERE kind = 'cpu' AND pid = ?"
            " GROUP BY tid",
            process.pid,
        )
    )
    assert seconds[light] == pytest.approx(0.5, rel=0.15)
    assert seconds[heavy] == pytest.approx(1.5, rel=0.1)


def test_children_that_ran_before_are_watched_too(record):
    """`timeout 60 python train.py`: who asks for the first means the second, too."""
    burn = "import time\nprint()\nwhile time.process_time() < 30: pass"
    with subprocess.Popen(
        ["timeout", "60", sys.executable, "-uc", burn], stdout=subprocess.PIPE
    ) as parent:
        parent.stdout.readline()
        with record("-F", str(HZ), "-p", str(parent.pid)) as recorder:
            time.sleep(1)
        parent.terminate()
    [(pids, seconds)] = recorder.rows(
        "SELECT count(DISTINCT pid), sum(weight_ns) / 1e9 FROM sample"
        " WHERE kind = 'cpu' AND pid <> ?",
        parent.pid,
    )
    assert pids == 1
    assert seconds > 0.5


def test_only_the_watched_process_and_its_children_are_sampled(record):
    burn = "import time\nwhile time.process_time() < 1.5: pass"
    parent = subprocess.Popen(
        ["sh", "-c", 'read -r _; "$0" -c "$1"; true', sys.executable, burn], stdin=subprocess.PIPE
    )
    with record("-F", str(HZ), "-p", str(parent.pid)) as recorder:
        stranger = run(sys.executable, "-c", burn)
        parent.communicate(b"\n")
        stranger.wait()
    named = dict(
        recorder.rows(
            "SELECT pid, sum(weight_ns) / 1e9 FROM sample WHERE kind = 'cpu' GROUP BY pid"
        )
    )
    assert stranger.pid not in named
    assert sum(named.values()) == pytest.approx(1.5, rel=0.1)
    assert set(named) - {parent.pid}
