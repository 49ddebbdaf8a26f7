# SPDX-License-Identifier: Apache-2.0
"""`sonde owners`: asks a server who held GPUs and what they did with them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from sonde.cli.job import PARTS, add_selection, ask, hours, printed
from sonde.export.layout import one_line

EXAMPLE = """\
examples:
  sonde owners --server https://HOST:7373 --token-file ~/.config/sonde/token
  sonde owners --by job --from -7d --limit 50

Most wasted first. docs/guide/server.md#gpu-hours defines the columns.
"""
COLUMNS = ("held", "wasted", *PARTS)
WIDTH = 11
"""Of a column, in characters."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `owners` to the commands."""
    parser = subparsers.add_parser(
        "owners",
        help="who held GPUs and who wastes them, by user, job, pod, …",
        description="Report GPU hours by owner: held, wasted, productive, stalled, idle.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_selection(parser, "user", "what an owner is; default user")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the server and print. Raises UsageError, SinkError."""
    found = ask(args, "owners", {"by": args.by})
    print(json.dumps(found, indent=2) if args.json else printed(as_text, found))
    return 0


def as_text(found: Mapping[str, Any]) -> str:
    """The answer for people."""
    if not found["owners"]:
        return "no process held a GPU in this time"
    lines = ["".join(f"{name:>{WIDTH}}" for name in COLUMNS) + f"  GPUs  {found['by']}"]
    for one in found["owners"]:
        cells = "".join(f"{hours(one[f'{name}_h']):>{WIDTH}}" for name in COLUMNS)
        lines.append(f"{cells}  {one['gpus']:>4}  {one['owner'] or '(not known)'}")
    if found["left_out"]:
        lines.append(f"{found['left_out']:,} more, who waste less")
    lines += [f"not covered: {text}" for text in found["not_covered"]]
    return "\n".join(map(one_line, lines))
