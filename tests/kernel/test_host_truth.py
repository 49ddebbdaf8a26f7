# SPDX-License-Identifier: Apache-2.0
"""Each signal of the host against a truth that the test reads for itself."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from truths import TRUTH, agrees

from sonde.collect.host.files import table
from sonde.collect.host.pressure import stalls

pytestmark = pytest.mark.bpf

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def group(controller: str, name: str) -> Iterator[Path]:
    """A control group of version 1, or of version 2 where there is no such hierarchy."""
    path = (ROOT / controller if (ROOT / controller).is_dir() else ROOT) / name
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        yield path
    finally:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.05)


def first_of(folder: Path, *names: str) -> Path:
    """The first of some files that is there."""
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        pytest.skip(f"{folder} has none of {names}")
    return found


def run(source: str, *arguments: str, enter: Path | None = None) -> str:
    """What a Python program says that runs in a control group."""
    if enter:
        source = f"open('{enter}/cgroup.procs', 'w').write('0')\n{source}"
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def grown(recorder, series: str, **attributes: object) -> float:
    """How much a counter grew over the recording, all that carry these attributes together."""
    total = 0.0
    for labels, first, last in recorder.rows(
        "SELECT labels, min(value), max(value) FROM metric WHERE series = ? GROUP BY labels", series
    ):
        found = json.loads(labels or "{}")
        if all(found.get(name) == value for name, value in attributes.items()):
            total += last - first
    return total


@contextmanager
def read_beside(read: Callable[[], int]) -> Iterator[list[tuple[int, int]]]:
    """A counter as it is read a hundred times a second in this process: (ns, value)."""
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.01):
            seen.append((time.monotonic_ns(), read()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def grown_beside(recorder, seen: list[tuple[int, int]], series: str, **attributes: object):
    """How much a counter grew between the first and the last reading of the recorder, and how much
    it did between the same two moments by readings of our own."""
    rows = [
        (labels, time_ns, value)
        for labels, time_ns, value in recorder.rows(
            "SELECT labels, time_ns, value FROM metric WHERE series = ? ORDER BY time_ns", series
        )
        if attributes.items() <= json.loads(labels or "{}").items()
    ]
    first = {labels: value for labels, _, value in reversed(rows)}
    final = {labels: value for labels, _, value in rows}
    ends = (rows[0][1], rows[-1][1])
    truths = [next(value for ns, value in seen if ns >= end) for end in ends]
    return sum(final.values()) - sum(first.values()), truths[1] - truths[0]


def last(recorder, series: str, **attributes: object) -> float:
    return sum(
        value
        for labels, value in recorder.rows(
            "SELECT labels, max_by(value, time_ns) FROM metric WHERE series = ? GROUP BY labels",
            series,
        )
        if attributes.items() <= json.loads(labels or "{}").items()
    )


def settle() -> None:
    """Until counters have been read once more."""
    time.sleep(1.2)


# --- scheduler ------------------------------------------------------------------------------------


def test_a_quota_that_is_used_up(record):
    with group("cpu", "sonde-test-quota") as limited:
        quota = first_of(limited, "cpu.cfs_quota_us", "cpu.max")
        quota.write_text("20000 100000" if quota.name == "cpu.max" else "20000")
        with record("--host") as recorder:
            time.sleep(0.3)
            run("import time\ne = time.time() + 2\nwhile time.time() < e: pass", enter=limited)
            settle()
            truth = table((limited / "cpu.stat").read_bytes())
    mine = {"sonde.cgroup": "/sonde-test-quota"}
    seconds = truth.get("throttled_time", 0) / 1e9 + truth.get("throttled_usec", 0) / 1e6
    assert truth["nr_throttled"] >= 10
    told = last(recorder, "sonde.cgroup.cpu.throttled", **mine)
    agrees("periods without quota, by cpu.stat", told, truth["nr_throttled"])
    told = last(recorder, "sonde.cgroup.cpu.throttled_time", **mine)
    agrees("seconds without quota, by cpu.stat", told, seconds)


def test_waits_for_a_cpu_are_those_that_threads_had(record):
    """Two busy loops on one CPU: what the run queue saw is what the kernel told the loops."""
    loop = (
        "import os, time\nos.sched_setaffinity(0, {0})\n"
        "e = time.time() + 2\nwhile time.time() < e: pass\n"
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
    # Others wait on that CPU too; the kernel's own sums over all processes say how much, at most.
    assert waited * (1 - TRUTH) <= saw <= usage * (1 + TRUTH)
    assert lengths >= 2


def test_run_queues_are_looked_at_a_hundred_times_a_second_while_something_runs(record):
    with record("--host") as recorder:
        run("import time\ne = time.time() + 2\nwhile time.time() < e: pass")
    times = [
        time_ns
        for (time_ns,) in recorder.rows(
            "SELECT time_ns FROM metric WHERE series = 'sonde.host.runqueue.running' ORDER BY 1"
        )
    ]
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    assert gaps[len(gaps) // 2] == pytest.approx(10e6, rel=0.1)
    assert len(times) >= 150


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
    told = last(recorder, "sonde.cgroup.memory.limit_hits", **mine)
    agrees("hits of a memory limit, by failcnt", told, truth)


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
    told = grown(recorder, "system.paging.faults")
    assert truth > 100_000
    assert told >= truth * (1 - TRUTH)


def test_pressure_or_why_there_is_none(record):
    with record("--host") as recorder:
        settle()
    notices = [text for (text,) in recorder.rows("SELECT text FROM event WHERE kind = 'notice'")]
    try:
        truth = dict(stalls(Path("/proc/pressure/cpu").read_bytes()))
    except OSError:
        assert any("PSI" in text for text in notices)
        return
    told = last(
        recorder,
        "sonde.host.pressure",
        **{"sonde.resource": "cpu", "sonde.pressure": "some"},
    )
    assert told == pytest.approx(truth[b"some"], rel=TRUTH)


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
    # The interpreter reads a little of its own.
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
    told = last(recorder, "sonde.cgroup.disk.io", **mine)
    agrees("bytes under a blkio limit, by blkio", told, truth)


# --- network --------------------------------------------------------------------------------------


@contextmanager
def pair(*, rate: str = "") -> Iterator[tuple[str, str]]:
    """Two network namespaces and a cable; from the first one no faster than `rate`."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc")
    names = (f"sonde-a{os.getpid()}", f"sonde-b{os.getpid()}")
    made: list[str] = []

    def do(command: str) -> None:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{command}: {done.stderr.strip()}")

    try:
        for name in names:
            do(f"ip netns add {name}")
            made.append(name)
        do(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
        for end, name in enumerate(names, 1):
            do(f"ip -n {name} addr add 10.123.0.{end}/24 dev veth0")
            do(f"ip -n {name} link set veth0 up")
            do(f"ip -n {name} link set lo up")
        if rate:
            do(f"tc -n {names[0]} qdisc add dev veth0 root tbf {rate}")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def inside(name: str, source: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def counters(name: str, file: str) -> dict[str, int]:
    """Protocol counters of a namespace."""
    raw = subprocess.run(
        ["ip", "netns", "exec", name, "cat", f"/proc/net/{file}"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return {
        f"{heads.split()[0]}{key}": int(value)
        for heads, values in zip(raw[::2], raw[1::2], strict=True)
        for key, value in zip(heads.split()[1:], values.split()[1:], strict=True)
    }


def soft_interrupts() -> dict[str, int]:
    lines = Path("/proc/softirqs").read_text().splitlines()[1:]
    return {
        line.split(":")[0].strip().lower(): sum(map(int, line.split(":")[1].split()))
        for line in lines
    }


def test_soft_interrupts_of_a_flood(record):
    flood = (
        "import socket, time\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "e = time.time() + 1.5\n"
        "while time.time() < e:\n"
        "    for _ in range(100): s.sendto(b'x' * 64, ('10.123.0.2', 9))\n"
    )
    read = lambda: soft_interrupts()["net_rx"]  # noqa: E731
    with pair() as (first, second), read_beside(read) as seen:
        with record("--host") as recorder:
            settle()
            packets_before = counters(second, "snmp").get("Udp:NoPorts", 0)
            inside(first, flood).communicate(timeout=60)
            arrived = counters(second, "snmp")["Udp:NoPorts"] - packets_before
            settle()
        time.sleep(0.1)
    kind = {"sonde.interrupt": "net_rx"}
    told, truth = grown_beside(recorder, seen, "sonde.host.softirqs", **kind)
    assert arrived > 10_000
    assert truth > 1_000
    agrees("NET_RX in a flood, by /proc/softirqs", told, truth)


def test_what_is_sent_again_through_a_narrow_queue(record):
    server = (
        "import socket, sys\n"
        "s = socket.socket(); s.bind(('10.123.0.2', 5001)); s.listen()\n"
        "print('ready', flush=True)\n"
        "c, _ = s.accept()\n"
        "n = 0\n"
        "while b := c.recv(1 << 16): n += len(b)\n"
        "print(n, flush=True); sys.stdin.readline()\n"
    )
    client = (
        "import socket, sys, time\n"
        "sys.stdin.readline()\n"
        "s = socket.create_connection(('10.123.0.2', 5001))\n"
        "s.sendall(bytes(4 << 20)); s.shutdown(socket.SHUT_WR)\n"
        "print('sent', flush=True); sys.stdin.readline()\n"
    )
    with (
        pair(rate="rate 20mbit burst 10kb limit 20kb") as (first, second),
        record("--host") as recorder,
    ):
        receiver = inside(second, server)
        assert receiver.stdout.readline() == "ready\n"
        sender = inside(first, client)
        time.sleep(1)
        sender.stdin.write("go\n")
        sender.stdin.flush()
        assert sender.stdout.readline() == "sent\n"
        received = int(receiver.stdout.readline())
        settle()
        truth, ending = counters(first, "snmp"), counters(first, "netstat")
        for end in (sender, receiver):
            end.communicate("end\n", timeout=30)
        settle()

    def flow(pid: int, op: str) -> tuple[int, int]:
        ((count, size),) = recorder.rows(
            'SELECT coalesce(sum("count"), 0), coalesce(sum(bytes), 0) FROM activity'
            " WHERE pid = ? AND kind = 'tcp' AND op = ?",
            pid,
            op,
        )
        return int(count), int(size)

    again, again_bytes = flow(sender.pid, "retransmit")
    segments, sent = flow(sender.pid, "send")
    assert received == 4 << 20
    assert truth["Tcp:RetransSegs"] > 20
    agrees("segments sent again, by /proc/net/snmp", again, truth["Tcp:RetransSegs"], 1)
    # netstat counts reasons and buffers, not segments; but its bytes are those of all packets, each
    # with its headers: IP, and TCP with time stamps.
    payload = ending["IpExt:OutOctets"] - truth["Ip:OutRequests"] * (20 + 32)
    agrees("bytes sent, by /proc/net/netstat", sent, payload)
    # What the queue refuses at once is handed to it again: the kernel counts it as sent twice, but
    # not as sent again.
    assert sent - again_bytes >= received
    all_sent = truth["Tcp:OutSegs"] + truth["Tcp:RetransSegs"]
    agrees("segments sent, by /proc/net/snmp", segments, all_sent)
    agrees("bytes received, by the receiver", flow(receiver.pid, "receive")[1], received)
    ((peer,),) = recorder.rows(
        "SELECT DISTINCT name FROM activity WHERE pid = ? AND kind = 'tcp'", sender.pid
    )
    assert peer == "10.123.0.2:5001"


def test_connections_too_short_for_any_walk_have_their_owner(record):
    talk = (
        "import socket, sys\n"
        "for _ in range(30):\n"
        "    s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "    s.sendall(bytes(1000)); s.recv(1); s.close()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, record("--host") as recorder:
        port = listener.getsockname()[1]
        client = subprocess.Popen([sys.executable, "-c", talk, str(port)])
        for _ in range(30):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000, socket.MSG_WAITALL)
                connection.sendall(b".")
        assert client.wait(30) == 0
        settle()
    ((sent,),) = recorder.rows(
        "SELECT sum(bytes) FROM activity WHERE pid = ? AND kind = 'tcp' AND op = 'send'", client.pid
    )
    assert sent == pytest.approx(30_000, rel=TRUTH)


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
    ((told, ns),) = recorder.rows(
        'SELECT sum("count"), sum(ns) FROM activity'
        " WHERE pid = ? AND kind = 'syscall' AND name = 'getppid'",
        caller.pid,
    )
    ((failed,),) = recorder.rows(
        'SELECT sum("count") FROM activity'
        " WHERE pid = ? AND kind = 'syscall' AND name IN ('stat', 'newfstatat') AND status <> 0",
        caller.pid,
    )
    assert told == 5_000
    assert 0 < ns < 1e9
    assert failed >= 700
