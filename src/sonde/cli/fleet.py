# SPDX-License-Identifier: Apache-2.0
"""sonde fleet: private aggregation over a fleet."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sonde.cli import fleet_clock, fleet_collect, fleet_simulate, log_output
from sonde.errors import MissingDependency, SinkError, SondeError, UsageError
from sonde.export.layout import one_line

if TYPE_CHECKING:
    from sonde.fleet.clock import PartyClock
    from sonde.fleet.sampling import Period

EXAMPLES = """\
examples:
  sonde fleet aggregate --new trial --nodes 20     keys and directories of every party, for a trial
  sonde fleet aggregate --state trial/helper &     the two aggregators, each its own process
  sonde fleet aggregate --state trial/leader &
  sonde fleet report --node trial/nodes/0000 training.sonde
  sonde fleet collect --state trial/collector -o totals.html
  sonde fleet budget --state trial/leader          privacy cost of the releases so far
  sonde fleet clock --state trial/leader           its trusted time; --accept a new one
  sonde fleet simulate --nodes 10000 --attacks     the whole protocol in one process, with attacks
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `sonde fleet` and its commands."""
    parser = subparsers.add_parser(
        "fleet",
        help="fleet totals with differential privacy",
        description="Totals over a fleet of GPUs with differential privacy.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(dest="fleet_command", metavar="COMMAND", required=True)
    _add_report(commands)
    _add_aggregate(commands)
    _add_collect(commands)
    _add_discover(commands)
    _add_budget(commands)
    _add_clock(commands)
    _add_simulate(commands)


def _command(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    return cast(
        argparse.ArgumentParser,
        commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  sonde fleet {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        ),
    )


def _add_report(commands: Any) -> None:
    parser = _command(
        commands,
        "report",
        "Upload this node's samples of one period as secret shares.",
        "report --node trial/nodes/0000 training.sonde",
    )
    parser.add_argument("--node", type=Path, required=True, help="the node's directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("capture", nargs="?", type=Path, metavar="FILE.sonde", help="a recording")
    what.add_argument(
        "--kernels",
        type=Path,
        help="kernel records: CSV or JSON lines with name, start_ns, duration_ns[, activity]",
    )
    parser.add_argument(
        "--source",
        choices=("kernel", "device", "cpu"),
        default=None,
        help="of a recording: kernels on the device, device calls, or functions on the CPU "
        "(default: the first of these that it holds)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be sent, send nothing"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to retry while the leader is unavailable (default 30)",
    )


def _add_aggregate(commands: Any) -> None:
    parser = _command(
        commands,
        "aggregate",
        "Run one of the two aggregators, or create a trial fleet (--new).",
        "aggregate --state trial/leader",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--state", type=Path, help="the aggregator's directory")
    what.add_argument("--new", type=Path, metavar="DIR", help="create a trial fleet there and exit")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    log_output.add_options(parser)
    fleet = parser.add_argument_group("a trial fleet")
    fleet.add_argument("--nodes", type=int, default=10)
    fleet.add_argument("--tenants", type=int, default=5)
    fleet.add_argument("--release-hours", type=float, default=24.0, help="hours per release")
    fleet.add_argument(
        "--min-batch",
        type=int,
        default=None,
        help="minimum reports of a release (default: half the nodes)",
    )
    fleet.add_argument("--unit", choices=("gpu", "tenant"), default="gpu", help="unit of privacy")
    fleet.add_argument(
        "--tenant-cap",
        type=int,
        default=None,
        help="nodes of a tenant that count in a release (default with --unit tenant: chosen from "
        "the tenants' sizes)",
    )
    fleet.add_argument("--epsilon", type=float, default=8.0, help="yearly budget")
    fleet.add_argument("--delta", type=float, default=1e-6)
    fleet.add_argument(
        "--discovery",
        action="store_true",
        help="count unclassified kernels instead of classes, for 'sonde fleet discover'",
    )
    fleet.add_argument(
        "--port", type=int, default=8471, help="port of the leader; the helper uses the next"
    )


def _add_collect(commands: Any) -> None:
    parser = _command(
        commands,
        "collect",
        "Collect the release of one batch: counts with error bars, and their epsilon.",
        "collect --state trial/collector --batch 2026-11-20T00:00 -o totals.html",
    )
    fleet_collect.add_collect(parser)


def _add_discover(commands: Any) -> None:
    parser = _command(
        commands,
        "discover",
        "Find common kernels without a class, by matching known names.",
        "discover --state trial/collector --names kernel-names.txt",
    )
    fleet_collect.add_discover(parser)


def _add_budget(commands: Any) -> None:
    parser = _command(
        commands,
        "budget",
        "The privacy cost of an aggregator's releases, per GPU and per tenant.",
        "budget --state trial/leader",
    )
    parser.add_argument("--state", type=Path, required=True, help="an aggregator's directory")
    parser.add_argument("--json", action="store_true")


def _add_clock(commands: Any) -> None:
    parser = _command(
        commands,
        "clock",
        "Show the trusted time of a party or node, or accept the machine's clock.",
        "clock --state trial/leader --accept",
    )
    fleet_clock.add_clock(parser)


def _add_simulate(commands: Any) -> None:
    parser = _command(
        commands,
        "simulate",
        "Simulate a fleet with the real protocol.",
        "simulate --nodes 2000 --buckets 4096 --dropouts 0.3 --one-sided 0.05 --attacks",
    )
    fleet_simulate.add_simulate(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen fleet command; returns the exit code."""
    try:
        return _RUN[args.fleet_command](args)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the fleet protocol needs {error.name}", "pip install 'sonde[fleet]'"
        ) from error


