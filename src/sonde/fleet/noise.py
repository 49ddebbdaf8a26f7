# SPDX-License-Identifier: Apache-2.0
"""Noise and privacy accounting, from OpenDP: exact discrete samplers and tight zCDP accounting."""

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

_BEYOND_RHO = 1000.0
"""Practically no protection; the bound of Bun and Steinke 2016, proposition 1.3, is used there."""


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
        """Half the width of the interval that contains the sum of all parties' noise.

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
    dp = _opendp()
    domain = dp.vector_domain(dp.atom_domain(T="i64"))
    if kind == "laplace":
        return dp.m.make_laplace(domain, dp.l1_distance(T="i64"), scale=scale)
    return dp.m.make_gaussian(domain, dp.l2_distance(T="f64"), scale=scale)


@lru_cache(maxsize=1024)
def epsilon_of_rho(rho: float, delta: float) -> float:
    """The epsilon of rho-zCDP at delta, by the library's conversion; rounded up, never down.

    A Gaussian of scale sqrt(1/2) costs d² at distance d, so distance sqrt(rho) carries any rho.
    The root of 1/2 and that of rho are rounded, so the distance is raised by more than both errors.
    """
    if rho <= 0:
        return 0.0
    if rho > _BEYOND_RHO:  # where the curve overflows; a bound that always holds instead
        return (rho + 2 * math.sqrt(rho * math.log(1 / delta))) * _ROUND_UP
    dp = _opendp()
    curve = dp.c.make_zCDP_to_approxDP(_measurement("gaussian", math.sqrt(0.5)))
    return float(curve.map(math.sqrt(rho) * _ROUND_UP).epsilon(delta))


_UNIT = 1 << 100
"""Losses are summed as integer multiples of 1/_UNIT: exactly, in any order."""


@lru_cache(maxsize=1024)
def exact_loss(loss: float) -> int:
    """A loss as an integer that is added and subtracted without error; rounded up."""
    return math.ceil(Fraction(loss) * _UNIT)


def loss_of(exact: int) -> float:
    """The smallest float that is not below a sum of exact losses."""
    nearest = exact / _UNIT
    return nearest if Fraction(nearest) * _UNIT >= exact else math.nextafter(nearest, math.inf)


def composed_epsilon(rho: int, pure: int | None, delta: float) -> float:
    """The epsilon at delta of releases whose exact losses sum to these; the smaller of the two
    results holds. `pure` is None if some release has no pure epsilon.
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
    """The mechanism of least variance for `releases` releases within (epsilon, delta); of the given
    kind, if one is given. Raises UsageError.
    """
    if epsilon <= 0 or not 0 < delta < 1 or releases < 1 or sensitivity < 1:
        raise UsageError(
            f"no noise can guarantee epsilon = {epsilon:g} at delta = {delta:g}",
            "give an epsilon above 0, a delta between 0 and 1, and at least one release",
        )
    rho = rho_of_epsilon(epsilon, delta) / releases
    pure = max(epsilon / releases, math.sqrt(2 * rho))

    def within(mechanism: Mechanism) -> Mechanism:
        """The mechanism, with its scale increased until the composed loss, as the ledger computes
        it, is within epsilon: scales are rounded as well.
        """
        while True:
            cost = mechanism.cost(sensitivity)
            whole = None if cost.epsilon is None else releases * exact_loss(cost.epsilon)
            if composed_epsilon(releases * exact_loss(cost.rho), whole, delta) <= epsilon:
                return mechanism
            mechanism = replace(mechanism, scale=mechanism.scale * (1 + 2**-40))

    laplace = within(Mechanism("laplace", sensitivity / pure))
    gaussian = within(Mechanism("gaussian", sensitivity / math.sqrt(2 * rho)))
    if kind is not None:
        return laplace if kind == "laplace" else gaussian
    return laplace if math.sqrt(2) * laplace.scale <= gaussian.scale else gaussian


def discovery_threshold(scale: float, delta: float, contribution: int = 1) -> int:
    """The least count at which a key that a single unit holds stays hidden, except with probability
    delta.

    Uses OpenDP's stability-based mechanism for keys that are not known beforehand. A unit adds up
    to `contribution` to one key.
    """
    dp = _opendp()
    domain = dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T="i64"))
    metric = dp.l01inf_distance(dp.absolute_distance(T="i64"))

    def fits(threshold: int) -> bool:
        made = dp.m.make_laplace_threshold(domain, metric, scale=scale, threshold=threshold)
        return bool(made.map((1, contribution, contribution))[1] <= delta)

    low, high = contribution + 1, contribution + 2 + math.ceil(scale * (math.log(1 / delta) + 2))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
