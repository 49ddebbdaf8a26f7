# SPDX-License-Identifier: Apache-2.0
"""`sonde agent`: the daemon that exports a node's metrics."""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from sonde.cli import log_output
from sonde.errors import UsageError

if TYPE_CHECKING:
    from sonde.agent import Live, Sink
    from sonde.config import Config

LOG = logging.getLogger("sonde.agent")
EXAMPLE = """\
examples:
  sudo sonde agent --prometheus 127.0.0.1:9400     a metrics endpoint for Prometheus, on loopback
  sudo sonde agent --prometheus :9400 --dcgm-names also under the names of dcgm-exporter
  sudo sonde agent --otlp http://127.0.0.1:4318    push to an OpenTelemetry collector

Stops at SIGTERM or Ctrl-C; ignores SIGHUP. No data leaves this machine unless an address is given.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `agent` to the commands."""
    parser = subparsers.add_parser(
        "agent",
        help="run on a node and export its metrics: Prometheus, OTLP",
        description="Observe this node and export its metrics until it is stopped.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prometheus", metavar="HOST:PORT",
        help="serve metrics for Prometheus; port 0: any free port")  # fmt: skip
    add("--dcgm-names", action="store_true",
        help="also serve them under the names of NVIDIA's dcgm-exporter")  # fmt: skip
    add("--otlp", metavar="URL", help="push to this OpenTelemetry collector, over HTTP")
    add("-o", "--output", type=Path, metavar="FILE",
        help="also record a capture, with stacks and waits")  # fmt: skip
    add("-f", "--force", action="store_true", help="overwrite FILE if it exists")
    add("--no-device", action="store_true", help="no device calls, no device metrics")
    log_output.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT. Raises SondeError where it cannot start."""
    from sonde.cli.abort_signals import AbortOnSecondSignal

    as_json = log_output.is_json(args.log_format)
    with AbortOnSecondSignal(), log_output.to_stderr(as_json, args.log_level):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from sonde import procfs
    from sonde.cli.record import require_host

    # A daemon has no terminal, and systemd takes death by SIGHUP for a clean exit. Subprocesses
    # inherit this.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    procfs.BROKER.warm_up()
    config = _config(args)
    if not (config.prometheus or config.otlp or args.output):
        raise UsageError("the agent has no output", "Give --prometheus, --otlp or -o.")
    require_host()
    from sonde.agent import Agent
    from sonde.host import descriptors

    descriptors.raise_limit()

    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    sink = _sink(args)
    agent = Agent(config, sink)
    agent.start()
    _print_outputs(config, agent.serves_at)
    agent.run(lambda: bool(signals), _no_progress)
    agent.stop()
    for text in agent.left_behind():
        LOG.warning("%s", text)
    LOG.info("stopped")
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
    if not args.output:  # only captures hold stacks
        flags |= {"on_cpu": False, "off_cpu": False}
    return load(flags, defaults={"host_metrics": True})


def _sink(args: argparse.Namespace) -> Sink | None:
    if not args.output:
        return None
    from sonde.sinks.capture import CaptureFile

    return CaptureFile(args.output, force=args.force)


def _print_outputs(config: Config, address: str) -> None:
    if address:
        LOG.info("metrics at http://%s/metrics", address)
    if config.otlp:
        LOG.info("pushing to %s", _without_secrets(config.otlp))


def _without_secrets(url: str) -> str:
    """Scheme, host and path: credentials and the query may hold secrets."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _no_progress(_live: Live) -> None:
    """A daemon shows no progress."""