def _report(args: argparse.Namespace) -> int:
    from sonde.fleet import node, provision
    from sonde.fleet.buckets import BucketSpace
    from sonde.fleet.clock import PartyClock, utc
    from sonde.fleet.discovery import NO_UNKNOWN_KERNEL, bucket_of, is_discovery
    from sonde.fleet.sampling import Sampler, rng_of_period
    from sonde.fleet.task import Task

    task, identity = Task.load(args.node / "task.json"), provision.load_node(args.node)
    clock = PartyClock(args.node, must_persist=False)
    space, period = BucketSpace.of_task(task), _period(args, clock)
    number = period.time_s // task.period_s
    rng = rng_of_period(identity.private(), task.id, number)
    sampler = Sampler(space, period.start_ns, period.duration_ns, task.max_samples, rng)
    # In a fixed order: records with the same start may come in any.
    for record in sorted(period.records, key=lambda it: (it.start_ns, it.duration_ns, it.name)):
        sampler.observe(record)
    unknown = sampler.unclassified_kernel()
    buckets = [bucket_of(task, unknown)] if is_discovery(task) else sampler.buckets()
    if args.dry_run:
        for bucket in buckets:
            if is_discovery(task):
                content = (
                    "no unclassified kernel"
                    if bucket == NO_UNKNOWN_KERNEL
                    else f"hash of {one_line(unknown or '')}"
                )
            else:
                application, kernel, activity = space.label(bucket)
                content = f"{application} / {kernel} {activity}".rstrip()
            print(f"bucket {bucket}: {content}")
        until = "" if args.kernels is None else f" until {utc((number + 1) * task.period_s)}"
        print(
            f"would be sent{until} as secret shares to {one_line(task.leader_url)}; "
            "nothing was sent"
        )
        return 0
    report = node.make_report(task, identity, buckets, period.time_s)
    tls = provision.client_tls(args.node)
    receipt = node.upload_with_retry(task, report.encode(), tls, args.patience)
    if not receipt.accepted:
        raise SinkError(
            f"the leader refuses the report: {receipt.reason}", _REFUSED.get(receipt.reason, "")
        )
    print(f"{len(buckets)} samples sent as secret shares")
    return 0


