# SPDX-License-Identifier: Apache-2.0
"""`sonde diagnose`: watches this node and reports why work became slower, and who did it."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.cli.incident_exporters import IncidentExporters
from sonde.cli.incident_exporters import add_arguments as add_exporters
from sonde.errors import SinkError
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.diagnose.early import EarlyWarning
    from sonde.diagnose.incident import Incident
    from sonde.diagnose.moments import Moment, Window
    from sonde.diagnose.series import Series

EXAMPLE = """\
examples:
  sudo sonde diagnose                  watch the whole machine, until Ctrl-C
  sudo sonde diagnose --for 30s        for half a minute
  sudo sonde diagnose --json | jq 'select(.verdict.change == null) | .verdict'
  sudo sonde diagnose --keep incidents.d, then: sonde incidents incidents.d

Prints an incident when a process has become slower and the cause is known, or is not after a fair
look. One cause is one incident as long as it goes on, however many processes it slows. An
offender is named only with evidence from that very time. No data leaves this machine
unless a URL names a destination.
"""
TICK_S = 0.25
HZ = 49
"""On-CPU samples per second on each CPU."""
STACK_GAP_MS = 40.0
"""Between two stacks of waits of one thread. Only two of fifteen causes need stacks, so a few are
enough, and each new one has to be named."""
NO_SPANS_MS = 60_000.0
"""Waits from this length on are recorded one by one: next to none."""
MIN_CPU = 0.02
"""Of a CPU: processes that use less, and no disk, are left out of the file of `--rows`."""
MAX_PARTS = 256
"""Names of programs that are counted by one incident; incidents whose parts are printed by name."""
SHOWN = 4
"""Of these, those that are printed."""
NICE = -5
"""Higher priority than others have, to observe in time that they lack a CPU."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `diagnose` to the commands."""
    parser = subparsers.add_parser(
        "diagnose",
        help="watch this node: what became slower, why, and who did it",
        description="Watch this node, and explain slowdowns as they happen.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--for", type=_seconds, metavar="S", dest="seconds", help="end after S seconds (30, 30s)")
    add("--json", action="store_true", help="print each incident as a line of JSON")
    add("--early", action="store_true", help="also warn of what is about to go wrong")
    add(
        "--all",
        action="store_true",
        help="also changes that are no fault, and parts of incidents that go on",
    )
    add("--keep", type=Path, metavar="FOLDER", help="write each incident with its rows there")
    add("--rows", type=Path, metavar="FILE",
        help="write what is watched of each process, a line of JSON a tick")  # fmt: skip
    add("--no-device", action="store_true", help="leave out device calls")
    add_exporters(parser)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text.removesuffix("s"))) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def run(args: argparse.Namespace) -> int:
    """Watch until the time is over, or a signal. Raises SondeError where it cannot start."""
    from sonde.cli.abort_signals import AbortOnSecondSignal

    with AbortOnSecondSignal():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    import os

    from sonde import procfs
    from sonde.config import load
    from sonde.host.requirements import require_recording

    procfs.BROKER.warm_up()
    flags: dict[str, object] = {"tick_s": TICK_S, "hz": HZ, "stack_gap_ms": STACK_GAP_MS}
    flags |= {"wait_span_ms": NO_SPANS_MS, "injected": False}
    if args.no_device:
        flags |= {"device_calls": False, "device_metrics": False}
    config = load(flags, defaults={"host_metrics": True, "host_hz": 0})
    require_recording()
    from sonde.agent import DiagnosisAgent
    from sonde.agent.slowdown_watcher import Watcher
    from sonde.host import descriptors

    descriptors.raise_limit()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    exporters = IncidentExporters(args)
    printer = Printer(args.json, args.all, args.keep, exporters)
    agent = DiagnosisAgent(config, lambda text: print(f"sonde: {one_line(text)}", file=sys.stderr))
    note = Notebook(args.rows).take if args.rows else None
    watcher = Watcher(
        printer.take,
        agent.frames_of,
        agent.process,
        agent.running,
        config.hz,
        note,
        agent.log_failure,
        printer.warn if args.early else None,
    )
    agent.observe(watcher)
    watcher.start()
    agent.start()
    print("sonde: watching", file=sys.stderr, flush=True)
    until_s = time.monotonic() + (args.seconds or float("inf"))
    agent.run(lambda: bool(signals) or time.monotonic() >= until_s, lambda _: None, until_s)
    watcher.close()
    agent.stop()
    printer.close()
    for text in agent.left_behind():
        print(f"sonde: {one_line(text)}", file=sys.stderr)
    exporters.close()
    lost = {**watcher.losses, **exporters.losses}
    lost = {name: count for name, count in lost.items() if count}
    if agent.failures:
        lost["diagnose.ticks"] = agent.failures
    if lost:
        print(f"sonde: lost: {one_line(json.dumps(lost))}", file=sys.stderr)
    return 0


