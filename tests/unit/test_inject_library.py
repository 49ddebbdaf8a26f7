# SPDX-License-Identifier: Apache-2.0
"""The library in a process that launches on a stub of the CUDA driver: what it times, and that it
harms nobody. The stub ends the program when it is used in a way that a driver would punish."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from sonde import _native
from sonde.collect import inject_abi as abi
from sonde.collect.device_time import DeviceTime
from sonde.collect.inject_memory import InjectMemory
from stub_driver import REQUEST, build, find, start, watch

ROOT = Path(__file__).parents[2]
NS_OF = {"shorter(float*)": 20_000, "longer": 60_000, "(graph)": 100_000}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stub")) / "launches"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "sonde-inject-0.so"
    path.write_bytes(_native.inject_library())
    return path


CANCELLATION_POINTS = {
    *("accept", "clock_nanosleep", "close", "connect", "creat", "fcntl", "fsync", "msync"),
    *("nanosleep", "open", "open64", "openat", "pause", "poll", "ppoll", "pread", "pread64"),
    *("pselect", "pthread_cond_wait", "pthread_join", "pwrite", "read", "readv", "recv", "select"),
    *("sem_wait", "send", "sigsuspend", "sigwait", "sleep", "system", "usleep", "wait", "waitpid"),
    *("write", "writev"),
}


def test_it_calls_nothing_that_may_end_the_thread_that_it_is_in(library):
    # A thread that is cancelled is unwound out of such a call, here out of fork() and of drivers.
    found = subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
    )
    called = {line.split()[-1].partition("@")[0] for line in found.stdout.splitlines()}
    assert "syscall" in called
    assert not called & CANCELLATION_POINTS


def counted(text):
    """What the program reports it launched, by name as the library reports it."""
    ran = {name: int(count) for name, count, _ in map(str.split, text.splitlines())}
    return {
        "shorter(float*)": ran["shorter"], "longer": ran["longer"], "(graph)": ran["graph"],
    }  # fmt: skip


def test_sums_of_weights_are_the_launches_and_durations_the_device_s(launches, library):
    process = start(launches, library, 4)
    collector = DeviceTime([process.pid], 0.05)
    find(process.pid).close()
    collector.start()
    runs = watch(process, collector)["device_run"]
    truth = counted(process.stdout.read())
    assert process.returncode == 0
    count, variance, durations = defaultdict(float), defaultdict(float), defaultdict(list)
    for run in runs:
        name, weight = run[3], run[10]
        count[name] += weight
        variance[name] += weight * (weight - 1)
        durations[name].append(run[1] - run[0])
    assert count.keys() == truth.keys()
    for name, launched in truth.items():
        # Four standard errors, and what was under way at the begin and the end.
        assert abs(count[name] - launched) < 4 * variance[name] ** 0.5 + 0.03 * launched
        middle = sorted(durations[name])[len(durations[name]) // 2]
        assert NS_OF[name] - 2_000 <= middle < NS_OF[name] + 25_000
    assert sum(len(d) for d in durations.values()) > 500
    kernels = [run for run in runs if run[2] == "kernel"]
    assert all(run[16:18] == ("7,2,1", "128,1,1") for run in kernels)
    assert len({run[13] for run in runs}) == 3
    assert all(run[8] for run in runs), "every run has a stack"


def test_what_timing_costs_is_tried_out_and_the_sums_stay_true(launches, library, monkeypatch):
    monkeypatch.setattr("sonde.collect.overhead_controller.GAP_S", 0.2)
    monkeypatch.setattr("sonde.collect.overhead_controller.STRETCH_S", 0.15)
    monkeypatch.setattr("sonde.collect.device_records.REPORT_S", 0.5)
    process = start(launches, library, 8)
    collector = DeviceTime([process.pid], 0.05)
    find(process.pid).close()
    collector.start()
    rows = watch(process, collector)
    runs, metrics = rows["device_run"], rows["metric"]
    truth = counted(process.stdout.read())
    last = {json.loads(labels)["sonde.bound"]: value for _, _, labels, value in metrics[-3:]}
    assert {name for _, name, _, _ in metrics} == {"sonde.device_time.slowdown"}
    assert -1 < last["low"] <= last["median"] <= last["high"] < 1
    for name, launched in truth.items():
        weights = [run[10] for run in runs if run[3] == name]
        error = sum(weight * (weight - 1) for weight in weights) ** 0.5
        assert abs(sum(weights) - launched) < 4 * error + 0.03 * launched


def test_copies_sets_and_waits(launches, library):
    process = start(launches, library, 4, "copies", request="1:4000")
    collector = DeviceTime([process.pid], 5)
    find(process.pid).close()
    collector.start()
    rows = watch(process, collector)
    truth = {
        name: (int(count), int(size))
        for name, count, size in map(str.split, process.stdout.read().splitlines())
    }
    assert process.returncode == 0
    for name, kind, direction in (
        ("h2d", "copy", "h2d"), ("d2h", "copy", "d2h"), ("d2d", "copy", "d2d"),
        ("set", "set", ""), ("waits", "sync", ""),
    ):  # fmt: skip
        count, size = truth[name]
        runs = [run for run in rows["device_run"] if (run[2], run[14]) == (kind, direction)]
        error = sum(run[10] * (run[10] - 1) for run in runs) ** 0.5
        assert abs(sum(run[10] for run in runs) - count) < 4 * error + 0.03 * count
        assert {run[15] for run in runs} == {size}, direction
        middle = sorted(run[1] - run[0] for run in runs)[len(runs) // 2]
        if kind == "sync":
            assert {run[3:5] for run in runs} == {("cuStreamSynchronize", "host")}
            assert middle > 100_000, "as long as what was waited for"
        else:  # 10 bytes a nanosecond
            assert size / 10 - 2_000 <= middle < size / 10 + 25_000
    assert not [row for row in rows["sample"] if row[2] == "cuStreamSynchronize"], (
        "time of the host is no time of a device"
    )


@pytest.mark.parametrize("more", [(), ("capture",)])
def test_behind_other_work_kernels_are_timed_without_a_gate(launches, library, monkeypatch, more):
    """Loading the gate's module while the queue is full would hold the program up."""
    monkeypatch.setenv("STUB_LOADS_NO_MODULE", "1")
    process = start(launches, library, 4, "deep", *more, request="0:0")  # until it is asked
    collector = DeviceTime([process.pid], 0.05)
    time.sleep(0.2)  # the queue grows
    find(process.pid).close()
    collector.start()
    runs = watch(process, collector)["device_run"]
    assert process.returncode == 0
    for name in ("shorter(float*)", "longer"):
        durations = sorted(run[1] - run[0] for run in runs if run[3] == name)
        assert len(durations) > 50
        assert NS_OF[name] - 2_000 <= durations[0] <= durations[-1] < NS_OF[name] + 2_000


