# SPDX-License-Identifier: Apache-2.0
"""`sonde trace`: what a hostile process can hand over, what is refused, and a whole trace on stubs
of the CUDA driver and of CUPTI."""

from __future__ import annotations

import _ctypes
import ctypes
import dataclasses
import gzip
import io
import json
import os
import subprocess
import time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from sonde import _native, procfs
from sonde.attach import cupti_builds, glibc
from sonde.cli import main
from sonde.cli.trace_price import require_at_most
from sonde.collect import inject_abi, tracing
from sonde.collect import inject_trace_abi as abi
from sonde.collect.inject_memory import Seen
from sonde.collect.tracing import Tracer
from sonde.errors import NotACapture, ProcessGone, TargetRefused, UsageError
from sonde.export import device_trace as export
from sonde.model.device_trace import Kind, RawTrace
from sonde.model.launches import LaunchRates
from sonde.readers import device_trace, kineto
from stub_driver import build, find, start

LATER = 1_000_000_000_000_000
"""CUPTI's clock is so far ahead."""
BEGIN, END = 50_000_000_000, 51_000_000_000


def head(**changed: int) -> dict[str, int]:
    fields = dict.fromkeys(abi.Trace._fields, 0)
    return fields | {
        "opened_ns": BEGIN, "closed_ns": END, "opened_cupti_ns": BEGIN + LATER,
        "closed_cupti_ns": END + LATER, "off_cupti_ns": END + LATER + 30_000_000,
    } | changed  # fmt: skip


def record(kind: int, at_ns: int, correlation: int, length_ns: int = 1000, **changed: int) -> bytes:
    fields = dict.fromkeys(abi.Traced._fields, 0)
    fields |= {
        "kind": kind, "start_ns": BEGIN + LATER + at_ns, "correlation": correlation,
        "end_ns": BEGIN + LATER + at_ns + length_ns, "name": 8, "tid": 7,
    } | changed  # fmt: skip
    return abi.TRACED.pack(*fields.values())


def raw(*records: bytes, **changed: int) -> RawTrace:
    return RawTrace(
        head(**changed),
        b"".join(records),
        abi.TRACED_BYTES,
        abi.TRACED_FIELDS,
        {8: "cudaLaunchKernel_v7000"},
    )


def test_runs_from_before_the_trace_are_left_out_and_times_are_the_hosts():
    trace = device_trace.read(
        raw(
            record(Kind.RUNTIME, 0, 50),
            record(Kind.KERNEL, 5_000, 50, grid_0=4),
            record(Kind.KERNEL, 6_000, 51),  # of a call of the driver that CUPTI does not record
            record(Kind.KERNEL, 7_000, 49),  # of the window before
        ),
        pid=7,
        wall_offset_ns=0,
        tids={7: 4711},
    )
    assert [trace.count(Kind.RUNTIME), trace.count(Kind.KERNEL)] == [1, 2]
    assert trace.rows["start_ns"].tolist() == [BEGIN, BEGIN + 5_000, BEGIN + 6_000]
    assert trace.rows["tid"][0] == 4711
    assert trace.lost == {"runs of calls from before the trace, left out": 1}


