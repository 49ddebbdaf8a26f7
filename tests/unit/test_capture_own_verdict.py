# SPDX-License-Identifier: Apache-2.0
"""Verdicts on captures at the default budget: few runs timed, but every wait and call counted."""

from __future__ import annotations

import pytest

from captures import START_NS
from sonde.analyze.bound import explain
from sonde.export.verdict import render
from sonde.model.causes import Bound, Cause
from sonde.recording.timelines import open_timeline
from training_capture import MS, on_cpu, shares, timed_runs


def test_a_recorder_of_the_whole_machine_and_its_children_are_not_asked_about(
    writer, key, verdicts
):
    """They wait on sockets of each other all the time, beside a job that works a little."""
    loop = writer.stack(("sleep_until", "[python]", "agent/event_loop.py", 142, "python"))
    for pid, parent in ((7, 1), (8, 7)):
        own = writer.process(pid, "sonde", ppid=parent)
        writer.wait(own, pid, "poll", 4.0, count=80, stack=loop)
        writer.on_cpu(own, pid, loop, 80)
    on_cpu(writer, key, 0.5, "main", "step")

    def asked_about():
        return {one.device_name.partition(" ")[0] for one in verdicts()}

    assert asked_about() == {"sonde", "train"}
    writer.host = {"whole_machine": True, "recorder": 7}
    assert asked_about() == {"train"}
    for host in ({"whole_machine": False, "recorder": 7}, {"recorder": "7"}, {"recorder": 99}):
        writer.host = {"whole_machine": True, **host}
        assert asked_about() == {"sonde", "train"}


def test_a_test_that_calls_a_device_for_a_moment_decides_nothing(writer, key, explained):
    test = writer.process(7, "pytest")
    writer.calls(test, 7, "cuCtxSynchronize", count=9, seconds=0.1, op="sync")
    writer.wait(test, 7, "sleep", 0.1)
    on_cpu(writer, key, 4.0, "main", "step")
    assert "train (42)" in explained().device_name

    writer.wait(test, 7, "sleep", 0.2)
    assert "pytest (7)" in explained().device_name


LOADER = ("fetch", "[python]", "torch/utils/data/_utils/fetch.py", 49, "python")


def test_what_sondes_own_thread_does_in_a_process_is_not_the_programs(writer, key, explained):
    """It may call the device more than a program whose launches are not probed."""
    writer.calls(key, 50, "cuModuleLoadData", count=1, seconds=1.5, op="build")
    thread = writer.stack(("run", "[memfd:sonde-library]"), ("nanosleep", "libc.so.6"))
    writer.wait(key, 50, "sleep", 3.0, stack=thread)
    writer.wait(key, 42, "futex", 1.0, waker=(42, 50))
    timed_runs(writer, key, 0.01)
    on_cpu(writer, key, 3.0, "main", "step")
    verdict = explained()

    assert "train (42)" in verdict.device_name
    assert set(shares(verdict)) == {Cause.HOST}


CALL = ("_call_impl", "[python]", "torch/nn/modules/module.py", 1751, "python")
FORWARD = ("Net.forward", "[python]", "nets/model.py", 12, "python")
STEP = ("step", "[python]", "train.py", 88, "python")
ADD = ("at::_ops::add::call", "libtorch_cpu.so")
CUDA_ADD = ("at::native::add_kernel", "libtorch_cuda.so")
LAUNCH = ("cudaLaunchKernel", "libcudart.so.13")
DRIVER = ("", "libcuda.so.580.1")
EVAL = ("_PyEval_EvalFrameDefault", "python3.12")
CPU_ADD = ("at::native::AVX2::add_kernel", "libtorch_cpu.so")
PILLOW = ("resize", "[python]", "PIL/Image.py", 2365, "python")
RESAMPLE = ("ImagingResample", "_imaging.cpython-312-x86_64-linux-gnu.so")
SAVE = ("save", "[python]", "torch/serialization.py", 850, "python")
DYNAMO = ("compile_frame", "[python]", "torch/_dynamo/convert_frame.py", 10, "python")
LOAD = ("cuModuleLoadData", "libcuda.so.580.1")
AOT = ("forward", "[python]", "torch/_functorch/aot_autograd.py", 10, "python")
AOT_FOLDER = "torch/_functorch/_aot_autograd"
WRAPPER = ("runtime_wrapper", "[python]", f"{AOT_FOLDER}/runtime_wrappers.py", 5, "python")
COMPILED = ("__call__", "[python]", "torch/_inductor/output_code.py", 10, "python")
GENERATED_FILE = "lw/clwlhgd7tqmziru3fldav5m3suh7u7bgca5jm7dlvv5rbrgb76rq.py"
GENERATED = ("call", "[python]", GENERATED_FILE, 80, "python")
VMAP = ("vmap_impl", "[python]", "torch/_functorch/vmap.py", 10, "python")


