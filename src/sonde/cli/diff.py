# SPDX-License-Identifier: Apache-2.0
"""`sonde diff`: compares two recordings of the same work, for people and for CI."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

EXAMPLE = """\
examples:
  sonde diff before.json.gz after.json.gz
  sonde diff main.sonde branch.sonde --fail-above 3%     in CI: exit code 1 where it got worse

Only changes beyond the noise count, and only what costs more than the given share of a step (where
both have steps, else of a second).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `diff` to the commands."""
    parser = subparsers.add_parser(
        "diff",
        help="what changed between two recordings: steps, kernels, causes, functions",
        description="Compare two recordings of the same work.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="A", type=Path, help="a file for `sonde explain`")
    parser.add_argument("after", metavar="B", type=Path, help="the later one")
    parser.add_argument(
        "--fail-above",
        type=_share,
        metavar="SHARE",
        help="exit code 1 if it got worse by more: 3%%",
    )
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 where something got worse than allowed. Raises CaptureError."""
    from sonde.cli.timelines import open_timeline

    before, after = (open_timeline([path]) for path in (args.before, args.after))
    from sonde.analyze.difference import compare, regressions
    from sonde.export import difference as text

    found = compare(before, after)
    above = args.fail_above
    failed = regressions(found, above) if above is not None else []
    if args.json:
        print(text.to_json(found.per, found.changes, failed, above))
    else:
        print(text.render(found.per, found.changes))
        for line in text.worse(found.per, failed):
            print(line)
        if above is not None and not failed:
            print(f"nothing got worse by more than {100 * above:g} %")
    return 1 if failed else 0


def _share(text: str) -> float:
    number = text.removesuffix("%").strip()
    try:
        value = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, as 3% or 0.03")
    return value
