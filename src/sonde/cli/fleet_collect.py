# SPDX-License-Identifier: Apache-2.0
"""sonde fleet collect and discover: releases, their schedule, and output files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.cli import fleet_clock
from sonde.errors import SinkError, UsageError
from sonde.export.layout import one_line
from sonde.input_files import open_input
from sonde.private_files import make_folder, replacing

if TYPE_CHECKING:
    from sonde.fleet.clock import PartyClock
    from sonde.fleet.result import Result
    from sonde.fleet.task import Task

FORMATS = ("table", "json", "csv", "html", "parquet")
_RETRY_S = 30.0
_CLOCK_CHECK_S = 60.0
"""How often a wait reads the clock again: `sonde fleet clock --accept` may change it meanwhile."""


def add_collect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", type=Path, required=True, help="the collector's directory")
    _add_batch(parser)
    parser.add_argument("--top", type=int, default=20, help="rows of the table")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=None,
        help="default: by the suffix of -o (.html .parquet .csv .json), else a table",
    )
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument(
        "-o", "--output", type=Path, help="write to this file; with --follow, to this directory"
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--schedule", action="store_true", help="only show which batches are due, and when"
    )
    when.add_argument(
        "--follow",
        action="store_true",
        help="collect each batch when it is due, into one file each, until stopped",
    )
    parser.add_argument(
        "--releases", type=int, default=0, metavar="N", help="with --follow: stop after N batches"
    )


def add_discover(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", type=Path, required=True, help="the collector's directory of a discovery task"
    )
    _add_batch(parser)
    parser.add_argument(
        "--names", type=Path, required=True, help="known kernel names, one per line"
    )
    parser.add_argument("--json", action="store_true")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch",
        default=None,
        metavar="TIME",
        help="any time in the batch, ISO 8601 in UTC or seconds (default: the last that is due)",
    )


def collect(args: argparse.Namespace) -> int:
    """Run `sonde fleet collect`; returns the exit code."""
    from sonde.fleet import collector
    from sonde.fleet.task import Task

    task = Task.load(args.state / "task.json")
    clock = _clock(args)
    if args.schedule:
        _schedule(args, task, clock())
        return 0
    if args.follow:
        return _follow(args, task, clock)
    release = collector.collect(args.state, batch_start(task, args.batch, clock()))
    _show(args, task, release, args.output)
    return 0


def discover(args: argparse.Namespace) -> int:
    """Run `sonde fleet discover`; returns the exit code."""
    from sonde.fleet import collector, discovery
    from sonde.fleet.task import Task

    task = Task.load(args.state / "task.json")
    if not discovery.is_discovery(task):
        raise UsageError(
            f"{task.name} counts classes, not unclassified kernels",
            "make a task with 'sonde fleet aggregate --new DIR --discovery'",
        )
    try:
        with open_input(args.names) as file:
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {args.names}: {error.strerror}") from error
    names = [line.strip() for line in lines if line.strip()]
    threshold = discovery.threshold_of(task)
    release = collector.collect(args.state, batch_start(task, args.batch, _clock(args)()))
    found = discovery.discover(task, release, names)
    if args.json:
        answer = {
            "privacy": release.privacy_guarantee(),
            "least": threshold,
            "found": [asdict(f) for f in found],
        }
        print(json.dumps(answer))
        return 0
    print(f"{task.name}: kernels without a class, with at least {threshold:,} noised samples")
    print(f"privacy: {release.privacy_guarantee()}\n")
    for one in found:
        known = one_line(" or ".join(one.names)) or f"(no known name has hash {one.bucket})"
        print(f"{one.count:>10,} ± {one.error:<8,.0f} {known}")
    if not found:
        print("none")
    return 0


def _clock(args: argparse.Namespace) -> PartyClock:
    """The collector's clock; warns where it does not use the machine's wall clock."""
    from sonde.fleet.clock import PartyClock

    clock = PartyClock(args.state, must_persist=False)
    fleet_clock.warn_of_step(clock)
    return clock


def batch_start(task: Task, text: str | None, now_s: float) -> int:
    """Start of the batch that a user's text names. Raises UsageError."""
    if text is None:
        return task.last_due(now_s)
    try:
        if text.isdigit():
            return task.batch_of(int(text))
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"not a time: {text}", "write it like 2026-11-20T00:00") from error
    return task.batch_of(int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()))


def due_batches(task: Task, now_s: float) -> list[int]:
    """Starts of the last batch that is due, and of the next ones."""
    last = task.last_due(now_s)
    open_ = task.batch_of(int(now_s))
    return list(range(last, open_ + 2 * task.release_s, task.release_s))


