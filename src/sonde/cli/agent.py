# SPDX-License-Identifier: Apache-2.0
"""`sonde agent`: the node's daemon, which lets metrics out for as long as it runs."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from sonde.errors import UsageError
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.agent import Live, Sink
    from sonde.config import Config

EXAMPLE = """\
examples:
  sudo sonde agent --prometheus 127.0.0.1:9400     a page for Prometheus, on loopback
  sudo sonde agent --prometheus :9400 --dcgm-names also under the names of dcgm-exporter
  sudo sonde agent --otlp http://127.0.0.1:4318    push to an OpenTelemetry collector

Ends with SIGTERM or Ctrl-C; ignores SIGHUP. Nothing leaves this machine unless an address says so.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `agent` to the commands."""
    parser = subparsers.add_parser(
        "agent",
        help="run on a node and let its metrics out: Prometheus, OTLP",
        description="Watch this node and let its metrics out, until told to end.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prometheus", metavar="HOST:PORT",
        help="serve a page for Prometheus; port 0 takes a free one")  # fmt: skip
    add("--dcgm-names", action="store_true",
        help="on that page, also use the names of NVIDIA's dcgm-exporter")  # fmt: skip
    add("--otlp", metavar="URL", help="push to this OpenTelemetry collector, over HTTP")
    add("-o", "--output", type=Path, metavar="FILE",
        help="also keep everything in a capture, stacks and waits too")  # fmt: skip
    add("-f", "--force", action="store_true", help="overwrite FILE if it exists")
    add("--no-device", action="store_true", help="leave devices alone: no calls, no signals")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch until told to end. Raises SondeError for whatever stands in the way."""
    from sonde.cli.at_once import EndsAtOnce

    with EndsAtOnce():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from sonde import procfs
    from sonde.cli.record import require_host

    # A daemon has no terminal, and systemd would take an end by this for a clean one. Helper
    # processes inherit it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    procfs.BROKER.warm_up()
    config = _config(args)
    if not (config.prometheus or config.otlp or args.output):
        raise UsageError("nobody would hear the agent", "Give --prometheus, --otlp or -o.")
    require_host()
    from sonde.agent import Agent
    from sonde.host import descriptors

    descriptors.raise_limit()

    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: ended.append(number))
    # A daemon has no terminal, so none that hangs up is its own.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sink = _sink(args)
    agent = Agent(config, sink)
    agent.start()
    _say(config, agent.serves_at)
    agent.run(lambda: bool(ended), _nothing)
    agent.stop()
    for text in agent.left_behind():
        print(f"sonde: {one_line(text)}", file=sys.stderr)
    return 0


def _config(args: argparse.Namespace) -> Config:
    from sonde.config import load

    flags: dict[str, object] = {}
    if args.prometheus:
        flags["prometheus"] = args.prometheus
    if args.dcgm_names:
        flags["dcgm_names"] = True
    if args.otlp:
        flags["otlp"] = args.otlp
    if args.no_device:
        flags |= {"device_calls": False, "device_metrics": False}
    if not args.output:  # stacks would go nowhere
        flags |= {"on_cpu": False, "off_cpu": False}
    return load(flags, defaults={"host_metrics": True})


def _sink(args: argparse.Namespace) -> Sink | None:
    if not args.output:
        return None
    from sonde.sinks.capture import CaptureFile

    return CaptureFile(args.output, force=args.force)


def _say(config: Config, address: str) -> None:
    if address:
        print(f"sonde: metrics at http://{address}/metrics", file=sys.stderr, flush=True)
    if config.otlp:
        print(f"sonde: pushing to {_without_secrets(config.otlp)}", file=sys.stderr, flush=True)


def _without_secrets(url: str) -> str:
    """Scheme, host and path: what stands before the host or in the query may be a key."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _nothing(_live: Live) -> None:
    """A daemon shows no progress."""
