# SPDX-License-Identifier: Apache-2.0
"""sonde fleet clock: the time that a party goes by, and how the operator sets it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import UsageError

if TYPE_CHECKING:
    from sonde.fleet.clock import PartyClock


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    parser.add_argument("--state", type=Path, required=True, help="a party's or a node's directory")
    parser.add_argument(
        "--accept",
        action="store_true",
        help="this machine's clock is right: go by it from now on, whatever it said before",
    )


def clock(args: argparse.Namespace) -> int:
    """Run `sonde fleet clock`; returns the exit code. Changes nothing without --accept."""
    from sonde.fleet.clock import Sources, accept, duration, examine, utc

    if not (args.state / "task.json").exists():
        raise UsageError(f"no party at {args.state}", "name a party's or a node's directory")
    if args.accept:
        print(f"{args.state} goes by this machine's clock: {utc(accept(args.state))}")
        return 0
    now_s, step_s = examine(args.state)
    print(f"{args.state} goes by {utc(now_s)}; this machine's clock says {utc(Sources().wall_s())}")
    if step_s:
        print(f"the clock was set by {duration(step_s)}, which is not followed without --accept")
    return 0


def warn_of_step(clock: PartyClock) -> None:
    """Says on stderr that the wall clock is not followed, where that is so."""
    from sonde.fleet.clock import duration, utc

    now_s = clock()
    if clock.step_s:
        print(
            f"sonde: this machine's clock was set by {duration(clock.step_s)} since it started; "
            f"going by {utc(now_s)} (if the clock is right: sonde fleet clock --accept)",
            file=sys.stderr,
        )
