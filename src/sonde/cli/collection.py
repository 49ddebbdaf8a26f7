# SPDX-License-Identifier: Apache-2.0
"""`sonde collection`: pauses and resumes the agents of a server, and shows what they do."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Annotated

import msgspec

from sonde.errors import SinkError, UsageError
from sonde.export.layout import one_line

EXAMPLE = """\
examples:
  sonde collection pause --store DIR --tenant lab     agents of that tenant stop within seconds
  sonde collection pause --store DIR --all            agents of all tenants
  sonde collection resume --store DIR --tenant lab
  sonde collection list --store DIR
  SONDE_TOKEN=… sonde collection agents --server https://HOST:7373     what they do, when seen last

--store is for users who may write to the store. --server needs a token with the scope `admin`, acts
on its tenant alone, and does not lift a pause that was ordered with --store. `agents` needs `read`.
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
    add("action", choices=("pause", "resume", "list", "agents"))
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--store", type=Path, metavar="DIR", help="that of `sonde serve`")
    where.add_argument("--server", metavar="URL", help="with a token in SONDE_TOKEN")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--tenant", default="default", help="whose agents, with --store")
    whose.add_argument("--all", action="store_true", help="agents of all tenants, with --store")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pause, resume or list. Raises UsageError; SinkError where the server refuses or does not
    answer."""
    if args.server:
        _over_http(args.server, args.action)
    elif args.action == "agents":
        raise UsageError("only a running server knows its agents", "give --server URL")
    else:
        _in_store(args)
    return 0


def _in_store(args: argparse.Namespace) -> None:
    from sonde.server.collection_pauses import ALL_TENANTS, CollectionPauses, PausedBy

    if not args.store.is_dir():
        raise UsageError(f"{args.store} is no directory", "make it, or start `sonde serve` first")
    tenant = ALL_TENANTS if args.all else args.tenant
    shown = _shown(tenant)
    pauses = CollectionPauses(args.store)
    try:
        if args.action == "pause":
            pauses.pause(tenant, PausedBy.OPERATOR)
            print(f"{shown} are paused")
        elif args.action == "resume":
            if not pauses.resume(tenant, PausedBy.OPERATOR):
                raise UsageError(f"{shown} are not paused", "see `sonde collection list`")
            still = pauses.is_paused(tenant)
            print(f"{shown} {'stay paused: all are' if still else 'collect again'}")
        else:
            for one in pauses.paused():
                print(_paused(_shown(one.tenant), one.paused_by, one.since_s))
    finally:
        pauses.close()


def _shown(tenant: str) -> str:
    return f"agents of {tenant}" if tenant else "all agents"


def _paused(agents: str, paused_by: str, since_s: int) -> str:
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since_s))
    return f"{agents}: paused by the {one_line(paused_by)} since {since}"


class _Agent(msgspec.Struct):
    node: str
    seen_s: float
    state: str


class _Pause(msgspec.Struct):
    authority: str
    since_s: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class _Answer(msgspec.Struct):
    """The answer to each of the requests; what one does not have has its default."""

    agents: list[_Agent] = []
    paused: list[_Pause] = []
    collect: bool = True
    not_shown: int = 0


def _over_http(url: str, action: str) -> None:
    if action in ("pause", "resume"):
        wanted = "true" if action == "resume" else "false"
        found = _request(url, "PUT", "collection", collect=wanted)
        print("the tenant's agents " + ("collect" if found.collect else "are paused"))
        return
    found = _request(url, "GET", "agents")
    for pause in found.paused:
        print(_paused("the tenant's agents", pause.authority, pause.since_s))
    if action == "agents":
        now_s = time.time()
        for agent in found.agents:
            ago_s = max(0.0, now_s - agent.seen_s)
            print(f"{one_line(agent.node)}: {one_line(agent.state)}, seen {ago_s:.0f} s ago")
        if found.not_shown:
            print(f"{found.not_shown:,} more are not shown")


def _request(url: str, method: str, path: str, **parameters: str) -> _Answer:
    """The answer. Raises UsageError for a bad URL, SinkError for every other failure."""
    from sonde.server.client import ServerClient

    client = ServerClient(url, token=os.environ.get("SONDE_TOKEN", ""))
    try:
        return msgspec.convert(client.request(method, path, parameters), _Answer)
    except msgspec.ValidationError as error:
        raise SinkError("no answer of a Sonde server", "check the server's URL") from error
