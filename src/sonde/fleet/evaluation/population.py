# SPDX-License-Identifier: Apache-2.0
"""A synthetic fleet: Zipf-distributed tenants, applications and kernels, with a daily cycle.

Sizes of tenants, popularity of applications, and popularity of kernels within an application follow
Zipf's law with exponent 1. Each application ranks the kernels in a different order. A node is busy
with a probability that varies with its tenant's local time. No figure comes from a real fleet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def zipf(count: int, exponent: float = 1.0) -> Floats:
    """Probabilities of ranks 1…count."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.asarray(weights / weights.sum())


def grid(buckets: int) -> tuple[int, int]:
    """(applications, kernels): the most nearly square grid of this many buckets."""
    applications = next(n for n in range(math.isqrt(buckets), 0, -1) if buckets % n == 0)
    return applications, buckets // applications


@dataclass(frozen=True)
class Population:
    """`tenant`, `application`: per node. `kernel_of[a, r]`: the kernel of rank r in application a;
    `kernel_share[r]`: the share of time of the kernel of rank r. `longitude_h`: per tenant, how
    many hours its local time is ahead of UTC.
    """

    buckets: int
    tenant: Ints
    application: Ints
    kernel_of: Ints
    kernel_share: Floats
    longitude_h: Floats

    @staticmethod
    def draw(
        nodes: int, buckets: int, tenants: int, rng: np.random.Generator, concentration: float = 0.7
    ) -> Population:
        """Draws a fleet whose tenant sizes follow Zipf's law. `concentration`: as `of_tenants` has
        it.
        """
        tenant = rng.choice(tenants, size=nodes, p=zipf(tenants))
        return Population.of_tenants(tenant, tenants, buckets, rng, concentration)

    @staticmethod
    def of_tenants(
        tenant: Ints,
        tenants: int,
        buckets: int,
        rng: np.random.Generator,
        concentration: float = 0.7,
    ) -> Population:
        """Draws a fleet of given tenants: `tenant[i]`, below `tenants`, is that of node i. A node
        runs its tenant's main application with probability `concentration`, else a random one.
        """
        applications, kernels = grid(buckets)
        nodes = len(tenant)
        popularity = zipf(applications)
        main = rng.choice(applications, size=tenants, p=popularity)
        other = rng.choice(applications, size=nodes, p=popularity)
        application = np.where(rng.random(nodes) < concentration, main[tenant], other)
        kernel_of = np.stack([rng.permutation(kernels) for _ in range(applications)])
        return Population(
            buckets, tenant, application, kernel_of, zipf(kernels), rng.uniform(0, 24, tenants)
        )

    @property
    def nodes(self) -> int:
        """Nodes of the fleet."""
        return len(self.tenant)

    def busy(self, hour: float) -> Floats:
        """Probability that each node is busy in this hour (UTC): 0.4 to 1, 0.7 on average."""
        local = hour + self.longitude_h[self.tenant]
        return np.asarray(0.7 + 0.3 * np.cos((local - 15) * math.pi / 12))

    def sample(self, hour: float, rng: np.random.Generator) -> Ints:
        """One bucket per node: what it runs at a random instant of the hour (UTC); bucket 0 is
        idle, and also the first kernel of the first application.
        """
        kernels = len(self.kernel_share)
        rank = rng.choice(kernels, size=self.nodes, p=self.kernel_share)
        bucket = self.application * kernels + self.kernel_of[self.application, rank]
        return np.where(rng.random(self.nodes) < self.busy(hour), bucket, 0)

    def truth(self, hours: list[float]) -> Floats:
        """Expected samples per bucket if each node sends one in each of these hours (UTC)."""
        applications, kernels = self.kernel_of.shape
        expected = np.zeros((applications, kernels))
        idle = 0.0
        for hour in hours:
            busy = self.busy(hour)
            idle += float((1 - busy).sum())
            busy_nodes = np.bincount(self.application, weights=busy, minlength=applications)
            for application in range(applications):
                expected[application, self.kernel_of[application]] += (
                    busy_nodes[application] * self.kernel_share
                )
        flat = expected.reshape(-1)
        flat[0] += idle
        return np.asarray(flat)
