# SPDX-License-Identifier: Apache-2.0
"""Each signal of the host against a truth that the test reads for itself."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from control_groups import ROOT, group
from host_counters import grown, last, settle
from truths import TRUTH, agrees

from sonde.collect.host.files import table
from sonde.collect.host.pressure import waiting_times

pytestmark = pytest.mark.bpf
TWO_SECONDS = "import time\ne = time.monotonic() + 2\nwhile time.monotonic() < e: pass"
"""A program that works for so long."""


def first_of(folder: Path, *names: str) -> Path:
    """The first of some files that is there."""
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        pytest.skip(f"{folder} has none of {names}")
    return found


def run(source: str, *arguments: str, enter: Path | None = None) -> str:
    """What a Python program prints that runs in a control group."""
    if enter:
        source = f"open('{enter}/cgroup.procs', 'w').write('0')\n{source}"
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- scheduler ------------------------------------------------------------------------------------


def test_a_quota_that_is_used_up(record):
    with group("cpu", "sonde-test-quota") as limited:
        quota = first_of(limited, "cpu.cfs_quota_us", "cpu.max")
        quota.write_text("20000 100000" if quota.name == "cpu.max" else "20000")
        with record("--host") as recorder:
            time.sleep(0.3)
            run(TWO_SECONDS, enter=limited)
            settle()
            truth = table((limited / "cpu.stat").read_bytes())
    mine = {"sonde.cgroup": "/sonde-test-quota"}
    seconds = truth.get("throttled_time", 0) / 1e9 + truth.get("throttled_usec", 0) / 1e6
    assert truth["nr_throttled"] >= 10
    recorded = last(recorder, "sonde.cgroup.cpu.throttled", **mine)
    agrees("periods without quota, by cpu.stat", recorded, truth["nr_throttled"])
    recorded = last(recorder, "sonde.cgroup.cpu.throttled_time", **mine)
    agrees("seconds without quota, by cpu.stat", recorded, seconds)


def test_waits_for_a_cpu_are_those_that_threads_had(record):
    """Two busy loops on one CPU: what the run queue saw is what the kernel counted for them."""
    loop = (
        "import os, time\nos.sched_setaffinity(0, {0})\n"
        "e = time.monotonic() + 2\nwhile time.monotonic() < e: pass\n"
        "print(open('/proc/self/schedstat').read())"
    )
    with record("--host") as recorder:
        time.sleep(0.3)
        busy = [
            subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        waited = sum(int(one.communicate(timeout=60)[0].split()[1]) for one in busy) / 1e9
        settle()
    saw = last(recorder, "sonde.host.runqueue.wait_time", **{"cpu.logical_number": 0})
    ((usage,),) = recorder.rows(
        "SELECT sum(runqueue_ns) / 1e9 FROM usage u JOIN process p ON u.process = p.process"
    )
    ((lengths,),) = recorder.rows(
        "SELECT max(value) FROM metric WHERE series = 'sonde.host.runqueue.longest'"
    )
    if recorder.rows("SELECT * FROM event WHERE name = 'runqueue_rest'"):
        pytest.skip("others switch so often that switches are not followed all the time")
    assert waited > 1.5
    # Others wait on that CPU too; the kernel's sums over all processes show how much, at most.
    assert waited * (1 - TRUTH) <= saw <= usage * (1 + TRUTH)
    assert lengths >= 2


def test_run_queues_are_looked_at_a_hundred_times_a_second_while_something_runs(record):
    with record("--host") as recorder:
        run(TWO_SECONDS)
    times = [
        time_ns
        for (time_ns,) in recorder.rows(
            "SELECT time_ns FROM metric WHERE series = 'sonde.host.runqueue.running' ORDER BY 1"
        )
    ]
    notices = recorder.rows("SELECT name, text FROM event WHERE name LIKE 'runqueue%'")
    assert times, notices
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    assert gaps[len(gaps) // 2] == pytest.approx(10e6, rel=0.1)
    # Where looks are missing it matters when: one long gap is a machine that stood still.
    longest = [gap // 10**6 for gap in gaps[-5:]]
    after_s = times[0] / 1e9 - recorder.info.start_ns / 1e9
    assert len(times) >= 150, f"gaps {longest} ms, {after_s:.2f} s after the start, {notices}"


# --- memory, pressure -----------------------------------------------------------------------------


def test_a_memory_limit_that_is_hit(record, tmp_path):
    with group("memory", "sonde-test-memory") as limited:
        limit = first_of(limited, "memory.limit_in_bytes", "memory.max")
        limit.write_text(str(24 << 20))
        write = (
            "import os, sys\nwith open(sys.argv[1], 'wb') as f:\n"
            "    for _ in range(64): f.write(bytes(1 << 20)); f.flush(); os.fdatasync(f.fileno())"
        )
        with record("--host") as recorder:
            time.sleep(0.3)
            run(write, str(tmp_path / "data"), enter=limited)
            settle()
            file = first_of(limited, "memory.failcnt", "memory.events")
            raw = file.read_bytes()
            truth = int(raw) if file.name == "memory.failcnt" else table(raw)["max"]
    mine = {"sonde.cgroup": "/sonde-test-memory"}
    assert truth > 0
    recorded = last(recorder, "sonde.cgroup.memory.limit_hits", **mine)
    agrees("hits of a memory limit, by failcnt", recorded, truth)


def test_faults_of_the_machine(record):
    def faults() -> int:
        return table(Path("/proc/vmstat").read_bytes())["pgfault"]

    with record("--host") as recorder:
        settle()
        before = faults()
        run("import mmap\nfor _ in range(40):\n m = mmap.mmap(-1, 16 << 20)\n"
            " for i in range(0, 16 << 20, 4096): m[i] = 1\n m.close()")  # fmt: skip
        truth = faults() - before
        settle()
    recorded = grown(recorder, "system.paging.faults")
    assert truth > 100_000
    assert recorded >= truth * (1 - TRUTH)


def test_pressure_or_why_there_is_none(record):
    with record("--host") as recorder:
        settle()
    notices = [text for (text,) in recorder.rows("SELECT text FROM event WHERE kind = 'notice'")]
    try:
        truth = dict(waiting_times(Path("/proc/pressure/cpu").read_bytes()))
    except OSError:
        assert any("PSI" in text for text in notices)
        return
    recorded = last(
        recorder,
        "sonde.host.pressure",
        **{"sonde.resource": "cpu", "sonde.pressure": "some"},
    )
    assert recorded == pytest.approx(truth[b"some"], rel=TRUTH)


def test_pressure_of_a_group_without_a_limit(record):
    contend = (
        "import os, sys\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "open(sys.argv[1] + '/cgroup.procs', 'w').write('0')\n"
        f"print(flush=True); input(); os.fork()\n{TWO_SECONDS}\nprint(flush=True); input()"
    )
    with group("unified", "sonde-test-pressure") as unlimited:
        file = first_of(unlimited, "cpu.pressure")
        command = [sys.executable, "-c", contend, str(unlimited)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as two:
            assert two.stdin and two.stdout
            two.stdout.readline()
            with record("--host", "--group-pressure") as recorder:
                settle()
                two.stdin.write(b"\n")
                two.stdin.flush()
                two.stdout.readline()
                two.stdin.write(b"\n\n")
                two.stdin.flush()
                settle()
                truth = dict(waiting_times(file.read_bytes()))
    mine = {"sonde.cgroup": "/sonde-test-pressure", "sonde.resource": "cpu"}
    recorded = last(recorder, "sonde.cgroup.pressure", **mine, **{"sonde.pressure": "some"})
    assert truth[b"some"] > 1
    agrees("pressure of a group, by cpu.pressure", recorded, truth[b"some"])


# --- block devices --------------------------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[Path, str, str]:
    """(a file of 32 MiB, the name of its disk, major:minor of that)."""
    file = tmp_path / "data"
    with file.open("wb") as out:
        out.write(bytes(32 << 20))
        out.flush()
        os.fsync(out.fileno())
    device = file.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    link = Path(f"/sys/dev/block/{number}")
    if not link.exists() or (link / "partition").exists():
        pytest.skip("needs a file system on a whole disk")
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("needs O_DIRECT")
    return file, link.readlink().name, number


READ = (
    "import mmap, os, sys\n"
    "f = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)\n"
    "m = mmap.mmap(-1, 1 << 18)\n"
    "for i in range(int(sys.argv[2])): os.preadv(f, [m], i << 18)\n"
)


def test_direct_reads_by_the_one_who_reads(record, on_disk):
    file, name, _ = on_disk
    with record("--host") as recorder:
        reader = subprocess.Popen([sys.executable, "-c", READ, str(file), "100"])
        began = time.monotonic()
        assert reader.wait(60) == 0
        elapsed = time.monotonic() - began
    ((count, ns, size),) = recorder.rows(
        'SELECT sum("count"), sum(ns), sum(bytes) FROM activity'
        " WHERE pid = ? AND kind = 'block' AND op = 'read' AND name = ?",
        reader.pid,
        name,
    )
    ((queued,),) = recorder.rows(
        "SELECT sum(ns) FROM activity WHERE pid = ? AND kind = 'block-queue'", reader.pid
    )
    # The interpreter reads a little, too.
    assert size == pytest.approx(100 << 18, rel=TRUTH, abs=4 << 20)
    assert count >= 100
    assert 0 < queued < ns
    assert ns / 1e9 < elapsed * 8  # a request is split into several that run at once


def test_a_limit_on_a_disk_is_the_groups(record, on_disk):
    file, _, number = on_disk
    if not (ROOT / "blkio").is_dir():
        pytest.skip("needs blkio of version 1")
    with group("blkio", "sonde-test-blkio") as limited:
        (limited / "blkio.throttle.read_bps_device").write_text(f"{number} {4 << 20}")
        with record("--host") as recorder:
            began = time.monotonic()
            run(READ, str(file), "32", enter=limited)
            elapsed = time.monotonic() - began
            settle()
            served = (limited / "blkio.throttle.io_service_bytes").read_text()
    (truth,) = (
        int(line.split()[2]) for line in served.splitlines() if line.startswith(f"{number} Read")
    )
    mine = {"sonde.cgroup": "/sonde-test-blkio", "disk.io.direction": "read"}
    assert elapsed > 1.5  # 8 MiB at 4 MiB/s
    assert truth >= 8 << 20
    recorded = last(recorder, "sonde.cgroup.disk.io", **mine)
    agrees("bytes under a blkio limit, by blkio", recorded, truth)


# --- system calls ---------------------------------------------------------------------------------


def test_system_calls_by_process(record):
    calls = (
        "import os\n"
        "for _ in range(5000): os.getppid()\n"
        "for _ in range(700):\n"
        "    try: os.stat('/nowhere')\n"
        "    except OSError: pass\n"
    )
    with record("--host", "--syscalls") as recorder:
        time.sleep(0.3)
        caller = subprocess.Popen([sys.executable, "-c", calls])
        assert caller.wait(60) == 0
    ((recorded, ns),) = recorder.rows(
        'SELECT sum("count"), sum(ns) FROM activity'
        " WHERE pid = ? AND kind = 'syscall' AND name = 'getppid'",
        caller.pid,
    )
    ((failed,),) = recorder.rows(
        'SELECT sum("count") FROM activity'
        " WHERE pid = ? AND kind = 'syscall' AND name IN ('stat', 'newfstatat') AND status <> 0",
        caller.pid,
    )
    assert recorded == 5_000
    assert 0 < ns < 1e9
    assert failed >= 700
