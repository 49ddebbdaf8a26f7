# SPDX-License-Identifier: Apache-2.0
"""Discovery of kernels without a class: shown when many nodes run them, and only to a party that
has the name.

A second histogram task counts hashes: a node that runs an unclassified kernel at the period's first
sampled instant reports the bucket of its salted hash, any other node bucket 0. Names never leave a
node. The collector hashes the names that it has itself (its own libraries, public packages) and
learns which of them are common. Counts below a threshold are not shown: a bucket that one unit
alone reports reaches it with a probability of at most the task's delta per release.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from sonde.errors import UsageError
from sonde.fleet.noise import discovery_threshold
from sonde.fleet.result import Result
from sonde.fleet.task import Task

NO_UNKNOWN_KERNEL = 0
"""The bucket of nodes without an unclassified kernel at that instant."""
DISCOVERY_SPACE = {"purpose": "discovery"}
"""The `space` field of a discovery task, in place of a bucket grid."""


def is_discovery(task: Task) -> bool:
    """Whether a task counts hashes of kernel names without a class."""
    return task.space.get("purpose") == "discovery"


@dataclass(frozen=True)
class DiscoveredKernel:
    """A bucket that many nodes reported. `names`: the known names that fall into it, by several
    where hashes collide; `count`: noised; `error`: half the width of the noise's 95 % interval.
    """

    bucket: int
    names: tuple[str, ...]
    count: int
    error: float


def bucket_of(task: Task, kernel: str | None) -> int:
    """The bucket of a kernel name. The task id is the salt, so that buckets of two tasks differ."""
    if kernel is None:
        return NO_UNKNOWN_KERNEL
    digest = blake2b(kernel.encode(errors="replace"), key=task.id, digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (task.buckets - 1)


def threshold_of(task: Task) -> int:
    """The smallest noised count that is shown. With the noise of both aggregators, or of one, a
    bucket that a single unit reports reaches it with a probability of at most delta. Raises
    UsageError if the contribution is unbounded.
    """
    contribution = task.sensitivity(task.privacy.unit)
    if contribution is None or task.privacy.mechanism != "laplace":
        raise UsageError("discovery needs proofs and Laplace noise")
    return discovery_threshold(task.privacy.scale, task.privacy.delta, contribution)


def discover(task: Task, release: Result, known_names: Iterable[str]) -> list[DiscoveredKernel]:
    """The buckets of a release that may be shown, largest count first."""
    names: dict[int, list[str]] = defaultdict(list)
    for name in known_names:
        names[bucket_of(task, name)].append(name)
    least = threshold_of(task)
    return [
        DiscoveredKernel(row.bucket, tuple(names.get(row.bucket, ())), row.count, row.error)
        for row in release.top(len(release.rows))
        if row.bucket != NO_UNKNOWN_KERNEL and row.count >= least
    ]
