# SPDX-License-Identifier: Apache-2.0
"""`sonde serve`: takes chunks of agents and recordings, remembers them, answers questions."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.cli import end_with_input, log_output, retention
from sonde.cli.service_manager import HangUps, ServiceManager
from sonde.errors import MissingDependency, UsageError
from sonde.host import descriptors

if TYPE_CHECKING:
    from sonde.server.listen import Listener
    from sonde.server.service import ServerLimits, TokenIssuer
    from sonde.store.storage import BucketSettings

LOG = logging.getLogger("sonde.server")
EXAMPLE = """\
examples:
  sonde serve --store /var/lib/sonde --open            for this machine alone, without tokens
  sonde token make --store /var/lib/sonde --tenant lab --scope ingest
  sonde serve --store /var/lib/sonde --listen 0.0.0.0:7373 --certificate c.pem --key k.pem

Stops at SIGTERM or Ctrl-C; SIGHUP has it read its certificate again. What it acknowledged is on the
disk.
"""
CACHE_GB = 10.0
"""Default size of the cache of a bucket's files (S3) in --store."""
FILES = 512
"""Descriptors for all but connections: the log, the files of some questions, children."""
LEAST_CONNECTIONS = 64


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the commands."""
    parser = subparsers.add_parser(
        "serve",
        help="take chunks of many nodes, remember them, answer questions over HTTP",
        description="Run the server until it is stopped.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--store", type=Path, required=True, metavar="DIR", help="where everything is kept")
    add("--listen", default="127.0.0.1:7373", metavar="HOST:PORT",
        help="default 127.0.0.1:7373; port 0: any free port; a socket unit of systemd takes "
        "precedence")  # fmt: skip
    add("--listen-fd", type=int, metavar="N",
        help="take connections of this listening socket, for programs that start this "
        "command")  # fmt: skip
    add("--otlp-grpc", metavar="ADDRESS",
        help="receive OTLP profiles over gRPC there, too, as OpenTelemetry's eBPF profiler sends "
        "them, with the same tokens: unix:PATH, for this user alone, or HOST:PORT with "
        "--client-authority")  # fmt: skip
    add("--open", action="store_true", help="no tokens; on loopback alone")
    add("--oidc", type=Path, metavar="FILE",
        help="take tokens of an OpenID Connect issuer, too (docs/guide/server.md)")  # fmt: skip
    add("--certificate", type=Path, metavar="FILE", help="for TLS, with --key")
    add("--key", type=Path, metavar="FILE", help="of the certificate")
    add("--client-authority", type=Path, metavar="FILE",
        help="clients must show a certificate of this authority")  # fmt: skip
    add("--keep-days", type=retention.days, default=0, metavar="N", help="remove what is older")
    add(
        "--keep-gb",
        type=retention.gigabytes,
        default=0,
        metavar="N",
        help="remove the oldest beyond",
    )
    add("--bucket", metavar="URI",
        help="keep files in s3://BUCKET/PREFIX or file:///FOLDER; --store has the log and a cache; "
        "credentials from the environment (docs/guide/bucket.md)")  # fmt: skip
    add("--server-name", metavar="NAME", default="",
        help="with --bucket: whose files these are; default the machine's name")  # fmt: skip
    add("--cache-gb", type=float, metavar="N",
        help=f"with --bucket: at most this of it in --store, default {CACHE_GB:g}")  # fmt: skip
    add("--incidents", type=Path, metavar="DIR",
        help="show the incidents that `sonde diagnose --keep` wrote there; with tokens, those of a "
        "tenant are in DIR/TENANT")  # fmt: skip
    add("--fleet", type=Path, metavar="DIR",
        help="show the releases that `sonde fleet collect -o DIR/NAME.json` wrote there; everybody "
        "with a token for `read` sees them")  # fmt: skip
    add("--alerts", type=Path, metavar="FILE",
        help="evaluate the rules of this file and notify of what fires (docs/guide/server.md); "
        "`sonde alerts check` tries them")  # fmt: skip
    log_output.add_options(parser)
    add(end_with_input.FLAG, action="store_true", help=end_with_input.HELP)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve. Raises UsageError, MissingDependency."""
    hang_ups = HangUps()  # first: the threads of libraries inherit the blocked signal
    if bool(args.certificate) != bool(args.key):
        raise UsageError("TLS needs both --certificate and --key", "give both")
    try:
        from sonde.server.addresses import Address, for_grpc, handed_over, parse
        from sonde.server.alert_rules import load
        from sonde.server.alerts import Alerts
        from sonde.server.listen import Listener
        from sonde.server.service import Service
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the server needs {error.name}",
            "install Sonde with it: pip install 'sonde[server]' or 'FILE.whl[server]'",
        ) from error
    host, port = parse(args.listen)
    listening = handed_over(args.listen_fd)
    if listening is not None:
        host, port = listening.getsockname()[:2]
    address = Address(host, port, args.certificate, args.key, args.client_authority)
    receiver = None
    if args.otlp_grpc is not None:
        receiver = for_grpc(args.otlp_grpc, address)
    addresses = [address, receiver] if receiver else [address]
    is_loopback = all(one.is_loopback for one in addresses)
    if args.open and not is_loopback:
        raise UsageError(
            "--open would let anybody on the network read and write",
            "listen on 127.0.0.1, or make tokens with `sonde token make`",
        )
    if receiver is not None and importlib.util.find_spec("grpc") is None:
        raise MissingDependency(
            "--otlp-grpc needs grpcio", "install it: pip install 'sonde[server]'"
        )
    issuer = _issuer(args.oidc, args.open)
    rules = load(args.alerts) if args.alerts else None
    bucket = _bucket(args)
    manager = ServiceManager()
    if args.end_with_input:
        end_with_input.watch()
    with log_output.to_stderr(log_output.is_json(args.log_format), args.log_level):
        if not is_loopback and not address.certificate:
            LOG.warning("tokens and data cross the network in the clear")
        service = Service(
            args.store,
            _limits(receiver is not None),
            age_s=round(args.keep_days * 86_400),
            size_bytes=round(args.keep_gb * 1e9),
            open_tenant="default" if args.open else "",
            incidents=args.incidents,
            fleet=args.fleet,
            bucket=bucket,
        )
        service.issuer = issuer
        alerts = None
        try:
            listener = Listener(service, address, listening, receiver)
            if rules is not None:
                alerts = service.alerts = Alerts(service, rules)
                alerts.start()
            print(f"serving {listener.url}", flush=True)
            if receiver is not None:
                print(f"receiving OTLP over gRPC at {listener.otlp_target}", flush=True)
            manager.ready()

            def on_turn() -> None:
                manager.working()
                if hang_ups.came():
                    manager.reloading()
                    _reload(listener)
                    manager.ready()

            # The HTTP server sends itself again the signal that ended it, when it is done.
            signal.signal(signal.SIGTERM, lambda _number, _frame: None)
            listener.run(on_turn)
            manager.stopping()
        finally:
            if alerts is not None:
                alerts.close()
            service.close()
    return 0


