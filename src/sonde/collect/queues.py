# SPDX-License-Identifier: Apache-2.0
"""Run queues: their length up to 100 times a second, and how long threads wait in each.

Rows of `metric`: at the full rate for the machine, once a tick for each CPU.
"""

from __future__ import annotations

import math
import mmap
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sonde.collect.collector import Batch, Collector
from sonde.collect.kernel import BpfObject, Kernel, losses_of, refusal
from sonde.metrics import MetricRow, labels
from sonde.model.rows import EventRow

IDLE_GAP_NS = 100_000_000
"""Between two looks at a machine on which nothing runs: looking would wake it."""
SWITCHES = 4
"""Index of the field in `struct cpu_queue`."""
TIMED = 3
"""Index of the field in `struct watch`."""
PULSES_A_TICK = 10_000
"""Looks at all run queues (one `struct pulse` each, abi/events.h) that are drained at a time."""
STIRS_KEPT = 64
"""Records of the ring `stirs`, by which the BPF program wakes the agent as soon as the machine is
no longer idle, that are dropped at a time: nobody waits for them any more."""
MAX_CPUS = 1_024
"""CPUs whose run queues are looked at, those with the lowest numbers."""
GIVEN_BACK = 1 << 20
"""Bytes that are allocated and freed, so that the kernel has free pages on this CPU."""
QUANTILE = 0.99
"""Of the waits of a tick, as sonde.host.runqueue.wait_p99 has it, rounded up to a power of 2 ns."""
SWITCH_S = 80e-9
"""CPU time that it costs to follow one context switch."""
SWITCH_BUDGET = 0.001
"""Share of the node's CPU for that. Where it would be more, switches are followed in one tick of
many, and a notice is given; what processes waited in all is in `usage`, whatever happens here."""
REST_S = 10.0
"""How long switches are not followed, times their cost as a multiple of the budget; at most six
times that."""
TRY_S = 0.25
"""How long switches are then followed to see whether they are still too many."""
PULSES = {
    "sonde.host.runqueue.running": "running",
    "sonde.host.runqueue.busy_cpus": "busy",
    "sonde.host.runqueue.longest": "longest",
    "sonde.host.runqueue.io_waiting": "io_waiting",
    "sonde.host.runqueue.switches": "switches",
}
"""Series at the full rate, and the field of `struct pulse` that each holds."""


