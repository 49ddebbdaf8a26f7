# SPDX-License-Identifier: Apache-2.0
"""`sonde agent`: the daemon that observes a node, for a server, a capture file or metrics."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import platform
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

from sonde.cli import end_with_input, log_output
from sonde.cli.service_manager import HangUps, ServiceManager
from sonde.errors import SondeError, UsageError

if TYPE_CHECKING:
    from sonde.agent import Agent, Live
    from sonde.config import Config
    from sonde.sinks.capture import CaptureFile
    from sonde.sinks.server import ServerSink

LOG = logging.getLogger("sonde.agent")
ALWAYS: Final = {
    "hz": 19,
    "host_hz": 10,
    "chunk_s": 10.0,
    "wait_span_ms": 100.0,
    "row_ms": 50.0,
    "stack_gap_ms": 50.0,
}
"""Defaults with --server, as such an agent always runs and all that it sees crosses the network. A
row of waits stands for about as much time as a sample on a CPU does (1 s / 19), and stacks of a
thread's waits are as far apart."""
EXAMPLE = """\
examples:
  sudo sonde agent --prometheus 127.0.0.1:9400     a metrics endpoint for Prometheus, on loopback
  sudo sonde agent --prometheus :9400 --dcgm-names also under the names of dcgm-exporter
  sudo sonde agent --server https://HOST:7373 --token-file FILE     everything, to a server
  sudo sonde agent --otlp http://127.0.0.1:4318    push to an OpenTelemetry collector

Stops at SIGTERM or Ctrl-C; SIGHUP has it read its configuration again.
No data leaves this machine unless an address is given.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `agent` to the commands."""
    parser = subparsers.add_parser(
        "agent",
        help="run on a node: send what happens to a server, export metrics to Prometheus and OTLP",
        description="Observe this node until it is stopped.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prometheus", metavar="HOST:PORT",
        help="serve metrics for Prometheus; port 0: any free port")  # fmt: skip
    add("--dcgm-names", action="store_true",
        help="also serve them under the names of NVIDIA's dcgm-exporter")  # fmt: skip
    add("--otlp", metavar="URL", help="push to this OpenTelemetry collector, over HTTP")
    add("--server", metavar="URL",
        help="send everything to this server (`sonde serve`), with stacks and waits")  # fmt: skip
    add("--token-file", type=Path, metavar="FILE",
        help="with the token for the server; read again when the server refuses it")  # fmt: skip
    add("--node", metavar="NAME", help="of this machine at the server (default: its host name)")
    add("--spool", type=Path, metavar="DIR",
        help="what the server has not acknowledged waits there "
        "(default: /var/lib/sonde/spool, or below ~/.local/state)")  # fmt: skip
    add("--spool-mb", type=int, metavar="N",
        help="how much may wait there, oldest dropped first (default: 256)")  # fmt: skip
    add("--chunk", type=float, metavar="S", help="send every S seconds (default: 10; with -o 5)")
    add("-F", "--hz", type=int, metavar="HZ",
        help="samples per second on each CPU (default: 99; with --server 19)")  # fmt: skip
    add("-o", "--output", type=Path, metavar="FILE",
        help="also record a capture, with stacks and waits")  # fmt: skip
    add("-f", "--force", action="store_true", help="overwrite FILE if it exists")
    add("--group-pressure", action="store_true",
        help="pressure (PSI) of control groups without a limit, too")  # fmt: skip
    add("--traces", action="store_true",
        help="follow HTTP requests with the header traceparent (W3C): their samples and waits by "
        "trace")  # fmt: skip
    add("--no-device", action="store_true", help="no device calls, no device metrics")
    log_output.add_options(parser)
    add(end_with_input.FLAG, action="store_true", help=end_with_input.HELP)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT. Raises SondeError where it cannot start."""
    from sonde.cli.abort_signals import AbortOnSecondSignal

    # SIGHUP reloads. Unhandled it would end the agent, which systemd counts as a clean exit.
    hang_ups = HangUps()
    as_json = log_output.is_json(args.log_format)
    with AbortOnSecondSignal(), log_output.to_stderr(as_json, args.log_level):
        return _run(args, hang_ups)


def _run(args: argparse.Namespace, hang_ups: HangUps) -> int:
    from sonde import procfs
    from sonde.host.requirements import require_recording

    procfs.BROKER.warm_up()
    config = _config(args)
    if not (config.prometheus or config.otlp or config.server or args.output):
        raise UsageError("the agent has no output", "Give --server, --prometheus, --otlp or -o.")
    if config.server and args.output:
        raise UsageError("a capture and a server at once", "Give -o to a second agent.")
    require_recording()
    from sonde.agent import Agent
    from sonde.host import descriptors

    descriptors.raise_limit()

    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    if args.end_with_input:
        end_with_input.watch()
    manager = ServiceManager()
    sender = _server_sink(config) if config.server else None
    agent = Agent(config, sender or _capture(args))
    agent.start()
    if sender is not None:
        _obey_server(agent, sender)
    _print_outputs(config, agent.serves_at)
    manager.ready()
    running = [config]  # the present configuration

    def ends() -> bool:
        manager.working()
        if hang_ups.came():
            manager.reloading()
            running[0] = _reload(args, running[0], agent, sender)
            manager.ready()
        return bool(signals)

    agent.run(ends, _no_progress)
    manager.stopping()
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
    for name, value in (
        ("server", args.server),
        ("server_token_file", str(args.token_file) if args.token_file else ""),
        ("node", args.node),
        ("spool", str(args.spool) if args.spool else ""),
        ("spool_mb", args.spool_mb),
        ("chunk_s", args.chunk),
        ("hz", args.hz),
    ):
        if value:
            flags[name] = value
    if args.traces:
        flags["traces"] = True
    if args.group_pressure:
        flags["group_pressure"] = True
    if args.no_device:
        flags |= {"device_calls": False, "device_metrics": False}
    config = load(flags, defaults={"host_metrics": True})
    if config.server:
        return load(flags, defaults={"host_metrics": True, **ALWAYS})
    if not args.output:  # without chunks nobody gets the stacks
        return dataclasses.replace(config, on_cpu=False, off_cpu=False)
    return config


def _capture(args: argparse.Namespace) -> CaptureFile | None:
    if not args.output:
        return None
    from sonde.sinks.capture import CaptureFile

    return CaptureFile(args.output, force=args.force)


def _server_sink(config: Config) -> ServerSink:
    from sonde.cli.state_folder import state_folder
    from sonde.sinks.server import ServerSink
    from sonde.sinks.spool import Spool

    folder = Path(config.spool) if config.spool else state_folder() / "spool"
    spool = Spool(folder, config.spool_mb << 20)
    return ServerSink(config.server, config.node or platform.node(), spool, _token_file(config))


def _token_file(config: Config) -> Path | None:
    return Path(config.server_token_file) if config.server_token_file else None


def _reload(
    args: argparse.Namespace, running: Config, agent: Agent, sender: ServerSink | None
) -> Config:
    """Read the configuration again and apply what can change live; logs the outcome. Returns the
    configuration from now on."""
    from sonde.agent.reload import difference

    try:
        found = difference(running, _config(args))
        taken = found.taken
        if sender is not None:
            sender.reconfigure(_token_file(taken), taken.spool_mb << 20)
        try:
            agent.reconfigure(taken)
        except SondeError:
            if sender is not None:
                sender.reconfigure(_token_file(running), running.spool_mb << 20)
            raise
    except SondeError as error:
        LOG.error("the configuration stays as it was: %s; %s", error.cause, error.remedy)
        return running
    for text in found.refused:
        LOG.warning("this setting needs a restart of the agent, and stays: %s", text)
    LOG.info("configuration read again; changed: %s", ", ".join(found.changed) or "nothing")
    return taken


def _obey_server(agent: Agent, sink: ServerSink) -> None:
    """Pause and resume as the server's operator orders (`sonde collection`)."""

    def switch(collects: bool) -> None:
        if collects:
            agent.resume()
        else:
            agent.pause()
        LOG.warning("the server's operator %s collection", "resumes" if collects else "pauses")

    sink.on_switch(switch)


def _print_outputs(config: Config, address: str) -> None:
    if address:
        LOG.info("metrics at http://%s/metrics", address)
    if config.server:
        LOG.info("sending to %s", _without_secrets(config.server))
    if config.otlp:
        LOG.info("pushing to %s", _without_secrets(config.otlp))


def _without_secrets(url: str) -> str:
    """Scheme, host and path of a URL: its credentials and query may be secret."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _no_progress(_live: Live) -> None:
    """A daemon shows no progress."""