def test_a_replay_that_the_end_cut_is_left_out_and_counted():
    late = record(Kind.KERNEL, 999_999_000, 1, 40_000_000, graph=3)
    trace = device_trace.read(raw(record(Kind.RUNTIME, 999_000_000, 1), late), 7, 0)
    assert trace.count(Kind.KERNEL) == 0
    assert list(trace.lost.values()) == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        record(77, 0, 1),
        record(Kind.KERNEL, 10_000, 1, length_ns=-5_000),
        record(Kind.KERNEL, 200_000_000_000, 1),
        record(Kind.COPY, 0, 1, bytes=1 << 60),
        record(Kind.KERNEL, 0, 1, device=1 << 20),
        record(Kind.KERNEL, 0, 1, start_ns=(1 << 64) - 1, end_ns=(1 << 64) - 1),
    ],
)
def test_what_cannot_be_true_is_left_out_and_counted(wrong):
    trace = device_trace.read(raw(record(Kind.RUNTIME, 0, 1), wrong), 7, 0)
    assert len(trace.rows) == 1
    assert trace.lost["records that cannot be true"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"closed_ns": BEGIN}, {"closed_ns": BEGIN + (1 << 50)}, {"closed_cupti_ns": 5},
        {"opened_ns": (1 << 64) - 1}, {"closed_cupti_ns": (1 << 64) - 1},
        {"closed_cupti_ns": BEGIN + LATER + 1},
    ],
)  # fmt: skip
def test_clocks_that_cannot_be_are_refused(wrong):
    with pytest.raises(NotACapture, match="clocks"):
        device_trace.read(raw(record(Kind.RUNTIME, 0, 1), **wrong), 7, 0)


def test_any_bytes_at_all_are_read_without_a_fault():
    random = np.random.default_rng(3)
    for _ in range(50):
        fields = {name: int(random.integers(0, 1 << 63)) for name in abi.Trace._fields}
        records = random.bytes(abi.TRACED_BYTES * 40)
        whole = RawTrace(head(), records, abi.TRACED_BYTES, abi.TRACED_FIELDS, {})
        export.write(device_trace.read(whole, 7, 0), io.BytesIO())
        try:
            device_trace.read(
                RawTrace(fields, records, abi.TRACED_BYTES, abi.TRACED_FIELDS, {}), 7, 0
            )
        except NotACapture:
            continue


def test_launches_without_any_kernel_are_a_stated_problem():
    calls = [record(Kind.RUNTIME, 1000 * n, n + 1) for n in range(30)]
    trace = device_trace.read(raw(*calls), 7, 0)
    assert "no kernel" in device_trace.problem(trace)
    whole = device_trace.read(raw(*calls, record(Kind.KERNEL, 0, 1)), 7, 0)
    assert device_trace.problem(whole) == ""


def test_the_timeline_reads_as_a_trace_of_torch_profiler(tmp_path):
    trace = device_trace.read(
        raw(
            record(Kind.RUNTIME, 0, 1),
            record(Kind.KERNEL, 5_001, 1, grid_0=4, grid_1=2, grid_2=1, stream=7, graph=2, node=5),
            record(Kind.DRIVER, 10_000, 2),
            record(Kind.COPY, 12_000, 2, bytes=64, direction=1, memory=2 | 3 << 4, stream=7),
        ),
        7,
        wall_offset_ns=1_700_000_000_000_000_000,
    )
    path = tmp_path / "x.json.gz"
    with gzip.open(path, "wb") as out:
        assert export.write(trace, out, threads={7: 'a "name"\n'}) == 4
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [event["args"]["graph node id"] for event in events if "graph id" in event["args"]] == [
        5
    ]
    timeline = kineto.read(path)
    assert len(timeline.device) == 2
    assert len(timeline.calls) == 2
    assert timeline.device.bytes.tolist() == [0, 64]
    assert "Memcpy HtoD (Pinned -> Device)" in timeline.names
    begin = int(timeline.device.start_ns[0]) + timeline.wall_offset_ns
    assert begin == BEGIN + 5_001 + trace.wall_offset_ns


# ---- refusals -----------------------------------------------------------------------------------


def mapped(monkeypatch, *builds: tuple[str, str]) -> None:
    """The process has these files mapped, with these build ids."""
    lines = [glibc.Mapped(n, n + 1, "r-xp", 0, n, path) for n, (path, _) in enumerate(builds)]
    monkeypatch.setattr(glibc, "mappings_of", lambda pid: lines)
    ids = dict(builds)
    monkeypatch.setattr(cupti_builds, "_build_id", lambda pid, one: ids[one.path])


