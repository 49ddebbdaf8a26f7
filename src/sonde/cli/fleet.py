# SPDX-License-Identifier: Apache-2.0
"""sonde fleet: totals over many machines that nobody can look into."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sonde.cli import fleet_clock, fleet_collect, fleet_simulate
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
  sonde fleet budget --state trial/leader          what the releases have cost so far
  sonde fleet clock --state trial/leader           the time it goes by, and --accept
  sonde fleet simulate --nodes 10000 --attacks     the whole protocol in one process, attacked
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `sonde fleet` and its commands."""
    parser = subparsers.add_parser(
        "fleet",
        help="fleet totals, private by construction",
        description="Totals over a fleet of GPUs that no server and no reader can take apart.",
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
        "Send this node's samples of one period, in shares.",
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
        help="keep trying for so long while the leader is away (default 30)",
    )


def _add_aggregate(commands: Any) -> None:
    parser = _command(
        commands,
        "aggregate",
        "Run one of the two aggregators, or make a trial fleet (--new).",
        "aggregate --state trial/leader",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--state", type=Path, help="the aggregator's directory")
    what.add_argument("--new", type=Path, metavar="DIR", help="make a trial fleet there and exit")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    fleet = parser.add_argument_group("a trial fleet")
    fleet.add_argument("--nodes", type=int, default=10)
    fleet.add_argument("--tenants", type=int, default=5)
    fleet.add_argument("--release-hours", type=float, default=24.0, help="one release in so long")
    fleet.add_argument(
        "--min-batch",
        type=int,
        default=None,
        help="fewest reports of a release (default: half the nodes)",
    )
    fleet.add_argument("--unit", choices=("gpu", "tenant"), default="gpu", help="unit of privacy")
    fleet.add_argument(
        "--tenant-cap",
        type=int,
        default=None,
        help="nodes of a tenant that count in a release (default with --unit tenant: chosen from "
        "the tenants' sizes)",
    )
    fleet.add_argument("--epsilon", type=float, default=8.0, help="of a year of releases")
    fleet.add_argument("--delta", type=float, default=1e-6)
    fleet.add_argument(
        "--discovery",
        action="store_true",
        help="not classes but unknown kernels are counted, for 'sonde fleet discover'",
    )
    fleet.add_argument("--port", type=int, default=8471, help="leader; the helper takes the next")


def _add_collect(commands: Any) -> None:
    parser = _command(
        commands,
        "collect",
        "Release one batch: counts with error bars, and their epsilon.",
        "collect --state trial/collector --batch 2026-11-20T00:00 -o totals.html",
    )
    fleet_collect.add_collect(parser)


def _add_discover(commands: Any) -> None:
    parser = _command(
        commands,
        "discover",
        "Kernels that no class knows yet and many nodes run, by who has their names.",
        "discover --state trial/collector --names kernel-names.txt",
    )
    fleet_collect.add_discover(parser)


def _add_budget(commands: Any) -> None:
    parser = _command(
        commands,
        "budget",
        "What an aggregator's releases have cost, for GPUs and for tenants.",
        "budget --state trial/leader",
    )
    parser.add_argument("--state", type=Path, required=True, help="an aggregator's directory")
    parser.add_argument("--json", action="store_true")


def _add_clock(commands: Any) -> None:
    parser = _command(
        commands,
        "clock",
        "The time that a party or node goes by, and the operator's word that a new one is right.",
        "clock --state trial/leader --accept",
    )
    fleet_clock.add_clock(parser)


def _add_simulate(commands: Any) -> None:
    parser = _command(
        commands,
        "simulate",
        "A simulated fleet through the real protocol.",
        "simulate --nodes 2000 --buckets 4096 --dropouts 0.3 --one-sided 0.05 --attacks",
    )
    fleet_simulate.add_simulate(parser)


def run(args: argparse.Namespace) -> int:
    """Run the chosen fleet command; returns the exit code."""
    try:
        return _RUN[args.fleet_command](args)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"the fleet protocol needs {error.name}", "pip install 'sonde[fleet]'"
        ) from error


def _report(args: argparse.Namespace) -> int:
    from sonde.fleet import node, provision
    from sonde.fleet.buckets import BucketSpace
    from sonde.fleet.clock import PartyClock
    from sonde.fleet.discovery import NOTHING_NEW, bucket_of, is_discovery
    from sonde.fleet.sampling import Sampler
    from sonde.fleet.task import Task

    task, identity = Task.load(args.node / "task.json"), provision.load_node(args.node)
    clock = PartyClock(args.node, must_keep=False)
    space, period = BucketSpace.of_task(task), _period(args, clock)
    sampler = Sampler(space, period.start_ns, period.duration_ns, task.max_samples)
    for record in period.records:
        sampler.see(record)
    unknown = sampler.unknown()
    buckets = [bucket_of(task, unknown)] if is_discovery(task) else sampler.buckets()
    if args.dry_run:
        for bucket in buckets:
            if is_discovery(task):
                said = "no unknown kernel" if bucket == NOTHING_NEW else f"hash of {unknown}"
            else:
                application, kernel, activity = space.label(bucket)
                said = f"{application} / {kernel} {activity}".rstrip()
            print(f"bucket {bucket}: {said}")
        print(f"would be sent in shares to {task.leader_url}; nothing was sent")
        return 0
    report = node.make_report(task, identity, buckets, period.time_s)
    tls = provision.client_tls(args.node)
    receipt = node.upload_patiently(task, report.encode(), tls, args.patience)
    if not receipt.accepted:
        raise SinkError(
            f"the leader refuses the report: {receipt.reason}", _REFUSED.get(receipt.reason, "")
        )
    print(f"{len(buckets)} samples sent in shares")
    return 0


