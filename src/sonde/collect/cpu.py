# SPDX-License-Identifier: Apache-2.0
"""On-CPU samples: what every CPU runs, `hz` times a second."""

from __future__ import annotations

import os

from sonde.collect.attached import Attached
from sonde.collect.collector import Batch
from sonde.collect.kernel import Kernel, expect_fields, refusal
from sonde.procfs import START_UNIT_NS

FIELDS = ("tgid", "tid", "start_ns", "stack_id", "count")


ROOM_S = 4
"""There is room for the samples of so long, should they all differ: a tick may come late."""
LEAST_ROWS = 1024


class CpuSampler(Attached):
    """Samples user and kernel stacks on all CPUs; the kernel counts equal ones together."""

    name = "cpu"

    def __init__(self, kernel: Kernel, hz: int) -> None:
        rows = ROOM_S * hz * (os.cpu_count() or 1)
        super().__init__(kernel.load("cpu", {}, most={"samples": max(LEAST_ROWS, rows)}))
        self._hz = hz
        self._period_ns = 1e9 / hz
        expect_fields(self._bpf, "samples", FIELDS)

    def start(self) -> None:
        """Start the sampling clocks. Raises HostError."""
        try:
            self._links = [self._bpf.attach_sampling("on_sample", self._hz)]
        except OSError as error:
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """One row of `sample` for each thread and stack; weights in samples and in ns."""
        batch = Batch()
        rows = batch.rows["sample"] = []
        for pid, tid, start, stack_id, count in self._bpf.drain("samples"):
            start_ns = start - start % START_UNIT_NS
            weight_ns = count * self._period_ns
            rows.append(
                (since_ns, "cpu", "", pid, start_ns, tid, stack_id, float(count), weight_ns, 0.0)
            )
            batch.stacks[stack_id] = (pid, start_ns)
            batch.threads.add((pid, start_ns, tid))
            batch.seen += count
        return batch