class Notebook:
    """Writes the file of `--rows`, a line for each tick:
    `{"from": ns, "to": ns, "processes": {PID: {series: value}}}`."""

    def __init__(self, path: Path) -> None:
        """Replaces the file. Raises SinkError."""
        from sonde.private_files import create

        self._fd = create(path, force=True).fd

    def take(self, moment: Moment, values: dict[int, dict[Series, float]]) -> None:
        """Write the line of one tick."""
        import os

        found = {}
        for pid, row in values.items():
            one = moment.processes.get(pid)
            disk = sum(use.bytes for use in one.disk) / moment.seconds if one is not None else 0.0
            if max(row.values()) > MIN_CPU or disk:
                found[pid] = {str(name): round(value, 4) for name, value in row.items()}
                found[pid]["disk_bytes"] = round(disk)
        line = {"from": moment.start_ns, "to": moment.end_ns, "processes": found}
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(line).encode() + b"\n")


@dataclass(slots=True)
class Parts:
    """Slowdowns that belong to one incident."""

    count: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def add(self, incident: Incident) -> None:
        """Count one."""
        self.count += 1
        if incident.victim_name in self.names or len(self.names) < MAX_PARTS:
            self.names[incident.victim_name] += 1

    def text(self) -> str:
        """How many slowdowns, of which programs most."""
        most = ", ".join(f"{name} {count}" for name, count in self.names.most_common(SHOWN))
        more = "1 more slowdown" if self.count == 1 else f"{self.count} more slowdowns"
        return f"{more}, of {most}"


class Printer:
    """Prints incidents as they come, writes them to a folder, and hands them to exporters."""

    def __init__(
        self, as_json: bool, changes_too: bool, folder: Path | None, exporters: IncidentExporters
    ) -> None:
        """`changes_too`: print and keep changes that are no fault, too; `folder`: None to keep
        nothing."""
        self._as_json = as_json
        self._changes_too = changes_too
        self._folder = folder
        self._exporters = exporters
        self._count = 0
        self._parts: defaultdict[int, Parts] = defaultdict(Parts)
        """Of incidents that go on, by number, since they were printed last."""
        self._titles: dict[int, str] = {}
        """Of incidents that were printed, by number: the cause and the victim."""

    def take(self, incident: Incident, window: Window) -> None:
        """Take an incident; called from other threads, one at a time."""
        if not incident.part_of:
            self._exporters.take(incident)
        elif not self._as_json and not self._changes_too:
            self._parts[incident.part_of].add(incident)
        is_news = incident.verdict.is_fault and not incident.part_of
        if not is_news and not self._changes_too:
            return
        self._print_parts()
        from sonde.cli.incidents import as_json, as_text

        self._count += 1
        cause, name = incident.verdict.cause, incident.victim_name
        self._titles[incident.number] = f"{cause} of {name} ({incident.victim})"
        while len(self._titles) > MAX_PARTS:
            del self._titles[next(iter(self._titles))]
        if self._folder is not None:
            self._keep(self._folder, incident, window)
        print(as_json(incident) if self._as_json else as_text(incident), flush=True)

    def _print_parts(self) -> None:
        for number, parts in self._parts.items():
            title = self._titles.get(number, "an earlier incident")
            print(one_line(f"{title} goes on: {parts.text()}"), flush=True)
        self._parts.clear()

    def close(self) -> None:
        """Print what belongs to earlier incidents."""
        self._print_parts()

    def warn(self, warning: EarlyWarning) -> None:
        """Print what is about to go wrong; it is neither kept nor exported."""
        from sonde.cli.incidents import warning_as_json, warning_as_text

        print(warning_as_json(warning) if self._as_json else warning_as_text(warning), flush=True)

    def _keep(self, folder: Path, incident: Incident, window: Window) -> None:
        from sonde.cli.incidents import write

        name = f"{incident.began_ns // 1_000_000}-{incident.victim}-{self._count}.json.gz"
        try:
            write(folder, name, incident, window)
        except SinkError as error:
            print(f"sonde: {one_line(error.cause)}", file=sys.stderr, flush=True)
