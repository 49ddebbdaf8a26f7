# SPDX-License-Identifier: Apache-2.0
"""Asks the injected library of a process for a trace by CUPTI, and reads the result.

The process may write anything there at any time: its memory is copied once, and counts and names
are bounded; `sonde.readers.device_trace` checks the rows. The layout is in abi/inject.h.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from sonde import _native, procfs
from sonde.collect import inject_abi as abi
from sonde.collect import inject_trace_abi as trace_abi
from sonde.collect.inject_memory import REASON_TEXT, InjectMemory, find_memory
from sonde.collect.inject_records import Ring, Run
from sonde.collect.slots import Slots, slots_asked
from sonde.errors import AttachFailed, ProcessGone, TargetRefused
from sonde.model.device_trace import RawTrace
from sonde.model.launches import COPY, REPLAY, SET, CountedLaunch, LaunchRates

HOOKED_S: Final = 20.0
"""How long the library may take to hook the program's slots."""
HOOKS_STEADY_S: Final = 0.6
"""All slots count as hooked when there was no new one for this long."""
DRAINED_S: Final = 8.0
"""How long it may take after a trace's end until the library has all its records."""
_POLL_S: Final = 0.02
"""Between two readings of the library's state."""
_MAX_NAMES: Final = 65_536
"""Different names of one trace."""
_COUNTED_A_SECOND: Final = 200
"""Launches that are timed for `rates`."""
GUESSED_S: Final = 0.4
"""For so long launches are counted to choose which part of them is timed."""
_FOLLOWED_S: Final = 0.3
"""How long the library may take to follow a new stride."""
_QUEUED_S: Final = 0.15
"""After that: what was launched before runs first."""
_UNTIMED: Final = ("lost_pool", "lost_order", "lost_ring", "left_capturing")
"""Counts of launches that were chosen and could not be timed: others carry their weight."""
_MOST_COUNTED: Final = 20_000
"""Of more records counting ends at once: the program launches far more often than before."""
_MOST_STRIDE: Final = 1_000_000
_ENOUGH: Final = 10
"""Of one thread and type, for a rate between the first and the last of them."""
_MOST_OF: Final = 0.7
"""Of the time, between these two."""
_MOST_CARRY: Final = 0.3
"""Of the runs of a type: where more carry weight, some launches cannot be timed at any time."""
_WHAT: Final = {
    abi.Type.KERNEL: "",
    abi.Type.COPY: COPY,
    abi.Type.SET: SET,
    abi.Type.REPLAY: REPLAY,
}
"""What is counted; kernels by their names."""
_REMEDIES: Final = {
    abi.Reason.CUPTI_TAKEN: "Try again when that profiler has ended; one that was at work before "
    "Sonde came counts as working until it was seen to begin and end once.",
    abi.Reason.CUPTI_DENIED: "An administrator allows it by NVreg_RestrictProfilingToAdminUsers=0.",
}


