# SPDX-License-Identifier: Apache-2.0
"""Noise and privacy accounting, from OpenDP: exact discrete samplers and tight zCDP accounting.
The tail of a sum of two noises has a closed form here.

zCDP (zero-concentrated differential privacy, Bun and Steinke 2016) measures a loss by rho, of which
losses add up; pure epsilon is that of delta 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

from sonde.errors import MissingDependency, UsageError

MechanismKind = Literal["laplace", "gaussian"]

_ROUND_UP = 1 + 2**-48
"""Larger than the rounding errors of the few operations before it."""

_ROUND_TAIL_UP = 1 + 2**-40
"""As _ROUND_UP, with exponentials, whose relative error grows with their argument."""

_BEYOND_RHO = 1000.0
"""A rho that is practically no protection. Above it the bound of Bun and Steinke 2016, proposition
1.3, is used."""


@lru_cache(maxsize=1)
def _opendp() -> Any:
    try:
        import opendp.prelude as dp
    except ImportError as error:
        raise MissingDependency("OpenDP is not installed", "pip install 'sonde[fleet]'") from error
    dp.enable_features("contrib")
    return dp


@dataclass(frozen=True)
class PrivacyLoss:
    """Privacy loss of one release: zCDP always, pure epsilon if the mechanism has one."""

    rho: float
    epsilon: float | None


@dataclass(frozen=True)
class Mechanism:
    """Integer noise of one aggregator: discrete Laplace (scale b) or Gaussian (scale sigma)."""

    kind: MechanismKind
    scale: float

    def sample(self, length: int) -> list[int]:
        """A draw of `length` integers."""
        noise: list[int] = _measurement(self.kind, self.scale)([0] * length)
        return noise

    def cost(self, sensitivity: int) -> PrivacyLoss:
        """Loss of a release in which one unit changes the counts by at most `sensitivity` (L1)."""
        dp = _opendp()
        measurement = _measurement(self.kind, self.scale)
        if self.kind == "laplace":
            rho = dp.c.make_pureDP_to_zCDP(measurement).map(sensitivity)
            return PrivacyLoss(rho, measurement.map(sensitivity))
        return PrivacyLoss(measurement.map(float(sensitivity)), None)

    def deviation(self, parties: int = 2) -> float:
        """Standard deviation of the sum of all parties' noise, in counts."""
        one = self.scale * (math.sqrt(2) if self.kind == "laplace" else 1)
        return one * math.sqrt(parties)

    def half_width(self, confidence: float = 0.95, parties: int = 2) -> float:
        """Half the width of the interval around 0 that contains the sum of all parties' noise with
        the probability `confidence`, in counts.

        Of two Laplace variables P(|X| > x) = exp(-x/b)·(1 + x/2b); Gaussians add in variance.
        """
        if self.kind == "gaussian" or parties != 2:
            return self.deviation(parties) * NormalDist().inv_cdf((1 + confidence) / 2)
        low, high = 0.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            beyond = math.exp(-middle) * (1 + middle / 2)
            low, high = (middle, high) if beyond > 1 - confidence else (low, middle)
        return self.scale * high


@lru_cache(maxsize=64)
def _measurement(kind: MechanismKind, scale: float) -> Any:
    """OpenDP's object for a mechanism: adds the noise to a vector, and maps a sensitivity to a
    loss.
    """
    dp = _opendp()
    domain = dp.vector_domain(dp.atom_domain(T="i64"))
    if kind == "laplace":
        return dp.m.make_laplace(domain, dp.l1_distance(T="i64"), scale=scale)
    return dp.m.make_gaussian(domain, dp.l2_distance(T="f64"), scale=scale)


@lru_cache(maxsize=1024)
def epsilon_of_rho(rho: float, delta: float) -> float:
    """The epsilon of rho-zCDP at delta, by OpenDP's conversion; rounded up, never down.

    OpenDP converts the curve of a mechanism. A Gaussian of scale sqrt(1/2) has a rho of d² at
    sensitivity d, so the curve is read at d = sqrt(rho). The root of 1/2 and that of rho are
    rounded, so d is raised by more than both errors.
    """
    if rho <= 0:
        return 0.0
    if rho > _BEYOND_RHO:  # where the curve overflows; a bound that always holds instead
        return (rho + 2 * math.sqrt(rho * math.log(1 / delta))) * _ROUND_UP
    dp = _opendp()
    curve = dp.c.make_zCDP_to_approxDP(_measurement("gaussian", math.sqrt(0.5)))
    return float(curve.map(math.sqrt(rho) * _ROUND_UP).epsilon(delta))


_LOSS_RESOLUTION = 1 << 100
"""Losses are summed as integer multiples of 1/_LOSS_RESOLUTION: exactly, in any order."""