def _period(args: argparse.Namespace, clock: PartyClock) -> Period:
    """What ran, from a recording or from a file of kernel records."""
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
        raise UsageError("--source is for recordings", "leave it away with --kernels")
    fleet_clock.warn_of_step(clock)
    records = list(read_records(args.kernels))
    start_ns = min((r.start_ns for r in records), default=0)
    end_ns = max((r.start_ns + r.duration_ns for r in records), default=0)
    return Period(records, start_ns, max(1, end_ns - start_ns), int(clock()), "kernel")


def _aggregate(args: argparse.Namespace) -> int:
    if args.new is not None:
        return _new_trial(args)
    from sonde.fleet.service import serve

    def ready(url: str) -> None:
        print(f"listening on {url}", flush=True)

    try:
        serve(args.state, args.threads, ready)
    except OSError as error:
        raise SondeError(
            f"cannot listen: {error.strerror or error}",
            "free the address that task.json names, or make the trial with another --port",
        ) from error
    return 0


def _new_trial(args: argparse.Namespace) -> int:
    from sonde.fleet.budget import releases_a_year
    from sonde.fleet.discovery import SPACE, threshold_of
    from sonde.fleet.noise import MechanismKind, plan, stated
    from sonde.fleet.provision import provision
    from sonde.fleet.task import Privacy, Task
    from sonde.fleet.tenants import choose_cap

    if args.nodes < 1 or args.tenants < 1 or args.release_hours < 1:
        raise UsageError("a fleet has nodes and tenants, and releases of an hour or more")
    if args.release_hours % 1:
        raise UsageError(f"a release of {args.release_hours:g} h", "give whole hours")
    if not 1 <= args.port <= 65_534:
        raise UsageError(
            f"no port {args.port}", "give one from 1 to 65534; the helper takes the next"
        )
    if args.tenant_cap is not None and args.tenant_cap < 1:
        raise UsageError("a cap counts at least one node of a tenant")
    if args.min_batch is not None and args.min_batch < 1:
        raise UsageError("a batch holds at least one report")
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
        space=SPACE if args.discovery else {"applications": 64, "kernels": 64, "levels": 1},
    )
    sensitivity = task.sensitivity(args.unit)
    assert sensitivity is not None  # a proved task with its cap
    kind: MechanismKind | None = (
        "laplace" if args.discovery else None
    )  # what the threshold of unknown keys is made for
    mechanism = plan(sensitivity, args.epsilon, args.delta, releases, kind)
    task = replace(
        task, privacy=replace(task.privacy, mechanism=mechanism.kind, scale=mechanism.scale)
    )
    provision(args.new, task, tags)
    print(f"{args.nodes} nodes, leader, helper and collector in {args.new}")
    print(
        f"{releases} releases a year at ε = {stated(args.epsilon)} per {args.unit}: "
        f"{mechanism.kind} noise of scale {mechanism.scale:.1f} by each aggregator, "
        f"± {mechanism.half_width():.0f} samples (95 %)"
    )
    if args.unit == "tenant":
        import numpy as np

        from sonde.fleet.forecast import forecast_of

        nodes_of = list(Counter(tags).values())
        print(forecast_of(task, nodes_of, np.random.default_rng(1)).summary())
    if args.discovery:
        print(f"a kernel is shown from {threshold_of(task):,} noised samples on")
    return 0


def _budget(args: argparse.Namespace) -> int:
    from sonde.fleet.budget import entry_for, worst_year
    from sonde.fleet.noise import stated
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
        f"{task.name}: {len(ledger)} releases; budget ε = {stated(task.privacy.budget)} a year "
        f"per {task.privacy.unit} at δ = {stated(delta)}"
    )
    for unit in units:
        each, sum_ = single[unit], spent[unit]
        if each is None or sum_ is None:
            print(f"  per {unit:<7} not bounded: no promise")
        else:
            print(
                f"  per {unit:<7} ε = {stated(each)} a release, "
                f"{stated(sum_)} in the worst year so far"
            )
    for reason, count in refused.items():
        print(f"  refused: {reason:<14} {count}")
    return 0


_REFUSED = {
    "quota": "report again in the next period; this node has reported for this one",
    "late": "report recordings soon after they end; the batch of this one is closed",
    "early": "set this machine's clock right",
    "unknown node": "have this node's key put into the roster of both aggregators",
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