def test_only_a_build_that_was_tried_with_this_driver_is_taken(monkeypatch):
    known = cupti_builds.proved()[0]
    mapped(monkeypatch, ("/x/libcupti.so.13", known.build_id))
    assert cupti_builds.require(1, driver=known.drivers[0]).version == known.version
    with pytest.raises(TargetRefused, match="driver"):
        cupti_builds.require(1, driver=known.drivers[0] + 5)
    with pytest.raises(TargetRefused, match="unknown"):
        cupti_builds.require(1, driver=0)


@pytest.mark.parametrize(
    ("builds", "why"),
    [
        ([], "uses no NVIDIA GPU"),
        ([("/x/libcuda.so.580.1", "cc")], "not loaded CUPTI"),
        ([("/x/libcupti.so.12", "00ff")], "not tried"),
        ([("/x/libcupti.so.13", "")], "unknown"),
        ([("/x/libcupti.so.13", "aa"), ("/y/libcupti.so.13.2", "bb")], "several"),
        ([("/x/libcuda.so.1", "cc"), ("/x/libcupti.so.evil", "aa")], "not loaded CUPTI"),
    ],
)
def test_others_are_refused_with_the_reason(monkeypatch, builds, why):
    mapped(monkeypatch, *builds)
    with pytest.raises(TargetRefused, match=why):
        cupti_builds.require(1, driver=580)


def test_the_price_adds_up():
    price = cupti_builds.Price(launch_us=2.0, replay_us=20.0, mixed_us=50.0)
    assert price.share(10_000, 0) == pytest.approx(0.02)
    assert price.share(0, 1_000) == pytest.approx(0.02)
    assert price.share(500, 1_000) == pytest.approx(0.001 + 0.02 + 0.025)


class Memory:
    """That of a library, which does at once what it is asked for."""

    def __init__(self):
        self.fields = {"window": 0, "request": 0}
        self.fd = -1

    def lock(self):
        return True

    def ask(self, **fields):
        self.fields |= fields

    def heartbeat(self):
        pass

    def seen(self):
        is_on = bool(self.fields["request"])
        done = 0 if is_on and self.fields["window"] else self.fields["window"]
        counts = {"head": 0, "hooks": is_on, "window_done": done, "window_reason": 0}
        status = inject_abi.Status.TIMING if is_on else inject_abi.Status.REFUSED
        return Seen(status, inject_abi.Reason.OK, {**counts, "cupti_error": 0})


def test_a_trace_after_one_that_was_ended_early_asks_for_work_again(monkeypatch):
    monkeypatch.setattr(tracing, "HOOKS_STEADY_S", 0.0)
    monkeypatch.setattr(tracing, "slots_asked", lambda pid: 0)
    monkeypatch.setattr(Tracer, "_outcome", lambda self, state: "trace")
    requests = []
    memory = Memory()

    def goes_on():
        requests.append(memory.fields["request"])
        return False

    with Tracer(os.getpid(), memory) as tracer:
        tracer.prepare()
        assert [tracer.take(0.1, goes_on), tracer.take(0.1, goes_on)] == ["trace", "trace"]
    assert requests == [inject_abi.Request.WINDOWS, inject_abi.Request.WINDOWS]


# ---- on the stubs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stub"), names=("traced",)) / "traced"


@pytest.fixture
def begin(traced, library):
    """Starts the program, for some rounds; it ends with the test, whatever becomes of that."""
    started = []

    def one(*rounds: int) -> subprocess.Popen[str]:
        started.append(start(traced, library, *rounds, request="0:0"))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "sonde-inject-0.so"
    path.write_bytes(_native.inject_library())
    return path


