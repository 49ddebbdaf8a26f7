# SPDX-License-Identifier: Apache-2.0
"""System calls by process: how many, how long, how many failed. Off unless asked for."""

from __future__ import annotations

from typing import Final

from sonde.collect.attached import Attached
from sonde.collect.collector import Batch
from sonde.collect.kernel import BpfObject, Kernel, expect_fields, refusal
from sonde.collect.reasons import reason_of
from sonde.procfs import START_UNIT_NS

FIELDS = ("tgid", "nr", "start_ns", "count", "errors", "ns", "max_ns")

ALL_CALLS: Final = 0xFFFF_FFFF
"""SYSCALLS_ALL of abi/events.h, in place of a number: all calls of a process for which there was no
row by number."""


NO_CALL: Final = 1024
"""CALL_NUMBERS of bpf/syscalls.bpf.c: numbers of no call, all of them together."""
ROW_SHARES: Final = {
    "free_rows": 8192,
    "most_rows_of_one_party": 1024,
    "young_rows_of_one": 1024,
}
"""Rows that are made in a second (bpf/row_share.h): a process has one for each call."""


class SyscallCollector(Attached):
    """Rows of `activity`, kind syscall, named after the call; failed ones have status 1."""

    name = "syscalls"

    @staticmethod
    def bpf_object() -> BpfObject:
        """What is loaded into the kernel for it."""
        return BpfObject("syscalls", ROW_SHARES, takes_stacks=False)

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel.load(self.bpf_object()))
        self._recount: int | None = None
        expect_fields(self._bpf, "syscalls", FIELDS)

    def start(self) -> None:
        """Count every call. Returns of calls are followed before entries, or a call that began in
        between would seem to go on. Raises HostError."""
        try:
            if self._recount is None:
                self._recount = self._bpf.attach("on_recount")
            self._links = [self._bpf.attach(program) for program in ("on_exit", "on_enter")]
        except OSError as error:
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Calls that returned since the last tick."""
        if to_the_end and self._recount is not None:
            self._iterators.run(self._recount)
        batch = Batch()
        for pid, nr, start, count, errors, ns, max_ns in self._bpf.drain("syscalls"):
            start_ns = start - start % START_UNIT_NS
            thread = (pid, start_ns, pid)  # calls of all its threads count as its first one's
            batch.threads.add(thread)
            is_unnamed = nr == ALL_CALLS or not pid  # pid 0: what had no row in the map (`rest`)
            name = "other" if is_unnamed else _name(nr)
            # `activity`: start, kind, name, api, op, direction, status, thread, count, ns, bytes,
            # max_ns, waker.
            if count > errors:
                totals = (count - errors, ns, 0, max_ns, 0, 0)
                batch.add("activity", (since_ns, "syscall", name, "", "", "", 0, *thread, *totals))
            if errors:
                # Time is counted once, with those that succeeded where there are any. The longest
                # call is in both rows: it is not known which of them it was.
                totals = (errors, 0 if count > errors else ns, 0, max_ns, 0, 0)
                batch.add("activity", (since_ns, "syscall", name, "", "", "", 1, *thread, *totals))
            batch.seen += count
        return batch


def _name(nr: int) -> str:
    return "unknown" if nr == NO_CALL else reason_of(nr)[1] or f"call {nr}"