def _schedule(args: argparse.Namespace, task: Task, now_s: float) -> None:
    rows: list[dict[str, Any]] = [
        {"batch": start_s, "until": start_s + task.release_s, "due": task.due_s(start_s)}
        for start_s in due_batches(task, now_s)
    ]
    if args.json or args.format == "json":
        print(json.dumps({"release_s": task.release_s, "grace_s": task.grace_s, "batches": rows}))
        return
    print(
        f"{task.name}: a release every {_hours(task.release_s)}, "
        f"{_hours(task.grace_s)} after its batch has ended"
    )
    for row in rows:
        state = "due" if row["due"] <= now_s else f"in {_hours(row['due'] - now_s)}"
        print(f"  batch {_utc(row['batch'])} to {_utc(row['until'])}: {_utc(row['due'])} ({state})")


def _follow(args: argparse.Namespace, task: Task, clock: PartyClock) -> int:
    """Writes one file per release. A batch that is refused for good is reported and skipped."""
    from sonde.fleet import collector

    if args.output is None:
        raise UsageError("--follow writes a file per release", "name a directory with -o")
    ending = args.format or "html"
    if ending == "table":
        raise UsageError("--follow writes files", "choose --format html, parquet, csv or json")
    make_folder(args.output)
    start_s = batch_start(task, args.batch, clock())
    done = 0
    while not args.releases or done < args.releases:
        if clock() < task.due_s(start_s):
            print(f"batch {_utc(start_s)} is due {_utc(task.due_s(start_s))}", flush=True)
        while (wait_s := task.due_s(start_s) - clock()) > 0:
            time.sleep(min(wait_s, _CLOCK_CHECK_S))
        path = args.output / f"{datetime.fromtimestamp(start_s, UTC):%Y-%m-%dT%H%M%S}.{ending}"
        try:
            release = collector.collect(args.state, start_s)
        except collector.ReleaseDenied as denied:
            why = one_line(str(denied))
            again = "" if denied.is_final else "; retrying"
            print(
                f"batch {_utc(start_s)} is not released: {why}{again}", file=sys.stderr, flush=True
            )
            # Its clock differs from ours, it still verifies reports, the request was delayed on
            # its way, or the operators must correct something: ask again.
            if not denied.is_final:
                time.sleep(min(_RETRY_S, task.release_s))
                continue
        except SinkError as error:
            print(f"{one_line(str(error))}; retrying", file=sys.stderr, flush=True)
            time.sleep(min(_RETRY_S, task.release_s))
            continue
        else:
            _write(ending, args.state, task, release, path)
            print(f"{one_line(str(path))}: {release.privacy_guarantee()}", flush=True)
        done += 1
        start_s += task.release_s
    return 0


def _show(args: argparse.Namespace, task: Task, release: Result, output: Path | None) -> None:
    from sonde.fleet import result

    if output is not None:
        _write(args.format or output.suffix.removeprefix("."), args.state, task, release, output)
        if args.format is not None:
            return
    if args.json or args.format == "json":
        print(_json(args.state, task, release))
    elif args.format == "csv":
        print(result.to_csv(release), end="")
    elif args.format == "html":
        print(_page(args.state, task, release), end="")
    elif args.format == "parquet":
        raise UsageError("Parquet cannot be written to a terminal", "name a file with -o")
    else:
        print(result.to_table(release, args.top))


def _write(kind: str, state: Path, task: Task, release: Result, path: Path) -> None:
    from sonde.fleet import result

    contents: dict[str, Callable[[], bytes]] = {
        "html": lambda: _page(state, task, release).encode(),
        "json": lambda: _json(state, task, release).encode(),
        "csv": lambda: result.to_csv(release).encode(),
        "table": lambda: f"{result.to_table(release)}\n".encode(),
        "parquet": lambda: result.to_parquet(release),
    }
    if kind not in contents:
        raise UsageError(
            f"unknown kind of file: {path.name}", "use the suffix .html, .parquet, .csv or .json"
        )
    content = contents[kind]()
    with replacing(path) as out:
        out.write(content)


def _page(state: Path, task: Task, release: Result) -> str:
    from sonde.fleet import collector, page
    from sonde.fleet.budget import ledger_of

    return page.render(release, ledger_of(task, collector.collected_batches(state)))


def _json(state: Path, task: Task, release: Result) -> str:
    """The release, its privacy guarantee as text, and the privacy cost of all releases that were
    collected here."""
    from sonde.fleet import collector
    from sonde.fleet.budget import ledger_of

    ledger = ledger_of(task, collector.collected_batches(state))
    return json.dumps(
        {
            **asdict(release),
            "privacy": release.privacy_guarantee(),
            "ledger": asdict(ledger),
        }
    )


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds:.0f} s"
