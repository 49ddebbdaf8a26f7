# SPDX-License-Identifier: Apache-2.0
"""The recommended next step for each cause and each bound: data. A step names the thread and the
code that were found; it is a general one where neither is known."""

from __future__ import annotations

from collections.abc import Mapping

from sonde.model.causes import Bound, Cause, CauseDetail
from sonde.model.spinning import REMEDIES, SpinningPool
from sonde.model.verdict import WITHOUT_CPU, CauseShare, Culprit

MAJORITY = 0.5
"""A next step is about one place of a cause if that has this part of its time."""

OF_CAUSE: Mapping[tuple[Cause, CauseDetail], str] = {
    (Cause.STOPPED, CauseDetail.NONE): "find what stops the process: signals, a debugger, or the "
    "freezer of its control group",
    (Cause.SPIN, CauseDetail.NONE): "let the pool have fewer threads (OPENBLAS_NUM_THREADS, "
    "OMP_NUM_THREADS, MKL_NUM_THREADS): they wait for one another on CPUs",
    (Cause.RUN_QUEUE, CauseDetail.NONE): "reserve a CPU for the launching thread: pin it, or move "
    "other work to other CPUs",
    (
        Cause.RUN_QUEUE,
        CauseDetail.QUOTA,
    ): "raise the CPU quota: it is spent before each period ends",
    (Cause.INPUT, CauseDetail.NONE): "prepare batches ahead and in parallel: more loader workers, "
    "prefetching, less work per sample",
    (Cause.FULL_QUEUE, CauseDetail.NONE): "nothing here: it is ahead of what takes from the queue; "
    "make that faster",
    (Cause.ALLOCATION, CauseDetail.NONE): "keep memory allocated: no empty_cache() in the loop, "
    "fixed shapes, expandable segments, or a larger pool",
    (Cause.BUILD, CauseDetail.NONE): "compile, load and capture before the loop, and keep what "
    "was built",
    (
        Cause.PAGE_FAULT,
        CauseDetail.NONE,
    ): "reuse host buffers instead of mapping new ones, or touch them ahead; use huge pages",
    (Cause.GIL, CauseDetail.NONE): "move the work of other Python threads into processes",
    (Cause.LOCK, CauseDetail.NONE): "hold the lock for a shorter time, or do not take it in the "
    "launching thread",
    (Cause.POOL, CauseDetail.NONE): "keep what the pool lends for a shorter time, or let it lend "
    "more",
    (Cause.IO, CauseDetail.NONE): "do the I/O in another thread or process than the launching one",
    (Cause.SLEEP, CauseDetail.NONE): "remove the sleep from the launching thread",
    (
        Cause.IDLE,
        CauseDetail.NONE,
    ): "nothing, if it has little to do. An event loop looks idle, too, "
    "while what its handlers await is slow: then ask the services that it calls",
    (
        Cause.SYNCHRONIZATION,
        CauseDetail.NONE,
    ): "read results back later or less often: keep them on "
    "the device, copy non-blocking, log every n-th step",
    (Cause.COPY, CauseDetail.NONE): "copy from pinned memory on a separate stream, a batch ahead",
    (Cause.COPY, CauseDetail.PAGEABLE): "pin the host memory and copy non-blocking, a batch ahead",
    (Cause.COPY, CauseDetail.SMALL): "merge small copies into one, or create the values on the "
    "device",
    (Cause.COPY, CauseDetail.BANDWIDTH): "copy fewer bytes (smaller types, decode on the device), "
    "or copy a batch ahead on a separate stream",
    (Cause.COLLECTIVE, CauseDetail.NONE): "overlap communication with computation; look for the "
    "rank that comes last",
    (Cause.LAUNCH, CauseDetail.NONE): "launch fewer kernels: CUDA graphs, torch.compile, fused "
    "kernels, larger batches",
    (Cause.KERNEL_GAP, CauseDetail.NONE): "fuse small kernels, or capture them in one CUDA graph",
    (Cause.HOST, CauseDetail.NONE): "move this code out of the loop, make it faster, or run it "
    "while the device works",
    (Cause.GPU_CONTENTION, CauseDetail.NONE): "give the process a GPU without co-tenants, or share "
    "it by MPS or MIG",
    (
        Cause.NOT_TAKEN,
        CauseDetail.NONE,
    ): "record with Sonde on the machine: it shows which processes use the device; look for events "
    "that streams wait for",
    (Cause.DEPENDENCY, CauseDetail.NONE): "let fewer streams wait for one another across devices, "
    "or record the event earlier",
    (
        Cause.UNKNOWN,
        CauseDetail.NONE,
    ): "record with Sonde beside the profiler: it shows why threads were off-CPU",
}
"""By cause and detail; a detail without an entry has the entry of the cause."""

