# SPDX-License-Identifier: Apache-2.0
"""Samples and waits of traced requests: of threads that received an HTTP request with the W3C
header `traceparent`, until its answer begins (bpf/traces.bpf.c)."""

from __future__ import annotations

from typing import Final

from sonde.collect.attached import Attached
from sonde.collect.collector import Batch
from sonde.collect.kernel import BpfObject, Kernel, refusal
from sonde.collect.reasons import reason_of
from sonde.model.rows import TracedTuple
from sonde.procfs import START_UNIT_NS

FIELDS = (
    *("time_ns", "start_ns", "stack_id", "trace_hi", "trace_lo", "span_id"),
    *("count", "blocked_ns", "runqueue_ns", "tgid", "tid", "reason"),
)
ON_CPU: Final = -100
"""TRACED_CPU of abi/events.h."""
RECORDS_A_TICK: Final = 8_192
"""Samples and waits that are drained at a time; the ring holds fewer."""


class TraceCollector(Attached):
    """Follows requests from the socket that they came by. The samples are those of `CpuSampler`,
    the waits those of `WaitCollector`: without these there is nothing to note."""

    name = "traces"

    @staticmethod
    def bpf_object() -> BpfObject:
        """What is loaded into the kernel for it."""
        return BpfObject("traces")

    def __init__(self, kernel: Kernel, hz: int) -> None:
        super().__init__(kernel.load(self.bpf_object()))
        self._period_ns = 1e9 / hz

    def start(self) -> None:
        """Attach to what receives from, writes to and closes TCP sockets. Raises HostError."""
        try:
            for program in ("on_state", "on_sent", "on_received"):
                self._links.append(self._bpf.attach(program))
        except OSError as error:
            self.stop()
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Each sample, and each wait whose stack was taken, with its request's trace."""
        batch = Batch()
        ring = self._bpf.drain_ring("traced", "traced_sample", RECORDS_A_TICK)
        for time_ns, start, stack_id, trace_hi, trace_lo, span_id, *of_thread in ring.rows(FIELDS):
            count, blocked_ns, runqueue_ns, pid, tid, reason = of_thread
            start_ns = start - start % START_UNIT_NS
            ids = f"{trace_hi:016x}{trace_lo:016x}", f"{span_id:016x}"
            who = pid, start_ns, tid
            batch.threads.add(who)
            batch.seen += 1
            if stack_id:
                batch.stacks[stack_id] = pid, start_ns
            rows: list[TracedTuple] = []
            if reason == ON_CPU:
                weights = float(count), count * self._period_ns
                rows.append((time_ns, "cpu", "", *ids, *who, stack_id, *weights))
            else:
                name, _ = reason_of(reason)
                for kind, ns in (("blocked", blocked_ns), ("runqueue", runqueue_ns)):
                    if ns:
                        weights = float(count), float(ns)
                        rows.append((time_ns, kind, name, *ids, *who, stack_id, *weights))
            for row in rows:
                batch.add("traced", row)
        return batch
