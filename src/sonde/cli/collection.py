# SPDX-License-Identifier: Apache-2.0
"""`sonde collection`: pauses and resumes the agents of a server's tenant."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from sonde.errors import UsageError

EXAMPLE = """\
examples:
  sonde collection pause --store DIR --tenant lab     agents of that tenant stop within seconds
  sonde collection resume --store DIR --tenant lab
  sonde collection list --store DIR
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `collection` to the commands."""
    parser = subparsers.add_parser(
        "collection",
        help="pause and resume the agents that send to a server",
        description="Pause and resume the agents that send to a server. A paused agent takes its "
        "samples, waits and probes out of the kernel, and asks every ten seconds whether to go on.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", choices=("pause", "resume", "list"))
    add("--store", type=Path, required=True, metavar="DIR", help="that of `sonde serve`")
    add("--tenant", default="default", help="whose agents")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do it. Raises UsageError."""
    from sonde.server.collection import Collection

    if not args.store.is_dir():
        raise UsageError(f"{args.store} is no directory", "make it, or start `sonde serve` first")
    collection = Collection(args.store)
    try:
        if args.action == "pause":
            collection.pause(args.tenant)
            print(f"agents of {args.tenant} are paused")
        elif args.action == "resume":
            if not collection.resume(args.tenant):
                raise UsageError(
                    f"the agents of {args.tenant!r} are not paused", "see `sonde collection list`"
                )
            print(f"agents of {args.tenant} collect again")
        else:
            for tenant, since_s in collection.paused().items():
                since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since_s))
                print(f"{tenant} paused since {since}")
    finally:
        collection.close()
    return 0
