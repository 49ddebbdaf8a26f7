# SPDX-License-Identifier: Apache-2.0
"""Questions: tables in, answers out."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from captures import KERNEL, SECOND_NS, START_NS, Writer, scene
from sonde.model.calls import STATUS_UNKNOWN
from sonde.model.code import NO_STACK
from sonde.model.profile import ProfileKind
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.memory import memory
from sonde.query.queries import Where
from sonde.query.session import Session
from sonde.query.validation import MAX_NUMBER


@pytest.fixture
def ask(tmp_path):
    """Open what a writer holds."""

    def ask(writer):
        return Session(read(writer.write(tmp_path / "a.sonde")))

    return ask


@pytest.fixture
def session(ask):
    return ask(scene())


def names(frames):
    return [frame.name for frame in frames]


# ---- what was used ----


def test_usage_adds_up_over_time_and_keeps_whose_it_is(session):
    first, second = queries.usage(session)
    assert (first.process.pid, first.cpu_ns, first.voluntary) == (4211, 4_050_000_000, 900)
    assert (first.major_faults, first.read_bytes, first.reclaim_ns) == (2, 3_000_000, 70_000)
    assert first.process.owner.label == "job 77.0"
    assert (second.process.pid, second.involuntary) == (5000, 40)


def test_usage_of_some_processes_and_times(session):
    (only,) = queries.usage(session, Where(pids=[4211], start_ns=START_NS + 5 * SECOND_NS))
    assert (only.cpu_ns, only.major_faults) == (50_000_000, 2)


# ---- profiles ----


def test_a_profile_has_the_weights_of_its_kind(session):
    profile = queries.profile(session, ProfileKind.ON_CPU)
    assert profile.total_events == 650
    assert profile.total_ns == pytest.approx(650 / 99 * 1e9, abs=10)
    assert queries.profile(session, ProfileKind.GPU_CALLS).total_bytes == 5_000_000_000


def test_rows_come_heaviest_first_with_their_thread_and_stack(session):
    first = next(iter(profile := queries.profile(session, ProfileKind.ON_CPU)))
    assert profile.threads[first.thread].tid == 4211
    assert names(profile.stacks[first.stack]) == ["memmove", "train_step", "main", "_start"]
    assert (first.name, first.events) == ("", 300)


def test_rows_of_several_chunks_are_summed(ask):
    writer = Writer(seconds=2, chunk_seconds=1)
    key = writer.process(7, "p")
    for second in range(2):
        writer.on_cpu(key, 7, writer.stack("main"), 10)
        writer.rows["sample"][-1]["time_ns"] = START_NS + second * SECOND_NS
    profile = queries.profile(ask(writer), ProfileKind.ON_CPU)
    assert len(profile) == 1
    assert profile.total_events == 20


def test_a_stack_that_was_not_taken_is_one_frame(session):
    profile = queries.profile(session, ProfileKind.OFF_CPU, Where(names=["sleep"]))
    assert [profile.stacks[row.stack] for row in profile] == [(NO_STACK,)]


@pytest.mark.parametrize(
    ("where", "events"),
    [
        (Where(pids=[4211]), 580),
        (Where(pids=[4211, 17]), 590),
        (Where(tids=[4215]), 180),
        (Where(pids=[1]), 0),
        (Where(start_ns=START_NS + 1), 0),
        (Where(start_ns=START_NS, end_ns=START_NS + 1), 650),
        (Where(end_ns=START_NS), 0),
    ],
    ids=str,
)
def test_a_filter_leaves_out_the_rest(session, where, events):
    assert queries.profile(session, ProfileKind.ON_CPU, where).total_events == events


def test_names_filter_reasons(session):
    rows = queries.profile(session, ProfileKind.OFF_CPU, Where(names=["futex", "read"]))
    assert {row.name for row in rows} == {"futex", "read"}


def test_stacks_of_waits_end_where_the_thread_did_not_where_the_probe_did(ask):
    writer = Writer()
    key = writer.process(7, "p")
    probe = (("__traceiter_sched_switch", KERNEL), ("bpf_trace_run4", KERNEL))
    stack = writer.stack("main", ("schedule", KERNEL), *probe, ("bpf_prog_1f_on_switch", "[bpf]"))
    writer.wait(key, 7, "futex", 1.0, stack=stack)
    writer.on_cpu(key, 7, stack, 1)
    session = ask(writer)
    ends = {
        kind: profile.stacks[next(iter(profile)).stack][0].name
        for kind in (ProfileKind.ON_CPU, ProfileKind.OFF_CPU)
        for profile in [queries.profile(session, kind)]
    }
    assert ends == {
        ProfileKind.ON_CPU: "bpf_prog_1f_on_switch",
        ProfileKind.OFF_CPU: "schedule",
    }


def test_a_process_without_a_dictionary_entry_still_counts(ask):
    writer = Writer()
    writer.on_cpu({"pid": 77, "start_ns": 5}, 77, writer.stack("main"), 3)
    session = ask(writer)
    assert queries.profile(session, ProfileKind.ON_CPU).total_events == 3
    assert queries.processes(session)[0].process.label == "pid 77"


def test_a_frame_without_a_dictionary_entry_is_unknown(ask):
    writer = Writer()
    writer.on_cpu(writer.process(7, "p"), 7, writer.stack("main", "gone"), 3)
    del writer.rows["frame"][1]
    profile = queries.profile(ask(writer), ProfileKind.ON_CPU)
    assert names(profile.stacks[next(iter(profile)).stack]) == ["[unknown]", "main"]


def test_an_empty_capture_answers_with_nothing(ask):
    session = ask(Writer())
    assert len(queries.profile(session, ProfileKind.ON_CPU)) == 0
    for ask_for in (
        *(queries.processes, queries.waits, queries.device_calls),
        *(queries.losses, queries.notices, queries.metrics),
    ):
        assert ask_for(session) == []
    assert queries.top_functions(session, ProfileKind.ON_CPU) == []


# ---- functions ----


def test_self_is_the_leaf_and_total_the_whole_stack(session):
    by_name = {use.function: use for use in queries.top_functions(session, ProfileKind.ON_CPU)}
    assert (by_name["memmove"].self_count, by_name["memmove"].total_count) == (300, 300)
    assert (by_name["train_step"].self_count, by_name["train_step"].total_count) == (0, 400)
    assert by_name["train_step"].file == "/src/train.cc"
    assert sum(use.self_count for use in by_name.values()) == 650


def test_recursion_counts_once(session):
    top = queries.top_functions(session, ProfileKind.ON_CPU)
    (fold,) = (use for use in top if use.function == "fold")
    assert (fold.self_count, fold.total_count) == (40, 40)


def test_addresses_without_a_symbol_go_by_their_binary(session):
    functions = [use.function for use in queries.top_functions(session, ProfileKind.ON_CPU)]
    assert "[libjpeg.so.62]" in functions


def test_functions_of_one_name_in_two_binaries_are_two(session):
    top = queries.top_functions(session, ProfileKind.ON_CPU)
    assert sorted(use.binary for use in top if use.function == "main") == ["cc1", "python3"]


def test_the_limit_keeps_the_hottest(session):
    top = queries.top_functions(session, ProfileKind.ON_CPU, limit=2)
    assert [use.function for use in top] == ["memmove", "decode"]


# ---- processes, waits, device calls ----


def test_processes_are_summed_over_their_threads(session):
    python = queries.processes(session)[0]
    assert python.process.comm == "python3"
    assert (python.threads, python.cpu_samples, python.device_calls) == (2, 580, 3000)
    assert python.blocked_ns == round(6.5 * SECOND_NS)
    assert python.runqueue_ns == round(0.25 * SECOND_NS)


def wait_of(session, reason, kind=ProfileKind.OFF_CPU):
    (wait,) = (w for w in queries.waits(session) if w.reason == reason and w.kind == kind)
    return wait


def test_waits_are_exact_totals_by_thread_and_reason(session):
    wait = wait_of(session, "futex")
    assert (wait.thread.tid, wait.count, wait.ns) == (4211, 400, 4 * SECOND_NS)
    assert wait.system_call == "futex"
    assert wait.max_ns == SECOND_NS // 100


def test_time_for_a_cpu_is_separate(session):
    assert wait_of(session, "futex", ProfileKind.RUN_QUEUE).ns == SECOND_NS // 4
    assert wait_of(session, "preempted", ProfileKind.RUN_QUEUE).ns == 3 * SECOND_NS


def test_a_wait_names_its_waker_and_the_code_that_waited(session):
    wait = wait_of(session, "futex")
    assert wait.waker == "loader (4215)"
    assert (wait.hint, wait.hint_binary) == ("train_step", "app.so")


def test_the_waker_is_the_one_that_ended_most_of_the_time(ask):
    writer = Writer()
    key = writer.process(7, "p", threads=[{"tid": t, "comm": f"t{t}"} for t in (7, 8, 9)])
    writer.wait(key, 7, "futex", 1.0, waker=(7, 8))
    writer.wait(key, 7, "futex", 0.5, waker=(7, 9))
    writer.wait(key, 7, "futex", 0.8, waker=(7, 9))
    assert wait_of(ask(writer), "futex").waker == "t9 (9)"


def test_a_waker_that_nobody_knows_is_called_so(ask):
    writer = Writer()
    writer.wait(writer.process(7, "p"), 7, "futex", 1.0, waker=(55, 56))
    assert wait_of(ask(writer), "futex").waker == "unknown thread (56)"


def test_only_a_wait_as_long_as_the_recording_makes_a_thread_idle(session):
    assert wait_of(session, "sleep").idle
    assert not wait_of(session, "kernel thread").idle  # long in all, in many short waits
    idle = queries.idle_threads(session)
    assert [session.threads[number].tid for number in idle] == [900]


def test_device_calls_are_exact_by_direction(session):
    read_back = {call.function: call for call in queries.device_calls(session)}
    call = read_back["clEnqueueReadBuffer"]
    assert (call.calls, call.errors, call.bytes) == (1000, 1, {"d2h": 1_000_000_000})
    assert call.ns == 751_000_000
    assert read_back["clEnqueueWriteBuffer"].bytes == {"h2d": 4_000_000_000}
    assert read_back["clFinish"].bytes == {}


def test_calls_counted_at_their_entry_are_no_errors_and_have_no_time(ask):
    writer = Writer()
    process = writer.process(7, "p")
    build = {"op": "build", "status": STATUS_UNKNOWN}
    writer.calls(process, 7, "clBuildProgram", count=3, seconds=0, **build)
    (call,) = queries.device_calls(ask(writer))
    assert (call.calls, call.at_entry, call.errors, call.is_timed) == (3, 3, 0, False)


def test_sizes_that_no_call_means_leave_the_answer_readable(ask):
    writer = Writer()
    process = writer.process(7, "p")
    for _ in range(8):
        writer.calls(process, 7, "clCreateBuffer", count=1, seconds=1, op="alloc", moved=2**61)
    (call,) = queries.device_calls(ask(writer))
    assert (call.calls, call.bytes_total) == (8, MAX_NUMBER)


def test_bytes_that_no_program_moves_leave_the_answers_readable(ask):
    """Copies that a program claims, and munmap() where nothing is mapped."""
    w = Writer(seconds=200)
    who = {**w.process(70, "program"), "tid": 70}
    copy = {**who, "kind": "kernel", "name": "(copy h2d)", "stack_id": 0, "weight_count": 1.0}
    call = {**who, "kind": "unmapped", "name": "anonymous", "op": "", "count": 1}
    for second in range(200):
        time_ns = START_NS + second * SECOND_NS
        sample = {"time_ns": time_ns, "weight_ns": 1000.0, "weight_bytes": 9.9e16}
        w.rows["sample"].append({**copy, **sample})
        w.rows["activity"].append({**call, "time_ns": time_ns, "bytes": MAX_NUMBER})
    session = ask(w)
    assert queries.profile(session, ProfileKind.GPU_TIME).total_bytes == pytest.approx(MAX_NUMBER)
    (use,) = memory(session)
    assert use.unmapped_bytes == MAX_NUMBER


def test_device_calls_come_longest_first(session):
    assert queries.device_calls(session)[0].function == "clFinish"


# ---- losses, notices, metrics ----


def test_losses_are_summed_and_worded(ask):
    writer = Writer()
    for _ in range(2):
        writer.event("loss", "waits.ring_full", 21)
    writer.event("loss", "cpu.other", 0)
    (loss,) = queries.losses(ask(writer))
    assert (loss.name, loss.amount) == ("waits.ring_full", 42)
    assert "totals hold them" in loss.text


def test_damage_of_the_file_is_a_loss_too(tmp_path):
    data = bytearray(Writer(seconds=4, chunk_seconds=1).bytes())
    data[60] ^= 1
    path = tmp_path / "a.sonde"
    path.write_bytes(data[:-3])
    losses = queries.losses(Session(read(path)))
    assert [loss.name for loss in losses] == ["chunks damaged", "bytes cut"]


def test_every_loss_that_the_kernel_side_counts_has_words():
    from sonde.collect.kernel import LOSSES

    assert set(LOSSES) <= set(queries.LOSS_TEXT)


def test_every_loss_that_the_agent_counts_has_words():
    """The names are those of dictionaries in functions called `losses`, and the agent's own."""
    from sonde.agent import losses

    found = {*losses.HUNG, losses.LOST_EVENTS, losses.STUCK, losses.FAILED}
    source = Path(queries.__file__).parents[1]
    for path in (one for it in COUNTERS for one in (source / it).glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name in ("losses", "_now"):
                found |= set(_keys(function))
    assert {"processes.hung", "attach.queue_full", "files_left_out", "diagnose.jobs"} <= found
    assert [name for name in sorted(found) if not queries.loss_text(name)] == []


COUNTERS = ("agent", "collect", "sinks", "unwind")


def _keys(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        for key in node.keys if isinstance(node, ast.Dict) else ():
            last = key.values[-1] if isinstance(key, ast.JoinedStr) else key
            if isinstance(last, ast.Constant) and isinstance(last.value, str):
                yield last.value


def test_notices_and_metrics(session):
    (notice,) = queries.notices(session)
    assert (notice.name, notice.text) == ("probe_refused", "would single-step")
    (metric,) = queries.metrics(session)
    assert (metric.points, metric.first, metric.last, metric.mean) == (3, 1e6, 3e6, 2e6)
