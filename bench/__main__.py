# SPDX-License-Identifier: Apache-2.0
"""`make bench`: overhead beside perf and py-spy, then accuracy.

`--quick` takes four minutes, and under two with one load (`--quick --loads cpu`)."""

from __future__ import annotations

import argparse
import os
import platform
import sys

from bench import accuracy, overhead, table
from bench.tools import HZ, USUAL, require_root

LOADS = "cpu,switches,python"


def main() -> int:
    """Exit code 1 where a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four minutes rather than twenty")
    parser.add_argument("--loads", help=f"these alone, without accuracy; default: {LOADS}")
    parser.add_argument("--tools", default=USUAL, help="default: %(default)s; there is otel, too")
    parser.add_argument("--no-accuracy", action="store_true")
    parser.add_argument("--no-overhead", action="store_true")
    args = parser.parse_args()
    require_root()
    busy = os.getloadavg()[0]
    print(f"{platform.release()}, {os.cpu_count()} CPUs, {HZ} Hz, load average before: {busy:.2f}")
    if busy > 0.3:
        print("bench: the machine is not quiet, figures will be noisy", file=sys.stderr)
    missed = []
    if not args.no_overhead:
        loads = set((args.loads or LOADS).split(","))
        results = table.print_overhead(overhead.measure(loads, args.quick, args.tools))
        missed += table.misses(results)
    if not (args.no_accuracy or args.loads):
        figures = accuracy.measure(10 if args.quick else 60)
        print()
        accuracy.print_figures(figures)
        missed += [f"{it.what}: off by {it.error:+.2%}" for it in figures if not it.holds]
    for text in missed:
        print(f"missed: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
