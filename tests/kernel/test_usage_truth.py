# SPDX-License-Identifier: Apache-2.0
"""What processes use, against what the kernel reports to each of them, and whose they are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from control_groups import group
from truths import TRUTH, agrees

from sonde.query import queries
from sonde.query.queries import Where

pytestmark = pytest.mark.bpf

CONTAINER = "ab12" * 16

# Counters of the process itself, read as late as can be.
REPORT = """
import json, os, resource
ended = []
def mine():
    with open("/proc/thread-self/schedstat") as f:
        return [int(word) for word in f.read().split()]
def report(**more):
    cpu, delay, runs = map(sum, zip(mine(), *ended))
    used = resource.getrusage(resource.RUSAGE_SELF)
    io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    print(json.dumps({
        "cpu_ns": cpu, "runqueue_ns": delay, "runs": runs,
        "voluntary": used.ru_nvcsw, "involuntary": used.ru_nivcsw,
        "minor_faults": used.ru_minflt, "major_faults": used.ru_majflt,
        "read_bytes": int(io["read_bytes"]), "written_bytes": int(io["write_bytes"]), **more,
    }), flush=True)
"""


def usage_of(recorder, pid):
    (row,) = queries.usage(recorder.session, Where(pids=[pid]))
    return row


def run(source: str, *arguments: str, **how):
    return subprocess.Popen(
        [sys.executable, "-c", REPORT + source, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        **how,
    )


def close(truth: float, slack: float = 0.0):
    return pytest.approx(truth, rel=TRUTH, abs=slack)


def test_two_threads_that_share_a_cpu(record):
    """CPU time, waiting for it, switches: of threads that ended before the recorder looked, too."""
    spin = (
        "import threading, time\n"
        "os.sched_setaffinity(0, {0})\n"
        "def work():\n"
        "    end = time.thread_time() + 0.4\n"
        "    while time.thread_time() < end: pass\n"
        "    for _ in range(50): time.sleep(0.001)\n"
        "other = threading.Thread(target=lambda: (work(), ended.append(mine())))\n"
        "other.start(); work(); other.join(); report()\n"
    )
    with record("--host") as recorder:
        busy = [run(spin) for _ in range(2)]
        truths = [(one.pid, json.loads(one.communicate(timeout=60)[0])) for one in busy]
    for pid, truth in truths:
        used = usage_of(recorder, pid)
        # The program goes on for a moment after its report.
        agrees("CPU time, by schedstat", used.cpu_ns, truth["cpu_ns"], 30e6)
        agrees("waiting for a CPU, by schedstat", used.runqueue_ns, truth["runqueue_ns"], 30e6)
        agrees("voluntary switches, by getrusage", used.voluntary, truth["voluntary"], 20)
        agrees("involuntary switches, by getrusage", used.involuntary, truth["involuntary"], 20)
        agrees("minor faults, by getrusage", used.minor_faults, truth["minor_faults"], 300)
        assert used.runqueue_ns > 0.2e9


def test_bytes_and_major_faults(record, tmp_path):
    file = tmp_path / "data"
    work = (
        "import mmap, sys\n"
        "size = 16 << 20\n"
        "with open(sys.argv[1], 'wb') as f:\n"
        "    f.write(bytes(size)); f.flush(); os.fsync(f.fileno())\n"
        "f = open(sys.argv[1], 'rb')\n"
        "os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "m = mmap.mmap(f.fileno(), size, prot=mmap.PROT_READ)\n"
        "m.madvise(mmap.MADV_RANDOM)\n"
        "sum(m[i] for i in range(0, size, 1 << 16))\n"
        "report()\n"
    )
    with record("--host") as recorder:
        worker = run(work, str(file))
        truth = json.loads(worker.communicate(timeout=60)[0])
    used = usage_of(recorder, worker.pid)
    agrees("major faults, by getrusage", used.major_faults, truth["major_faults"], 2)
    agrees("bytes read, by /proc/PID/io", used.read_bytes, truth["read_bytes"], 1 << 16)
    agrees("bytes written, by /proc/PID/io", used.written_bytes, truth["written_bytes"], 1 << 16)
    if truth["major_faults"] < 100:
        pytest.skip("this file system keeps what it was asked to drop")


def test_only_what_is_used_while_recording_counts(record):
    work = (
        "import sys, time\n"
        "def burn(s):\n"
        "    end = time.thread_time() + s\n"
        "    while time.thread_time() < end: pass\n"
        "burn(0.5); print('ready', flush=True); sys.stdin.readline(); burn(0.3)\n"
    )
    worker = run(work, stdin=subprocess.PIPE)
    assert worker.stdout.readline() == "ready\n"
    with record("--host") as recorder:
        worker.communicate("go\n", timeout=60)
    assert usage_of(recorder, worker.pid).cpu_ns == close(0.3e9, 20e6)


def test_memory_freed_by_the_one_who_is_over_the_limit(record, tmp_path):
    on_disk = tmp_path / "data"
    with group("memory", "sonde-test-limit") as limited:
        version_1 = (limited / "memory.limit_in_bytes").exists()
        limit = limited / ("memory.limit_in_bytes" if version_1 else "memory.max")
        if not limit.exists():
            pytest.skip("no memory controller")
        limit.write_text(str(24 << 20))
        # What is written and is not in the group's cache any more was freed: nothing else takes it.
        # (The group's own count of pages that left it counts a large folio once.)
        work = (
            "import sys\n"
            "open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "def cached():\n"
            "    lines = open(sys.argv[1] + '/memory.stat').read().splitlines()\n"
            "    stat = dict(line.split() for line in lines)\n"
            "    return int(stat['cache' if 'cache' in stat else 'file'])\n"
            "data = bytes(1 << 20)\n"
            "f = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)\n"
            "before = cached()\n"
            "for _ in range(96):\n"
            "    os.write(f, data); os.fdatasync(f)\n"
            "report(freed=(96 * len(data) - (cached() - before)) // 4096)\n"
        )
        with record("--host") as recorder:
            worker = run(work, str(limited), str(on_disk))
            truth = json.loads(worker.communicate(timeout=60)[0])["freed"]
        used = usage_of(recorder, worker.pid)
    # 96 MiB of file went through 24 MiB: the rest had to be freed by the writer itself.
    assert truth * 4096 > 60 << 20
    assert used.reclaims > 0
    agrees("pages freed at a memory limit, by its cache", used.reclaimed_pages, truth)
    assert 0 < used.reclaim_ns < 60e9
    assert used.process.owner.cgroup == "/sonde-test-limit"
    others = [row for row in queries.usage(recorder.session) if row.reclaims]
    in_group = [row for row in others if row.process.owner.cgroup == "/sonde-test-limit"]
    assert [row.process.pid for row in in_group] == [worker.pid]


# --- whose ----------------------------------------------------------------------------------------


def test_processes_of_50_ms_in_a_container_that_is_gone(record):
    with record("--host") as recorder, group("memory", f"docker/{CONTAINER}") as container:
        enter = f"echo $$ > {container}/cgroup.procs; "
        forks = [subprocess.Popen(["sh", "-c", enter + "exec sleep 0.05"]) for _ in range(20)]
        for fork in forks:
            fork.wait()
        in_it = {fork.pid for fork in forks}
        outside = subprocess.Popen(["sleep", "0.05"])
        outside.wait()
    owners = {process.pid: process.owner for process in recorder.session.processes}
    assert {owners[pid].container for pid in in_it} == {CONTAINER}
    assert {owners[pid].runtime for pid in in_it} == {"docker"}
    assert owners[outside.pid].container == ""


def test_users_and_pids_of_nested_namespaces(record):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    script = "sleep 0.05 & unshare -pf --mount-proc sh -c 'exec sleep 0.06'"
    with record("--host") as recorder:
        subprocess.run(["unshare", "-pf", "--mount-proc", "sh", "-c", script], check=True)
        nobody = subprocess.Popen(["sleep", "0.05"], user=65534)
        nobody.wait()
    inner = [
        process.owner.inner_pid
        for process in recorder.session.processes
        if process.comm == "sleep" and process.pid != nobody.pid
    ]
    assert 1 in inner  # two levels down it is the first
    assert 2 in inner or 3 in inner
    owners = {process.pid: process.owner for process in recorder.session.processes}
    assert owners[nobody.pid].user in ("nobody", "65534")
