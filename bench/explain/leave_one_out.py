# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.leave_one_out FOLDER… --json OUT`: do thresholds fit the programs?

Each threshold of `sonde explain` that decides on recordings of the exams takes half and twice its
value, one at a time. For every program, all of these settings are judged by the other programs: the
best of them (as it is in the code, where others are only as good) judges the program left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from bench.explain.exam_score import capture_of, judge
from sonde.recording.timelines import open_timeline

THRESHOLDS = (
    *("thread_verdicts.TURNS", "thread_verdicts.LEAST_WORK", "thread_verdicts.LEAST_CALLS"),
    *("thread_time.COPIED_NS_PER_BYTE", "thread_time.POLLS", "thread_time.FOR_COPIES"),
    *(
        "ranking.STALLED",
        "ranking.CO_DOMINANT_FRACTION",
        "ranking.SECOND_BOUND_SHARE",
        "ranking.LEAST_SHARE",
    ),
    "ranking.UNDERFILLED_BOUND",
    *("ordered_streams.LEAST_STREAM_WAITS", "device_totals.LEAST_SHARE", "device_totals.STALLED"),
    *("device_totals.SECOND_BOUND_SHARE", "device_totals.UNDERFILLED_BOUND"),
    *("ordered_streams.LEAST_SHARE", "ordered_streams.ALONE", "ordered_streams.UNDERFILLED_BOUND"),
    *("kernels.ALONE", "device_totals.ALONE", "offenders.LEAST_USE", "kernels.ACTIVE"),
    *("slowed_launches.HAND_OVER_NS", "slowed_launches.CO_DOMINANT_FRACTION"),
    *("device_totals.MOSTLY_COMPUTING", "round_trips.LEAST_SHARE"),
)
AS_IS = "as it is"


def main() -> int:
    """Judge all settings by all programs."""
    parser = argparse.ArgumentParser(prog="python -m bench.explain.leave_one_out")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="one for each exam")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    truths = [one for it in args.folders for one in sorted(it.glob("*.truth.json"))]
    timelines = {truth: open_timeline([capture_of(truth)]) for truth in truths}

    def right() -> dict[str, bool]:
        """By program: whether all its recordings are right."""
        found: dict[str, bool] = {}
        for truth in truths:
            one = judge(truth, timelines[truth])
            program = f"{args.folders.index(truth.parent) + 1}/{one.program}"
            found[program] = found.get(program, True) and one.is_right
        return found

    settings = {AS_IS: right()}
    for threshold in THRESHOLDS:
        name, _, constant = threshold.partition(".")
        module = importlib.import_module(f"sonde.analyze.{name}")
        before = getattr(module, constant)
        for factor in (0.5, 2.0):
            setattr(module, constant, before * factor)
            settings[f"{threshold} × {factor:g}"] = right()
        setattr(module, constant, before)
    left_out = {}
    for program in settings[AS_IS]:
        scores = {
            name: sum(found[other] for other in found if other != program)
            for name, found in settings.items()
        }
        best = max(scores, key=lambda name: (scores[name], name == AS_IS))
        left_out[program] = settings[best][program]
    for name, found in settings.items():
        changed = [one for one in found if found[one] != settings[AS_IS][one]]
        print(f"{name:40} {sum(found.values())} of {len(found)}  {' '.join(changed)}")
    print(f"leave one program out: {sum(left_out.values())} of {len(left_out)}")
    if args.json:
        kept = {name: sum(found.values()) for name, found in settings.items()}
        result = {"programs": len(left_out), "left_out": sum(left_out.values()), "settings": kept}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
