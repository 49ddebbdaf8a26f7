# SPDX-License-Identifier: Apache-2.0
"""Time without a CPU: what the program does to itself comes first (a pool that spins, a crowd of
threads, its nice value), then others as groups; and it hides no other cause."""

from __future__ import annotations

import json
import time

import pytest

from captures import START_NS, Writer
from sonde.analyze.bound import explain
from sonde.analyze.own_threads import nice_in_words
from sonde.export.verdict import document, headline, render
from sonde.model.causes import Bound, Cause
from sonde.model.spinning import POOLS, SpinningPool, pool_of_library, pool_that_spins
from sonde.model.verdict import Explanation, Verdict
from sonde.recording.timelines import open_timeline
from training_capture import Frame, Key, on_cpu, process, shares

STEP = ("Model.step", "[python]", "finetune.py", 59, "python")
DISTANCE = ("levenshtein", "[python]", "finetune.py", 70, "python")
APPEND = ("Ledger.commit", "[python]", "ledger.py", 18, "python")
EVAL = ("_PyEval_EvalFrameDefault", "libpython3.11.so.1.0")
CLONE = ("clone3", "libc.so.6")
TIMER = ("asm_sysvec_apic_timer_interrupt", "[kernel]")
YIELD = ("sched_yield", "libc.so.6")
FSYNC = ("fsync", "libc.so.6")
BLAS, GOMP, IOMP = "libscipy_openblas64_-32a4b2a6.so", "libgomp-a34b3233.so.1", "libiomp5.so"
SERVER = ("blas_thread_server", BLAS)
FIRST, WORKER = 42, 43


def text_of(verdict: Verdict) -> str:
    return render(Explanation([verdict], [], []))


def facts(verdict: Verdict, cause: Cause = Cause.RUN_QUEUE) -> list[str]:
    return [*next(one.facts for one in verdict.causes if one.key == cause)]


def ready(
    writer: Writer,
    key: Key,
    seconds: float,
    *stack: Frame,
    tid: int = FIRST,
    why: str = "preempted",
) -> None:
    """Time of a thread in a run queue, with the stack at which it lost its CPU."""
    number = writer.stack(*stack, TIMER) if stack else 0
    writer.wait(key, tid, why, seconds, count=100, kind="runqueue", stack=number)


def noted(writer: Writer, pid: int = FIRST, **values: float) -> None:
    for name, value in values.items():
        row = {"time_ns": START_NS, "kind": "process", "name": name, "pid": pid}
        writer.rows["event"].append({**row, "value": value, "text": ""})


def beside(writer: Writer, **cpu_s: float) -> None:
    """What the recorder found of processes that were not recorded."""
    for text, seconds in cpu_s.items():
        row = {"time_ns": START_NS + 4 * 10**9, "kind": "process", "name": "other_on_cpu"}
        writer.rows["event"].append({**row, "value": seconds * 1e9, "text": text})


def job(writer: Writer, caller: tuple[Frame, ...], worker: tuple[Frame, ...], **more: str) -> Key:
    """A job whose first thread calls a library, and a thread of that library's pool."""
    key = writer.process(
        FIRST, "python3", threads=[{"tid": tid, "comm": more.get("name", "python3")}
                                   for tid in (FIRST, WORKER)]
    )  # fmt: skip
    for tid, stack in ((FIRST, (STEP, EVAL, *caller)), (WORKER, (CLONE, *worker))):
        on_cpu(writer, key, 0.8, *stack, tid=tid)
        ready(writer, key, 4.0, *stack, tid=tid)
    return key


OPENBLAS = ((("cblas_sgemm", BLAS), ("exec_blas", BLAS)), (SERVER,))
SPINS = [
    (*OPENBLAS, SpinningPool.OPENBLAS, "OPENBLAS_NUM_THREADS=1"),
    (
        (("cblas_sgemm", BLAS), ("inner_thread", BLAS)),
        (SERVER, ("exec_threads", BLAS), ("inner_thread", BLAS)),
        SpinningPool.OPENBLAS,
        "OPENBLAS_NUM_THREADS=1",
    ),
    (
        (("GOMP_parallel", GOMP), ("gomp_team_barrier_wait_end", GOMP)),
        (("gomp_thread_start", GOMP), ("gomp_barrier_wait_end", GOMP)),
        SpinningPool.OPENMP,
        "OMP_NUM_THREADS=1",
    ),
    # Libraries of packages have no names of internal functions.
    ((("GOMP_parallel", GOMP), ("", GOMP)), (("", GOMP),), SpinningPool.OPENMP, "OMP_NUM_THREADS"),
    (
        (("mkl_blas_sgemm", "libmkl_intel_thread.so.2"), ("__kmp_join_barrier", IOMP)),
        (("__kmp_launch_worker", IOMP), ("__kmp_wait_4", IOMP)),
        SpinningPool.MKL,
        "MKL_NUM_THREADS=1",
    ),
    # Distributions strip OpenBLAS: what yields in it waits.
    (
        (("cblas_sgemm", "libopenblasp-r0.3.21.so"), ("", "libopenblasp-r0.3.21.so"), YIELD),
        (("", "libopenblasp-r0.3.21.so"), YIELD),
        SpinningPool.OPENBLAS,
        "OPENBLAS_NUM_THREADS=1",
    ),
]


