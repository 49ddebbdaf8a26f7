# SPDX-License-Identifier: Apache-2.0
"""Where every thread of one process is now: by an iterator over tasks for those that sleep, by the
CPU sampler for those that run, whose registers are in their CPU."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sonde import _native, interpreter, procfs
from sonde.collect.cpu import CpuSampler
from sonde.collect.kernel import BpfObject, Kernel, expect_fields, refusal
from sonde.collect.other_memory import OtherMemory
from sonde.errors import KernelUnsupported
from sonde.procfs import START_UNIT_NS

FIELDS: Final = ("tgid", "tid", "start_ns", "stack_id", "state", "on_cpu")
HZ: Final = 997
"""Of the CPU sampler, while threads that run are looked for."""
PASS_S: Final = 0.005
"""How long the CPU sampler runs at a time: some five samples of each CPU."""
MAX_PASSES: Final = 10
"""How often the sampler runs; a thread that was not seen by then has no stack."""
ITERATION_S: Final = 8.0
"""How long the iteration over the process's threads may take: 3,000 of them take a second."""
MAX_THREADS: Final = 65_536
"""Room of the map `dumped` (bpf/dump.bpf.c): 7 MB, and that twice."""
MIN_ROOM: Final = 1024
"""Threads that there is room for at least: a process may start more before it is dumped again."""
_TASK_IDLE: Final = 0x402
_RTLOCK_WAIT: Final = 0x1000
_FROZEN: Final = 0x8000
"""States of a task, bits of linux/sched.h."""
_LETTERS: Final = "RSDTtXZP"
"""Of ps(1), by the highest of the bits that the kernel reports (TASK_REPORT of linux/sched.h)."""


@dataclass(frozen=True, slots=True)
class ThreadState:
    """One thread at the moment it was looked at."""

    tid: int
    start_ns: int
    """Of its process."""
    state: str
    """As in ps(1): R running, S interruptible sleep, D uninterruptible sleep, I idle, T stopped,
    t traced, P parked, Z ended, X being removed."""
    stack_id: int
    """0: its stack could not be taken."""


class ThreadDump:
    """Takes the stack of every thread of one process once."""

    def __init__(self, kernel: Kernel, pid: int, sampler: CpuSampler) -> None:
        """`kernel` and `sampler` watch `pid`, and few others. Raises HostError."""
        room = {"dumped": room_for(len(procfs.tids(pid)))}
        try:
            self._bpf = kernel.load(BpfObject("dump", {"dump_tgid": pid}, max_entries=room))
        except KernelUnsupported as error:
            raise KernelUnsupported(
                "this kernel cannot read the stacks of threads that sleep",
                "Use Linux 5.18 or newer; sonde record -p works from 5.15 on.",
            ) from error
        expect_fields(self._bpf, "dumped", FIELDS)
        self._pid = pid
        self._is_given_up = False
        """Reading its memory took too long."""
        self._sampler = sampler
        self.left_out = 0
        """Threads that the last `take` had no room or no time for."""

    def take(self) -> list[ThreadState]:
        """Every thread, by number. A thread that runs is looked at until it was seen or sleeps, at
        most `MAX_PASSES` times."""
        before = procfs.tids(self._pid)
        threads = self._iterate()
        # Those that were there all the time.
        self.left_out = len(before & procfs.tids(self._pid) - threads.keys())
        left = {tid for tid, it in threads.items() if not it.stack_id and it.state == "R"}
        if left and not self._is_given_up:
            self._sampler.start()
            try:
                self._see_running(threads, left)
            finally:
                self._sampler.stop()
        return [threads[tid] for tid in sorted(threads)]

    def _see_running(self, threads: dict[int, ThreadState], left: set[int]) -> None:
        until_s = time.monotonic() + ITERATION_S
        for _ in range(MAX_PASSES):
            time.sleep(PASS_S)
            seen = self._sampler.take().rows(["tid", "start_ns", "stack_id"])
            for tid, start_ns, stack_id in seen:
                if tid in left and stack_id:
                    threads[tid] = ThreadState(tid, _in_clock_ticks(start_ns), "R", stack_id)
                    left.discard(tid)
            if not left or self._is_given_up or time.monotonic() > until_s:
                return
            now = self._iterate()
            for tid in list(left):
                if tid not in now:
                    if not self._is_given_up:  # else it may only not have been reached
                        del threads[tid]  # it ended
                        left.discard(tid)
                elif now[tid].stack_id:
                    threads[tid] = now[tid]
                    left.discard(tid)

    def _iterate(self) -> dict[int, ThreadState]:
        try:
            link = self._bpf.attach("on_dump")
            try:
                self._read_all(link)
            finally:
                self._bpf.detach(link)
        except OSError as error:
            if error.errno == errno.ESRCH:
                return {}
            raise refusal(error) from error
        found = {}
        for _, tid, start_ns, stack_id, state, on_cpu in self._bpf.drain("dumped"):
            letter = "R" if on_cpu else state_letter(state)
            found[tid] = ThreadState(tid, _in_clock_ticks(start_ns), letter, stack_id)
        return found

    def _read_all(self, link: int) -> None:
        """Run the iterator in a child, which may be given up: it reads the process's stacks, and
        waits where the process keeps its memory map locked, or where a page of a stack is that of a
        FUSE file whose server does not answer. What was seen until then counts. Raises OSError."""
        memory = OtherMemory(self._bpf, self._pid)
        status = interpreter.run_forked(lambda: memory.walk(link), ITERATION_S)
        if status is None:
            self._is_given_up = True
            procfs.BROKER.leave_alone(self._pid)
        elif status:
            raise OSError(status, os.strerror(status))

    def losses(self) -> Mapping[str, int]:
        """What was lost, by name."""
        return self._sampler.losses()


def room_for(threads: int) -> int:
    """Entries of the map `dumped` for a process that has this many threads now: as many again may
    start before they are looked at."""
    return min(MAX_THREADS, max(MIN_ROOM, 2 * threads))


def state_letter(bits: int) -> str:
    """Of ps(1), by the task's state and exit state together, as the kernel's task_state_index()."""
    if bits & (_RTLOCK_WAIT | _FROZEN):
        return "D"
    if bits & _TASK_IDLE == _TASK_IDLE:
        return "I"
    reported = bits & (1 << len(_LETTERS) - 1) - 1
    return _LETTERS[reported.bit_length()]


def _in_clock_ticks(start_ns: int) -> int:
    """As /proc has it: whole ticks of USER_HZ."""
    return start_ns - start_ns % START_UNIT_NS


def stacks(kernel: Kernel, threads: list[ThreadState]) -> dict[int, _native.RawStack]:
    """The walks of `threads` by the id of their stack."""
    wanted = [it.stack_id for it in threads if it.stack_id]
    return {found.id: found for found in kernel.walks(wanted)}
