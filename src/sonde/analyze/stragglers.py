# SPDX-License-Identifier: Apache-2.0
"""Why a job of many ranks is slower than its ranks are: one slow worker (a rank of a stage), a slow
stage, or unequal sequences. A first estimate, from durations of the same operation in all ranks.

The duration of an operation is divided by medians: what its stage takes, what its worker takes
beyond its stage, and the rest, which changes from piece to piece. Each part shows how much longer a
step takes because of it, since the slowest of those that wait for one another sets the pace: the
slowest worker of a stage, the slowest stage, and, of the pieces that the ranks of a stage work on
at the same time, the longest one.
"""

from __future__ import annotations

import enum
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

LEAST: Final = 0.1
"""Share of the time from which on a part is reported."""
LEAST_PEERS: Final = 2
"""Of a stage with no more ranks, no worker is the slow one."""


class Straggle(enum.StrEnum):
    """What the others wait for."""

    WORKER = "slow-worker"
    STAGE = "slow-stage"
    SEQUENCES = "unequal-sequences"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Work:
    """One operation of one rank on one piece (a micro batch) of one step."""

    operation: str
    stage: int
    replica: int
    """Number of the rank within its stage, which works on other data (data parallelism)."""
    step: int
    piece: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Straggling:
    """What was found."""

    kind: Straggle
    excess: dict[Straggle, float]
    """How much longer a step takes by each part, relative to the usual time; 0.3: 30 %."""
    stage: int = -1
    """The slow stage, or that of the slow worker; -1 for none."""
    replica: int = -1
    """The slow worker; -1 for none."""


def straggling(work: Iterable[Work]) -> Straggling:
    """What the ranks of a job wait for, if for anything."""
    by_operation: dict[str, list[Work]] = defaultdict(list)
    for one in work:
        if one.seconds > 0:
            by_operation[one.operation].append(one)
    found = [_of_operation(its) for its in by_operation.values()]
    seconds = [sum(one.seconds for one in its) for its in by_operation.values()]
    excess = dict.fromkeys((Straggle.WORKER, Straggle.STAGE, Straggle.SEQUENCES), 0.0)
    whole = sum(seconds)
    if not whole:
        return Straggling(Straggle.NOTHING, excess)
    for part, weight in zip(found, seconds, strict=True):
        for kind, value in part.excess.items():
            excess[kind] += value * weight / whole
    kind = max(excess, key=lambda it: excess[it])
    if excess[kind] < LEAST:
        return Straggling(Straggle.NOTHING, excess)
    largest = max(found, key=lambda it: it.excess[kind])
    where = (largest.stage, largest.replica if kind == Straggle.WORKER else -1)
    return Straggling(kind, excess, *(where if kind != Straggle.SEQUENCES else (-1, -1)))


def _of_operation(work: list[Work]) -> Straggling:
    """The same for the rows of one operation."""
    of_worker: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in work:
        of_worker[one.stage, one.replica].append(one.seconds)
    workers = {who: statistics.median(its) for who, its in of_worker.items()}
    stages: dict[int, list[float]] = defaultdict(list)
    for (stage, _), seconds in workers.items():
        stages[stage].append(seconds)
    usual = {stage: statistics.median(its) for stage, its in stages.items()}
    slowest = max(workers, key=lambda who: workers[who] / usual[who[0]])
    has_peers = len(stages[slowest[0]]) > LEAST_PEERS
    of_slowest = workers[slowest] / usual[slowest[0]] - 1 if has_peers else 0.0
    last = max(usual, key=lambda stage: usual[stage])
    rest = [seconds for stage, seconds in usual.items() if stage != last]
    of_stage = usual[last] / statistics.median(rest) - 1 if rest else 0.0
    # What is left of each piece, once stage and worker are taken out; the largest of the replicas
    # that work on theirs at the same time, by the mean of them.
    at_a_time: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for one in work:
        left = one.seconds / workers[one.stage, one.replica]
        at_a_time[one.stage, one.step, one.piece].append(left)
    spreads = [max(its) / statistics.fmean(its) - 1 for its in at_a_time.values() if len(its) > 1]
    excess = {
        Straggle.WORKER: max(0.0, of_slowest),
        Straggle.STAGE: max(0.0, of_stage),
        Straggle.SEQUENCES: statistics.median(spreads) if spreads else 0.0,
    }
    at = slowest if of_slowest >= of_stage else (last, -1)
    return Straggling(max(excess, key=lambda it: excess[it]), excess, *at)