def _limits(has_grpc: bool) -> ServerLimits:
    """Limits with as many connections as descriptors are allowed for; fewer than usual are
    logged."""
    from sonde.server.service import ServerLimits

    limits = ServerLimits()
    wanted = FILES + limits.connections + (limits.connections_grpc if has_grpc else 0)
    allowed = descriptors.raise_limit(wanted)
    if allowed >= wanted:
        return limits
    room = allowed - FILES
    connections = max(LEAST_CONNECTIONS, room * 4 // 5 if has_grpc else room)
    LOG.warning(
        "this process may open %s files only: it takes %s connections, not %s; "
        "raise the hard limit to %s (LimitNOFILE= of the unit, ulimit -Hn)",
        *(f"{it:,}" for it in (allowed, connections, limits.connections, wanted)),
    )
    return replace(limits, connections=connections)


def _bucket(args: argparse.Namespace) -> BucketSettings | None:
    """The bucket that files are kept in; None: in --store. Raises UsageError."""
    if args.bucket is None:
        if args.server_name or args.cache_gb is not None:
            raise UsageError("--server-name and --cache-gb have no meaning without --bucket",
                             "name the bucket, or leave them out")  # fmt: skip
        return None
    from sonde.store.published import is_server_name
    from sonde.store.storage import BucketSettings

    name = args.server_name or socket.gethostname()
    if not is_server_name(name):
        raise UsageError(
            f"{name!r} cannot be the name of a server",
            "use letters, digits, '.', '_' and '-', at most 63",
        )
    cache_gb = CACHE_GB if args.cache_gb is None else args.cache_gb
    return BucketSettings(args.bucket, name, round(cache_gb * 1e9))


def _issuer(path: Path | None, is_open: bool) -> TokenIssuer | None:
    """The OpenID Connect issuer whose tokens are taken, too. Raises UsageError,
    MissingDependency."""
    if path is None:
        return None
    if is_open:
        raise UsageError("--open asks for no tokens, so --oidc has no meaning", "leave one out")
    try:
        from sonde.server.oidc import Oidc
        from sonde.server.oidc_config import load
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"--oidc needs {error.name}", "install it: pip install 'sonde[server,oidc]'"
        ) from error
    return Oidc(load(path))


def _reload(listener: Listener) -> None:
    """Read the certificate again, and log the outcome; nothing else can change live."""
    try:
        renewed = listener.renew_certificate()
    except UsageError as error:
        LOG.error("%s; %s", error.cause, error.remedy)
        return
    LOG.info("certificate read again" if renewed else "nothing to read again: no --certificate")