OF_BOUND: Mapping[tuple[Bound, CauseDetail], str] = {
    (
        Bound.COMPUTE,
        CauseDetail.NONE,
    ): "use fewer or cheaper operations: lower precision, sparsity, "
    "a better kernel for the first one",
    (Bound.KERNELS, CauseDetail.NONE): "make the first kernel faster: a profiler of hardware "
    "counters (Nsight Compute) shows its limit",
    (Bound.MEMORY, CauseDetail.NONE): "move fewer bytes: fuse elementwise work (torch.compile), "
    "smaller types, recompute instead of reload",
    (
        Bound.DEVICE,
        CauseDetail.NONE,
    ): "trace the device (torch.profiler) and explain the trace with this capture",
    (Bound.THROTTLED, CauseDetail.TEMPERATURE): "cool the GPU: check fans, airflow, inlet "
    "temperature, and other heat sources nearby",
    (Bound.THROTTLED, CauseDetail.POWER_BRAKE): "check the power supplies and the power budget of "
    "chassis and rack: they asked the GPU for less power",
    (Bound.THROTTLED, CauseDetail.HARDWARE): "the driver does not report what slows the clocks: "
    "check temperature (nvidia-smi -q -d TEMPERATURE), power supplies and power cables",
    (
        Bound.THROTTLED,
        CauseDetail.BOARD,
    ): "nothing to set right: the voltage that the board may use "
    "limits the clocks; where other GPUs of the model are faster, see the vendor",
    (Bound.THROTTLED, CauseDetail.OTHER_LIMIT): "look up the reason at the driver "
    "(nvidia-smi -q -d PERFORMANCE)",
    (Bound.THROTTLED, CauseDetail.NONE): "raise the power limit where the board allows it, or use "
    "fewer operations: power, not arithmetic, is the limit",
    (Bound.SMALL_KERNELS, CauseDetail.NONE): "run independent kernels on several streams at once, "
    "batch them, or make each larger",
}
"""By bound and detail, of bounds that are about the device's own work."""


