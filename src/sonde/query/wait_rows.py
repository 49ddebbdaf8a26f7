# SPDX-License-Identifier: Apache-2.0
"""Waits of threads by reason, as columns: what a report ranks and counts without their objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.model.answers import Wait
from sonde.model.code import Frame
from sonde.model.profile import ProfileKind
from sonde.model.serving import ACCEPT_CALLS
from sonde.model.wait_lengths import WaitLengths
from sonde.query.columns import int64_column
from sonde.query.kernel_threads import kernel_threads
from sonde.query.known_threads import coded_texts
from sonde.query.own_frames import own_frame, own_frames
from sonde.query.request_waits import wait_for_requests
from sonde.query.row_sequence import RowSequence
from sonde.query.session import Session
from sonde.query.single_waits import SingleWaits, WaitKey

IDLE_SHARE = 0.9
"""A thread counts as idle if one of its waits lasted this share of the recording or more."""

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


_LOW_HALF = 0xFFFFFFFF


class Hint(NamedTuple):
    """What a stack shows of a wait; fields as in `Wait`."""

    function: str
    binary: str
    location: str


class WaitRows(RowSequence[Wait]):
    """Waits, the longest total first."""

    def __init__(self, session: Session, rows: pa.Table, single: Callable[[], SingleWaits]) -> None:
        """`rows`: thread, kind, name, op, n, ns, max_ns, waker_tid, and stack (-1: none was taken)
        of each. `single`: reads those that are known one by one."""
        self._session = session
        self._read_single = single
        self._known_hints: dict[int, Hint] = {}
        kinds, self.kind = coded_texts(rows.column("kind"))
        """Index in `kinds` of each; `reason` and `system_call` likewise."""
        self.kinds = [ProfileKind.from_column(name) for name in kinds]
        self.reasons, self.reason = coded_texts(rows.column("name"))
        self.system_calls, self.system_call = coded_texts(rows.column("op"))
        self.thread: Ints = int64_column(rows, "thread")
        """Indices in `Session.threads`."""
        self.ns: Ints = int64_column(rows, "ns")
        self.events: Ints = int64_column(rows, "n")
        stack: Ints = int64_column(rows, "stack")
        self._stack = stack
        off_cpu = np.array([one == ProfileKind.OFF_CPU for one in (*self.kinds, None)], bool)
        self.is_off_cpu: Mask = off_cpu[self.kind]
        """The others are waits for a CPU."""
        self.max_ns: Ints = int64_column(rows, "max_ns")
        self.idle: Mask = self._idle(self.max_ns)
        """Whether one wait of the same thread lasted (nearly) the whole recording."""
        # Without stacks there is no need to look at any frame.
        has_stack = stack >= 0
        self.of_sonde: Mask = has_stack.copy()
        if has_stack.any():
            self.of_sonde[has_stack] = session.waits_of_sonde[stack[has_stack]]
        self._waker_tid: Ints = int64_column(rows, "waker_tid")
        texts = (self.kind, self.reason, self.system_call)
        numbers = (self.events, self.ns, self.max_ns, self._waker_tid)
        super().__init__(
            self._wait, (self.thread, *texts, *numbers, self.idle, stack, self.of_sonde)
        )

    def _idle(self, max_ns: Ints) -> Mask:
        least_ns = self._session.info.duration_ns * IDLE_SHARE
        idle = np.zeros(len(self._session.threads), bool)
        if least_ns:
            idle[self.thread[self.is_off_cpu & (max_ns >= least_ns)]] = True
        return idle[self.thread]

    @cached_property
    def is_kernel(self) -> Mask:
        """Whether each is of a thread of the kernel."""
        return self._session.threads.is_kernel[self.thread]

    @cached_property
    def single(self) -> SingleWaits:
        """Those that are known one by one."""
        return self._read_single()

    def lengths(self, rows: Ints) -> list[WaitLengths]:
        """The lengths of the single ones among each of these waits; `rows`: shape (waits,)."""
        columns = (self.thread[rows], self.kind[rows], self.reason[rows])
        return [
            self.single.lengths(
                [WaitKey(thread, self.kinds[kind].column_value, self.reasons[reason])]
            )
            for thread, kind, reason in zip(*(one.tolist() for one in columns), strict=True)
        ]

    def lengths_together(self, threads: Iterable[int], reason: str) -> WaitLengths:
        """The lengths of the single times for which these threads were blocked for a reason.
        `threads`: indices in `Session.threads`."""
        kind = ProfileKind.OFF_CPU.column_value
        return self.single.lengths(WaitKey(thread, kind, reason) for thread in threads)

    @cached_property
    def process(self) -> Ints:
        """The index in `Session.processes` of each."""
        found: Ints = np.asarray(self._session.threads.process, np.int64)[self.thread]
        return found

    def labels(self, rows: Ints) -> set[str]:
        """The threads of these waits, as `Wait.waker` names one; `rows`: shape (waits,)."""
        threads, numbers = self._session.threads, np.unique(self.thread[rows])
        return {f"{threads.name_of(one)} ({int(threads.tid[one])})" for one in numbers.tolist()}

    @cached_property
    def for_requests(self) -> Mask:
        """Whether each is for the next connection, request or task: the thread is idle."""
        found = np.array([one in ACCEPT_CALLS for one in (*self.system_calls, "")], bool)[
            self.system_call
        ]
        stacks, index = np.unique(self._stack, return_inverse=True)
        known = stacks >= 0
        waits = np.zeros(len(stacks), bool)
        waits[known] = wait_for_requests(self._session.stacks, stacks[known])
        idle: Mask = (found | waits[index.reshape(-1)]) & self.is_off_cpu
        return idle

    def of_kinds(self, kinds: Collection[ProfileKind]) -> Ints:
        """The numbers of the waits of these kinds, ascending; shape (waits of these kinds,)."""
        off_cpu, run_queue = ProfileKind.OFF_CPU in kinds, ProfileKind.RUN_QUEUE in kinds
        return np.flatnonzero(np.where(self.is_off_cpu, off_cpu, run_queue))

    def wakers(self, rows: Ints) -> tuple[list[str], Ints]:
        """(texts, as `Wait.waker`; the index in these of each of the rows)."""
        tids, index = np.unique(self._waker_tid[rows], return_inverse=True)
        return [*map(self.waker, tids.tolist())], index

    def hints(self, rows: Ints) -> tuple[list[Hint], Ints]:
        """(what stacks show of waits; the index in these of each of the rows)."""
        stacks, of_row = np.unique(self._stack[rows], return_inverse=True)
        has_stack = stacks >= 0
        own, user = np.full((2, len(stacks)), -1, np.int64)
        if has_stack.any():
            own[has_stack] = own_frames(self._session.stacks, stacks[has_stack])
            user[has_stack] = self._session.user_frames[stacks[has_stack]]
        pairs = (own << 32) | (user & _LOW_HALF)
        _, first, of_stack = np.unique(pairs, return_index=True, return_inverse=True)
        frames = self._session.stacks.frames
        own_of = [frames[at] if at >= 0 else None for at in own[first].tolist()]
        hints = [*map(self._hint, own_of, user[first].tolist())]
        return hints, of_stack[of_row]

    def has_hint(self, rows: Ints) -> Mask:
        """Whether the stack of each of the waits has a frame that shows what waited."""
        stacks, index = np.unique(self._stack[rows], return_inverse=True)
        found = np.zeros(len(stacks), bool)
        known = stacks >= 0
        found[known] = own_frames(self._session.stacks, stacks[known]) >= 0
        return found[index]

    @cached_property
    def _with_tid(self) -> dict[int, int]:
        """By thread id: the number of the last thread with it."""
        return {tid: number for number, tid in enumerate(self._session.threads.tid.tolist())}

    @cached_property
    def _process_names(self) -> dict[int, str]:
        """By pid: the name of the last process with it."""
        return {one.pid: one.name for one in self._session.processes if one.name}

    @cached_property
    def _kernel_threads(self) -> dict[int, str]:
        return kernel_threads(
            self._session.arrow("SELECT name, pid, text FROM event WHERE kind = 'process'")
        )

    def waker(self, tid: int) -> str:
        """A thread that ended waits: 'name (tid)', '' for 0. Of one that was not recorded the name
        is that of its process, if it is the first thread of a known one, or a kernel thread."""
        if not tid:
            return ""
        number = self._with_tid.get(tid)
        if number is None:
            whole = self._session.info.host.get("whole_machine", True)
            other = "unknown thread" if whole else "another process"
            name = self._process_names.get(tid) or self._kernel_threads.get(tid)
            return f"{name or other} ({tid})"
        return f"{self._session.threads.name_of(number)} ({tid})"

    def _hint_of(self, stack: int) -> Hint:
        """Of a stack; -1 none."""
        if stack < 0:
            return Hint("", "", "")
        found = self._known_hints.get(stack)
        if found is None:
            frame, user = own_frame(self._session.stacks, stack), self._session.user_frames[stack]
            found = self._known_hints[stack] = self._hint(frame, int(user))
        return found

    def _hint(self, frame: Frame | None, user: int) -> Hint:
        """`frame`: the own one; `user`: the number of that in the user's code, -1 none."""
        location = self._session.stacks.frames[user].location if user >= 0 else ""
        return Hint(frame.name, frame.binary, location) if frame else Hint("", "", location)

    def _wait(
        self,
        thread: int,
        kind: int,
        reason: int,
        system_call: int,
        count: int,
        ns: int,
        max_ns: int,
        waker_tid: int,
        idle: bool,
        stack: int,
        of_sonde: bool,
    ) -> Wait:
        hint = self._hint_of(stack)
        key = WaitKey(thread, self.kinds[kind].column_value, self.reasons[reason])
        single = self.single.lengths([key])
        return Wait(
            thread=self._session.threads[thread],
            kind=self.kinds[kind],
            reason=self.reasons[reason],
            system_call=self.system_calls[system_call],
            count=count,
            ns=ns,
            max_ns=max_ns,
            waker=self.waker(waker_tid),
            idle=idle,
            hint=hint.function,
            hint_binary=hint.binary,
            location=hint.location,
            of_sonde=of_sonde,
            single_count=single.count,
            single_ns=single.ns,
            single_p10_ns=single.p10_ns,
            single_p50_ns=single.p50_ns,
            single_p90_ns=single.p90_ns,
        )
