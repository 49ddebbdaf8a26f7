# SPDX-License-Identifier: Apache-2.0
"""The recorder as a whole: what survives its death or a full disk, what it costs and leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.bpf


def run(*command):
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)


def seconds(recorder, pid, kind):
    ((value,),) = recorder.rows(
        "SELECT sum(ns) / 1e9 FROM activity WHERE pid = ? AND kind = ?", pid, kind
    )
    return value


def wait_for_chunks(recorder, count):
    """Until the file has grown `count` times. Returns the time of the last one, as monotonic s."""
    size = recorder.path.stat().st_size
    while count:
        time.sleep(0.02)
        before, size = size, recorder.path.stat().st_size
        count -= size > before
    return time.monotonic()


def test_a_killed_recorder_leaves_a_readable_file(record):
    sleeper = run("sleep", "100")
    with record(tick_s=0.2, chunk_s=0.4) as recorder:
        began_s = time.monotonic()
        written_s = wait_for_chunks(recorder, 6)
        recorder.end(signal.SIGKILL)
    sleeper.kill()
    sleeper.wait()
    info = recorder.info
    assert not info.clean_end
    assert info.chunks >= 4
    assert info.chunks_missing == info.chunks_damaged == 0
    # All but the chunk that was being filled, and the time it took to start.
    assert info.duration_ns / 1e9 == pytest.approx(written_s - began_s, abs=1)
    assert seconds(recorder, sleeper.pid, "blocked") == pytest.approx(
        info.duration_ns / 1e9, abs=0.3
    )


def test_what_happens_in_a_pause_is_not_observed(record):
    with record(tick_s=0.2, chunk_s=0.4) as recorder:
        sleeper = run("sleep", "30")
        burner = run("sh", "-c", "while :; do :; done")
        time.sleep(1.5)
        recorder.process.send_signal(signal.SIGUSR1)
        time.sleep(2)
        recorder.process.send_signal(signal.SIGUSR2)
        time.sleep(1.5)
        recorder.end()
    for process in (sleeper, burner):
        process.kill()
        process.wait()
    info = recorder.info
    assert info.paused_ns / 1e9 == pytest.approx(2, abs=0.4)
    observed_s = info.duration_ns / 1e9
    assert observed_s == pytest.approx(3, abs=1)
    ((busy_ns,),) = recorder.rows(
        "SELECT sum(weight_ns) FROM sample WHERE pid = ? AND kind = 'cpu'", burner.pid
    )
    assert 0 < busy_ns / 1e9 < observed_s + 0.1
    # A wait that lasts over the pause counts up to it and from its end on.
    assert seconds(recorder, sleeper.pid, "blocked") == pytest.approx(observed_s, abs=0.4)


def test_a_killed_recorder_leaves_nothing_in_the_kernel(record):
    with record() as recorder:
        pid = recorder.process.pid
        held = []
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                held += ["bpf"] if "bpf" in str(link.readlink()) else []
        assert held  # its programs, maps and links: nothing is pinned,
        recorder.end(signal.SIGKILL)
    if Path("/sys/fs/bpf").is_dir():  # so nothing outlives it
        assert not list(Path("/sys/fs/bpf").glob("*sonde*"))


def test_a_full_disk_ends_the_recording_and_keeps_what_there_is(record, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    busy = run(sys.executable, "-c", "while True: sum(range(1000))")
    try:
        flags = ["-d", "60", "-F", "997"]
        with record(*flags, path=disk / "a.sonde", tick_s=0.1, chunk_s=0.1) as recorder:
            recorder.process.wait(40)
            code = recorder.end()
        assert code == 1
        assert "No space left" in recorder.complaints
        assert "remedy" in recorder.complaints
        assert "Traceback" not in recorder.complaints
        assert recorder.info.chunks >= 2
        assert recorder.info.tail_bytes == 0
        assert recorder.rows("SELECT count(*) FROM sample")[0][0] > 0
    finally:
        busy.kill()
        busy.wait()
        subprocess.run(["umount", disk], check=True)


def test_chunks_follow_one_another_without_a_gap(record):
    wait = (
        "import sys, time\nbegan = time.monotonic()\nsys.stdin.readline()\n"
        "print(time.monotonic() - began)"
    )
    with record(tick_s=0.1, chunk_s=0.3) as recorder:
        waiter = subprocess.Popen(
            [sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        wait_for_chunks(recorder, 5)
        truth = float(waiter.communicate("go\n", timeout=30)[0])
    assert recorder.info.clean_end
    assert recorder.info.chunks >= 5
    ((waited,),) = recorder.rows(
        "SELECT sum(ns) / 1e9 FROM activity WHERE pid = ? AND name = 'read'", waiter.pid
    )
    # Cut into pieces at every chunk, the wait still adds up.
    assert waited == pytest.approx(truth, rel=0.02)


def test_short_processes_are_known_by_name(record):
    names = [f"brief{i}" for i in range(8)]
    with record() as recorder:
        for name in names:
            source = f"open('/proc/self/comm', 'w').write('{name}'); sum(range(2_000_000))"
            subprocess.run([sys.executable, "-c", source], check=True)
    seen = {process.comm for process in recorder.session.processes}
    assert set(names) <= seen


def test_it_reports_what_it_costs(record):
    with record() as recorder:
        time.sleep(3)
    costs = dict(recorder.rows("SELECT series, max(value) FROM metric GROUP BY series"))
    assert 0 < costs["sonde.agent.cpu_seconds"] < 3
    assert 10e6 < costs["sonde.agent.max_rss_bytes"] < 96e6
    assert 1e6 < costs["sonde.agent.kernel_map_bytes"] < 64e6


def test_nothing_is_lost_on_a_machine_at_work(record, program):
    with record() as recorder:
        games = [run(program("truth/pingpong"), 200_000) for _ in range(2)]
        for game in games:
            game.communicate()
        subprocess.run(["sh", "-c", "for i in $(seq 200); do /bin/true; done"], check=True)
    assert recorder.losses() == {}
    assert recorder.outcome["lost"] == 0


def test_two_recorders_do_not_disturb_each_other(record):
    with record("-F", "997") as first, record("-F", "499") as second:
        burner = run(sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass")
        _, status, usage = os.wait4(burner.pid, 0)
        burner.returncode = os.waitstatus_to_exitcode(status)
    for recorder in (first, second):
        ((used,),) = recorder.rows(
            "SELECT sum(weight_ns) / 1e9 FROM sample WHERE kind = 'cpu' AND pid = ?", burner.pid
        )
        assert used == pytest.approx(usage.ru_utime + usage.ru_stime, rel=0.1)
