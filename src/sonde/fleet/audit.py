# SPDX-License-Identifier: Apache-2.0
"""How much releases really tell of one sample, measured on releases.

A canary is a sample that is put into some buckets of a batch and not into others. The batch goes
the whole way: a report with its proof, both aggregators, their noise, the collector's key. The
reader is the strongest that is promised against: he knows every sample but the canary, and one
aggregator adds no noise for him, the leader and the helper by turns.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from sonde.fleet import seal
from sonde.fleet.aggregator import Aggregator, Helper, Leader
from sonde.fleet.noise import Mechanism, epsilon_of_rho, rho_of_epsilon
from sonde.fleet.population import Floats
from sonde.fleet.rehearsal import Rehearsal, small_task
from sonde.fleet.verdicts import CONFIDENCE, Attack, clopper_pearson

BUCKETS = 4096  # each is an experiment of its own: its noise has nothing to do with another's
RELEASES = 10
DELTA = 1e-6


@dataclass(frozen=True)
class Views:
    """What the reader makes of buckets without the canary and with it, and what is promised."""

    mechanism: Mechanism
    epsilon: float
    without: Floats
    with_: Floats

    def half(self, second: bool) -> tuple[Floats, Floats]:
        """The first half is to choose a test by, the second to judge by it."""
        middle = len(self.without) // 2
        part = slice(middle, None) if second else slice(middle)
        return self.without[part], self.with_[part]


def promised(kind: str, epsilon: float) -> Mechanism:
    """The mechanism of this kind that states so much for one sample."""
    if kind == "laplace":
        return Mechanism("laplace", 1 / epsilon)
    return Mechanism("gaussian", 1 / math.sqrt(2 * rho_of_epsilon(epsilon, DELTA)))


def views(
    kind: str,
    epsilon: float,
    rng: np.random.Generator,
    weaken: float = 1.0,
    releases: int = RELEASES,
) -> Views:
    """Releases with canaries; `weaken` multiplies the scale of the noise behind the task's back."""
    mechanism = promised(kind, epsilon)
    task = small_task(BUCKETS, "sumvec", min_batch=1, budget=1e12)  # a report fills many buckets
    task = replace(
        task, privacy=replace(task.privacy, mechanism=mechanism.kind, scale=mechanism.scale)
    )
    broken = Mechanism(mechanism.kind, mechanism.scale * weaken)
    silent = seal.LEADER

    class Watched(Aggregator):
        """Silent for the reader if its turn has come; else it draws as ever, unless broken."""

        def noise(self) -> list[int]:
            if self.role == silent:
                return [0] * BUCKETS
            return super().noise() if weaken == 1 else broken.sample(BUCKETS)

    class WatchedLeader(Watched, Leader):
        pass

    class WatchedHelper(Watched, Helper):
        pass

    seen: tuple[list[Floats], list[Floats]] = ([], [])
    with tempfile.TemporaryDirectory() as directory:
        fleet = Rehearsal(Path(directory), task, ["a"], parties=(WatchedLeader, WatchedHelper))
        for number in range(releases):
            silent = (seal.LEADER, seal.HELPER)[number % 2]
            planted = np.zeros(BUCKETS, dtype=bool)
            planted[rng.permutation(BUCKETS)[: BUCKETS // 2]] = True
            start_s = task.batch_of(int(fleet.now_s))
            fleet.send(fleet.report(0, np.flatnonzero(planted).tolist()))
            fleet.close_batch()
            shares = fleet.collected_shares(start_s)
            counts = np.array(fleet.task.aggregation().unshard(shares), dtype=np.float64)
            seen[0].append(counts[~planted])
            seen[1].append(counts[planted])
        fleet.close()
    return Views(mechanism, epsilon, np.concatenate(seen[0]), np.concatenate(seen[1]))


def canary(seen: Views, confidence: float = CONFIDENCE, control: str = "") -> Attack:
    """Lower bound of the true epsilon, by the best threshold.

    Laplace: log(TPR / FPR), which pure epsilon bounds whatever the noise is. Gaussian: what its
    trade-off curve allows, `Φ⁻¹(TPR) - Φ⁻¹(FPR) ≤ 1/σ` (Dong, Roth, Su 2022), turned into epsilon
    as the ledger does; a single ratio would tell next to nothing of so small a delta (Nasr et al.,
    USENIX Security 2023).
    """
    quantiles = [np.quantile(part, np.linspace(0.02, 0.98, 17)) for part in seen.half(False)]
    thresholds = np.unique(np.round(np.concatenate(quantiles)))
    tests = [(t, above) for t in thresholds for above in (True, False)]
    measure = _ratio if seen.mechanism.kind == "laplace" else _separation
    best = max(tests, key=lambda test: measure(*_rates(seen.half(False), test, confidence)))
    bound = measure(*_rates(seen.half(True), best, confidence))
    if seen.mechanism.kind == "gaussian":
        bound = epsilon_of_rho(bound * bound / 2, DELTA)
    return Attack(
        f"{control or 'canary audit'}, {seen.mechanism.kind}",
        f"ε ≥ {bound:.3f}",
        f"stated ε = {seen.epsilon:g}",
        bound <= seen.epsilon,
        f"{len(seen.without):,} buckets without and {len(seen.with_):,} with a canary, released; "
        f"{confidence:.1%} confidence",
        control=bool(control),
    )


def _rates(
    part: tuple[Floats, Floats], test: tuple[float, bool], confidence: float
) -> tuple[float, float]:
    """(TPR, FPR) of a threshold test, the first from below, the second from above.

    Two one-sided bounds are used, so each gets half of the error.
    """
    (without, with_), (threshold, above) = part, test
    if above:  # "it is in": false positives without, true positives with
        false, true = (without >= threshold).sum(), (with_ >= threshold).sum()
    else:  # "it is not in", the other way round
        false, true = (with_ < threshold).sum(), (without < threshold).sum()
    each = 1 - (1 - confidence) / 2
    return (
        clopper_pearson(int(true), len(with_), each)[0],
        clopper_pearson(int(false), len(without), each)[1],
    )


def _ratio(tpr: float, fpr: float) -> float:
    return max(0.0, math.log(tpr / fpr)) if tpr > 0 and fpr > 0 else 0.0


def _separation(tpr: float, fpr: float) -> float:
    if tpr <= 0 or fpr >= 1:
        return 0.0
    quantile: Callable[[float], float] = NormalDist().inv_cdf
    return max(0.0, quantile(tpr) - quantile(fpr))


def membership(seen: Views, confidence: float = CONFIDENCE, control: str = "") -> Attack:
    """Was this sample in the release? Advantage (true minus false positives) of the best threshold,
    with Hoeffding's bound. Pure epsilon limits it to (e^ε - 1) / (e^ε + 1).
    """

    def advantage(t: float, second: bool) -> float:
        without, with_ = seen.half(second)
        return float((with_ >= t).mean() - (without >= t).mean())

    best = max(np.unique(np.concatenate(seen.half(False))), key=lambda t: advantage(t, False))
    reached = advantage(best, True)
    slack = math.sqrt(math.log(2 / (1 - confidence)) / len(seen.half(True)[0]))
    limit = math.expm1(seen.epsilon) / (math.exp(seen.epsilon) + 1)
    return Attack(
        control or "membership in a release",
        f"advantage {reached:.3f} ± {slack:.3f}",
        f"{limit:.3f} at ε = {seen.epsilon:g}",
        reached - slack <= limit,
        "the reader knows all other reports; DP bounds this, not more",
        control=bool(control),
    )