@pytest.mark.parametrize(
    ("stack", "cause", "place"),
    [
        ((STEP, EVAL, ADD, CUDA_ADD, LAUNCH, DRIVER), Cause.LAUNCH, "step train.py:88"),
        ((STEP, EVAL, ADD), Cause.LAUNCH, "step train.py:88"),
        ((STEP, CALL, EVAL), Cause.LAUNCH, "step train.py:88"),
        ((ADD, CUDA_ADD, LAUNCH), Cause.LAUNCH, ""),
        ((STEP, AOT, WRAPPER, COMPILED, ADD, CUDA_ADD, LAUNCH), Cause.LAUNCH, "step train.py:88"),
        ((STEP, AOT, COMPILED, GENERATED, EVAL), Cause.LAUNCH, "step train.py:88"),
        ((STEP, VMAP, EVAL), Cause.LAUNCH, "step train.py:88"),
        ((STEP, DYNAMO, AOT, EVAL), Cause.BUILD, "step train.py:88"),
        ((STEP, EVAL), Cause.HOST, "step train.py:88"),
        ((STEP, ("gc_collect_main", "python3.12")), Cause.HOST, "step train.py:88"),
        ((STEP, CALL, FORWARD, EVAL), Cause.HOST, "Net.forward nets/model.py:12"),
        ((STEP, ADD, CPU_ADD), Cause.HOST, "step train.py:88"),
        ((STEP, PILLOW, EVAL, RESAMPLE), Cause.HOST, "step train.py:88"),
        ((STEP, SAVE, ("write", "libc.so.6")), Cause.HOST, "step train.py:88"),
        ((STEP, CALL, DYNAMO, EVAL), Cause.BUILD, "step train.py:88"),
        ((STEP, ADD, LAUNCH, LOAD, DRIVER), Cause.LAUNCH, "step train.py:88"),
        ((STEP, ADD, LOAD, DRIVER), Cause.BUILD, "step train.py:88"),
        ((("serve", "server"), ("parse", "server")), Cause.HOST, "parse"),
        ((("serve", "server"), LAUNCH, DRIVER), Cause.LAUNCH, "serve"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("weight", [20.0, 4000.0])
def test_time_on_a_cpu_belongs_to_the_code_that_the_stacks_show(
    writer, key, explained, stack, cause, place, weight
):
    """However much of it there is per launch: 1,000 launches or 200,000 in 5 s."""
    timed_runs(writer, key, 0.0005, weight=weight)
    writer.on_cpu(key, 42, writer.stack(*stack), round(4.9 * 99))
    (first, *_) = explained().causes

    assert first.key == cause
    assert first.share == pytest.approx(0.98, abs=0.01)
    assert place == (first.locations[0].function if first.locations else "")


def test_a_sleep_in_the_loader_is_input(writer, key, explained):
    writer.wait(key, 42, "sleep", 3.5, count=500, stack=writer.stack("main", LOADER, "nanosleep"))
    timed_runs(writer, key, 0.01)
    on_cpu(writer, key, 1.0, "main", LOADER, "decode")
    verdict = explained()

    assert verdict.bound == Bound.INPUT
    assert verdict.bounds[0].share == pytest.approx(0.9, abs=0.01)


def test_a_read_that_a_worker_ends_is_input(writer, key, explained):
    writer.process(43, "x", ppid=42, threads=[{"tid": 44, "comm": "y"}])
    writer.wait(key, 42, "read", 4.0, count=100, waker=(43, 44))
    timed_runs(writer, key, 0.01)

    assert explained().bound == Bound.INPUT


@pytest.mark.parametrize(
    ("reason", "waiting"),
    [
        ("futex", (("result", "[python]", "concurrent/futures/_base.py", 449, "python"),)),
        (
            "poll",
            (("communicate", "[python]", "subprocess.py", 1200, "python"), ("poll", "libc.so.6")),
        ),
    ],
)
def test_what_a_compiler_waits_for_is_building(writer, key, explained, reason, waiting):
    """Its workers, or the process of another compiler."""
    timed_runs(writer, key, 0.0005)
    writer.wait(key, 42, reason, 3.0, count=50, stack=writer.stack(STEP, DYNAMO, *waiting))
    verdict = explained()

    assert verdict.bounds[0].key == Bound.HOST
    assert verdict.bounds[0].share == pytest.approx(0.6, abs=0.01)


def test_waits_for_the_interpreters_lock_are_known_by_their_stacks(writer, key, explained):
    writer.wait(key, 42, "futex", 3.0, count=600, stack=writer.stack("main", "take_gil"))
    writer.wait(key, 42, "futex", 1.0, count=600, stack=writer.stack("main", "mutex"))
    timed_runs(writer, key, 0.01)

    assert shares(explained()) == pytest.approx({Cause.GIL: 0.6, Cause.LOCK: 0.2}, abs=0.01)


def test_who_is_throttled_while_it_waits_was_throttled(writer, key, explained):
    """70 % in calls that wait, 65 % of the time without a CPU: 35 % is both."""
    writer.calls(key, 42, "cuStreamSynchronize", count=5000, seconds=3.5, op="sync")
    writer.wait(key, 42, "preempted", 3.25, count=50, kind="runqueue")
    verdict = explained()

    assert [one.key for one in verdict.bounds] == [Bound.CPU_CONTENTION]
    assert verdict.computing == pytest.approx(0.35, abs=0.01)


def test_short_waits_within_a_window_are_parted_as_the_totals_are(writer, key, explained):
    """Single waits are kept from 10 ms on; what lies below counts by its sum."""
    for number in range(40):
        start = START_NS + 100 * MS * number
        row = {"kind": "kernel", "name": "gemm", "weight": 1.0, "source": "event", "tid": 42}
        times = {"start_time_ns": start, "end_time_ns": start + MS}
        writer.rows["device_run"].append({**key, **times, **row})
    writer.wait(key, 42, "futex", 4.5, count=900, stack=writer.stack("main", "take_gil"))
    on_cpu(writer, key, 0.5, "main", "step")
    verdict = explained()

    assert verdict.device == 0
    assert verdict.bounds[0].key == Bound.LOCK
    assert shares(verdict)[Cause.GIL] == pytest.approx(0.89, abs=0.02)
    stalled = verdict.window_ns * (1 - verdict.computing)
    assert sum(one.ns for one in verdict.causes) == pytest.approx(stalled, abs=2)


GET = ("Queue.get", "[python]", "queue.py", 171, "python")
WAIT = ("Condition.wait", "[python]", "threading.py", 355, "python")
SIMPLE_GET = ("_queue_SimpleQueue_get", "python3.12")
STRIPPED_GET = ("", "_queue.cpython-311-x86_64-linux-gnu.so")
SEM_WAIT = ("sem_clockwait", "libc.so.6")
GIL_WAIT = ("pthread_cond_timedwait", "libc.so.6")
WORK = ("decode", "[python]", "data/images.py", 31, "python")


@pytest.mark.parametrize(
    ("stack", "cause"),
    [
        ((STEP, GET, WAIT, ("sem_wait", "libc.so.6")), Cause.INPUT),
        ((STEP, WAIT, ("sem_wait", "libc.so.6")), Cause.INPUT),
        ((("serve", "server"), ("pthread_cond_wait", "libc.so.6")), Cause.INPUT),
        ((STEP, ("sem_wait", "libc.so.6")), Cause.LOCK),
        ((("serve", "server"), ("pthread_mutex_lock", "libc.so.6")), Cause.LOCK),
        ((STEP, ADD, ("pthread_cond_wait", "libc.so.6")), Cause.LOCK),
        ((STEP, ADD, CPU_ADD, ("gomp_barrier_wait", "libgomp.so.1")), Cause.HOST),
        ((STEP, WAIT, ("take_gil", "python3.12"), GIL_WAIT), Cause.GIL),
        ((STEP, SIMPLE_GET, SEM_WAIT), Cause.INPUT),
        ((STEP, EVAL, STRIPPED_GET, ("PyThread_acquire_lock_timed", "python3.11"), SEM_WAIT),
         Cause.INPUT),
        ((STEP, ("_queue_SimpleQueue_put", "_queue.abi3.so"), SEM_WAIT), Cause.LOCK),
        # It has what it waited for, and is not let run.
        ((STEP, SIMPLE_GET, ("take_gil", "python3.12"), GIL_WAIT), Cause.GIL),
        ((STEP, STRIPPED_GET, ("PyEval_RestoreThread", "python3.11"), GIL_WAIT), Cause.GIL),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["loader", "A"])
def test_a_lock_and_a_queue_are_distinguished_by_stacks_and_not_by_who_ends_the_wait(
    writer, explained, stack, cause, name
):
    key = writer.process(42, "train", threads=[{"tid": 42, "comm": "B"}, {"tid": 43, "comm": name}])
    writer.wait(key, 42, "futex", 4.0, waker=(42, 43), stack=writer.stack(*stack))
    writer.on_cpu(key, 43, writer.stack(WORK, EVAL), 400)
    timed_runs(writer, key, 0.01)
    first = explained().causes[0]

    assert first.key == cause
    assert f"ended by {name} (43), on a CPU in decode data/images.py:31" in first.facts[0]


def test_a_socket_that_nobody_here_fills_is_io(writer, key, explained):
    writer.wait(key, 42, "socket", 4.0, stack=writer.stack(STEP, ("recv", "libc.so.6")))
    timed_runs(writer, key, 0.01)

    assert explained().bound == Bound.IO


def test_the_kernel_that_writes_a_file_on_a_cpu_is_io(writer, key, explained):
    write = [("write", "libc.so.6"), ("ksys_write", "[kernel]"), ("copy_from_user", "[kernel]")]
    writer.on_cpu(key, 42, writer.stack(STEP, SAVE, *write), 400)
    timed_runs(writer, key, 0.01)

    assert explained().bound == Bound.IO


def test_a_function_with_several_causes_is_described_as_one(writer, key, explained):
    """A checkpoint copies to the host, serializes, and writes."""
    stack = writer.stack(("save", "[python]", "train.py", 40, "python"), SAVE)
    writer.calls(
        key, 42, "cudaMemcpyAsync", count=10, seconds=0.8, op="copy", moved=10**9, direction="d2h",
        stack=stack,
    )  # fmt: skip
    writer.on_cpu(key, 42, stack, 99)
    writer.wait(key, 42, "sync to disk", 0.7, stack=stack)
    writer.on_cpu(key, 42, writer.stack(STEP, LAUNCH), 198)
    timed_runs(writer, key, 0.01)

    (line,) = [line for line in explained().evidence if "in save train.py" in line]
    assert line.startswith(
        "50 % of the time in save train.py: host-bound 20 %, copy-bound 16 %, I/O-bound 14 %"
    )


def test_a_function_that_runs_in_bursts_is_described_so(writer, key, explained):
    evaluate, step = (
        writer.stack((name, "[python]", "train.py", 7, "python"), EVAL)
        for name in ("evaluate", "f")
    )
    for second in range(5):
        writer.on_cpu(key, 42, step, 50)
        writer.rows["sample"][-1]["time_ns"] = START_NS + second * 1000 * MS
    writer.on_cpu(key, 42, evaluate, 100)
    timed_runs(writer, key, 0.01)

    lines = [line for line in explained().evidence if "bursts" in line]
    assert len(lines) == 1
    assert "in evaluate train.py" in lines[0]
    assert "in bursts, in 1 of 5 parts of the record" in lines[0]


def test_threads_that_launch_at_once_say_of_what_their_shares_are(writer, explained):
    key = writer.process(42, "x", threads=[{"tid": 42, "comm": "x"}, {"tid": 43, "comm": "x"}])
    for tid, other in ((42, 43), (43, 42)):
        writer.calls(key, tid, "cuStreamSynchronize", count=9, seconds=0.5, op="sync")
        writer.wait(key, tid, "futex", 0.3, waker=(42, other))
        writer.on_cpu(key, tid, writer.stack(STEP, EVAL), 400)
    verdict = explained()

    assert sum(one.share for one in verdict.causes) + verdict.computing <= 1.0001
    assert any("of 2 threads together, 1.82 times" in line for line in verdict.evidence)


@pytest.mark.parametrize(
    ("kind", "bound", "text"),
    [
        ("cpu", Bound.HOST, "parse app.py:3"),
        ("gil", Bound.LOCK, "GIL"),
        ("lock", Bound.LOCK, "ended by B (43)"),
        ("disk", Bound.IO, "I/O"),
        ("starved", Bound.CPU_CONTENTION, "waited for a CPU"),
        ("memory", Bound.PAGE_FAULT, "page faults"),
    ],
)
def test_a_capture_without_a_device_is_explained(writer, tmp_path, kind, bound, text):
    key = writer.process(42, "x", threads=[{"tid": 42, "comm": "A"}, {"tid": 43, "comm": "B"}])
    parse = ("parse", "[python]", "app.py", 3, "python")
    writer.on_cpu(key, 42, writer.stack(parse, EVAL), 400 if kind == "cpu" else 40)
    if kind == "gil":
        writer.wait(key, 42, "futex", 4.0, stack=writer.stack(parse, "take_gil"))
    if kind == "lock":
        held = writer.stack(parse, ("sem_wait", "libc.so.6"))
        writer.wait(key, 42, "futex", 4.0, waker=(42, 43), stack=held)
    if kind == "disk":
        writer.wait(key, 42, "sync to disk", 4.0, stack=writer.stack(parse, "fsync"))
    if kind == "starved":
        writer.wait(key, 42, "preempted", 4.0, kind="runqueue")
    if kind == "memory":
        fault = writer.stack(parse, EVAL, ("exc_page_fault", "[kernel]"))
        writer.on_cpu(key, 42, fault, 300)
    explanation = explain(open_timeline([writer.write(tmp_path / "a.sonde")]))
    page = render(explanation)

    assert explanation.verdicts[0].bounds[0].key == bound
    assert text in page
    assert "time by cause, of 5.00 s:" in page
    assert "device" not in page
    assert "launch" not in page


def test_a_queue_that_a_process_fills_is_input_also_if_that_process_was_not_recorded(
    writer, key, explained
):
    receive = ("Connection._recv", "[python]", "multiprocessing/connection.py", 430, "python")
    stack = writer.stack(STEP, receive, ("read", "libc.so.6"))
    writer.wait(key, 42, "read", 4.0, stack=stack, waker=(900, 901))
    timed_runs(writer, key, 0.01)

    assert explained().bound == Bound.INPUT