@pytest.mark.parametrize(("caller", "worker", "pool", "remedy"), SPINS)
@pytest.mark.parametrize("name", ["python3", "blas_thread_server", "rust-worker"])
def test_a_pool_that_spins_is_named_with_its_remedy(
    writer, verdicts, caller, worker, pool, remedy, name
):
    """Whatever its threads are called, and for all that another program runs."""
    job(writer, caller, worker, name=name)
    beside(writer, **{"pip (7)": 15.0})
    for verdict in verdicts():
        assert verdict.bounds[0].key == Bound.CPU_CONTENTION
        first, *others = facts(verdict)
        assert first.startswith(f"the threads of {pool} wait for one another by spinning")
        assert "100 % of its CPU time" in first
        assert others[0].startswith("not recorded, with 3.0 of 4 CPUs meanwhile: pip (7) 3.00")
        assert verdict.advice[0].text.startswith(f"start it with {remedy}")
        assert verdict.advice[0].text.index(remedy) < verdict.advice[0].text.index("pip (7)")
        assert Cause.HOST not in shares(verdict)
        assert shares(verdict)[Cause.SPIN] == pytest.approx(0.16, abs=0.01)
        assert "no work" in text_of(verdict)
        assert "CPU-bound" not in text_of(verdict)


@pytest.mark.parametrize(
    ("caller", "worker"),
    [
        (
            (("cblas_sgemm", BLAS), ("inner_thread", BLAS), ("sgemm_kernel_HASWELL", BLAS)),
            (SERVER, ("inner_thread", BLAS), ("sgemm_kernel_HASWELL", BLAS)),
        ),
        (
            (("GOMP_parallel", GOMP), ("at::native::add()", "libtorch_cpu.so")),
            (("gomp_thread_start", GOMP), ("at::native::add()", "libtorch_cpu.so")),
        ),
        ((("inner_thread", "app"),), (("inner_thread", "app"),)),
        ((YIELD,), (("run", "app"), YIELD)),
    ],
)
def test_a_pool_that_computes_does_not_spin(writer, verdicts, caller, worker):
    job(writer, caller, worker)
    for verdict in verdicts():
        assert not any("spinning" in fact for fact in facts(verdict))
        assert Cause.SPIN not in shares(verdict)
        assert "NUM_THREADS" not in verdict.advice[0].text


def test_a_thread_of_a_pool_that_went_to_sleep_did_not_spin(writer, verdicts):
    """It was woken, and is ready since."""
    key = process(writer, WORKER)
    on_cpu(writer, key, 0.8, STEP, EVAL)
    ready(writer, key, 4.0, STEP, EVAL)
    ready(writer, key, 4.0, CLONE, SERVER, tid=WORKER, why="futex")
    assert not any("spinning" in fact for one in verdicts() for fact in facts(one))


def test_spinning_with_cpus_to_spare_is_no_work_either(writer, explained):
    key = process(writer, WORKER)
    on_cpu(writer, key, 4.5, STEP, EVAL, *OPENBLAS[0])
    on_cpu(writer, key, 4.5, CLONE, SERVER, tid=WORKER)
    verdict = explained()

    assert [one.key for one in verdict.bounds] == [Bound.SPIN]
    assert verdict.advice[0].text.startswith("start it with OPENBLAS_NUM_THREADS=1")
    assert "step finetune.py:59" in text_of(verdict)


def test_what_has_no_code_of_the_program_is_named_by_the_library_that_computes(writer, verdicts):
    key = process(writer, WORKER)
    on_cpu(writer, key, 4.5, STEP, EVAL)
    on_cpu(writer, key, 4.0, CLONE, SERVER, ("sgemm_kernel_HASWELL", BLAS), tid=WORKER)
    worker = next(one for one in verdicts() if one.device_name == "t43 (43)")
    assert [one.function for one in worker.causes[0].locations] == ["sgemm_kernel_HASWELL"]