def _period(args: argparse.Namespace, clock: PartyClock) -> Period:
    """The records of one period, from a recording or from a file."""
    if args.capture is not None:
        from sonde.fleet.clock import SKEW_S, duration
        from sonde.fleet.from_capture import period_of

        period = period_of(args.capture, args.source)
        print(f"{one_line(args.capture.name)}: {_SOURCES[period.source]}", file=sys.stderr)
        fleet_clock.warn_of_step(clock)
        if (ahead_s := period.time_s - clock()) > SKEW_S:
            raise UsageError(
                f"{args.capture.name} ends {duration(ahead_s)} after now: this machine's clock "
                "was wrong when it was recorded",
                "record again",
            )
        return period
    from sonde.fleet.sampling import Period, read_records

    if args.source is not None:
        raise UsageError("--source is for recordings", "omit it with --kernels")
    fleet_clock.warn_of_step(clock)
    records = list(read_records(args.kernels))
    start_ns = min((r.start_ns for r in records), default=0)
    end_ns = max((r.start_ns + r.duration_ns for r in records), default=0)
    return Period(records, start_ns, max(1, end_ns - start_ns), int(clock()), "kernel")


def _aggregate(args: argparse.Namespace) -> int:
    if args.new is not None:
        return _new_trial(args)
    from sonde.fleet.service import serve

    is_json = log_output.is_json(args.log_format)

    def ready(url: str) -> None:
        if is_json:
            logging.getLogger(__name__).info("listening on %s", url)
        else:
            print(f"listening on {one_line(url)}", flush=True)

    try:
        with log_output.to_stderr(is_json, args.log_level):
            serve(args.state, args.threads, ready)
    except OSError as error:
        raise SondeError(
            f"cannot listen: {error.strerror or error}",
            "free the address that task.json names, or make the trial with another --port",
        ) from error
    return 0