def test_a_trace_ends_before_another_profilers_begins_and_is_refused_meanwhile(traced, library):
    process = start(traced, library, request="0:0")
    kernels, refused, cut = [], 0, 0
    with find(process.pid) as memory, Tracer(process.pid, memory) as tracer:
        tracer.prepare()
        while process.poll() is None:
            try:
                trace = device_trace.read(tracer.take(0.1), process.pid, 0)
            except ProcessGone:
                break
            except TargetRefused as error:
                assert "another profiler" in error.cause
                refused += 1
                time.sleep(0.1)
                continue
            cut += trace.is_cut
            kernels.append(trace.count(Kind.KERNEL))
            assert trace.count(Kind.RUNTIME) == kernels[-1] > 0
            assert "shorter(float*)" in trace.names.values()
            stale = trace.lost.get("runs of calls from before the trace, left out", 0)
            assert stale == (3 if len(kernels) > 1 else 0)
    own, seen = map(int, process.communicate(timeout=20)[0].split())
    assert process.returncode == 0
    assert kernels
    assert refused
    assert seen >= own  # the program's own traces hold all that it launched in them


def test_the_command_traces_explains_and_states_its_price_first(
    begin, monkeypatch, tmp_path, capsys
):
    process = begin(1_000)  # longer than any attempt takes
    find(process.pid).close()
    monkeypatch.setattr(cupti_builds, "require", lambda pid: cupti_builds.proved()[0])
    monkeypatch.setattr(cupti_builds, "has_subscriber", lambda pid, build: False)
    path = tmp_path / "x.json.gz"
    words = ["trace", str(process.pid), "-d", "0.2", "-o", str(path), "--no-stacks", "--no-trial"]
    assert run(*words, "--dry-run") == 0
    assert not path.exists()
    assert "nothing was touched" in capsys.readouterr().err
    for _ in range(20):  # the program traces itself, too
        try:
            assert run(*words, "--json", "--at-most", "1000") == 0
            break
        except TargetRefused:
            continue
    out, err = capsys.readouterr()
    outcome = json.loads(out)
    assert outcome["kernels"] == outcome["calls"] > 0
    assert outcome["in_replays"] == []
    assert "no kernel of a replayed graph" in outcome["in_replays_unknown"]
    assert "price" in err.splitlines()[1]
    assert "afterwards" in err
    assert len(kineto.read(path).device) == outcome["kernels"]


def test_a_trace_that_leaves_too_much_behind_is_refused_before_cupti_is_touched(
    begin, monkeypatch, tmp_path
):
    process = begin(1_000)
    find(process.pid).close()
    monkeypatch.setattr(cupti_builds, "require", lambda pid: cupti_builds.proved()[0])
    monkeypatch.setattr(Tracer, "take", lambda *_, **__: pytest.fail("traced"))
    words = ["trace", str(process.pid), "-d", "0.2", "-o", str(tmp_path / "x.json.gz")]
    with pytest.raises(TargetRefused, match=r"until the process ends, more than 0.001 %"):
        run(*words, "--no-stacks", "--at-most", "0.001")
    assert not list(tmp_path.iterdir())


class Chosen(NamedTuple):
    start_ns: int
    weight: float


def test_a_rate_is_that_between_the_first_and_the_last_that_were_chosen():
    """10,000 a second, of which each hundredth was chosen; the first block is a guess."""
    runs = [Chosen(10_000_000 * number, 100.0) for number in range(1, 99)]
    assert tracing._a_second(runs, 1.0) == pytest.approx(10_000)
    assert tracing._a_second([runs[0]._replace(weight=900.0), *runs[1:]], 1.0) == pytest.approx(
        10_000 + 400 / 0.97
    )
    assert tracing._a_second(runs[:50], 1.0) == 5_000, "for a half of the time"
    assert tracing._a_second(runs[:5], 1.0) == 500, "few"


def test_what_a_trace_leaves_behind_is_bounded_or_refused():
    build = cupti_builds.proved()[0]
    after = 100 * build.after.share(1_000, 50)
    require_at_most(build, LaunchRates(1_000, 50), after)
    with pytest.raises(TargetRefused, match=f"up to {after:.1f} % slower"):
        require_at_most(build, LaunchRates(1_000, 50), after - 0.01)
    with pytest.raises(TargetRefused, match="not known"):
        require_at_most(build, LaunchRates(0, 0), 100)


