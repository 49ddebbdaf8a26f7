# SPDX-License-Identifier: Apache-2.0
"""Captures of 5 s of a training program, made by hand: its processes, device runs and CPU time."""

from __future__ import annotations

from typing import Any

from captures import START_NS, Writer
from sonde.model.verdict import Verdict

MS = 1_000_000

Key = dict[str, int]
Frame = str | tuple[Any, ...]


def process(writer: Writer, *tids: int, pid: int = 42, **more: Any) -> Key:
    """The program: its first thread and those of `tids`, called by their numbers."""
    threads = [{"tid": tid, "comm": f"t{tid}"} for tid in (pid, *tids)]
    return writer.process(pid, "train", threads=threads, **more)


def runs(
    writer: Writer, key: Key, share: float, *, tid: int = 42, count: int = 50, **more: Any
) -> None:
    """Kernels that take a share of the 5 s."""
    for number in range(count):
        start = START_NS + 5000 * MS * number // count
        end = start + round(5000 * MS * share / (count * 20))
        row = {"kind": "kernel", "name": "gemm", "weight": 20.0, "source": "event", "tid": tid}
        row |= {"start_time_ns": start, "end_time_ns": end, "stream": 7, "grid": "512,1,1"}
        writer.rows["device_run"].append({**key, **row, **more})


def timed_runs(
    writer: Writer,
    key: Key,
    take_ms: float | list[float],
    count: int = 50,
    weight: float = 20.0,
    **more: Any,
) -> None:
    """Kernels evenly over the 5 s; `take_ms`: one length for all, or one for each."""
    lengths = take_ms if isinstance(take_ms, list) else [take_ms] * count
    row = {"kind": "kernel", "name": "gemm", "weight": weight, "source": "event", "tid": 42, **more}
    for number, length in enumerate(lengths):
        start = START_NS + 5000 * MS * number // len(lengths)
        times = {"start_time_ns": start, "end_time_ns": start + round(length * MS)}
        writer.rows["device_run"].append({**key, **times, **row})


def on_cpu(writer: Writer, key: Key, seconds: float, *stack: Frame, tid: int = 42) -> None:
    """Time of a thread on a CPU, under a stack from the outermost frame on."""
    writer.on_cpu(key, tid, writer.stack(*stack), round(seconds * 99))


def shares(verdict: Verdict) -> dict[str, float]:
    """Shares of a verdict's causes."""
    return {one.key: one.share for one in verdict.causes}
