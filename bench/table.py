# SPDX-License-Identifier: Apache-2.0
"""Prints the figures, each tool in its row, and whether the targets hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from bench.overhead import Cost, LoadResult

MAX_SLOWDOWN = 0.005
MAX_CPU_SHARE = 0.005
MAX_BYTES = 96e6


def print_overhead(results: Iterable[LoadResult]) -> list[LoadResult]:
    """One table, all loads, each as soon as it was measured. Returns them."""
    shown = []
    head = ("tool", "slowdown", "≤ (95 %)", "CPU of it", "to start", "memory", "samples", "lost")
    print(_row((*head, "others")))
    for result in results:
        shown.append(result)
        print(f"\n{result.kind.title} ({_state(result)})")
        for tool, cost in result.costs.items():
            slowdown = result.slowdown(tool)
            print(
                _row(
                    (
                        tool,
                        f"{slowdown.mean:+.2%}",
                        f"{slowdown.upper:+.2%}",
                        f"{_mean(cost.cpu_share):.2%}",
                        f"{_mean(cost.start_cpu_s):.2f} s",
                        f"{cost.peak_bytes / 1e6:.0f} MB",
                        f"{cost.samples:,}",
                        f"{cost.lost:,}",
                        f"{_mean(cost.others_share):.1%}",
                    )
                )
            )
        for tool, cost in result.costs.items():
            if cost.bpf_share is not None:
                each = f", {cost.bpf_ns_per_run:.0f} ns each" if cost.bpf_ns_per_run else ""
                print(f"  {tool}'s programs in the kernel: {cost.bpf_share:.2%} of one core{each}")
        sys.stdout.flush()  # the next load takes minutes
    print()
    print("slowdown: extra time of the load for the same work")
    print("CPU: of the tool's cgroup while it observes, as a share of one core")
    print("others: CPU time of all other programs meanwhile; figures are as noisy as they are busy")
    print("memory: of its cgroup, the kernel's for it included, without file pages")
    return shown


def misses(results: Sequence[LoadResult]) -> list[str]:
    """Targets that these figures do not show to hold."""
    found = []
    for result in results:
        if "sonde" not in result.costs:
            continue
        cost = result.costs["sonde"]
        upper = result.slowdown("sonde").upper
        if result.kind.name == "cpu" and upper > MAX_SLOWDOWN:
            found.append(f"cpu: slowdown up to {upper:.2%}, more than {MAX_SLOWDOWN:.1%}")
        found += [f"{result.kind.name}: {text}" for text in _misses(cost)]
    return found


def _misses(cost: Cost) -> list[str]:
    found = []
    if _mean(cost.cpu_share) > MAX_CPU_SHARE:
        found.append(f"{_mean(cost.cpu_share):.2%} of one core, more than {MAX_CPU_SHARE:.1%}")
    if cost.peak_bytes > MAX_BYTES:
        found.append(f"{cost.peak_bytes / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f} MB")
    if cost.lost:
        found.append(f"{cost.lost} lost")
    return found


def _state(result: LoadResult) -> str:
    text = f"noise between stretches {result.noise:.2%}"
    if result.kind.name == "switches":
        text = f"{result.switches_per_s:,.0f}/s seen in /proc, {text}"
    return text


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _row(cells: Sequence[str]) -> str:
    return f"{cells[0]:10}" + "".join(f"{cell:>12}" for cell in cells[1:])