def test_where_launches_are_chosen_from_is_reported(launches, library):
    before_ns = time.monotonic_ns()
    process = start(launches, library, 2)
    collector = DeviceTime([process.pid], 0.05)
    find(process.pid).close()
    collector.start()
    rows = watch(process, collector)
    [(began_ns, kind, name, pid, _, _, _)] = [row for row in rows["event"] if row[1] == "timing"]
    assert (kind, name, pid) == ("timing", "began", process.pid)
    assert before_ns < began_ns <= min(run[0] for run in rows["device_run"])


def test_a_process_that_another_agent_reads_is_reported_once(launches, library, monkeypatch):
    monkeypatch.setattr("sonde.collect.device_time.LOOK_AGAIN_S", 0.0)
    process = start(launches, library, 30)
    find(process.pid).close()
    first = DeviceTime([process.pid], 0.01)
    second = DeviceTime([process.pid], 0.01, has_events=True)
    first.start()
    assert first.pids == {process.pid}
    second.start()
    try:
        events = [row for _ in range(2) for row in second.drain(0, False).rows.get("event", [])]
        assert not second.pids
        [(_, kind, name, pid, _, _, text)] = events
        assert (kind, name, pid) == ("notice", "device_time_refused", process.pid)
        assert "another agent" in text
        second.on_process_events([])  # none reports what comes now
        first.stop()
        second.drain(0, False)
        assert second.pids == {process.pid}, "taken over once the other has let go"
    finally:
        first.stop()
        second.stop()
        process.kill()
        process.wait()