@lru_cache(maxsize=1024)
def exact_loss(loss: float) -> int:
    """A loss (rho or pure epsilon) as a multiple of 1/_LOSS_RESOLUTION, which is added and
    subtracted without error; rounded up.
    """
    return math.ceil(Fraction(loss) * _LOSS_RESOLUTION)


def loss_of(exact: int) -> float:
    """The smallest float that is not below a sum of exact losses."""
    nearest = exact / _LOSS_RESOLUTION
    is_enough = Fraction(nearest) * _LOSS_RESOLUTION >= exact
    return nearest if is_enough else math.nextafter(nearest, math.inf)


def composed_epsilon(rho: int, pure: int | None, delta: float) -> float:
    """The epsilon at delta of releases whose exact losses (`exact_loss`) sum to `rho` and `pure`;
    the smaller of the two results holds. `pure` is None if some release has no pure epsilon.
    """
    composed = epsilon_of_rho(loss_of(rho), delta)
    return composed if pure is None else min(composed, loss_of(pure))


def format_rounded_up(value: float, digits: int = 3) -> str:
    """A privacy loss or budget, `value`, as text with `digits` digits, rounded up: the
    stated figure is never less than the real one.
    """
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(repr(value)))
    return f"{float(rounded):.{digits}g}"


def rho_of_epsilon(epsilon: float, delta: float) -> float:
    """The largest rho that is within (epsilon, delta)."""
    low, high = 0.0, epsilon + 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon_of_rho(middle, delta) > epsilon else (middle, high)
    return low


def plan(
    sensitivity: int,
    epsilon: float,
    delta: float,
    releases: int = 1,
    kind: MechanismKind | None = None,
) -> Mechanism:
    """The mechanism of least variance for `releases` releases that together stay within (epsilon,
    delta), where one unit of privacy changes the counts of each by up to `sensitivity` (L1); of the
    given kind, if one is given. Raises UsageError.
    """
    if epsilon <= 0 or not 0 < delta < 1 or releases < 1 or sensitivity < 1:
        raise UsageError(
            f"no noise can guarantee epsilon = {epsilon:g} at delta = {delta:g}",
            "give an epsilon above 0, a delta between 0 and 1, and at least one release",
        )
    rho = rho_of_epsilon(epsilon, delta) / releases
    pure = max(epsilon / releases, math.sqrt(2 * rho))  # pure epsilon costs a rho of epsilon² / 2

    def within(mechanism: Mechanism) -> Mechanism:
        """The mechanism, with its scale increased until the composed loss, as the ledger computes
        it, is within epsilon: scales are rounded as well.
        """
        while True:
            cost = mechanism.cost(sensitivity)
            all_pure = None if cost.epsilon is None else releases * exact_loss(cost.epsilon)
            if composed_epsilon(releases * exact_loss(cost.rho), all_pure, delta) <= epsilon:
                return mechanism
            mechanism = replace(mechanism, scale=mechanism.scale * (1 + 2**-40))

    laplace = within(Mechanism("laplace", sensitivity / pure))
    gaussian = within(Mechanism("gaussian", sensitivity / math.sqrt(2 * rho)))
    if kind is not None:
        return laplace if kind == "laplace" else gaussian
    return laplace if math.sqrt(2) * laplace.scale <= gaussian.scale else gaussian


def chance_of_sum(scale: float, least: int) -> float:
    """The chance that the sum of both aggregators' Laplace noise is at least `least`, which is 0 or
    more; rounded up.

    With q = exp(-1/scale), P(X = k) = (1 - q) / (1 + q) · q^|k| for one noise X, and for the sum of
    two P(X + Y = k) = ((1 - q) / (1 + q))² · q^k · (k + (1 + q²) / (1 - q²)) at each k from 0 on;
    added up from `least` on, that is the term below. For a `least` of 1 or more it exceeds the
    chance of one noise, q^least / (1 + q).
    """
    q = math.exp(-1 / scale)
    one_minus_q2 = -math.expm1(-2 / scale)
    weight = 1 + q + 2 * q * q + least * one_minus_q2
    return math.exp(-least / scale) * weight / (1 + q) ** 3 * _ROUND_TAIL_UP


def discovery_threshold(scale: float, delta: float, contribution: int = 1) -> int:
    """The smallest threshold that the noised count of a key reaches with a probability of at most
    delta if a single unit holds that key; above `contribution`, which is what that unit adds at
    most.

    The noised count has the Laplace noise of both aggregators, each of this scale.
    """

    def fits(threshold: int) -> bool:
        return chance_of_sum(scale, threshold - contribution) <= delta

    low = high = contribution + 1
    while not fits(high):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