@pytest.mark.parametrize(
    ("binary", "function", "pool"),
    [
        ("libiomp5.so", "kmp_flag_64<false, true>::wait", SpinningPool.OPENMP),
        ("libiomp5.so", "__kmp_hyper_barrier_release", SpinningPool.OPENMP),
        ("libiomp5.so", "__kmpc_dispatch_next_8", None),
        ("libomp.so", "__kmp_wait_template", SpinningPool.OPENMP),
        ("libgomp.so.1", "GOMP_loop_dynamic_next", None),
        ("libblis.so.4", "bli_thrcomm_barrier_atomic", SpinningPool.BLIS),
        ("libblis.so.4", "bli_sgemm_haswell_asm_6x16", None),
        ("_multiarray_umath.so", "blas_thread_server", SpinningPool.OPENBLAS),
        ("libblas.so.3", "exec_blas", SpinningPool.OPENBLAS),
        ("app", "exec_blas", None),
        ("libopenblas.so.0", "inner_thread.isra.0", SpinningPool.OPENBLAS),
        ("libopenblas.so.0", "inner_threads_of_mine", None),
        ("libomptarget.so", "", None),
        ("", "", None),
    ],
)
def test_functions_that_wait(binary, function, pool):
    found = pool_that_spins(binary, function)
    assert (POOLS[found - 1] if found else None) == pool
    assert pool_of_library("libmkl_core.so.2") == 1 + POOLS.index(SpinningPool.MKL)


# ---- threads and nice value of the program ----


@pytest.mark.parametrize(
    ("allowed", "crowded"), [(2.0, True), (4.0, True), (64.0, True), (0, True)]
)
@pytest.mark.parametrize("threads", [7, 3])
def test_threads_of_a_program_that_take_one_anothers_cpus(
    writer, explained, allowed, crowded, threads
):
    """Four CPUs; its affinity may leave it fewer, and never more."""
    tids = range(FIRST, FIRST + threads)
    key = process(writer, *tids[1:])
    if allowed:
        noted(writer, cpus_allowed=allowed)
    for tid in tids:
        on_cpu(writer, key, 2.0, STEP, EVAL, tid=tid)
        ready(writer, key, 2.9, STEP, EVAL, tid=tid)
    beside(writer, **{"rustc (7)": 12.0})
    verdict = explained()
    cpus = min(4, int(allowed) or 4)
    crowded = threads > cpus
    lines = [fact for fact in facts(verdict) if "take them from one another" in fact]

    assert bool(lines) is crowded
    if crowded:
        assert lines[0].startswith(f"{threads} threads of the program itself want")
        assert f"may use {cpus}:" in lines[0]
    assert verdict.advice[0].text.startswith("let the program start fewer threads") is crowded


@pytest.mark.parametrize(("nice", "words"), [(5, "1 of 4.1 parts"), (19, "1 of 70."), (0, "")])
def test_the_nice_value_of_the_program_is_stated(writer, explained, nice, words):
    key = process(writer)
    on_cpu(writer, key, 0.9, STEP, EVAL)
    ready(writer, key, 4.0, STEP, EVAL)
    noted(writer, nice=float(nice), cpus_allowed=4.0)
    beside(writer, **{"rustc (7)": 18.0})
    verdict = explained()

    assert any(
        f"its nice value is {nice}" in fact and words in fact for fact in facts(verdict)
    ) is (nice > 0)
    assert verdict.advice[0].text.startswith("start it without nice") is (nice > 0)
    assert "keep rustc (7) off the CPUs of the thread" in verdict.advice[0].text


def test_a_negative_nice_value_goes_before_others(writer, explained):
    assert nice_in_words(-5) == "its nice value is -5: it goes before others, 3.1 times their part"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300, 1e300])
def test_what_a_file_claims_of_nice_values_is_bounded(writer, explained, value):
    key = process(writer)
    on_cpu(writer, key, 0.9, STEP, EVAL)
    ready(writer, key, 4.0, STEP, EVAL)
    noted(writer, nice=value, cpus_allowed=value)
    for pid in range(100, 5_000):
        noted(writer, pid=pid, nice=1.0)
    assert explained().bounds[0].key == Bound.CPU_CONTENTION


# ---- others ----