def test_a_process_that_was_detached_is_read_once_it_is_allowed_again(
    launches, library, monkeypatch
):
    monkeypatch.setattr("sonde.collect.device_time.LOOK_AGAIN_S", 0.0)
    process = start(launches, library, 30)
    collector = DeviceTime([process.pid], 0.01, has_events=True)
    try:
        with find(process.pid) as memory:
            memory.ask(request=abi.Request.LEAVE)
            collector.start()
            collector.on_process_events([])
            assert not collector.drain(0, False).rows and not collector.pids
            memory.ask(request=0)
        collector.drain(0, False)
        assert collector.pids == {process.pid}
    finally:
        collector.stop()
        process.kill()
        process.wait()


def test_it_ends_also_where_it_is_stopped_between_two_heartbeats():
    """Stopped just before it cleared the wake-up, the heartbeat slept for ever."""
    collector = DeviceTime([os.getpid()], 0.01)

    class Woken(threading.Event):
        def clear(self):
            collector._stopped.set()
            self.set()
            super().clear()

    collector._carried = Woken()
    collector.start()
    collector._heart.join(5)
    assert not collector._heart.is_alive()


@pytest.mark.parametrize("words", [("capture",), ("capture", "legacy"), ("fork",), ("exec",)])
def test_no_harm(launches, library, words):
    process = start(launches, library, 1.5, *words, request="9:20000")
    collector = DeviceTime([process.pid], 0.5)
    find(process.pid).close()
    collector.start()
    runs = watch(process, collector)["device_run"]
    assert process.returncode == 0
    assert runs
    if "fork" in words:
        children = {run[5]: run for run in runs if run[5] != process.pid}
        assert len(children) >= 4, "children are timed too, the fifth like the first"
        assert all(run[7] == pid for pid, run in children.items()), "under their own numbers"


def test_idle_within_a_second_without_a_heartbeat_and_back(launches, library):
    process = start(launches, library, 8, request="0:0")
    memory = find(process.pid)
    try:
        assert memory.seen().status in (abi.Status.IDLE, abi.Status.STARTING)
        memory.ask(request=int(abi.Request.EVENTS), per_second=500)
        for _ in range(100):
            memory.heartbeat()
            if memory.wait_for(abi.Status.TIMING, timeout_s=0.1).status == abi.Status.TIMING:
                break
        assert memory.seen().status == abi.Status.TIMING
        assert memory.wait_for(abi.Status.IDLE, timeout_s=3).status == abi.Status.IDLE
        time.sleep(0.5)  # what threads had begun to count is counted
        launched = memory.seen().counts["launches"]
        time.sleep(0.5)
        assert memory.seen().counts["launches"] == launched, "nothing is even counted"
        memory.heartbeat()
        assert memory.wait_for(abi.Status.TIMING, timeout_s=3).status == abi.Status.TIMING
    finally:
        memory.close()
        process.wait()
    assert process.returncode == 0


def test_a_program_executed_over_another_is_timed_too(launches, library):
    process = start("/bin/sh", library, "-c", f"sleep 0.5; exec {launches} 4")
    find(process.pid).close()
    collector = DeviceTime([process.pid], 0.05)
    collector.start()
    assert process.pid in collector.pids
    runs = watch(process, collector)["device_run"]
    assert process.returncode == 0
    assert process.pid in {run[5] for run in runs}


def test_detach_takes_the_hooks_out_and_attach_puts_them_back(launches, library):
    process = start(launches, library, 3, request=REQUEST)
    memory = find(process.pid)
    try:
        assert memory.wait_for(abi.Status.TIMING, timeout_s=2).status == abi.Status.TIMING
        assert memory.seen().counts["hooks"]
        memory.ask(request=int(abi.Request.LEAVE))
        left = memory.wait_for(abi.Status.LEFT, timeout_s=1)
        assert (left.status, left.counts["hooks"]) == (abi.Status.LEFT, 0)
        memory.ask(request=int(abi.Request.EVENTS), per_second=100)
        memory.heartbeat()
        assert memory.wait_for(abi.Status.TIMING, timeout_s=1).counts["hooks"]
    finally:
        memory.close()
        process.wait()
    assert process.returncode == 0


def test_kill_switch_is_for_good(launches, library):
    process = start(launches, library, 2, request=REQUEST)
    memory = find(process.pid)
    try:
        memory.wait_for(abi.Status.TIMING, timeout_s=2)
        memory.ask(off=abi.KILL)
        assert memory.wait_for(abi.Status.KILLED, timeout_s=1).counts["hooks"] == 0
        memory.ask(off=0, request=int(abi.Request.EVENTS))
        memory.heartbeat()
        time.sleep(0.5)
        assert memory.seen().status == abi.Status.KILLED
    finally:
        memory.close()
        process.wait()
    assert process.returncode == 0