class Tracer:
    """Traces one process, once or several times. Use as a context manager."""

    def __init__(self, pid: int, memory: InjectMemory) -> None:
        """`memory`: that of the library in the process. Raises TargetRefused where another agent
        has it."""
        self.pid = pid
        self._memory = memory
        self._slots = Slots()
        self._window = 0
        self._ended_early = False
        """The last trace was: then the library was asked for nothing more, its hooks included."""
        if not memory.lock():
            raise TargetRefused(
                f"another recorder uses the library in process {pid}",
                "Wait until it has ended, or end it: a trace excludes timed launches.",
            )

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ask for nothing any more; the library frees the memory of its trace."""
        self._slots.close()
        try:
            self._memory.ask(window=0, request=0)
            self._memory.heartbeat()
        except OSError:
            return  # it ended

    def prepare(self) -> None:
        """Have the library hook the program's slots, so that it sees other profilers.

        Raises TargetRefused, AttachFailed.
        """
        stat = procfs.read_stat(self.pid)
        if stat is None:
            raise TargetRefused(f"process {self.pid} has ended", "Give one that runs.")
        by_slots = slots_asked(self.pid)
        self._ended_early = False
        self._memory.ask(
            window=0,
            request=abi.Request.WINDOWS | by_slots,
            tail=self._memory.seen().counts["head"],
        )
        if by_slots:
            self._slots.follow(self.pid, stat.start_ns, self._memory.fd)
        deadline, hooks, since = time.monotonic() + HOOKED_S, -1, 0.0
        while time.monotonic() < deadline:
            self._require_alive()
            self._memory.heartbeat()
            seen = self._memory.seen()
            if seen.counts["hooks"] != hooks:
                hooks, since = seen.counts["hooks"], time.monotonic()
            working = seen.status in (abi.Status.TIMING, abi.Status.YIELDED)
            if working and hooks and time.monotonic() - since > HOOKS_STEADY_S:
                return
            time.sleep(_POLL_S)
        raise AttachFailed(
            f"process {self.pid}: {seen.why or 'the library did not come to work in time'}",
            "Is it a process that uses CUDA? sonde top shows which do.",
        )

    def rates(self, seconds: float = 1.0) -> LaunchRates:
        """Launches and replays a second, estimated by timing some: before anything of CUPTI is
        touched. Takes GUESSED_S longer than `seconds`."""
        request = self._memory.control()["request"]
        before = self._memory.seen().counts
        stride = self._stride(request, before["head"])
        # One in `stride` from here on: where the stride changes, what is left of a block is lost.
        self._memory.ask(every=stride)
        self._beat(_FOLLOWED_S, lambda seen: seen["every"] == stride)
        self._beat(_QUEUED_S)
        began, began_ns = self._memory.seen().counts, time.monotonic_ns()
        head = began["head"]
        ring = Ring(self._memory.fd, head)
        self._memory.ask(tail=head)
        self._beat(seconds, lambda seen: seen["head"] - head > _MOST_COUNTED)
        seen = self._memory.seen().counts
        ended_ns = time.monotonic_ns()
        self._memory.ask(request=request, every=0)
        runs = [
            run
            for run in ring.take(seen["head"], ended_ns).runs
            if began_ns <= run.start_ns <= ended_ns and run.type in _WHAT
        ]
        self._memory.ask(tail=ring.tail)
        if all(seen[name] == began[name] for name in _UNTIMED):  # what else is carried is older
            runs = [run._replace(weight=float(stride)) for run in runs]
        began_ns = max(began_ns, _paid_ns(runs, stride))
        by_type: dict[tuple[int, abi.Type], list[Run]] = defaultdict(list)
        for run in runs:
            if run.start_ns >= began_ns:
                by_type[run.tid, run.type].append(run)
        took_s = (ended_ns - began_ns) / 1e9
        paces = [(kind, _a_second(mine, took_s)) for (_, kind), mine in by_type.items()]
        return LaunchRates(
            launches=sum(pace for kind, pace in paces if kind is not abi.Type.REPLAY),
            replays=sum(pace for kind, pace in paces if kind is abi.Type.REPLAY),
            counted=tuple(
                sorted(
                    CountedLaunch(run.start_ns, run.weight, _WHAT[run.type] or run.name)
                    for mine in by_type.values()
                    for run in mine
                )
            ),
            captures=seen["left_capturing"] > before["left_capturing"],
        )

    def _stride(self, request: int, head: int) -> int:
        """One launch in this many is timed, for `_COUNTED_A_SECOND`."""
        self._memory.ask(
            tail=head, per_second=_COUNTED_A_SECOND, every=0, request=request | abi.Request.EVENTS
        )
        self._beat(GUESSED_S / 2)
        counts, began_s = self._memory.seen().counts, time.monotonic()
        self._beat(GUESSED_S / 2)
        seen, took_s = self._memory.seen().counts, time.monotonic() - began_s
        launched = max(0, seen["launches"] - counts["launches"])
        if not launched or not took_s:
            return min(max(1, seen["every"]), _MOST_STRIDE)
        return min(max(1, round(launched / took_s / _COUNTED_A_SECOND)), _MOST_STRIDE)

    def _beat(
        self, seconds: float, is_enough: Callable[[dict[str, int]], bool] | None = None
    ) -> None:
        """Let the library work for so long, or until its state is enough."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < seconds:
            self._memory.heartbeat()
            if is_enough is not None and is_enough(self._memory.seen().counts):
                return
            time.sleep(_POLL_S)

    def take(
        self,
        duration_s: float,
        goes_on: Callable[[], bool] | None = None,
        *,
        all_calls: bool = False,
        taken: bool = False,
    ) -> RawTrace:
        """One trace of this length. `goes_on`: called every _POLL_S; False ends the trace early.
        `all_calls`: with all calls of the driver, not only those that launch, copy or set; that
        costs more. `taken`: whether somebody holds CUPTI's subscription; then it is refused unless
        it is known that they do not trace now.

        Raises TargetRefused with the library's reason, AttachFailed.
        """
        if self._ended_early:
            self.prepare()
        self._window = self._window % 0xFFFFFFFF + 1
        if self._window == self._memory.seen().counts["window_done"]:
            self._window = self._window % 0xFFFFFFFF + 1
        self._memory.ask(
            window_us=round(duration_s * 1e6),
            window_calls=int(all_calls),
            window_taken=int(taken),
            window=self._window,
        )
        deadline = time.monotonic() + duration_s + DRAINED_S
        while time.monotonic() < deadline:
            self._memory.heartbeat()
            seen = self._memory.seen()
            if seen.counts["window_done"] == self._window:
                return self._outcome(seen.counts)
            self._require_alive()
            if goes_on is not None and not goes_on():
                self._ended_early = True
                self._memory.ask(request=0)
            time.sleep(_POLL_S)
        raise AttachFailed(
            f"the trace of process {self.pid} did not end within {DRAINED_S:g} s after its time",
            "The process goes on; CUPTI did not answer the library's own thread. Trace it no more.",
        )

    def _require_alive(self) -> None:
        if not procfs.has_threads(self.pid):
            raise ProcessGone(f"process {self.pid} ended while it was traced", "Trace it earlier.")

    def _outcome(self, state: dict[str, int]) -> RawTrace:
        try:
            reason = abi.Reason(state["window_reason"])
        except ValueError:
            reason = abi.Reason.CUPTI_FAILED
        if reason is not abi.Reason.OK:
            detail = f" (CUPTI's error {state['cupti_error']})" if state["cupti_error"] else ""
            raise TargetRefused(
                f"process {self.pid} was not traced: {REASON_TEXT[reason]}{detail}",
                _REMEDIES.get(reason, "Record it without: sonde record --device-time -p PID."),
            )
        fd = find_memory(self.pid, trace_abi.TRACE_MEMFD, trace_abi.TRACE_BYTES)
        if fd is None:
            self._require_alive()
            raise AttachFailed(
                f"the trace of process {self.pid} is not to be found in it", "Try again."
            )
        try:
            return _read(fd, self._memory.fd, self._window)
        finally:
            os.close(fd)