ABOUT_CULPRIT: Mapping[Cause, str] = {
    Cause.LOCK: "shorten what {thread} does with the lock in {code}, or do it before or after",
    Cause.GIL: "move the work of {thread} in {code} into a process, or do it in calls that "
    "release the interpreter lock",
    Cause.POOL: "let {thread} keep what the pool lends for a shorter time ({doing} in {code}), or "
    "give it a separate pool, or let the pool lend more",
    Cause.INPUT: "make {code} in {thread} faster, or run it ahead and in parallel: more loader "
    "workers, prefetching, less work per sample",
    Cause.FULL_QUEUE: "nothing here: it is ahead of {thread}, which takes from the queue; make "
    "{code} there faster",
}
"""By cause, where the code of the thread is known that others wait for."""
BETWEEN_REQUESTS = (
    "shorten what requests do with what the pool lends: {doing} in {code}; or let it "
)
BETWEEN_REQUESTS += "lend more"
"""Of a pool that the requests themselves use up."""
ABOUT_ANSWERS = "look at what answers {code} in {thread}, or ask it ahead, while the device works: "
ABOUT_ANSWERS += "until it is asked, that thread waits"
"""Where a thread that others wait for waits for answers itself."""
ABOUT_GIL = "make {code} in {thread} faster, or move it into other processes: threads of one share "
ABOUT_GIL += "the interpreter lock"
"""Where a thread that prepares what others wait for is in their process, and its threads wait for
the interpreter lock."""
OF_REQUESTS: Mapping[Cause, str] = {
    Cause.SLEEP: "remove the sleep in {code}: requests wait for it",
}
"""By cause, where requests wait for it in one place of the program."""
PASSED_ON = "shorten what is done with the lock, or do it before or after: {doing} in {code}"
"""Of a lock that those who wait for it pass on."""
HELD_WITHOUT_CPU = "give the threads that hold the lock a CPU, for which they wait in {code}"
"""The same, where they do next to nothing else there."""
HOLDERS_SHORT_OF_CPU = (
    "; and give these threads CPUs, for which they wait longest while they hold it"
)
"""Behind `PASSED_ON`."""
SHORT_OF_A_CPU = "; and give it a CPU, for which it waits"
"""Of a thread that others wait for, which is mostly ready and has none."""
ABOUT_CPUS = "keep {thread} off the CPUs of the launching thread: pin either, lower its priority "
ABOUT_CPUS += "(nice), or move it elsewhere"
"""Where it is known who had the CPUs."""
ABOUT_POOL = (
    "start it with {remedy}, or with as many as it has CPUs to itself: the threads of {pool} "
)
ABOUT_POOL += "spin while they wait for one another"
"""Where a program's pool of native threads spins."""
ABOUT_CROWD = "let the program start fewer threads or worker processes: no more than it has CPUs"
"""Where a program's own threads take one another's CPUs."""
ABOUT_NICE = (
    "start it without nice, or `renice -n 0` it: others go before it while its value is {nice}"
)
"""Where a program's nice value is above 0."""
ABOUT_PLACE: Mapping[Cause, str] = {
    Cause.HOST: "make {code} faster, move it out of the loop, or run it while the device works",
    Cause.IO: "do the I/O of {code} in another thread or process than the launching one",
    Cause.SLEEP: "remove the sleep in {code} from the launching thread",
    Cause.LOCK: "hold the lock that {code} takes for a shorter time, or do not take it in the "
    "launching thread",
    Cause.PAGE_FAULT: "reuse the buffers of {code} instead of mapping new ones, or touch them "
    "ahead; use huge pages",
}
"""By cause, where most of its time is in one place of the program."""


OF_IO: Mapping[CauseDetail, str] = {
    CauseDetail.SYNC: "sync to disk less often{in_code}: write several changes and sync once for "
    "all that wait (group commit), or where a loss is bearable do not sync each",
    CauseDetail.FILES: "open, list and close files less often{in_code}: keep them open, or keep "
    "what was read",
    CauseDetail.SOCKETS: "look at what answers{code}; else ask it less often, or keep what it "
    "answered",
    CauseDetail.PIPES: "look at the process at the other end of the pipe{in_code}",
    CauseDetail.EVENTS: "look at what is polled for{in_code}: a time that is set, or what another "
    "process is to send",
    CauseDetail.NONE: "read and write{in_code} in larger pieces, ahead, or in another thread; keep "
    "what was read",
}
"""What to do about I/O, by kind, in a program that calls no device."""
OFF_THE_LOOP = "; and do it off the event loop, in a thread (asyncio.to_thread): all that the loop "
OFF_THE_LOOP += "serves waits meanwhile"
ANSWERED_BY = "look at {thread}, which answers{code}, at {at} ({doing}); else ask it less often, "
ANSWERED_BY += "or keep what it answered"
"""Of the process at the other end of a connection that was recorded, too."""
ANSWERED_WITHOUT_CPU = "give {thread}, which answers{code}, a CPU, for which it waits"
ANSWERED_ELSEWHERE = "look at {thread}, which answers{code}: sonde explain --pid {pid}"
"""Of one that was not."""


