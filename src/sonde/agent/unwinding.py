# SPDX-License-Identifier: Apache-2.0
"""The unwinder as the agent uses it; without privileges there is none, and all of this does
nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from sonde import procfs
from sonde._native import ProcessEvent
from sonde.collect.kernel import Kernel
from sonde.metrics import MetricRow, labels
from sonde.model.rows import EventRow
from sonde.resolve import Resolver
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind import STOP_REASONS, V8, Engine, Interpreter, Jvm, Unwinder

MAX_KERNEL_BYTES = 64_000_000
"""For all BPF maps together; unwind tables may take what the others leave."""
FIRST_WAIT_S = 5.0
"""How long the start waits for the unwind tables of given processes."""
BUSIEST = 32
"""In a recording of the whole machine: of this many processes, those that used most CPU time,
tables are loaded before the start."""
BUSIEST_WAIT_S = 1.0
"""How long the start waits for those."""
BUSY_GAP_S = 0.01
"""How often to call `update` while unwind tables are made, or walks ask for pages of them."""


class Unwinding:
    """Unwinds stacks by tables, where this user may load BPF programs."""

    def __init__(self, kernel: Kernel | None, resolver: Resolver) -> None:
        self._unwinder = Unwinder(kernel.unwind, resolver) if kernel else None
        self._ends: dict[str, int] = {}

    @property
    def walks(self) -> bool:
        """Whether stacks are unwound."""
        return self._unwinder is not None

    @property
    def is_busy(self) -> bool:
        """Whether something will be ready soon: call `update` again in BUSY_GAP_S."""
        unwinder = self._unwinder
        return unwinder is not None and (unwinder.is_busy or unwinder.is_paging)

    def limit(self, others_bytes: int) -> None:
        """Bound the tables by what `MAX_KERNEL_BYTES` leaves; `others_bytes`: memory of all other
        maps."""
        if self._unwinder is not None:
            self._unwinder.limit(MAX_KERNEL_BYTES - others_bytes)

    def expect(self, pids: Iterable[int]) -> None:
        """Load the tables of given processes that are there, and begin to make the others;
        `get_ready` waits for them."""
        if self._unwinder is not None and (given := set(pids)):
            self._unwinder.expect(given)
            deadline_s = time.monotonic() + FIRST_WAIT_S
            while self._unwinder.has_stale and time.monotonic() < deadline_s:
                self._unwinder.update()

    def get_ready(
        self, pids: Iterable[int], poll_events: Callable[[int], None], program: str = ""
    ) -> None:
        """Have the tables of given processes made, or where there are none those of the busiest
        ones, and wait for them for a while.

        `poll_events` waits for process events, as many milliseconds at most, and drains them.
        `program`: the file that a given process will execute.
        """
        if self._unwinder is None:
            return
        given = set(pids)
        if program:
            self._unwinder.preload(program)
        if given:
            self._unwinder.expect(given)
        else:
            self._unwinder.load_now(procfs.busiest(BUSIEST))
        deadline_s = time.monotonic() + (FIRST_WAIT_S if given else BUSIEST_WAIT_S)
        while self._unwinder.is_busy and time.monotonic() < deadline_s:
            poll_events(0 if self._unwinder.has_stale else int(BUSY_GAP_S * 1000))
            self._unwinder.update()
        self._unwinder.expect_pages()

    def on_process_events(self, events: Sequence[ProcessEvent]) -> None:
        """Take in what processes did."""
        if self._unwinder is not None:
            self._unwinder.on_process_events(events)

    def update(self) -> bool:
        """Load new tables, and those that walks ask for, into the kernel. Returns whether there was
        anything to do."""
        return self._unwinder is not None and self._unwinder.update()

    def on_events_lost(self) -> None:
        """Load all processes into the kernel again."""
        if self._unwinder is not None:
            self._unwinder.resync()

    def on_processes_unseen(self, pids: Sequence[int]) -> None:
        """Load these processes into the kernel again."""
        if self._unwinder is not None:
            self._unwinder.reload(pids)

    def python_of(self, key: tuple[int, int]) -> Interpreter | None:
        """The Python that a process (pid, start_ns) runs or ran last."""
        return self._unwinder.python_of(key) if self._unwinder is not None else None

    def loaded_python_of(self, key: tuple[int, int]) -> tuple[Interpreter, int] | None:
        """The same, and the address of its _PyRuntime in the process."""
        return self._unwinder.loaded_python_of(key) if self._unwinder is not None else None

    def runtime_of(self, process: TrackedProcess) -> Jvm | V8 | Engine | None:
        """The JVM, V8, Ruby or PHP that a process runs; None without one that can be read."""
        return self._unwinder.runtime_of(process) if self._unwinder is not None else None

    def memory_bytes(self) -> int:
        """Kernel memory of tables and mappings."""
        return self._unwinder.memory_bytes() if self._unwinder is not None else 0

    def stops(self) -> Mapping[str, int]:
        """Walks so far, by the name of their stop reason."""
        return self._unwinder.stops() if self._unwinder is not None else {}

    def losses(self) -> Mapping[str, int]:
        """Times so far that a process got no tables to be walked by, by cause."""
        return self._unwinder.losses() if self._unwinder is not None else {}

    def begin(self, tails_dropped: int) -> None:
        """Count walks from now on; `tails_dropped`: as in `ends`, up to now."""
        self._ends = {**self.stops(), "tail_dropped": tails_dropped}

    def ends(self, now_ns: int, tails_dropped: int) -> Iterator[EventRow]:
        """Rows of `event`: how the walks since the last call ended, by stop reason; and processes
        whose interpreter cannot be read, and why. `tails_dropped`: long stacks so far that were cut
        (`Dictionary.tails_dropped`)."""
        if self._unwinder is None:
            return
        now = self._unwinder.stops()
        if tails_dropped:
            now["tail_dropped"] = tails_dropped
        for end in STOP_REASONS:
            new = now.get(end.name, 0) - self._ends.get(end.name, 0)
            if new > 0:
                name = f"{end.kind}.{end.name}"
                yield EventRow(now_ns, "stack_end", name, 0, 0, float(new), end.text)
        self._ends = now
        for (pid, start_ns), reason in self._unwinder.take_refusals():
            text = f"{reason}; its stacks are native"
            yield EventRow(now_ns, "notice", "engine_refused", pid, start_ns, 1.0, text)

    def metrics(self, now_ns: int) -> Iterator[MetricRow]:
        """Rows of `metric`."""
        if self._unwinder is None:
            return
        for name, value in self._unwinder.usage().items():
            yield now_ns, f"sonde.unwind.{name}", "", float(value)
        for error, times in self._unwinder.refused.items():
            yield now_ns, "sonde.unwind.refused", labels(error__type=error), float(times)
        for end, walks in self._ends.items():
            yield now_ns, "sonde.unwind.walks", labels(sonde__stack__end=end), float(walks)

    def close(self) -> None:
        """End the unwinder's child processes."""
        if self._unwinder is not None:
            self._unwinder.close()
