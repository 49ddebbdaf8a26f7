# SPDX-License-Identifier: Apache-2.0
"""Leader, helper and collector in one process, with a clock that can be set: for attacks and tests.

Everything but the sockets is real: the state on disk, admission, verification, noise, ledger.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sonde.fleet import hpke
from sonde.fleet.aggregator import Helper, Leader
from sonde.fleet.collector import combine_shares
from sonde.fleet.node import make_report
from sonde.fleet.result import Result
from sonde.fleet.roster import Identity, Roster
from sonde.fleet.task import Kind, Privacy, Task
from sonde.fleet.verification import AggregatorKeys
from sonde.fleet.wire import Report, aggregate_binding

HOUR_S = 3600
START_S = 1_800_000_000 // HOUR_S * HOUR_S
"""When the first batch begins: a full hour in January 2027, in seconds since 1970."""


def small_task(
    buckets: int = 16,
    kind: Kind = "histogram",
    max_samples: int = 1,
    min_batch: int = 2,
    scale: float = 1.0,
    budget: float = 8.0,
    tenant_cap: int | None = None,
) -> Task:
    """A task of one-hour releases with Laplace noise."""
    return Task(
        name="local deployment",
        kind=kind,
        buckets=buckets,
        max_samples=max_samples,
        period_s=HOUR_S,
        release_s=HOUR_S,
        grace_s=600,
        min_batch=min_batch,
        privacy=Privacy("gpu", "laplace", scale, 1e-6, budget, tenant_cap),
    )


class LocalDeployment:
    """A leader, a helper, a collector and their nodes.

    `tenants[i]` is the tag of node i. `wrap` gets the function that sends the leader's requests to
    the helper and returns what is called instead. `party_types` are the classes of leader and
    helper, to test broken ones. `now_s` is the clock of all, which tests set.
    """

    def __init__(
        self,
        directory: Path,
        task: Task,
        tenants: Sequence[str],
        wrap: Callable[[Callable[[str, bytes], bytes]], Callable[[str, bytes], bytes]] = lambda p: (
            p
        ),
        party_types: tuple[type[Leader], type[Helper]] = (Leader, Helper),
    ) -> None:
        self.now_s = START_S + 60.0
        keys = [hpke.generate_key_pair() for _ in range(3)]
        self.task = replace(
            task, leader_key=keys[0][1], helper_key=keys[1][1], collector_key=keys[2][1]
        )
        self._collector = hpke.Opener(keys[2][0])
        self.nodes = [Identity() for _ in tenants]
        self.roster = Roster({n.public: t for n, t in zip(self.nodes, tenants, strict=True)})
        verify_key = os.urandom(32)
        self._keys = AggregatorKeys(keys[0][0], verify_key), AggregatorKeys(keys[1][0], verify_key)
        self._directory, self._wrap, self._party_types = directory, wrap, party_types
        self.open()

    def open(self) -> None:
        """Starts both parties from their state on disk, as after a crash."""
        leader, helper = self._party_types
        self.helper = helper(
            self.task, self._keys[1], self.roster, self._directory / "helper.sqlite", 1, self._clock
        )

        def post(path: str, body: bytes) -> bytes:
            return self.helper.process_job(body) if path == "jobs" else self.helper.release(body)

        self.leader = leader(
            self.task,
            self._keys[0],
            self.roster,
            self._directory / "leader.sqlite",
            self._wrap(post),
            1,
            self._clock,
        )

    def close(self) -> None:
        self.leader.store.close()
        self.helper.store.close()

    def _clock(self) -> float:
        return self.now_s

    def report(self, node: int, samples: Sequence[int]) -> Report:
        """A report of node `node` now; `samples` are bucket indices."""
        return make_report(self.task, self.nodes[node], samples, int(self.now_s))

    def send(self, *reports: Report | bytes) -> list[str]:
        """Uploads and verifies reports. Returns per upload "" or the leader's reason of refusal."""
        bodies = [r if isinstance(r, bytes) else r.encode() for r in reports]
        reasons = self.leader.admit(bodies)
        while self.leader.process_job():
            pass
        return reasons

    def exact_sums(self, start_s: int = START_S) -> list[int]:
        """The sums before noise, which no single party can compute."""
        shares = [party.store.batch(start_s).share for party in (self.leader, self.helper)]
        return self.task.aggregation().unshard(shares)

    def close_batch(self) -> None:
        """Moves the clock past the end of the current batch and its grace."""
        self.now_s = self.task.batch_of(int(self.now_s)) + self.task.release_s
        self.now_s += self.task.grace_s + 1

    def collect(self, start_s: int = START_S) -> Result:
        return combine_shares(self.task, start_s, self.collected_shares(start_s))

    def collected_shares(self, start_s: int) -> list[bytes]:
        """Both parties' noised shares, as the collector opens them."""
        sealed = self.leader.release(start_s, self.task.release_s)
        shares = []
        for role, share in zip((hpke.LEADER, hpke.HELPER), sealed, strict=True):
            binding = aggregate_binding(role, self.task.id, start_s, self.task.release_s)
            shares.append(self._collector.open(share, binding))
        return shares
