# SPDX-License-Identifier: Apache-2.0
"""`sonde alerts`: checks a file of rules, and lists the alerts of a store."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import MissingDependency, SondeError, UsageError
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.server.alert_rules import AlertConfig, Rule
    from sonde.server.service import Service

SHOWN = 10
"""Values of a rule that `check` prints."""
EXAMPLE = """\
examples:
  sonde alerts check rules.toml                 whether the file is right
  sonde alerts check rules.toml --store DIR     what each rule gives now
  sonde alerts list --store DIR                 what is pending, firing or was resolved
  sonde serve --store DIR --alerts rules.toml   evaluates them

docs/guide/server.md#alerts describes the file.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `alerts` to the commands."""
    parser = subparsers.add_parser(
        "alerts",
        help="check rules of alerts and what they give now; list alerts",
        description="Check the rules of `sonde serve --alerts`, or list the alerts of a store. "
        "Nothing is sent.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", choices=("check", "list"))
    add("file", nargs="?", type=Path, metavar="FILE", help="of rules (TOML), to check")
    add("--store", type=Path, metavar="DIR", help="that of `sonde serve`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check or list; 1 where a rule cannot be evaluated. Raises UsageError, MissingDependency."""
    try:
        from sonde.server.alert_rules import load
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"alerts need {error.name}", "install it: pip install 'sonde[server]'"
        ) from error
    if args.action == "list":
        return _list(_store(args.store))
    if args.file is None:
        raise UsageError("no file of rules", "give one: sonde alerts check FILE")
    config = load(args.file)
    if args.store is None:
        print(f"{len(config.rules)} rules, all well formed; --store DIR shows what each gives now")
        return 0
    return _check(config, _store(args.store))


def _store(path: Path | None) -> Path:
    if path is None or not path.is_dir():
        raise UsageError(
            f"{path or '--store'} is no directory", "give --store DIR of `sonde serve`"
        )
    return path


def _check(config: AlertConfig, store: Path) -> int:
    from sonde.server.service import Service

    service = Service(store, flushes=False)
    try:
        return max(_show(service, rule) for rule in config.rules)
    finally:
        service.close()


def _show(service: Service, rule: Rule) -> int:
    """Print what a rule gives now; 1 where it cannot be evaluated."""
    from sonde.server.alert_values import evaluate

    sign = ">" if rule.above is not None else "<"
    about = f"{rule.name} ({rule.tenant}): {rule.question} {rule.value or rule.reduce} {sign}"
    print(f"{about} {rule.threshold:g} for {rule.for_s:g} s")
    started = time.monotonic()
    try:
        found = evaluate(service, rule, time.time())
    except SondeError as error:
        print(f"  cannot be evaluated: {one_line(str(error))}")
        return 1
    for one in found.found[:SHOWN]:
        labels = ", ".join(f"{name}={one_line(text)}" for name, text in one.labels.items())
        print(f"  {'ALERT' if one.holds else 'fine '}  {one.value:.6g}  {labels}")
    more = len(found.found) - SHOWN
    if more > 0:
        print(f"  {more} more values")
    if found.left_out:
        print(f"  {found.left_out:,} values are too many, and are left out")
    if not found.found:
        print(f"  no value: none of the rows of the last {rule.range_s:g} s counts")
    print(f"  {found.rows:,} rows count; took {time.monotonic() - started:.2f} s")
    return 0


def _list(store: Path) -> int:
    from sonde.server.alert_states import AlertStates

    states = AlertStates(store)
    try:
        for one in states.listed():
            labels = ", ".join(f"{name}={one_line(text)}" for name, text in one.labels.items())
            since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.since_ns / 1e9))
            print(
                f"{one.state:8}  {one.tenant}  {one.rule}  {one.value:.6g}  since {since}  {labels}"
            )
    finally:
        states.close()
    return 0