def _new_trial(args: argparse.Namespace) -> int:
    from sonde.fleet.budget import releases_a_year
    from sonde.fleet.discovery import DISCOVERY_SPACE, threshold_of
    from sonde.fleet.noise import MechanismKind, format_rounded_up, plan
    from sonde.fleet.provision import provision
    from sonde.fleet.task import Privacy, Task
    from sonde.fleet.tenant_cap import choose_cap

    if args.nodes < 1 or args.tenants < 1 or args.release_hours < 1:
        raise UsageError("a fleet needs nodes, tenants, and releases of at least an hour")
    if args.release_hours % 1:
        raise UsageError(f"a release of {args.release_hours:g} h", "give whole hours")
    if not 1 <= args.port <= 65_534:
        raise UsageError(
            f"no port {args.port}", "give one from 1 to 65534; the helper uses the next"
        )
    if args.tenant_cap is not None and args.tenant_cap < 1:
        raise UsageError("the tenant cap must be at least 1")
    if args.min_batch is not None and args.min_batch < 1:
        raise UsageError("the minimum batch must be at least 1 report")
    release_s = int(args.release_hours) * 3600
    tags = [f"tenant-{n % args.tenants}" for n in range(args.nodes)]
    releases = releases_a_year(release_s)
    if args.unit == "tenant" and args.tenant_cap is None:
        sizes = Counter(tags).values()
        args.tenant_cap = choose_cap(
            sizes, 4096, release_s // 3600, args.epsilon, args.delta, releases
        )
        print(f"at most {args.tenant_cap} nodes of a tenant count in a release")
    task = Task(
        name=args.new.name,
        kind="histogram",
        buckets=4096,
        max_samples=1,
        period_s=3600,
        release_s=release_s,
        grace_s=3600,
        min_batch=args.min_batch or max(1, args.nodes // 2),
        privacy=Privacy(args.unit, "laplace", 1.0, args.delta, args.epsilon, args.tenant_cap),
        leader_url=f"https://127.0.0.1:{args.port}",
        helper_url=f"https://127.0.0.1:{args.port + 1}",
        space=DISCOVERY_SPACE
        if args.discovery
        else {"applications": 64, "kernels": 64, "levels": 1},
    )
    sensitivity = task.sensitivity(args.unit)
    assert sensitivity is not None  # its reports are proved and the cap is set
    # The threshold from which on an unclassified kernel is shown is that of Laplace noise.
    kind: MechanismKind | None = "laplace" if args.discovery else None
    mechanism = plan(sensitivity, args.epsilon, args.delta, releases, kind)
    task = replace(
        task, privacy=replace(task.privacy, mechanism=mechanism.kind, scale=mechanism.scale)
    )
    provision(args.new, task, tags)
    print(f"{args.nodes} nodes, leader, helper and collector in {args.new}")
    print(
        f"{releases} releases a year at ε = {format_rounded_up(args.epsilon)} per {args.unit}: "
        f"{mechanism.kind} noise of scale {mechanism.scale:.1f} by each aggregator, "
        f"± {mechanism.half_width():.0f} samples (95 %)"
    )
    if args.unit == "tenant":
        import numpy as np

        from sonde.fleet.evaluation.forecast import forecast_of

        nodes_of = list(Counter(tags).values())
        print(forecast_of(task, nodes_of, np.random.default_rng(1)).summary())
    if args.discovery:
        print(f"a kernel is shown if it has at least {threshold_of(task):,} noised samples")
    return 0


def _budget(args: argparse.Namespace) -> int:
    from sonde.fleet.budget import entry_for, worst_year
    from sonde.fleet.noise import format_rounded_up
    from sonde.fleet.store import Store
    from sonde.fleet.task import Task, Unit

    task, path = Task.load(args.state / "task.json"), args.state / "state.sqlite"
    if not path.exists():
        raise UsageError(
            f"no state of an aggregator at {args.state}",
            "name the leader's or the helper's directory, once it has run",
        )
    store = Store(path, task)
    ledger = store.ledger()
    refused = store.refusals()
    store.close()
    units: tuple[Unit, Unit] = ("gpu", "tenant")
    delta = task.privacy.delta
    spent = {unit: worst_year(ledger, unit, delta) for unit in units}
    single = {unit: worst_year([entry_for(task, 0)], unit, delta) for unit in units}
    if args.json:
        print(
            json.dumps(
                {
                    "task": task.name,
                    "unit": task.privacy.unit,
                    "budget": task.privacy.budget,
                    "delta": delta,
                    "releases": len(ledger),
                    "spent": spent,
                    "per_release": single,
                    "refused": refused,
                }
            )
        )
        return 0
    print(
        f"{task.name}: {len(ledger)} releases; yearly budget ε = "
        f"{format_rounded_up(task.privacy.budget)} per {task.privacy.unit} "
        f"at δ = {format_rounded_up(delta)}"
    )
    for unit in units:
        each, sum_ = single[unit], spent[unit]
        if each is None or sum_ is None:
            print(f"  per {unit:<7} unbounded: no guarantee")
        else:
            print(
                f"  per {unit:<7} ε = {format_rounded_up(each)} per release, "
                f"{format_rounded_up(sum_)} in the worst year so far"
            )
    for reason, count in refused.items():
        print(f"  refused: {one_line(reason):<14} {count}")
    return 0


# What to do, by the reason of a refused report.
_REFUSED = {
    "quota": "report again in the next period; this node has reported for this one",
    "late": "report recordings soon after they end; the batch of this one is closed",
    "early": "correct this machine's clock",
    "unknown node": "have this node's key added to the roster of both aggregators",
    "unknown task": "use the task.json that the aggregators use",
    "tenant cap": "try in a later batch; enough of this tenant's nodes count in this one",
    "forged": "use the task.json and the key that this node was enrolled with",
}
_SOURCES = {
    "kernel": "kernels that ran on devices",
    "device": "calls of device APIs",
    "cpu": "functions on the CPUs",
}
_RUN = {
    "report": _report,
    "aggregate": _aggregate,
    "collect": fleet_collect.collect,
    "discover": fleet_collect.discover,
    "budget": _budget,
    "clock": fleet_clock.clock,
    "simulate": fleet_simulate.simulate,
}
