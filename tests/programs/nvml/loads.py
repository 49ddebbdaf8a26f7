# SPDX-License-Identifier: Apache-2.0
"""Stands in for `bench.signals.loads -` where there is no GPU: has the stub of NVML count bytes.

Reads NAME SECONDS, a line each; h2d and d2h move `RATE` bytes a second, whatever else moves none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

RATE = 10e9
NUMBERS = {"d2h": 20, "h2d": 21}


def main() -> None:
    """Until standard input ends."""
    answers = Path(os.environ["NVML_STUB"])
    always = answers.read_text()
    counts = dict.fromkeys(NUMBERS.values(), 1e12)

    def report(moving: int, since_s: float) -> None:
        lines = [f"gpm_since={since_s:.9f}"]
        for number, count in counts.items():
            lines += [f"gpm_bytes_{number}={count:.0f}"]
            lines += [f"gpm_rate_{number}={RATE if number == moving else 0:.0f}"]
        fresh = answers.with_suffix(".fresh")
        fresh.write_text(always + "\n".join(lines) + "\n")
        fresh.replace(answers)

    report(0, 0.0)
    print("ready", flush=True)
    for line in sys.stdin:
        name, seconds = line.split()
        began_s, number = time.monotonic(), NUMBERS.get(name, 0)
        report(number, began_s)
        time.sleep(float(seconds))
        ended_s = time.monotonic()
        moved = round(RATE * (ended_s - began_s)) if number else 0
        if number:
            counts[number] += moved
        report(0, ended_s)
        moves = {"start_ns": int(began_s * 1e9), "end_ns": int(ended_s * 1e9), "bytes": moved}
        print(json.dumps(moves), flush=True)


if __name__ == "__main__":
    main()
