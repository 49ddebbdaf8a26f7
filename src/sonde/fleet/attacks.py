# SPDX-License-Identifier: Apache-2.0
"""The protocol under attack: each attack is carried out, and its success measured.

`limit` is what the model promises: chance where nothing may leak, the stated epsilon where a
bounded leak is the promise. Attacks on what is *not* promised are carried out too and marked so.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sonde.fleet.aggregator import Refused
from sonde.fleet.crowd import overstate
from sonde.fleet.noise import Mechanism, epsilon_of_rho, plan
from sonde.fleet.population import Floats
from sonde.fleet.rehearsal import HOUR_S, START_S, Rehearsal, small_task
from sonde.fleet.roster import Identity
from sonde.fleet.wire import Report

CONFIDENCE = 0.999  # of every verdict: an attack that reaches its limit exactly passes as held


@dataclass(frozen=True)
class Attack:
    """One attack: what it reached, what it may reach, and whether the promise held."""

    name: str
    reached: str
    limit: str
    held: bool | None  # None: nothing is promised
    note: str


def run_all(seed: int = 1, confidence: float = CONFIDENCE) -> list[Attack]:
    """Every attack; takes some seconds."""
    rng = np.random.default_rng(seed)
    table = [reconstruction(party, rng, confidence) for party in ("leader", "helper")]
    table.append(collusion(rng))
    for kind, epsilon in (("laplace", 0.5), ("laplace", 1.0), ("gaussian", 1.0)):
        table.append(canary(kind, epsilon, confidence))
    table.append(membership(1.0, confidence))
    table += poisoning() + intersection()
    return table


def to_table(attacks: list[Attack]) -> str:
    lines = [f"{'attack':<34} {'reached':<22} {'limit':<26} verdict"]
    for attack in attacks:
        verdict = {True: "held", False: "BROKEN", None: "not promised"}[attack.held]
        lines.append(f"{attack.name:<34} {attack.reached:<22} {attack.limit:<26} {verdict}")
        lines.append(f"    {attack.note}")
    return "\n".join(lines)


# --- what one server sees ------------------------------------------------------------------------


def _output_shares(
    buckets: int, reports: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """(labels, leader's, helper's) output share of each report, elements scaled to [0, 1)."""
    aggregation = small_task(buckets).aggregation()
    labels = rng.integers(buckets, size=reports)
    ids = [os.urandom(16) for _ in labels]
    made = aggregation.shard(ids, [[int(b)] for b in labels], 2)
    key = os.urandom(32)
    views: list[list[list[float]]] = [[], []]
    for id_, (public, leader, helper) in zip(ids, made, strict=True):
        pending = aggregation.begin(key, [id_], [public], [leader], 1)
        message = pending.messages[0]
        assert message is not None
        replies, _, theirs = aggregation.check(key, [id_], [public], [helper], [message], 1)
        _, ours = pending.finish(replies, 1)
        for view, share in zip(views, (ours, theirs), strict=True):
            width = len(share) // buckets
            view.append(
                [
                    int.from_bytes(share[at : at + width], "little") / 256**width
                    for at in range(0, len(share), width)
                ]
            )
    return labels.astype(np.float64), np.array(views[0]), np.array(views[1])


def reconstruction(
    party: str, rng: np.random.Generator, confidence: float = CONFIDENCE, reports: int = 2000
) -> Attack:
    """One aggregator guesses the bucket of a report from its share.

    The best of several guesses is taken: extreme elements, and class means learned from half of
    the reports with their labels.
    """
    buckets = 8
    labels, leader, helper = _output_shares(buckets, reports, rng)
    view = leader if party == "leader" else helper
    half = reports // 2
    means = np.stack([view[:half][labels[:half] == b].mean(axis=0) for b in range(buckets)])
    distance = ((view[half:, None, :] - means[None]) ** 2).sum(axis=2)
    guesses = {
        "largest": view[half:].argmax(axis=1),
        "smallest": view[half:].argmin(axis=1),
        "learned": distance.argmin(axis=1),
    }
    hits = max(int((guess == labels[half:]).sum()) for guess in guesses.values())
    # three guesses were tried: each gets a third of the error
    low = clopper_pearson(hits, half, 1 - (1 - confidence) / len(guesses))[0]
    return Attack(
        f"reconstruction by the {party}",
        f"{hits / half:.1%} right",
        f"chance {1 / buckets:.1%}",
        low <= 1 / buckets,
        f"{half} reports, best of {len(guesses)} guesses; at least {low:.1%} "
        f"with {confidence:.1%} confidence",
    )


def collusion(rng: np.random.Generator) -> Attack:
    """Both aggregators together: they add their shares."""
    labels = rng.integers(8, size=50)
    aggregation = small_task(8).aggregation()
    hits = 0
    for label in labels:
        id_, key = os.urandom(16), os.urandom(32)
        public, ours, theirs = aggregation.shard([id_], [[int(label)]], 1)[0]
        pending = aggregation.begin(key, [id_], [public], [ours], 1)
        replies, _, right = aggregation.check(
            key, [id_], [public], [theirs], [pending.messages[0] or b""], 1
        )
        left = pending.finish(replies, 1)[1]
        hits += aggregation.unshard([left, right]).index(1) == int(label)
    return Attack(
        "reconstruction by both together",
        f"{hits / len(labels):.1%} right",
        "-",
        None,
        "two colluding aggregators see every report; run them by different parties",
    )


# --- what a reader of the releases sees ----------------------------------------------------------


def _views(mechanism: Mechanism, trials: int) -> tuple[Floats, Floats]:
    """The target's bucket without and with it, as the strongest reader sees it.

    The reader knows every other report, and one aggregator adds no noise at all.
    """
    without = np.array(mechanism.sample(trials), dtype=np.float64)
    return without, np.array(mechanism.sample(trials), dtype=np.float64) + 1


def canary(
    kind: str,
    epsilon: float,
    confidence: float = CONFIDENCE,
    trials: int = 20_000,
    delta: float = 1e-6,
) -> Attack:
    """Lower bound of the true epsilon from planted reports (Clopper-Pearson).

    The threshold is chosen on one half of the trials and judged on the other.
    """
    if kind == "laplace":
        mechanism = Mechanism("laplace", 1 / epsilon)
    else:
        low, high = 0.1, 200.0
        for _ in range(60):
            sigma = (low + high) / 2
            over = epsilon_of_rho(1 / (2 * sigma * sigma), delta) > epsilon
            low, high = (sigma, high) if over else (low, sigma)
        mechanism = Mechanism("gaussian", high)
    without, with_ = _views(mechanism, trials)
    half = trials // 2
    first = without[:half], with_[:half]
    thresholds = np.unique(np.round(np.quantile(first[0], np.linspace(0.02, 0.98, 17))))
    tests = [(t, above) for t in thresholds for above in (True, False)]
    best = max(tests, key=lambda test: _bound(*first, test, delta, confidence))
    bound = _bound(without[half:], with_[half:], best, delta, confidence)
    return Attack(
        f"canary audit, {kind}",
        f"ε ≥ {bound:.3f}",
        f"stated ε = {epsilon:g}",
        bound <= epsilon,
        f"{trials} canaries, one aggregator without noise, {confidence:.1%} confidence",
    )


def _bound(
    without: Floats, with_: Floats, test: tuple[float, bool], delta: float, confidence: float
) -> float:
    """log((TPR - delta) / FPR) of a threshold test, pessimistically; 0 or more.

    Two one-sided bounds are used, so each gets half of the error.
    """
    threshold, above = test
    if above:  # "it is in": false positives without, true positives with
        false, true = (without >= threshold).sum(), (with_ >= threshold).sum()
    else:  # "it is not in", the other way round
        false, true = (with_ < threshold).sum(), (without < threshold).sum()
    each = 1 - (1 - confidence) / 2
    fpr = clopper_pearson(int(false), len(without), each)[1]
    tpr = clopper_pearson(int(true), len(with_), each)[0]
    return max(0.0, math.log((tpr - delta) / fpr)) if tpr > delta and fpr > 0 else 0.0


def membership(epsilon: float, confidence: float = CONFIDENCE, trials: int = 20_000) -> Attack:
    """Was this GPU in the release? Advantage (true minus false positives) of the best threshold."""
    mechanism = plan(1, epsilon, 1e-6)
    without, with_ = _views(mechanism, trials)
    half = trials // 2

    def advantage(t: float, part: slice) -> float:
        return float((with_[part] >= t).mean() - (without[part] >= t).mean())

    best = max(np.unique(without), key=lambda t: advantage(t, slice(0, half)))
    reached = advantage(best, slice(half, None))
    slack = math.sqrt(math.log(2 / (1 - confidence)) / half)
    limit = (math.exp(epsilon) - 1) / (math.exp(epsilon) + 1)
    return Attack(
        "membership in a release",
        f"advantage {reached:.3f} ± {slack:.3f}",
        f"{limit:.3f} at ε = {epsilon:g}",
        reached - slack <= limit,
        "the reader knows all other reports; DP bounds this, not more",
    )


# --- what a client or a server can do ------------------------------------------------------------


def poisoning() -> list[Attack]:
    """Nodes that want to move the sums by more than one sample."""
    table = []

    def attempt(name: str, note: str, act: Callable[[Rehearsal], object], limit: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            fleet = Rehearsal(Path(directory), small_task(), ["a"] * 4)
            fleet.send(fleet.report(0, [3]), fleet.report(1, [3]))
            before = fleet.raw()
            act(fleet)
            moved = sum(abs(a - b) for a, b in zip(fleet.raw(), before, strict=True))
            refused = {**fleet.leader.store.refusals(), **fleet.helper.store.refusals()}
            fleet.close()
        reasons = ", ".join(sorted(refused)) or "accepted"
        table.append(
            Attack(
                f"poisoning: {name}",
                f"moved {moved} ({reasons})",
                f"{limit} sample{'s' * (limit != 1)}",
                moved <= limit,
                note,
            )
        )

    def overweight(fleet: Rehearsal) -> None:
        fleet.send(overstate(fleet.task, fleet.nodes[2], fleet.report(2, [0])))

    def swapped(fleet: Rehearsal) -> None:
        good, other = fleet.report(2, [1]), fleet.report(3, [2])
        body = replace(other, public=good.public)
        fleet.send(replace(body, signature=fleet.nodes[3].sign(body.signed())))

    def stuffed(fleet: Rehearsal) -> None:
        fleet.send(*(fleet.report(2, [0]) for _ in range(50)))

    def replayed(fleet: Rehearsal) -> None:
        report = fleet.report(2, [0])
        fleet.send(*[report] * 50)

    def sybils(fleet: Rehearsal) -> None:
        for _ in range(50):
            fleet.nodes[2] = Identity()
            fleet.send(fleet.report(2, [0]))

    def impostor(fleet: Rehearsal) -> None:
        report: Report = fleet.report(2, [0])
        fleet.send(replace(report, node=fleet.nodes[3].public))

    attempt("a share that claims 1,000", "the proof does not hold", overweight, 0)
    attempt("another report's proof", "proofs are bound to their report", swapped, 0)
    attempt("50 reports in a period", "one report a node and period", stuffed, 1)
    attempt("one report 50 times", "report ids are remembered", replayed, 1)
    attempt("50 nodes not enrolled", "the roster decides", sybils, 0)
    attempt("another node's name", "reports are signed", impostor, 0)
    attempt(
        "a false but valid sample",
        "truth cannot be proved: one sample a period is the price",
        lambda fleet: fleet.send(fleet.report(2, [9])),
        1,
    )
    return table


def intersection() -> list[Attack]:
    """Readers that compare releases, or ask for small ones."""
    with tempfile.TemporaryDirectory() as directory:
        fleet = Rehearsal(Path(directory), small_task(min_batch=3), ["a"] * 6)
        fleet.send(*(fleet.report(n, [n]) for n in range(4)))
        fleet.close_batch()
        first = fleet.collect()
        again = all(fleet.collect().rows == first.rows for _ in range(20))
        spent = len(fleet.leader.store.ledger()), len(fleet.helper.store.ledger())
        intervals = [
            (START_S, 2 * HOUR_S),
            (START_S - HOUR_S, 2 * HOUR_S),
            (START_S + 1, HOUR_S),
            (START_S, HOUR_S - 1),
            (START_S + HOUR_S // 2, HOUR_S // 2),
        ]
        overlaps = sum(_granted(fleet, *interval) for interval in intervals)
        fleet.now_s = START_S + HOUR_S + 60.0
        fleet.send(fleet.report(5, [1]))
        open_ = _granted(fleet, START_S + HOUR_S, HOUR_S)
        fleet.close_batch()
        small = _granted(fleet, START_S + HOUR_S, HOUR_S)
        fleet.close()
    return [
        Attack(
            "batch intersection",
            f"{overlaps} of {len(intervals)} granted",
            "0",
            not overlaps,
            "releases lie on one grid; overlapping intervals do not exist",
        ),
        Attack(
            "averaging the noise away",
            "same answer" if again else "new noise",
            "one draw a batch",
            again and spent == (1, 1),
            "20 repeated collections: noise is drawn, and paid for, once",
        ),
        Attack(
            "a batch of one report",
            "granted" if small else "refused",
            "refused",
            not small,
            "fewer reports than the minimum are never released",
        ),
        Attack(
            "a batch that is still open",
            "granted" if open_ else "refused",
            "refused",
            not open_,
            "releases wait for the end of the batch and its grace",
        ),
    ]


def _granted(fleet: Rehearsal, start_s: int, duration_s: int) -> bool:
    try:
        fleet.leader.release(start_s, duration_s)
    except Refused:
        return False
    return True


def clopper_pearson(hits: int, trials: int, confidence: float) -> tuple[float, float]:
    """One-sided bounds, lower and upper, of a probability: each holds with that confidence."""
    counts = np.arange(trials + 1, dtype=np.float64)
    log_ways = _log_factorial(trials) - _cumulative(trials) - _cumulative(trials)[::-1]

    def tail(p: float, upper: bool) -> float:
        if p <= 0 or p >= 1:
            return float((p >= 1) == upper)
        logs = log_ways + counts * math.log(p) + (trials - counts) * math.log1p(-p)
        part = logs[hits:] if upper else logs[: hits + 1]
        return float(np.exp(part).sum())

    def solve(upper_tail: bool) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            # P(X >= hits) grows with p, P(X <= hits) falls
            rises = tail(middle, upper_tail) < 1 - confidence
            low, high = (middle, high) if rises == upper_tail else (low, middle)
        return (low + high) / 2

    return (0.0 if hits == 0 else solve(True)), (1.0 if hits == trials else solve(False))


def _cumulative(n: int) -> Floats:
    logs = np.log(np.arange(1, n + 1, dtype=np.float64))
    return np.concatenate(([0.0], np.cumsum(logs)))


def _log_factorial(n: int) -> float:
    return math.lgamma(n + 1)
