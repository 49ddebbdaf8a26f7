# SPDX-License-Identifier: Apache-2.0
"""Empirical audit of the privacy loss of one sample, measured on releases.

A canary is a sample that is added to some buckets of a batch and not to others. The batch passes
through the whole protocol: a report with its proof, both aggregators, their noise, the collector's
key. The adversary is the strongest that the guarantee covers: it knows all samples except the
canary, and one aggregator (leader and helper alternate) adds no noise.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from sonde.fleet import hpke
from sonde.fleet.aggregator import Aggregator, Helper, Leader
from sonde.fleet.evaluation.attack_results import CONFIDENCE, AttackResult
from sonde.fleet.evaluation.local_deployment import LocalDeployment, small_task
from sonde.fleet.evaluation.population import Floats
from sonde.fleet.noise import Mechanism, epsilon_of_rho, rho_of_epsilon
from sonde.model.confidence import clopper_pearson

BUCKETS = 4096  # each is a separate experiment with independent noise
RELEASES = 10
DELTA = 1e-6


@dataclass(frozen=True)
class CanaryCounts:
    """Released counts of buckets without and with the canary, and the stated guarantee."""

    mechanism: Mechanism
    epsilon: float
    without: Floats
    with_: Floats

    def half(self, second: bool) -> tuple[Floats, Floats]:
        """One half of both: the first chooses the best test, the second evaluates it."""
        middle = len(self.without) // 2
        part = slice(middle, None) if second else slice(middle)
        return self.without[part], self.with_[part]


def calibrated_mechanism(kind: str, epsilon: float) -> Mechanism:
    """The mechanism of this kind with this stated epsilon for one sample."""
    if kind == "laplace":
        return Mechanism("laplace", 1 / epsilon)
    return Mechanism("gaussian", 1 / math.sqrt(2 * rho_of_epsilon(epsilon, DELTA)))


def canary_counts(
    kind: str,
    epsilon: float,
    rng: np.random.Generator,
    weaken: float = 1.0,
    releases: int = RELEASES,
) -> CanaryCounts:
    """Releases batches with canaries in half of the buckets; `weaken` is a factor of the real
    noise, while the task states the full one.
    """
    mechanism = calibrated_mechanism(kind, epsilon)
    task = small_task(BUCKETS, "sumvec", min_batch=1, budget=1e12)  # a report fills many buckets
    task = replace(
        task, privacy=replace(task.privacy, mechanism=mechanism.kind, scale=mechanism.scale)
    )
    broken = Mechanism(mechanism.kind, mechanism.scale * weaken)
    without_noise = hpke.LEADER

    class WithoutNoise(Aggregator):
        """Adds no noise if its role is `without_noise`; else the stated or the weakened noise."""

        def noise(self) -> list[int]:
            if self.role == without_noise:
                return [0] * BUCKETS
            return super().noise() if weaken == 1 else broken.sample(BUCKETS)

    class LeaderWithoutNoise(WithoutNoise, Leader):
        pass

    class HelperWithoutNoise(WithoutNoise, Helper):
        pass

    seen: tuple[list[Floats], list[Floats]] = ([], [])
    with tempfile.TemporaryDirectory() as directory:
        fleet = LocalDeployment(
            Path(directory), task, ["a"], party_types=(LeaderWithoutNoise, HelperWithoutNoise)
        )
        for number in range(releases):
            without_noise = (hpke.LEADER, hpke.HELPER)[number % 2]
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
    return CanaryCounts(mechanism, epsilon, np.concatenate(seen[0]), np.concatenate(seen[1]))


def audit_canaries(
    seen: CanaryCounts, confidence: float = CONFIDENCE, control: str = ""
) -> AttackResult:
    """Lower bound of the true epsilon, by the best threshold.

    Laplace: log(TPR / FPR), which pure epsilon bounds for any noise. Gaussian: the separation that
    its trade-off curve allows, `Φ⁻¹(TPR) - Φ⁻¹(FPR) ≤ 1/σ` (Dong, Roth, Su 2022), converted to
    epsilon as in the ledger; a single ratio is uninformative at so small a delta (Nasr et al.,
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
    return AttackResult(
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
    """(TPR, FPR) of a threshold test, the first bounded from below, the second from above.

    Each of the two one-sided bounds gets half of the error probability.
    """
    (without, with_), (threshold, above) = part, test
    if above:  # test "present": false positives without, true positives with
        false, true = (without >= threshold).sum(), (with_ >= threshold).sum()
    else:  # test "absent": the other way round
        false, true = (with_ < threshold).sum(), (without < threshold).sum()
    each = 1 - (1 - confidence) / 2
    return (
        clopper_pearson(int(true), len(with_), each)[0],
        clopper_pearson(int(false), len(without), each)[1],
    )


def _ratio(tpr: float, fpr: float) -> float:
    """log(TPR / FPR), 0 at least."""
    return max(0.0, math.log(tpr / fpr)) if tpr > 0 and fpr > 0 else 0.0


def _separation(tpr: float, fpr: float) -> float:
    """Φ⁻¹(TPR) - Φ⁻¹(FPR), 0 at least."""
    if tpr <= 0 or fpr >= 1:
        return 0.0
    quantile: Callable[[float], float] = NormalDist().inv_cdf
    return max(0.0, quantile(tpr) - quantile(fpr))


def membership_inference(
    seen: CanaryCounts, confidence: float = CONFIDENCE, control: str = ""
) -> AttackResult:
    """Membership inference: was this sample in the release? The advantage (true minus false
    positive rate) of the best threshold, with Hoeffding's bound. Pure epsilon limits it to (e^ε -
    1) / (e^ε + 1).
    """

    def advantage(t: float, second: bool) -> float:
        without, with_ = seen.half(second)
        return float((with_ >= t).mean() - (without >= t).mean())

    best = max(np.unique(np.concatenate(seen.half(False))), key=lambda t: advantage(t, False))
    reached = advantage(best, True)
    slack = math.sqrt(math.log(2 / (1 - confidence)) / len(seen.half(True)[0]))
    limit = math.expm1(seen.epsilon) / (math.exp(seen.epsilon) + 1)
    return AttackResult(
        control or "membership in a release",
        f"advantage {reached:.3f} ± {slack:.3f}",
        f"{limit:.3f} at ε = {seen.epsilon:g}",
        reached - slack <= limit,
        "the adversary knows all other reports; DP bounds exactly this",
        control=bool(control),
    )
