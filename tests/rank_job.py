# SPDX-License-Identifier: Apache-2.0
"""A job of eight ranks on two nodes, made up: one rank is late in each of twelve steps, and the
others wait for it in their collective. Each rank mapped and touched memory and holds a GPU, and so
does a notebook that never uses its GPU."""

from __future__ import annotations

import json

from captures import SECOND_NS, START_NS, Writer

RANKS = 8
BUCKETS = 12
LATE = 5
"""The rank that works longest."""
RUNS = 8
"""Of a step, one after another."""
JOB = "train-7"
HOSTILE = '"><img src=x onerror=document.title=1>'
NODES = ("gpu-a", "gpu-b")
NOTEBOOK = "notebook-3"
"""The job of another user, on the last GPU of the second node."""
USED = 0.9
"""Share of the time in which a kernel of a rank runs, its collective among them."""
WATTS = 500.0
_A_NODE = RANKS // len(NODES)
_MIB = 1 << 20


def job_chunks(comm: str = HOSTILE, every: int = 2) -> dict[str, bytes]:
    """A chunk by node. `every`: each so-manieth run at work was timed."""
    return {
        node: b"".join(_writer(number, comm, every).chunks()) for number, node in enumerate(NODES)
    }


def _writer(node: int, comm: str, every: int) -> Writer:
    writer = Writer(seconds=float(BUCKETS), chunk_seconds=float(BUCKETS))
    for local in range(_A_NODE):
        _rank(writer, node * _A_NODE + local, local, comm, every)
    if node == 1:
        writer.process(300, "jupyter", job=NOTEBOOK, user="bob")
    for second in range(BUCKETS):
        for local in range(_A_NODE):
            _hold(writer, second, local, 100 + node * _A_NODE + local, USED, WATTS)
        row = {"time_ns": START_NS + second * SECOND_NS}
        for state, size in (("used", 300 + 10 * second), ("cached", 90), ("free", 60)):
            writer.rows["metric"].append(
                {
                    **row,
                    "series": "system.memory.usage",
                    "labels": f'{{"system.memory.state":"{state}"}}',
                    "value": float(size << 30),
                }
            )
        if node == 1:
            _hold(writer, second, _A_NODE, 300, 0.0, 90.0)
        available = (512 << 30) - second * (10 << 30)
        for series, size in (
            ("sonde.host.memory.available", available),
            ("system.memory.limit", 512 << 30),
        ):
            writer.rows["metric"].append({**row, "series": series, "value": float(size)})
    return writer


def _hold(writer: Writer, second: int, device: int, pid: int, used: float, watts: float) -> None:
    """What an agent polls of a GPU that one process holds."""
    gpu = {"hw.id": f"GPU-{device}"}
    whose = gpu | {"process.pid": str(pid), "sonde.process.start": str(pid * 10_000_000)}
    points: list[tuple[str, dict[str, str], float]] = [
        ("sonde.process.gpu.memory", whose, 40e9),
        ("sonde.process.gpu.utilization", whose | {"sonde.gpu.engine": "sm"}, used),
        ("hw.gpu.utilization", gpu | {"hw.gpu.task": "general"}, used),
        ("hw.gpu.memory.usage", gpu, 40e9),
        ("hw.gpu.memory.limit", gpu, 80e9),
        ("hw.power", gpu, watts),
    ]
    for series, labels, value in points:
        writer.rows["metric"].append(
            {
                "time_ns": START_NS + second * SECOND_NS, "series": series, "value": value,
                "labels": json.dumps(labels, separators=(",", ":")),
            }
        )  # fmt: skip


def _rank(writer: Writer, rank: int, local: int, comm: str, every: int) -> None:
    key = writer.process(100 + rank, comm, job=JOB, user="ada")
    tid = 100 + rank
    work_s = 0.8 if rank == LATE else 0.4
    for step in range(BUCKETS):
        begin = START_NS + step * SECOND_NS
        work = round(work_s * SECOND_NS)
        for run in range(0, RUNS, every):
            writer.add(
                "device_run", key, kind="kernel", name="gemm_kernel", tid=tid, device=local,
                weight=float(every), start_time_ns=begin + run * work // RUNS,
                end_time_ns=begin + (run + 1) * work // RUNS,
            )  # fmt: skip
        writer.add(
            "device_run", key, kind="kernel", name="ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            tid=tid, device=local, weight=1.0,
            start_time_ns=begin + work, end_time_ns=begin + round(0.9 * SECOND_NS),
        )  # fmt: skip
    stack = writer.stack("main", "load_batch", "malloc")
    for kind, name, size in (
        ("mapped", "anonymous", 96 * _MIB),
        ("mapped", "reserved", 1024 * _MIB),
        ("unmapped", "anonymous", 32 * _MIB),
        ("faulted", "anonymous", 48 * _MIB),
    ):
        writer.add(
            "sample", key, kind=kind, name=name, tid=tid, stack_id=stack, weight_count=1.0,
            weight_bytes=float(size),
        )  # fmt: skip