def _on_io(cause: CauseShare) -> str:
    """The next step on I/O of a program that calls no device."""
    places = [one.function for one in cause.locations[:1] if one.share >= MAJORITY]
    code = f" {places[0]}" if any(places) else ""
    who = cause.culprit
    if who is not None and who.pid and not who.doing:
        return ANSWERED_ELSEWHERE.format(thread=who.thread, code=code, pid=who.pid)
    if who is not None and who.code:
        return ANSWERED_BY.format(thread=who.thread, code=code, doing=who.doing, at=who.code)
    if who is not None and who.pid and who.doing == WITHOUT_CPU:
        return ANSWERED_WITHOUT_CPU.format(thread=who.thread, code=code)
    text = OF_IO.get(cause.detail) or OF_IO[CauseDetail.NONE]
    if who is not None and cause.detail == CauseDetail.SOCKETS:
        text = text.replace("what answers{code}", f"{{thread}}, for which{code} waits")
        text = text.format(thread=who.thread)
    else:
        text = text.format(code=code, in_code=f" in{code}" * bool(code))
    return text + OFF_THE_LOOP * cause.in_event_loop


def next_step_on(cause: CauseShare, of_requests: bool = False, on_host: bool = False) -> str:
    """What to do about a cause: about who is behind it, about the place where it happens, or in
    general, by what is known. `of_requests`: requests that are answered wait for it; `on_host`: the
    program calls no device."""
    who, key = cause.culprit, cause.key
    if on_host and key == Cause.IO:
        return _on_io(cause)
    if cause.detail == CauseDetail.NONE and who is not None:
        if key in (Cause.RUN_QUEUE, Cause.SPIN):
            return _about_cpus(who)
        if key == Cause.LOCK and who.code and not who.thread:
            if who.doing == WITHOUT_CPU:
                return HELD_WITHOUT_CPU.format(code=who.code)
            step = PASSED_ON.format(doing=who.doing, code=who.code)
            return step + HOLDERS_SHORT_OF_CPU * who.is_short_of_cpu
        if key == Cause.POOL and who.code and not who.thread:
            return BETWEEN_REQUESTS.format(doing=who.doing, code=who.code)
        if key == Cause.IO and who.asks and who.code:
            return ABOUT_ANSWERS.format(thread=who.thread, code=who.code)
        if key in ABOUT_CULPRIT and who.code:
            step = ABOUT_GIL if who.by_gil else ABOUT_CULPRIT[key]
            text = step.format(thread=who.thread, code=who.code, doing=who.doing)
            return text + SHORT_OF_A_CPU * (who.doing == WITHOUT_CPU or who.is_short_of_cpu)
    places = [one.function for one in cause.locations[:1] if one.share >= MAJORITY]
    if of_requests and key in OF_REQUESTS and any(places):
        return OF_REQUESTS[key].format(code=places[0])
    if cause.detail == CauseDetail.NONE and key in ABOUT_PLACE and any(places):
        return ABOUT_PLACE[key].format(code=places[0])
    return next_step(key, cause.detail)


def _about_cpus(who: Culprit) -> str:
    """What to do about time without a CPU, or spent spinning: what the program does to itself
    comes first."""
    steps = []
    if who.pool:
        pool = SpinningPool(who.pool)
        steps.append(ABOUT_POOL.format(pool=pool, remedy=REMEDIES[pool]))
    if who.crowded:
        steps.append(ABOUT_CROWD)
    if who.nice:
        steps.append(ABOUT_NICE.format(nice=who.nice))
    if who.thread:
        steps.append(ABOUT_CPUS.format(thread=who.thread))
    return "; ".join(steps)


def next_step(cause: Cause, detail: CauseDetail = CauseDetail.NONE) -> str:
    """What to do about a cause."""
    return OF_CAUSE.get((cause, detail)) or OF_CAUSE[cause, CauseDetail.NONE]


def next_step_of_bound(bound: Bound, detail: CauseDetail = CauseDetail.NONE) -> str:
    """What to do about a bound of the device's own work."""
    return OF_BOUND.get((bound, detail)) or OF_BOUND[bound, CauseDetail.NONE]
