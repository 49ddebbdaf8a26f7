# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.alone KIND SEED SECONDS`: a program with its cause, no tracer."""

from __future__ import annotations

import sys
import time


def main() -> None:
    from bench.explain.every_program import built

    kind, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    with built(kind, seed) as work:
        work.before_on()
        count, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            work.on()
            count += 1
        print(f"{kind}-{seed}: {count} steps of {1e3 * seconds / max(1, count):.3f} ms")


if __name__ == "__main__":
    main()
