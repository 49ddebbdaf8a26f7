# SPDX-License-Identifier: Apache-2.0
"""What a hook costs a call that is not timed, in the process, on a function that does nothing.

    python -m bench.hook_cost [--rounds 7] [--calls 20000000]

Three programs in turn: without the library; with it and nobody asking for anything; with it timing
one call a second. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.stub import PROGRAMS, build
from sonde.attach import library
from sonde.collect import inject_abi as abi

EVENTS = int(abi.Request.EVENTS)
WAYS = {"without": None, "idle": "0:0", "timing one a second": f"{EVENTS}:1"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20_000_000)
    args = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        program = folder / "hook_cost"
        subprocess.run(
            ["cc", "-O2", "-o", program, PROGRAMS / "hook_cost.c", folder / "libcuda.so.1",
             f"-Wl,-rpath,{folder}"],
            check=True,
        )  # fmt: skip
        for _ in range(args.rounds):
            for way, request in WAYS.items():
                environment = dict(os.environ)
                if request:
                    environment |= {"LD_PRELOAD": str(library.path()), "SONDE_INJECT": request}
                ran = subprocess.run(
                    [program, str(args.calls)],
                    env=environment, check=True, capture_output=True, text=True,
                )  # fmt: skip
                found[way].append(float(ran.stdout))
    without = statistics.median(found["without"])
    for way, each in found.items():
        middle = statistics.median(each)
        spread = f"{min(each):.2f}-{max(each):.2f}"
        print(f"{way:20} {middle:6.2f} ns a call  {middle - without:+6.2f}  {spread}")


if __name__ == "__main__":
    main()
