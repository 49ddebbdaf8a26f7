# SPDX-License-Identifier: Apache-2.0
"""Waits of threads by reason, as columns: what a report ranks and counts without their objects."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sonde.model.answers import Wait
from sonde.model.code import Frame
from sonde.model.profile import ProfileKind
from sonde.query.columns import int64_column
from sonde.query.known_threads import coded_texts
from sonde.query.own_frames import own_frame
from sonde.query.row_sequence import RowSequence
from sonde.query.session import Session

IDLE_SHARE = 0.9
"""A thread counts as idle if one of its waits lasted this share of the recording or more."""

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class WaitRows(RowSequence[Wait]):
    """Waits, the longest total first."""

    def __init__(self, session: Session, rows: pa.Table) -> None:
        """`rows`: thread, kind, name, op, n, ns, max_ns, waker_tid, and stack (-1: none was taken)
        of each."""
        self._session = session
        kinds, kind = coded_texts(rows.column("kind"))
        self._kinds = [ProfileKind.from_column(name) for name in kinds]
        self._reasons, reason = coded_texts(rows.column("name"))
        self._system_calls, system_call = coded_texts(rows.column("op"))
        self._hints: dict[int, tuple[Frame | None, str]] = {}
        self.thread: Ints = int64_column(rows, "thread")
        """Indices in `Session.threads`."""
        self.ns: Ints = int64_column(rows, "ns")
        self.events: Ints = int64_column(rows, "n")
        stack: Ints = int64_column(rows, "stack")
        self._stack = stack
        off_cpu = np.array([one == ProfileKind.OFF_CPU for one in (*self._kinds, None)], bool)
        self.is_off_cpu: Mask = off_cpu[kind]
        """The others are waits for a CPU."""
        max_ns = int64_column(rows, "max_ns")
        self.idle: Mask = self._idle(max_ns)
        """Whether one wait of the same thread lasted (nearly) the whole recording."""
        # Without stacks there is no need to look at any frame.
        has_stack = stack >= 0
        self.of_sonde: Mask = has_stack.copy()
        if has_stack.any():
            self.of_sonde[has_stack] = session.waits_of_sonde[stack[has_stack]]
        waker = int64_column(rows, "waker_tid")
        numbers = (self.thread, kind, reason, system_call, self.events, self.ns, max_ns, waker)
        super().__init__(self._wait, (*numbers, self.idle, stack, self.of_sonde))

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

    def of_kinds(self, kinds: Collection[ProfileKind]) -> Ints:
        """The numbers of the waits of these kinds, ascending; shape (waits of these kinds,)."""
        off_cpu, run_queue = ProfileKind.OFF_CPU in kinds, ProfileKind.RUN_QUEUE in kinds
        return np.flatnonzero(np.where(self.is_off_cpu, off_cpu, run_queue))

    def has_hint(self, row: int) -> bool:
        """Whether the stack of a wait has a frame that shows what waited."""
        stack = int(self._stack[row])
        return stack >= 0 and own_frame(self._session.stacks, stack) is not None

    @cached_property
    def _with_tid(self) -> dict[int, int]:
        """By thread id: the number of the last thread with it."""
        return {tid: number for number, tid in enumerate(self._session.threads.tid.tolist())}

    def _waker(self, tid: int) -> str:
        number = self._with_tid.get(tid)
        if number is None:
            return f"tid {tid}" if tid else ""
        return f"{self._session.threads.name_of(number)} ({tid})"

    def _hint(self, stack: int) -> tuple[Frame | None, str]:
        """(the own frame, the location in the user's Python code) of a stack."""
        if stack < 0:
            return None, ""
        found = self._hints.get(stack)
        if found is None:
            user = int(self._session.user_frames[stack])
            stacks = self._session.stacks
            location = stacks.frames[user].location if user >= 0 else ""
            found = self._hints[stack] = own_frame(stacks, stack), location
        return found

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
        hint, location = self._hint(stack)
        return Wait(
            thread=self._session.threads[thread],
            kind=self._kinds[kind],
            reason=self._reasons[reason],
            system_call=self._system_calls[system_call],
            count=count,
            ns=ns,
            max_ns=max_ns,
            waker=self._waker(waker_tid),
            idle=idle,
            hint=hint.name if hint else "",
            hint_binary=hint.binary if hint else "",
            location=location,
            of_sonde=of_sonde,
        )
