# SPDX-License-Identifier: Apache-2.0
"""`sonde token`: makes, lists and revokes the tokens of a server."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from sonde.errors import UsageError

EXAMPLE = """\
examples:
  sonde token make --store DIR --tenant lab --scope ingest --days 90
  sonde token list --store DIR
  sonde token revoke ID --store DIR
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `token` to the commands."""
    parser = subparsers.add_parser(
        "token",
        help="make, list and revoke the tokens of a server",
        description="Make, list and revoke the tokens of a server. A token is shown once.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", choices=("make", "list", "revoke"))
    add("id", nargs="?", default="", help="of the token to revoke")
    add("--store", type=Path, required=True, metavar="DIR", help="that of `sonde serve`")
    add("--tenant", default="default", help="whose data it opens")
    add("--scope", action="append", choices=("ingest", "read", "admin"), default=[],
        help="what for; may be repeated")  # fmt: skip
    add("--days", type=float, default=0, help="until it expires; default never")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make, list or revoke. Raises UsageError."""
    from sonde.server.tokens import Scope, Tokens

    if not args.store.is_dir():
        raise UsageError(f"{args.store} is no directory", "make it, or start `sonde serve` first")
    seconds = _seconds(args.days)
    tokens = Tokens(args.store)
    if args.action == "make":
        name, token = tokens.make(args.tenant, [Scope(one) for one in args.scope], seconds)
        print(f"{name} {token}")
    elif args.action == "revoke":
        if not tokens.revoke(args.id):
            raise UsageError(f"no valid token has the id {args.id!r}", "see `sonde token list`")
        print(f"{args.id} revoked")
    else:
        for one in tokens.listed():
            state = "revoked" if one.revoked_s else "valid"
            if one.expires_s and one.expires_s <= time.time():
                state = "expired"
            print(f"{one.id} {one.tenant} {one.scopes} {state}")
    tokens.close()
    return 0


def _seconds(days: float) -> int:
    """How long a token counts; 0: always. Raises UsageError for other times below one second, of
    which the store would make 0."""
    if days and not 1 <= days * 86_400 < 1 << 40:
        raise UsageError(
            f"--days {days:g} is no time for a token", "give a second (0.00002) or more"
        )
    return round(days * 86_400)