def test_switched_off_it_makes_nothing(launches, library):
    process = start(launches, library, 0.5, request="off")
    time.sleep(0.3)
    assert InjectMemory.find(process.pid) is None
    process.wait()


def test_one_agent_at_a_time(launches, library):
    process = start(launches, library, 1.5)
    memory, second = find(process.pid), find(process.pid)
    assert memory.lock()
    assert not second.lock()
    memory.close()
    assert second.lock(), "given up when the first one ends"
    second.close()
    process.wait()


def test_runs_on_any_glibc_since_2_17_and_shows_what_is_asked_of_it_alone(library):
    text = subprocess.run(
        ["nm", "-D", "--with-symbol-versions", library], check=True, capture_output=True, text=True
    ).stdout
    versions = {
        tuple(map(int, word.partition("@GLIBC_")[2].split(".")))
        for word in text.split()
        if "@GLIBC_" in word
    }
    assert max(versions) <= (2, 17)
    defined = {line.split()[-1] for line in text.splitlines() if " T " in line}
    layer = {"clGetLayerInfo", "clInitLayer"}
    assert defined == {"InitializeInjection", "sonde_inject_site", *layer}
    needed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True)
    assert needed.stdout.count("(NEEDED)") == 1


def test_it_stands_back_while_somebody_else_traces(launches, library):
    """What is traced by CUPTI holds the program's own launches alone; then timing goes on."""
    process = start(launches.parent / "traced", library)
    collector = DeviceTime([process.pid], 0.5)
    find(process.pid).close()
    collector.start()
    runs = watch(process, collector)["device_run"]
    own, traced = map(int, process.stdout.read().split())
    assert process.returncode == 0
    assert own > 200 and traced == own
    yielded_ms = collector.losses()["yielded_ms"]
    assert 3 * 400 < yielded_ms < 3 * 700
    starts = sorted(run[0] for run in runs)
    pauses = [after - before for before, after in pairwise(starts)]
    assert sum(pause > 400_000_000 for pause in pauses) == 3, "it went on after each"


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_under_a_sanitizer(tmp_path, sanitizer):
    """The library, the stub and the program, all compiled with it."""
    flags = (f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer")
    program = build(tmp_path, *flags) / "launches"
    library = tmp_path / "sonde-inject-0.so"
    subprocess.run(
        ["cc", "-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", *flags,
         "-Wl,-z,nodelete", "-o", library, *sorted((ROOT / "inject").glob("*.c")), "-lpthread"],
        check=True,
    )  # fmt: skip
    runtime = subprocess.run(
        ["cc", f"-print-file-name=lib{'asan' if sanitizer == 'address' else 'tsan'}.so"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime} {library}",
        "SONDE_INJECT": "9:2000",
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "exitcode=66",
    }
    ran = subprocess.Popen(
        [program, "2", "capture", *(["fork"] if sanitizer == "address" else [])],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    collector = DeviceTime([ran.pid], 0.5)
    find(ran.pid).close()
    collector.start()
    rows = watch(ran, collector)
    assert ran.returncode == 0, ran.stderr.read()[-6000:]
    assert rows["device_run"]


def test_a_thread_cancelled_in_a_launch_holds_up_no_capture(launches, library):
    process = start(launches.with_name("cancel"), library, 20)
    cancelled, longest_us = map(int, process.communicate(timeout=30)[0].split())

    assert (process.returncode, cancelled) == (0, 20)
    assert longest_us < 5_000, "it took 197 ms, each time, for ever"


@pytest.mark.skipif(shutil.which("musl-gcc") is None, reason="needs musl-gcc")
def test_a_child_with_another_c_library_starts_as_without_us(tmp_path, library):
    source, program = tmp_path / "hello.c", tmp_path / "hello"
    source.write_text('#include <stdio.h>\nint main(void) { return puts("hello") < 0; }\n')
    subprocess.run(["musl-gcc", "-O1", "-o", program, source], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "SONDE_INJECT": REQUEST}

    done = subprocess.run([program], env=environment, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
