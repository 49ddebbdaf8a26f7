# SPDX-License-Identifier: Apache-2.0
"""Noise and its price, from OpenDP: exact discrete samplers and tight zCDP accounting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from sonde.errors import MissingDependency, UsageError

MechanismKind = Literal["laplace", "gaussian"]


_BEYOND_RHO = 1000.0
"""No protection at all; Bun and Steinke 2016, proposition 1.3, gives a bound there."""


@lru_cache(maxsize=1)
def _opendp() -> Any:
    try:
        import opendp.prelude as dp
    except ImportError as error:
        raise MissingDependency("OpenDP is not installed", "pip install 'sonde[fleet]'") from error
    dp.enable_features("contrib")
    return dp


@dataclass(frozen=True)
class Cost:
    """Privacy loss of one release: zCDP always, pure epsilon where the mechanism has one."""

    rho: float
    epsilon: float | None


@dataclass(frozen=True)
class Mechanism:
    """Integer noise of one aggregator: discrete Laplace (scale b) or Gaussian (scale sigma)."""

    kind: MechanismKind
    scale: float

    def sample(self, length: int) -> list[int]:
        """One integer a bucket."""
        noise: list[int] = _measurement(self.kind, self.scale)([0] * length)
        return noise

    def cost(self, sensitivity: int) -> Cost:
        """Loss of a release in which one unit moves the counts by at most `sensitivity` (L1)."""
        dp = _opendp()
        measurement = _measurement(self.kind, self.scale)
        if self.kind == "laplace":
            rho = dp.c.make_pureDP_to_zCDP(measurement).map(sensitivity)
            return Cost(rho, measurement.map(sensitivity))
        return Cost(measurement.map(float(sensitivity)), None)

    def deviation(self, parties: int = 2) -> float:
        """Standard deviation of the sum of all parties' noise, to the width of a rounding."""
        one = self.scale * (math.sqrt(2) if self.kind == "laplace" else 1)
        return one * math.sqrt(parties)

    def half_width(self, confidence: float = 0.95, parties: int = 2) -> float:
        """Half the width of the interval that holds the noise of all parties' sum.

        Of two Laplace variables P(|X| > x) = exp(-x/b)·(1 + x/2b); Gaussians add in variance.
        """
        if self.kind == "gaussian" or parties != 2:
            return self.deviation(parties) * _normal_quantile((1 + confidence) / 2)
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


def epsilon_of_rho(rho: float, delta: float) -> float:
    """The epsilon of rho-zCDP at delta, by the library's conversion.

    A Gaussian of scale sqrt(1/2) costs d² at distance d, so distance sqrt(rho) carries any rho.
    """
    if rho <= 0:
        return 0.0
    if rho > _BEYOND_RHO:  # where the curve overflows; a bound that always holds instead
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))
    dp = _opendp()
    curve = dp.c.make_zCDP_to_approxDP(_measurement("gaussian", math.sqrt(0.5)))
    return float(curve.map(math.sqrt(rho)).epsilon(delta))


def rho_of_epsilon(epsilon: float, delta: float) -> float:
    """The largest rho that keeps within (epsilon, delta)."""
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
    """The mechanism of least variance that can release `releases` times within (epsilon, delta);
    of the given kind, where one is asked for.
    """
    if epsilon <= 0 or not 0 < delta < 1 or releases < 1 or sensitivity < 1:
        raise UsageError(
            f"no noise can promise epsilon = {epsilon:g} at delta = {delta:g}",
            "give an epsilon above 0, a delta between 0 and 1, and at least one release",
        )
    rho = rho_of_epsilon(epsilon, delta) / releases
    pure = max(epsilon / releases, math.sqrt(2 * rho))
    laplace = Mechanism("laplace", sensitivity / pure)
    gaussian = Mechanism("gaussian", sensitivity / math.sqrt(2 * rho))
    if kind is not None:
        return laplace if kind == "laplace" else gaussian
    return laplace if math.sqrt(2) * laplace.scale <= gaussian.scale else gaussian


def discovery_threshold(scale: float, delta: float, contribution: int = 1) -> int:
    """Least count at which a key that one unit alone holds stays hidden but for delta.

    By the library's stability-based mechanism for keys not known beforehand; a unit adds up to
    `contribution` to one key.
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


def release_unknown(counts: dict[str, int], scale: float, threshold: int) -> dict[str, int]:
    """Noised counts of those keys that enough units hold; each unit adds 1 to one key."""
    dp = _opendp()
    domain = dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T="i64"))
    metric = dp.l01inf_distance(dp.absolute_distance(T="i64"))
    made = dp.m.make_laplace_threshold(domain, metric, scale=scale, threshold=threshold)
    released: dict[str, int] = made(counts)
    return released


def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)