class QueueCollector(Collector):
    """Looks at run queues `hz` times a second while the machine works."""

    name = "queues"
    can_wake = True

    @staticmethod
    def bpf_object(hz: int) -> BpfObject:
        """What is loaded into the kernel for it."""
        constants = {
            "cpus": min(_possible_cpus(), MAX_CPUS),
            "busy_gap_ns": 1_000_000_000 // hz,
            "idle_gap_ns": max(IDLE_GAP_NS, 1_000_000_000 // hz),
        }
        return BpfObject("queues", constants, takes_stacks=False)

    def __init__(self, kernel: Kernel, hz: int) -> None:
        self._cpus = min(_possible_cpus(), MAX_CPUS)
        self._bpf = kernel.load(self.bpf_object(hz))
        self._running = False
        self._hz = hz
        self._timer: int | None = None
        """Link of the sampling clocks; None: the BPF timer looks."""
        self._reported = False
        self._labels = [labels(cpu__logical_number=cpu) for cpu in range(self._cpus)]
        self._following: int | None = None
        """Link of the program on context switches; None: they are not followed until
        `_rest_until_s`."""
        self._rest_until_s = 0.0
        self._drained_s = 0.0
        self._tried = False
        """Switches were followed for a whole tick, so that their cost is known."""
        self._delays: list[tuple[int, ...]] = []
        self._queues: list[tuple[int, ...]] = []

    def start(self) -> None:
        """Follow switches, and start the timer. Raises HostError."""
        try:
            self._following = self._bpf.attach("on_switch")
            self._bpf.set_array("wanted", 0, struct.pack("=I", 1))
            self._running = True
            self._begin()
            if not self._is_timed():
                self._timer = self._bpf.attach_sampling("on_tick", self._hz)
        except OSError as error:
            raise refusal(error) from error
        self._delays, self._queues = self._read()
        self._drained_s = time.monotonic()

    def _begin(self) -> None:
        """Start the timer where it does not run."""
        begin = self._bpf.attach("on_begin")
        # For a timer the kernel, which may take no lock here, allocates from this CPU's own list of
        # free pages or not at all: freeing some fills that list.
        with mmap.mmap(-1, GIVEN_BACK) as pages:
            for at in range(0, GIVEN_BACK, mmap.PAGESIZE):
                pages[at] = 1
        self._bpf.walk(begin)  # a pass of the iterator, which starts the timer
        self._bpf.detach(begin)

    def _is_timed(self) -> bool:
        """Whether the BPF timer runs."""
        return bool(self._bpf.values("watches", 0)[0][TIMED])

    def is_on_clocks(self) -> bool:
        """Whether perf's sampling clocks run in place of a BPF timer."""
        return self._timer is not None

    def _keep_looking(self, batch: Batch) -> None:
        """Have the timer run; while the kernel refuses it, the sampling clocks."""
        if not self._is_timed():
            with suppress(OSError):
                self._begin()
        timed = self._is_timed()
        if timed and self._timer is not None:
            self._bpf.detach(self._timer)
            self._timer = None
            self._reported = False
        elif not timed and self._timer is None:
            with suppress(OSError):
                self._timer = self._bpf.attach_sampling("on_tick", self._hz)
        if not timed and not self._reported:
            self._report_refusals(batch)
            self._reported = True

    def _report_refusals(self, batch: Batch) -> None:
        """Why there is no timer."""
        memory, other, start = self._bpf.sums("spent", [2, 3, 4])
        text = (
            "run queues are looked at by sampling clocks: the kernel refused a timer"
            f" ({memory} × no memory, {other} × for another reason, {start} × its start)"
        )
        row = EventRow(time.monotonic_ns(), "notice", "runqueue_timer", 0, 0, 1.0, text)
        batch.add("event", row)

    def _read(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        delays = self._bpf.values("delays", 0, per_cpu=True)
        return delays, [self._bpf.values("queues", cpu)[0] for cpu in range(self._cpus)]

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Looks one by one, and of each CPU sums over the tick."""
        batch = Batch()
        ring = self._bpf.drain_ring("pulses", "pulse", PULSES_A_TICK)
        if len(ring):
            for series, field in PULSES.items():
                columns = {
                    "time_ns": ring.ints("time_ns"),
                    "series": ring.constant(series),
                    "labels": ring.constant(""),
                    "value": ring.ints(field),
                }
                batch.parts.append(("metric", columns))
        batch.seen += len(ring)
        delays, queues = self._read()
        rows = batch.metrics
        for cpu, label in enumerate(self._labels):
            self._report_delays(rows, since_ns, label, self._delays[cpu], delays[cpu])
            looks, running, busy, *_ = (
                now - before for now, before in zip(queues[cpu], self._queues[cpu], strict=True)
            )
            if looks:
                mean, share = running / looks, busy / looks
                rows.append((since_ns, "sonde.host.runqueue.length", label, mean))
                rows.append((since_ns, "sonde.host.runqueue.busy", label, share))
        if self._running:
            self._keep_looking(batch)
        self._keep_budget(batch, queues)
        self._delays, self._queues = delays, queues
        return batch

    def _keep_budget(self, batch: Batch, queues: list[tuple[int, ...]]) -> None:
        """Follow no switches for a while where there are too many, and try again after that."""
        now_s = time.monotonic()
        passed_s, self._drained_s = now_s - self._drained_s, now_s
        if self._following is None:
            if self._running and now_s >= self._rest_until_s:
                with suppress(OSError):
                    self._following = self._bpf.attach("on_switch")
                    self._tried = False
            return
        before = sum(queue[SWITCHES] for queue in self._queues)
        self._tried = before > 0
        switches = sum(queue[SWITCHES] for queue in queues) - before
        share = switches * SWITCH_S / passed_s / self._cpus
        if share > SWITCH_BUDGET and before:
            self._bpf.detach(self._following)
            self._following = None
            rest_s = min(REST_S * share / SWITCH_BUDGET, 6 * REST_S)
            self._rest_until_s = now_s + rest_s
            text = f"{switches / passed_s:,.0f} switches a second: followed now and then only"
            row = EventRow(time.monotonic_ns(), "notice", "runqueue_rest", 0, 0, rest_s, text)
            batch.add("event", row)

    @staticmethod
    def _report_delays(
        rows: list[MetricRow],
        time_ns: int,
        label: str,
        before: tuple[int, ...],
        now: tuple[int, ...],
    ) -> None:
        count, total_ns, _max_ns, *slots = now
        if count == before[0]:
            return
        rows.append((time_ns, "sonde.host.runqueue.waits", label, float(count)))
        rows.append((time_ns, "sonde.host.runqueue.wait_time", label, total_ns / 1e9))
        new = [(a - b) & 0xFFFFFFFF for a, b in zip(slots, before[3:], strict=True)]
        left = (1 - QUANTILE) * sum(new)
        for slot in reversed(range(len(new))):
            left -= new[slot]
            if left < 0:
                rows.append((time_ns, "sonde.host.runqueue.wait_p99", label, 2**slot / 1e9))
                return

    @property
    def drain_within_s(self) -> float:
        """Soon, where switches are followed again and it is not known yet whether they are too
        many."""
        return TRY_S if self._following is not None and not self._tried else math.inf

    def arm_wakeup(self) -> int:
        """Have the timer report, once, when the machine is no longer idle."""
        self._bpf.set_array("wanted", 1, struct.pack("=I", 1))
        return self._bpf.ring_fileno("stirs")

    def disarm_wakeup(self) -> None:
        """Have it report no more, and forget what it reported."""
        self._bpf.set_array("wanted", 1, struct.pack("=I", 0))
        self._bpf.drain_ring("stirs", "pulse", STIRS_KEPT)

    def stop(self) -> None:
        """Stop the timer and detach; what was seen stays readable."""
        if self._running:
            self._bpf.set_array("wanted", 0, struct.pack("=I", 0))
        self._running = False
        for link in (self._following, self._timer):
            if link is not None:
                self._bpf.detach(link)
        self._following = self._timer = None

    def pause(self) -> None:
        """Detach; what was summed stays readable."""
        self.stop()

    def resume(self) -> None:
        """Follow again. Raises HostError."""
        self.start()

    def spent(self) -> tuple[int, int]:
        """(ns, looks): CPU time and runs of the timer so far; the kernel's own statistics of BPF
        programs leave timers out."""
        ns, looks = self._bpf.sums("spent", [0, 1])
        return ns, looks

    def losses(self) -> Mapping[str, int]:
        """Losses so far by name."""
        return losses_of(self._bpf)

    def memory_bytes(self) -> int:
        """Kernel memory held."""
        return self._bpf.map_bytes()


def _possible_cpus() -> int:
    """One more than the highest number in /sys/devices/system/cpu/possible: `0-3` or `0,2-7`."""
    text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return 1 + max(int(part.rpartition("-")[2]) for part in text.split(","))
