# SPDX-License-Identifier: Apache-2.0
"""Kernels that no class knows yet: found when many run them, and only by who has their name.

A second histogram task sums hashes: a node that met an unknown kernel reports one bucket of its
salted hash, any other node bucket 0. Names never leave a node. The collector looks up the names it
has itself (its own libraries, public packages) and learns which of them are widely run; below the
threshold of the library's mechanism for unknown keys nothing is shown.
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

NOTHING_NEW = 0
SPACE = {"purpose": "discovery"}
"""What the grid of a discovery task says, in place of classes."""


def is_discovery(task: Task) -> bool:
    return task.space.get("purpose") == "discovery"


@dataclass(frozen=True)
class Found:
    """A hash that many nodes ran: the names that fall on it (none, if nobody here has them)."""

    bucket: int
    names: tuple[str, ...]
    count: int
    error: float


def bucket_of(task: Task, kernel: str | None) -> int:
    """The bucket of a kernel name; the salt is the task, so that buckets of two tasks differ."""
    if kernel is None:
        return NOTHING_NEW
    digest = blake2b(kernel.encode(), key=task.id, digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (task.buckets - 1)


def threshold_of(task: Task) -> int:
    """Noised counts below this are not shown. Raises UsageError where nothing bounds a unit."""
    contribution = task.sensitivity(task.privacy.unit)
    if contribution is None or task.privacy.mechanism != "laplace":
        raise UsageError("discovery needs proofs and Laplace noise")
    return discovery_threshold(task.privacy.scale, task.privacy.delta, contribution)


def discover(task: Task, release: Result, known_names: Iterable[str]) -> list[Found]:
    """What of a release may be shown, largest first."""
    names: dict[int, list[str]] = defaultdict(list)
    for name in known_names:
        names[bucket_of(task, name)].append(name)
    least = threshold_of(task)
    return [
        Found(row.bucket, tuple(names.get(row.bucket, ())), row.count, row.error)
        for row in release.top(len(release.rows))
        if row.bucket != NOTHING_NEW and row.count >= least
    ]