def test_others_that_were_recorded_are_groups_by_what_they_run(writer, verdicts):
    """Twenty that have little each are more than one that has most of all."""
    key = process(writer)
    on_cpu(writer, key, 0.4, STEP, EVAL)
    ready(writer, key, 4.5, STEP, EVAL)
    for pid in [*range(100, 120), 200]:
        other = writer.process(pid, "sonde" if pid == 200 else "pytest")
        on_cpu(writer, other, 1.5 if pid == 200 else 0.6, DISTANCE, EVAL, tid=pid)
        ready(writer, other, 0.5, DISTANCE, EVAL, tid=pid)
    verdict = next(one for one in verdicts() if one.device_name == "t42 (42)")
    (fact,) = facts(verdict)

    assert fact.startswith(
        "21 processes (of 2 programs: pytest (20 processes), sonde (200)), short"
    )
    assert ": pytest (20 processes) 2.3" in fact
    assert "keep 21 processes (of 2 programs: pytest (20" in verdict.advice[0].text


def test_the_next_step_names_those_that_had_most_of_the_cpus_together(writer, explained):
    key = process(writer)
    on_cpu(writer, key, 0.4, STEP, EVAL)
    ready(writer, key, 4.5, STEP, EVAL)
    beside(
        writer,
        **{"pytest (20 processes)": 6.0, "make (7)": 5.0, "sh (8)": 4.0, "this recorder": 3.0},
    )
    assert "keep pytest (20 processes), make (7) off the CPUs" in explained().advice[0].text


# ---- where it stood ----


def test_time_without_a_cpu_has_the_place_where_the_thread_lost_it(writer, explained):
    key = process(writer)
    on_cpu(writer, key, 0.5, DISTANCE, EVAL)
    ready(writer, key, 3.0, STEP, EVAL)
    ready(writer, key, 1.4, DISTANCE, EVAL)
    cause = explained().causes[0]

    assert cause.key == Cause.RUN_QUEUE
    assert [one.function for one in cause.locations] == [
        "Model.step finetune.py:59", "levenshtein finetune.py:70",
    ]  # fmt: skip
    assert cause.locations[0].share == pytest.approx(3.0 / 4.4, abs=0.01)
    assert "samples" not in cause.title


def test_without_stacks_it_has_the_places_of_the_samples_and_is_marked_so(writer, explained):
    key = process(writer)
    on_cpu(writer, key, 0.5, DISTANCE, EVAL)
    ready(writer, key, 4.4)
    cause = explained().causes[0]

    assert [one.function for one in cause.locations] == ["levenshtein finetune.py:70"]
    assert cause.title.endswith("(places: where it ran, by samples)")


def test_all_places_with_a_twentieth_are_named(writer, explained):
    key = process(writer)
    for number, seconds in enumerate((1.4, 1.1, 0.8, 0.6, 0.5, 0.3, 0.1)):
        on_cpu(writer, key, seconds, (f"part{number}", "[python]", "a.py", 9, "python"), EVAL)
    text = text_of(explained())

    assert all(f"part{number} a.py:9" in text for number in range(6))
    assert "part6" not in text


# ---- beside another cause ----


def service(writer: Writer, queued: float, synced: float) -> None:
    key = process(writer)
    on_cpu(writer, key, 0.2, APPEND, EVAL)
    ready(writer, key, queued, APPEND, EVAL)
    writer.wait(
        key, FIRST, "sync to disk", synced, count=900, stack=writer.stack(APPEND, EVAL, FSYNC)
    )
    beside(writer, **{"python finetune.py (7)": 18.0})


@pytest.mark.parametrize(
    ("queued", "synced", "both"),
    [(3.0, 1.5, True), (1.5, 3.0, True), (2.3, 2.3, True), (4.3, 0.3, False), (0.4, 4.2, False)],
)
def test_contention_hides_no_other_cause(tmp_path, queued, synced, both):
    writer = Writer(seconds=5)
    service(writer, queued, synced)
    explanation = explain(open_timeline([writer.write(tmp_path / "a.sonde")]))
    (verdict,) = explanation.verdicts
    steps = [line for line in render(explanation).splitlines() if line.startswith("  next: ")]

    assert ("finetune.py (7)" in "".join(steps) and "Ledger.commit" in "".join(steps)) is both
    lines = headline(explanation)
    assert ("waited for a CPU" in lines and "blocking I/O" in lines) is both
    json.dumps(document(explanation))
    largest = "finetune.py (7)" if queued > synced else "Ledger.commit"
    assert largest in verdict.advice[0].text or queued == synced


def test_a_name_of_any_length_is_looked_at_in_no_time():
    names = [f"INTERNAL{'kmp' * 5_000}{number}" for number in range(50)]
    began = time.process_time()
    assert not any(pool_that_spins("libgomp.so.1", name) for name in names)
    assert time.process_time() - began < 1
