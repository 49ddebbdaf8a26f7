# SPDX-License-Identifier: Apache-2.0
"""Reads the output of `perf script`: samples with stacks, and context switches if recorded.

The weight of a clock's sample is its period; that of another event's sample is the median distance
between samples of a CPU. `sched:sched_switch` with `sched_waking` or `sched_wakeup` become states:
blocked (perf does not record the reason) and waiting for a CPU. Format: perf 5.10 to 6.18, default
fields, with or without `-F +pid`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import TypeVar

import numpy as np

from sonde.errors import NotACapture
from sonde.limits import Budget
from sonde.model.timeline import (
    Samples,
    StateKind,
    Timeline,
    events,
    no_events,
)
from sonde.readers.charged_interner import ChargedInterner
from sonde.readers.text import opened_text

_Known = TypeVar("_Known")

_HEAD = re.compile(
    # The command is up to 15 arbitrary bytes, which may look like other fields: match the longest.
    r"^(?P<comm>\S.{0,15})\s{1,32}(?P<pid>-?\d{1,10})(?:/(?P<tid>-?\d{1,10}))?\s{1,8}"
    r"(?:\[(?P<cpu>\d{1,6})\]\s{1,8})?(?P<seconds>\d{1,10})\.(?P<fraction>\d{1,9}):\s{1,32}"
    r"(?:(?P<period>\d{1,18})\s{1,8})?(?P<event>[^\s:]\S{0,250}?):(?:\s+(?P<rest>.*))?$",
    re.ASCII,
)
_FRAME = re.compile(
    r"^\s{1,64}(?P<address>[0-9a-f]{1,16})\s(?P<symbol>.*?)(?:\+0x[0-9a-f]{1,16})?\s"
    r"\((?P<file>.*)\)$",
    re.ASCII,
)
_SWITCH = re.compile(
    r"prev_comm=.{0,64}? prev_pid=(?P<prev>\d{1,10}) prev_prio=-?\d{1,6} "
    r"prev_state=(?P<state>\S{1,16}) ==> next_comm=.{0,64}? next_pid=(?P<next>\d{1,10})",
    re.ASCII,
)
_WAKE = re.compile(r"comm=.{0,64}? pid=(?P<pid>\d{1,10}) ", re.ASCII)
_LONGEST_LINE = 16 << 10
"""Longest line of a sample or frame; a mangled name of a GPU kernel may have 10 kB."""
_LAST_S = (1 << 62) // 1_000_000_000
_LONGEST_PERIOD_NS = 10**15
_SAMPLE_BYTES = 400
"""Memory of a sample, from reading to the verdict."""
_STATE_BYTES = 320
"""Memory of a state, from reading to the verdict."""
_KNOWN_BYTES = 250
"""Memory of what is known of one thread, or of one CPU."""
_FRAMES = 4_096
"""Frames of a sample that are looked at, the innermost ones."""
_CLOCKS = ("cpu-clock", "task-clock")
"""Events whose period is a time in ns."""
_FAULTS = {"exc_page_fault", "asm_exc_page_fault", "handle_mm_fault", "do_user_addr_fault"}
_USUAL_NS = 1_000_000_000 // 99
"""Weight of a sample where no distance between samples is known: 99 samples a second."""
_LIMIT = 3
"""Lines of a file's beginning that may be its first event."""


def looks_like(head: str) -> bool:
    """Whether a file that begins with `head` may be output of `perf script`."""
    lines = [line for line in head.splitlines() if line and not line.startswith("#")]
    return any(_HEAD.match(line) for line in lines[:_LIMIT])


