# SPDX-License-Identifier: Apache-2.0
"""On-CPU samples: what every CPU runs, `hz` times a second."""

from __future__ import annotations

import os

from sonde import _native
from sonde.collect.attached import Attached
from sonde.collect.collector import Batch
from sonde.collect.kernel import BpfObject, Kernel, expect_fields, refusal
from sonde.procfs import START_UNIT_NS

FIELDS = ("tgid", "tid", "start_ns", "stack_id", "count")


ROOM_S = 4
"""The map has room for the samples of this time even if no two are equal, as a tick may be late."""
LEAST_ROWS = 1024
"""Of the map, whatever the rate."""


class CpuSampler(Attached):
    """Samples user and kernel stacks on all CPUs; the kernel counts equal ones together."""

    name = "cpu"
    walks_stacks = True

    @staticmethod
    def bpf_object(hz: int) -> BpfObject:
        """What is loaded into the kernel for it."""
        rows = ROOM_S * hz * (os.cpu_count() or 1)
        return BpfObject("cpu", max_entries={"samples": max(LEAST_ROWS, rows)})

    def __init__(self, kernel: Kernel, hz: int) -> None:
        super().__init__(kernel.load(self.bpf_object(hz)))
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
        rows = self.take()
        batch = Batch()
        if not len(rows):
            return batch
        batch.add_who(rows)
        batch.on_cpu = rows
        batch.seen = sum(rows.column("count"))
        columns = {
            "time_ns": rows.repeated(since_ns),
            "kind": rows.constant("cpu"),
            "name": rows.constant(""),
            "pid": rows.ints("tgid"),
            "start_ns": rows.ints("start_ns", START_UNIT_NS),
            "tid": rows.ints("tid"),
            "stack_id": rows.ints("stack_id"),
            "weight_count": rows.ints("count"),
            "weight_ns": rows.scaled("count", self._period_ns),
            "weight_bytes": rows.zeros(),
        }
        batch.parts.append(("sample", columns))
        return batch

    def take(self) -> _native.Columns:
        """The counts since the last call, with the fields of `FIELDS`."""
        return self._bpf.drain_columns("samples")
