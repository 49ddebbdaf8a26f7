# SPDX-License-Identifier: Apache-2.0
"""`sonde explain`: what the work is bound by, where the device waited and why, what to do."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = """\
examples:
  sonde explain trace.json.gz                 what torch.profiler exported
  sonde explain trace.json.gz run.sonde       the same, with the machine's waits at that time
  sonde explain run.sonde --json | jq '.verdicts[0].bounds'
  sonde explain trace.json --steps 20         the first 20 steps too
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the commands."""
    parser = subparsers.add_parser(
        "explain",
        help="what the work is bound by, what the GPU waited for, and one next step",
        description="Give a verdict on recorded work: what limits it, and what each idle moment "
        "of the device was spent on. Files of one time are joined.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", metavar="FILE", type=Path, nargs="+",
        help="a capture (.sonde), a trace of torch.profiler (.json, .json.gz)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for scripts: ns, and shares of 1")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="list N steps")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain the files. Raises CaptureError, MissingDependency."""
    from sonde.cli.timelines import open_timeline

    timeline = open_timeline(args.files)
    from sonde.analyze.bound import explain
    from sonde.export import verdict

    explanation = explain(timeline)
    print(verdict.to_json(explanation) if args.json else verdict.render(explanation, args.steps))
    return 0
