# SPDX-License-Identifier: Apache-2.0
"""sonde fleet simulate: a synthetic fleet with the real protocol, attacks on it, and expected
errors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import SondeError, UsageError

if TYPE_CHECKING:
    from sonde.fleet.evaluation.forecast import Forecast


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--buckets", type=int, default=4096)
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--unproved", action="store_true", help="additive shares without proofs")
    parser.add_argument(
        "--dropouts", type=float, default=0.3, help="share of nodes that are absent"
    )
    parser.add_argument(
        "--one-sided",
        type=float,
        default=0.05,
        help="share of reports that reach one aggregator only",
    )
    parser.add_argument(
        "--stragglers", type=float, default=0.02, help="share of reports that are late"
    )
    parser.add_argument(
        "--liars", type=float, default=0.01, help="share of reports that are malicious"
    )
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--roster",
        type=Path,
        metavar="PATH",
        help="forecast the error of releases per tenant for this roster (roster.json, or an "
        "aggregator's directory) instead of the simulated fleet's tenants",
    )
    parser.add_argument("--attacks", action="store_true", help="also run the attacks")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-o", "--output", type=Path, help="write the release as .parquet or .csv")


def simulate(args: argparse.Namespace) -> int:
    """Runs `sonde fleet simulate`; returns the exit code."""
    from sonde.fleet import result
    from sonde.fleet.evaluation import attack_results, attacks
    from sonde.fleet.evaluation.simulation import Scenario, open_engine
    from sonde.fleet.evaluation.simulation import run as run_fleet

    if args.nodes < 1 or args.buckets < 2 or args.tenants < 1 or args.workers < 1:
        raise UsageError("a simulated fleet needs nodes, tenants, workers and two buckets")
    for name in ("dropouts", "one_sided", "stragglers", "liars"):
        if not 0 <= getattr(args, name) <= 1:
            raise UsageError(f"--{name.replace('_', '-')} is a share", "give a number from 0 to 1")
    if args.output is not None and args.output.suffix not in (".csv", ".parquet"):
        raise UsageError(f"unknown kind of file: {args.output.name}", "end it in .csv or .parquet")
    scenario = Scenario(
        nodes=args.nodes,
        buckets=args.buckets,
        tenants=args.tenants,
        kind="plain" if args.unproved else "histogram",
        dropouts=args.dropouts,
        one_sided=args.one_sided,
        stragglers=args.stragglers,
        liars=args.liars,
        epsilon=args.epsilon,
        delta=args.delta,
        seed=args.seed,
    )
    forecast = _forecast(args)
    if not args.json:
        print(f"{forecast.summary()}\n", flush=True)
    progress = _progress if sys.stderr.isatty() else None
    with open_engine(args.engine, args.workers) as engine:
        outcome = run_fleet(scenario, engine, progress)
    if args.output is not None:
        result.write(outcome.release, args.output)
    table = attacks.run_all(args.seed) if args.attacks else []
    if args.json:
        print(
            json.dumps(
                {
                    "simulation": outcome.figures(),
                    "per_tenant": asdict(forecast),
                    "attacks": [{**asdict(a), "verdict": a.verdict} for a in table],
                }
            )
        )
    else:
        print(outcome.summary())
        if table:
            print(f"\n{attack_results.to_table(table)}")
    if failed := attack_results.unexpected_results(table):
        raise SondeError(
            f"{len(failed)} of {len(table)} attacks did not have the expected outcome, "
            f"the first: {failed[0].name}",
            "run it again; if it persists, release nothing and report it",
        )
    return 0


def _forecast(args: argparse.Namespace) -> Forecast:
    """The forecast for the operator's roster, or for the simulated fleet."""
    import numpy as np

    from sonde.fleet.evaluation.forecast import forecast_of, forecast_of_a_day
    from sonde.fleet.evaluation.population import Population
    from sonde.fleet.roster import Roster
    from sonde.fleet.task import Task

    rng = np.random.default_rng(args.seed)
    if args.roster is None:
        fleet = Population.draw(args.nodes, 64, args.tenants, rng)  # 64 applications
        sizes = [int(size) for size in np.bincount(fleet.tenant) if size]
        return forecast_of_a_day(sizes, args.epsilon, rng)
    home = args.roster if args.roster.is_dir() else args.roster.parent
    sizes = Roster.load(home / "roster.json" if args.roster.is_dir() else args.roster).sizes()
    if (home / "task.json").exists():
        task = Task.load(home / "task.json")
        if task.privacy.unit == "tenant":
            return forecast_of(task, sizes, rng)
    return forecast_of_a_day(sizes, args.epsilon, rng)


def _progress(done: int, total: int) -> None:
    filled = 30 * done // max(1, total)
    end = "\n" if done >= total else ""
    print(f"\r[{'#' * filled:<30}] {done}/{total} reports", end=end, file=sys.stderr, flush=True)
