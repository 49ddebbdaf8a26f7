# SPDX-License-Identifier: Apache-2.0
"""`sonde diff`: compares two recordings of the same work, for people and for CI."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import CaptureError, UsageError
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.analyze.run_difference import RecordedRun

EXAMPLE = """\
examples:
  sonde diff before.json.gz after.json.gz
  sonde diff main.sonde branch.sonde --fail-above 3%     in CI: exit code 1 where it got worse
  sonde diff m1.sonde b1.sonde --before m2.sonde --before m3.sonde --after b2.sonde --after b3.sonde

Compared is the cost of the same work: of a step where both have steps; of the whole run where both
were recorded with `sonde record -- CMD` to the end; of a call that waits for the device. Otherwise
times per second are shown, but --fail-above refuses to judge (exit code 2). Only changes beyond the
noise of sampling count, and only what costs more than the given share.

Where threads waited is shown beside: how long all of them together were blocked, by function and
reason, without waits for the next request. --fail-above judges that with --waits alone: a program
that waits less may well compute more.

On a busy machine record both sides at the same time on the same CPU (taskset -c 0 CMD), eight
times: other programs then slow both alike, and each pair (the first A with the first B, and so on)
is compared by itself.
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
    for side, name in (("before", "A"), ("after", "B")):
        parser.add_argument(
            f"--{side}",
            dest=f"more_{side}",
            metavar="FILE",
            type=Path,
            action="append",
            default=[],
            help=f"one more run like {name}; may be given again",
        )
    parser.add_argument(
        "--fail-above",
        type=_share,
        metavar="SHARE",
        help="exit code 1 if it got worse by more: 3%%",
    )
    parser.add_argument(
        "--waits",
        action="store_true",
        help="--fail-above also judges how long threads were blocked, by function and reason",
    )
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 where something got worse than allowed. Raises CaptureError."""
    from sonde.recording.timelines import open_timeline

    before, after = (open_timeline([path]) for path in (args.before, args.after))
    from sonde.analyze.difference import Unit, Unlike, compare, regressions, unlike
    from sonde.analyze.run_difference import are_pairs, compare_runs
    from sonde.analyze.wait_difference import recorded, with_waits
    from sonde.export import difference as text

    found = compare(before, after)
    every = ([args.before, *args.more_before], [args.after, *args.more_after])
    paired = False
    if found.per != Unit.STEP and (runs := _runs(*every)):
        found, paired = compare_runs(*runs), are_pairs(*runs)
    if found.per != Unit.RUN and (args.more_before or args.more_after):
        raise UsageError(
            "several files of one side are compared only where each is of a whole run",
            "Record each with `sonde record -- CMD`, and let the program end by itself.",
        )
    above = args.fail_above
    differs = unlike(before, after)
    if found.per == Unit.RUN:
        differs = Unlike()
    elif found.per != Unit.SECOND:
        differs = replace(differs, length="")
    if above is not None and differs.scope:
        raise UsageError(differs.scope, "Record the same processes both times.")
    if above is not None and found.per == Unit.SECOND:
        raise UsageError(
            "nothing in these two recordings shows how much work was done, so neither can be called"
            " worse",
            "Record a whole run of the same work each time: sonde record -- CMD.",
        )
    was, now = [recorded(before)], [recorded(after)]
    del before, after
    was += [recorded(open_timeline([path])) for path in args.more_before]
    now += [recorded(open_timeline([path])) for path in args.more_after]
    found = with_waits(found, was, now, paired)
    failed = regressions(found, above, args.waits) if above is not None else []
    notes = differs.notes
    if args.json:
        print(
            text.to_json(found.per, found.changes, failed, above, notes, found.waits, found.spent)
        )
    else:
        print(text.render(found.per, found.changes, found.waits, found.spent))
        for note in notes:
            print(f"note: {one_line(note)}")
        for line in text.worse(found.per, failed):
            print(line)
        if above is not None and not failed:
            print(f"nothing got worse by more than {100 * above:g} %")
    return 1 if failed else 0


def _runs(before: Sequence[Path], after: Sequence[Path]) -> list[list[RecordedRun]]:
    """The whole runs before and after; none where one of the files is no recording of one."""
    sides = [[_recorded_run(path) for path in side] for side in (before, after)]
    runs = [[run for run in side if run is not None] for side in sides]
    return runs if runs == sides else []


def _recorded_run(path: Path) -> RecordedRun | None:
    from sonde.analyze.run_difference import RecordedRun
    from sonde.model.profile import ProfileKind
    from sonde.query import queries
    from sonde.query.capture import read
    from sonde.query.session import Session

    try:
        capture = read(path)
    except CaptureError:
        return None  # another tool's file
    if capture.info.program is None:
        return None
    session = Session(capture)
    return RecordedRun(
        capture.info.program,
        queries.top_functions(session, ProfileKind.ON_CPU),
        sum(use.runqueue_ns for use in queries.processes(session)),
        capture.info.start_ns,
        capture.info.end_ns,
        capture.info.wall_offset_ns,
    )


def _share(text: str) -> float:
    number = text.removesuffix("%").strip()
    try:
        value = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, as 3% or 0.03")
    return value