def run(*words: str) -> int:
    args = main.build_command_parser("trace").parse_args(list(words))
    code: int = args.run(args)
    return code


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(("left", "is_refused"), [(511_999_999, True), (512_000_000, False)])
def test_a_process_with_little_memory_left_is_refused_before_anything_is_touched(
    monkeypatch, capsys, sleeper, left, is_refused
):
    monkeypatch.setattr(cupti_builds, "require", lambda pid: cupti_builds.proved()[0])
    monkeypatch.setattr(
        procfs, "memory_left", lambda pid: procfs.MemoryLeft(left, 2_000_000_000, "/x")
    )
    words = ["trace", str(sleeper.pid), "--dry-run"]
    if not is_refused:
        assert run(*words) == 0
        return
    with pytest.raises(TargetRefused, match="511 MB of memory left in its control group") as error:
        run(*words)
    assert error.value.exit_code == 3
    assert "memory limit" in error.value.remedy
    assert "price" not in capsys.readouterr().err


def test_a_process_without_a_gpu_is_refused_and_explain_is_proposed(sleeper):
    with pytest.raises(TargetRefused, match="uses no NVIDIA GPU") as error:
        cupti_builds.require(sleeper.pid, driver=580)
    assert error.value.remedy.endswith(f"sonde explain --pid {sleeper.pid}")


def test_who_holds_the_subscription_is_read_in_the_processs_memory(traced):
    stub = traced.with_name("libcupti.so.13")
    nm = subprocess.run(["nm", stub], check=True, capture_output=True, text=True).stdout
    [offset] = [
        int(line.split()[0], 16) for line in nm.splitlines() if line.endswith(" subscribed")
    ]
    tried = dataclasses.replace(cupti_builds.proved()[0], subscriber=offset)
    driver = ctypes.CDLL(traced.with_name("libcuda.so.1"), ctypes.RTLD_GLOBAL)
    cupti = ctypes.CDLL(stub)
    subscriber = ctypes.c_void_p()
    try:
        assert not cupti_builds.has_subscriber(os.getpid(), tried)
        assert cupti.cuptiSubscribe(ctypes.byref(subscriber), None, None) == 0
        assert cupti_builds.has_subscriber(os.getpid(), tried)
        assert cupti.cuptiUnsubscribe(subscriber) == 0
        assert not cupti_builds.has_subscriber(os.getpid(), tried)
    finally:
        for loaded in (cupti, driver):
            _ctypes.dlclose(loaded._handle)


def test_a_capture_of_that_name_is_found_before_anything_is_touched(monkeypatch, tmp_path):
    (tmp_path / "x.sonde").touch()
    monkeypatch.setattr(cupti_builds, "require", lambda pid: pytest.fail("looked at"))
    with pytest.raises(UsageError, match=r"x\.sonde, where the stacks .* exists"):
        run("trace", str(os.getpid()), "-o", str(tmp_path / "x.json.gz"))


def test_captures_are_seen_while_launches_are_counted(monkeypatch):
    tracer = object.__new__(tracing.Tracer)
    state = dict.fromkeys(tracing._UNTIMED, 0)
    state |= {"head": 0, "left_capturing": 3, "launches": 0, "every": 7}
    counts = [state, *[state | {"left_capturing": 4}] * 20]

    class Memory:
        fd = -1

        def control(self):
            return {"request": 0}

        def seen(self):
            return SimpleNamespace(counts=counts.pop(0) if len(counts) > 1 else counts[0])

        def ask(self, **asked):
            pass

        def heartbeat(self):
            pass

    class Ring:
        tail = 0

        def __init__(self, fd, tail):
            pass

        def take(self, head, now_ns):
            return SimpleNamespace(runs=[])

    monkeypatch.setattr(tracing, "Ring", Ring)
    monkeypatch.setattr(tracing, "GUESSED_S", 0.0)
    for captured in (True, False):
        tracer._memory = Memory()
        assert tracer.rates(0.0) == LaunchRates(0.0, 0.0, (), captured)
        counts = counts[-1:]
