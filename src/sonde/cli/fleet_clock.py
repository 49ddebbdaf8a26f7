# SPDX-License-Identifier: Apache-2.0
"""sonde fleet clock: shows the trusted time of a party, or has it use the wall clock again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import UsageError

if TYPE_CHECKING:
    from sonde.fleet.clock import PartyClock


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `sonde fleet clock`."""
    parser.add_argument("--state", type=Path, required=True, help="a party's or a node's directory")
    parser.add_argument(
        "--accept",
        action="store_true",
        help="this machine's clock is correct: use it from now on",
    )


def clock(args: argparse.Namespace) -> int:
    """Runs `sonde fleet clock`; returns the exit code. Changes nothing without --accept."""
    from sonde.fleet.clock import ClockSources, accept, duration, examine, utc

    if not (args.state / "task.json").exists():
        raise UsageError(f"no party at {args.state}", "name a party's or a node's directory")
    if args.accept:
        print(f"{args.state} uses this machine's clock: {utc(accept(args.state))}")
        return 0
    now_s, step_s = examine(args.state)
    print(
        f"{args.state} uses {utc(now_s)}; this machine's clock shows {utc(ClockSources().wall_s())}"
    )
    if step_s:
        print(
            f"the clock was stepped by {duration(step_s)}, which is not followed without --accept"
        )
    return 0


def warn_of_step(clock: PartyClock) -> None:
    """Print a warning on stderr where the party does not use the wall clock, which was stepped."""
    from sonde.fleet.clock import duration, utc

    now_s = clock()
    if clock.step_s:
        print(
            f"sonde: this machine's clock was stepped by {duration(clock.step_s)} since boot; "
            f"using {utc(now_s)} (if the clock is correct: sonde fleet clock --accept)",
            file=sys.stderr,
        )