def _paid_ns(runs: list[Run], stride: int) -> int:
    """When no run carries the weight of launches any more that could not be timed before them."""
    by_type: dict[abi.Type, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.start_ns):
        by_type[run.type].append(run)
    paid_ns = 0
    for mine in by_type.values():
        first = next((at for at, run in enumerate(mine) if run.weight <= stride), len(mine))
        if first < _MOST_CARRY * len(mine):
            paid_ns = max(paid_ns, mine[first].start_ns)
    return paid_ns


def _a_second(runs: list[Run], took_s: float) -> float:
    """Launches a second of one thread and type, by those chosen from it in `took_s` seconds.

    From the first that was chosen to the last: the first block is as long as a guess of the rate.
    Each lies in the middle of its block, in the mean. Where they are few, or the thread launched
    for a part of the time, it is their sum over all of the time.
    """
    runs = sorted(runs, key=lambda run: run.start_ns)
    launches = sum(run.weight for run in runs)
    span_s = (runs[-1].start_ns - runs[0].start_ns) / 1e9
    if len(runs) < _ENOUGH or span_s < _MOST_OF * took_s:
        return launches / took_s
    return (launches - (runs[0].weight + runs[-1].weight) / 2) / span_s


def _read(fd: int, library_fd: int, window: int) -> RawTrace:
    """Copy a trace from its memory. Raises AttachFailed where that holds no trace of `window`."""
    head = trace_abi.Trace._make(trace_abi.TRACE.unpack(_all(fd, trace_abi.TRACE.size, 0)))
    if head.magic != trace_abi.TRACE_MAGIC or head.abi != abi.ABI or head.window != window:
        raise AttachFailed("what the process holds is no trace", "Try again.")
    count = min(head.records, trace_abi.TRACE_RECORDS)
    records = _all(fd, count * trace_abi.TRACED_BYTES, trace_abi.TRACE_AT)
    at, _ = trace_abi.TRACED_FIELDS["name"]
    offsets = set(memoryview(records).cast("I")[at // 4 :: trace_abi.TRACED_BYTES // 4])
    names = _all(library_fd, abi.NAMES_BYTES, abi.NAMES_AT)
    return RawTrace(
        head=head._asdict(),
        records=records,
        record_bytes=trace_abi.TRACED_BYTES,
        fields=trace_abi.TRACED_FIELDS,
        names=_names(names, sorted(offsets)),
    )


def _all(fd: int, size: int, at: int) -> bytes:
    pieces = []
    while size:
        piece = os.pread(fd, min(size, 16 << 20), at)
        if not piece:
            raise AttachFailed("the process cut its memory short", "Try again.")
        pieces.append(piece)
        size -= len(piece)
        at += len(piece)
    return b"".join(pieces)


def _names(names: bytes, offsets: list[int]) -> dict[int, str]:
    """Names by their offsets, of the first _MAX_NAMES; '' where there is none."""
    found = {}
    for offset in offsets[:_MAX_NAMES]:
        text = ""
        if 8 <= offset <= len(names) - abi.NAME.size and not offset % 8:
            length, _ = abi.NAME.unpack_from(names, offset)
            at = offset + abi.NAME.size
            if length <= min(abi.NAME_MAX, len(names) - at):
                text = _native.demangle(names[at : at + length])
        found[offset] = text
    return found