class _Reader:
    """Collects samples and states line by line."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.interner = ChargedInterner(budget)
        self.time: list[int] = []
        self.track: list[int] = []
        self.weight: list[int] = []
        self.name: list[int] = []
        self.fault: list[bool] = []
        self.cpu_times: dict[str, list[int]] = defaultdict(list)
        self.clocks: list[bool] = []
        self.off: dict[int, tuple[int, bool]] = {}
        """By thread off its CPU: (since when, whether it is ready)."""
        self.woken: dict[int, int] = {}
        """By thread: when it was woken last."""
        self.states: list[tuple[int, int, StateKind, int]] = []
        """(begin, end, kind, thread)"""
        self.pid_of: dict[int, int] = {}
        """By thread."""
        self.lost: Counter[str] = Counter()
        self._stack: _Stack | None = None

    def line(self, line: str) -> None:
        if not line.strip():
            self.end_stack()
            return
        if line[0] in " \t":
            frame = _FRAME.match(line) if line[-1] == ")" else None
            if frame is not None:
                if self._stack is not None:
                    self._stack.add(frame["symbol"], frame["file"])
                return
            if line[0] == "\t":
                return  # a frame without a file
        head = _HEAD.match(line.strip())  # without stacks, commands are right-aligned
        if head is None:
            if not line.startswith("#"):
                self.lost["lines not understood"] += 1
            return
        self.end_stack()
        self._event(head)

    def _event(self, head: re.Match[str]) -> None:
        fraction = (head["fraction"] + "000000000")[:9]
        if int(head["seconds"]) > _LAST_S or int(head["period"] or 0) > _LONGEST_PERIOD_NS:
            self.lost["events with a time out of range"] += 1
            return
        self.budget.hold(_SAMPLE_BYTES)
        time_ns = int(head["seconds"]) * 1_000_000_000 + int(fraction)
        tid = int(head["tid"] or head["pid"])
        pid = int(head["pid"])
        if head["tid"]:
            self._set(self.pid_of, tid, pid)
        event = head["event"].rstrip(":")
        if "sched_switch" in event:
            self._switch(time_ns, head["rest"] or "")
            return
        if "sched_wak" in event:
            if match := _WAKE.search(head["rest"] or ""):
                self._set(self.woken, int(match["pid"]), time_ns)
            return
        comm = head["comm"].rstrip()
        track = self.interner.thread(self.pid_of.get(tid, pid), tid, comm, comm)
        clock = event.split(":")[0] in _CLOCKS
        self.time.append(time_ns)
        self.track.append(track)
        self.weight.append(int(head["period"]) if clock and head["period"] else 0)
        self.clocks.append(bool(clock and head["period"]))
        self.name.append(self.interner.name(""))
        self.fault.append(False)
        cpu = head["cpu"] or ""
        if cpu not in self.cpu_times:
            self.budget.hold(_KNOWN_BYTES)
        self.cpu_times[cpu].append(time_ns)
        self._stack = _Stack()

    def _set(self, known: dict[int, _Known], tid: int, value: _Known) -> None:
        """Keep something of a thread."""
        if tid not in known:
            self.budget.hold(_KNOWN_BYTES)
        known[tid] = value

    def _switch(self, time_ns: int, rest: str) -> None:
        match = _SWITCH.search(rest)
        if match is None:
            self.lost["switches not understood"] += 1
            return
        prev, nxt = int(match["prev"]), int(match["next"])
        if prev:
            self._set(self.off, prev, (time_ns, match["state"].startswith("R")))
        began = self.off.pop(nxt, None)
        if began is None or not nxt:
            return
        since, ready = began
        wake = since if ready else self.woken.get(nxt, 0)
        if not since <= wake <= time_ns:
            wake = time_ns  # no wake-up recorded: all of it counts as blocked
        if wake > since:
            self._state(since, wake, StateKind.BLOCKED, nxt)
        if time_ns > wake:
            self._state(wake, time_ns, StateKind.RUNQUEUE, nxt)

    def _state(self, begin_ns: int, end_ns: int, kind: StateKind, tid: int) -> None:
        self.budget.hold(_STATE_BYTES)
        self.states.append((begin_ns, end_ns, kind, tid))

    def end_stack(self) -> None:
        """Names the sample after its innermost named user-space frame, else its innermost frame."""
        stack, self._stack = self._stack, None
        if stack is None or not stack.depth or not self.name:
            return
        self.name[-1] = self.interner.name(stack.user or stack.first)
        self.fault[-1] = stack.is_fault


class _Stack:
    """Summary of the frames of a sample, which are added innermost first."""

    def __init__(self) -> None:
        self.depth = 0
        self.user = self.first = ""
        """The innermost named user-space frame, and the innermost named frame."""
        self.is_fault = False

    def add(self, symbol: str, file: str) -> None:
        if self.depth >= _FRAMES:
            return
        self.depth += 1
        self.is_fault |= symbol in _FAULTS
        if symbol in ("", "[unknown]"):
            return
        self.first = self.first or symbol
        if not file.startswith("["):
            self.user = self.user or symbol


def read(path: Path) -> Timeline:
    """Reads the output of `perf script`. Raises CaptureError; NotACapture for another format."""
    reader = _Reader(Budget(str(path), 1))
    with opened_text(path) as text:
        while line := text.readline(_LONGEST_LINE):
            whole = line[-1] == "\n" or len(line) < _LONGEST_LINE
            reader.line(line.rstrip("\n").removeprefix("\ufeff") if whole else "?")
            while not whole:  # a longer line is skipped piece by piece
                more = text.readline(_LONGEST_LINE)
                whole = not more or more[-1] == "\n"
    reader.end_stack()
    if not reader.time and not reader.states:
        raise NotACapture(
            f"{path} holds no event that perf script prints", "give what `perf script` printed"
        )
    interner = reader.interner
    tracks = {tid: interner.thread(reader.pid_of.get(tid, tid), tid) for *_, tid in reader.states}
    distance = _distance(reader.cpu_times)
    weight = [
        w if clock else distance for w, clock in zip(reader.weight, reader.clocks, strict=True)
    ]
    states = no_events()
    if reader.states:
        begin, end, kind, tids = zip(*reader.states, strict=True)
        named = {
            StateKind.BLOCKED: interner.name("blocked"),
            StateKind.RUNQUEUE: interner.name("preempted"),
        }
        states = events(
            start_ns=begin, end_ns=end, kind=kind, name=[named[k] for k in kind],
            track=[tracks[tid] for tid in tids],
        )  # fmt: skip
    return Timeline(
        names=interner.names,
        tracks=interner.tracks,
        states=states,
        samples=Samples(
            np.array(reader.time, np.int64),
            np.array(reader.track, np.int32),
            np.array(weight, np.int64),
            np.array(reader.name, np.int32),
            np.array(reader.fault, bool),
        ),
        tick_ns=distance,
        sources=("perf script",),
        notes=[f"{count:,} {what}" for what, count in reader.lost.items()],
    )


def _distance(cpu_times: dict[str, list[int]]) -> int:
    """The median time between two samples of a CPU, in ns."""
    gaps = [np.diff(np.sort(np.array(times))) for times in cpu_times.values() if len(times) > 2]
    every = np.concatenate(gaps) if gaps else np.zeros(0, np.int64)
    every = every[every > 0]
    return int(np.median(every)) if len(every) else _USUAL_NS
