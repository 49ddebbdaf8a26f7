# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.windows RUN...`: whether short windows of a trace give its verdict.

`RUN`: folders of unpacked runs (`trace.json.gz`, `truth.json`). Of each, as many windows as a
recording could afford are cut from its trace, one at random in each part of the time, and explained
as if nothing else had been traced. Twice for each length and number, where they are together at
most half of the trace.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from bench.explain.score import proportion
from sonde.analyze.bound import explain
from sonde.errors import SondeError
from sonde.recording.timelines import open_timeline

LENGTHS_MS = (5, 10, 20, 50)
NUMBERS = (1, 2, 4, 8)
TRIALS = 2

Found = dict[tuple[int, int], list[bool]]


def agreements(folder: Path) -> tuple[str, Found]:
    """The program, and for each length and number whether the verdict is that of the whole."""
    known = json.loads((folder / "truth.json").read_text())
    waits = folder.parent / known.get("waits", "")
    found: Found = defaultdict(list)
    try:
        timeline = open_timeline([folder / "trace.json.gz", *([waits] if waits.is_file() else [])])
    except SondeError:
        return known["kind"], found
    verdicts = explain(timeline).verdicts
    if not verdicts or verdicts[0].device < 0:
        return known["kind"], found
    whole = verdicts[0]
    rng = random.Random(folder.name)
    for length in LENGTHS_MS:
        for number in NUMBERS:
            ns, part = length * 1_000_000, whole.window_ns // number
            if 2 * ns > part:
                continue
            for _ in range(TRIALS):
                starts = [whole.start_ns + i * part + rng.randrange(part - ns)
                          for i in range(number)]  # fmt: skip
                cut = replace(timeline, windows_ns=[(start, start + ns) for start in starts])
                verdict = explain(cut).verdicts[0]
                found[length, number].append(verdict.bounds[0].key == whole.bounds[0].key)
    return known["kind"], found


def main() -> int:
    """Prints a table; exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.explain.windows", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    args = parser.parse_args()
    sums: Found = defaultdict(list)
    wrong: dict[tuple[int, int], list[str]] = defaultdict(list)
    with ProcessPoolExecutor(2) as pool:
        for kind, found in pool.map(agreements, args.runs):
            for key, same in found.items():
                sums[key] += same
                wrong[key] += [kind] * same.count(False)
    for (length, number), same in sorted(sums.items()):
        others = ", ".join(sorted(set(wrong[length, number])))
        print(f"{number} of {length:2} ms: {proportion(sum(same), len(same))}  {others}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
