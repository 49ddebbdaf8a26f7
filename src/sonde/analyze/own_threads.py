# SPDX-License-Identifier: Apache-2.0
"""What a program itself does to its time without a CPU: more threads that are ready than CPUs that
it may use, a pool of native threads that spins, its nice value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from sonde.analyze.causes import descends
from sonde.analyze.ranking import LEAST_SHARE
from sonde.model.spinning import SpinningPool
from sonde.model.timeline import Scheduling, ThreadOwner, Timeline, Total, TotalKind

SPINS = 0.25
"""Of the time that a program's threads run or are ready, in waits of a pool that spins, from which
on it is named."""
CROWDED = 1.1
"""Times the CPUs that a program may use, that its own threads ask for on average, from which on
they take one another's."""
LEAST_THREADS = 2
"""One thread takes no CPU from itself."""
SPIN_PLACES = 3
"""Functions named in which a pool's threads spin."""


@dataclass(frozen=True, slots=True)
class OwnThreads:
    """The threads of a program that is short of CPUs. Lengths in ns."""

    pids: frozenset[int]
    """Its processes, with those that it started."""
    wanted: Mapping[int, int]
    """By track: time on a CPU or ready for one."""
    spun: Mapping[str, int]
    """By pool (`SpinningPool`), the part of that in which its threads wait for one another."""
    on_cpu: int
    """The part on a CPU."""
    spun_on_cpu: int
    """And of that, what was spun."""
    spins_in: Mapping[str, int]
    """By function or place, what was spun there."""
    cpus: int
    """CPUs that it may use; 0 not known."""
    nice: int

    @property
    def whole(self) -> int:
        """Time on a CPU or ready for one, of all of them."""
        return sum(self.wanted.values())

    @property
    def most_spun(self) -> SpinningPool | None:
        """The pool that spins most. Where MKL calls OpenMP's threads, they are MKL's, also while
        they wait for it."""
        spun = dict(self.spun)
        if SpinningPool.MKL in spun:
            spun[SpinningPool.MKL] += spun.pop(SpinningPool.OPENMP, 0)
        most = max(spun, key=lambda one: spun[one], default="")
        return SpinningPool(most) if most else None

    @property
    def pool(self) -> SpinningPool | None:
        """The same, where the program's threads spin for long; else None."""
        return self.most_spun if sum(self.spun.values()) >= SPINS * self.whole else None

    def is_crowded(self, length: int) -> bool:
        """Whether they want more CPUs than it may use. `length`: of the record."""
        busy = [ns for ns in self.wanted.values() if ns >= LEAST_SHARE * length]
        if self.cpus < 1 or len(busy) < LEAST_THREADS:
            return False
        return sum(busy) > CROWDED * self.cpus * length

    def facts(self, length: int) -> list[str]:
        """In words, for people."""
        lines = []
        if self.is_crowded(length):
            busy = sum(ns >= LEAST_SHARE * length for ns in self.wanted.values())
            lines.append(
                f"{busy:,} threads of the program itself want {self.whole / length:.1f} CPUs, and "
                f"it may use {self.cpus}: they take them from one another"
            )
        if (pool := self.pool) is not None:
            spun = sum(self.spun.values()) / max(1, self.whole)
            ranked = sorted(self.spins_in, key=lambda place: -self.spins_in[place])
            named = ", ".join(ranked[:SPIN_PLACES])
            lines.append(
                f"the threads of {pool} wait for one another by spinning"
                + f", in {named}," * bool(named)
                + f" for {100 * spun:.0f} % of the time that the program runs or is ready"
                + f" ({100 * self.spun_on_cpu / self.on_cpu:.0f} % of its CPU time)"
                * bool(self.on_cpu)
                + ": that is waiting, no work, and each waits for one that has no CPU"
            )
        if self.nice:
            lines.append(nice_in_words(self.nice))
        return lines


def nice_in_words(nice: int) -> str:
    """What a nice value means for who gets the CPUs. A step is a factor of 1.25
    (`sched_prio_to_weight` of the kernel)."""
    weight = 1.25 ** abs(nice)
    if nice > 0:
        return (
            f"its nice value is {nice}: beside a process with 0 it gets 1 of {1 + weight:.1f} "
            "parts of a CPU"
        )
    return f"its nice value is {nice}: it goes before others, {weight:.1f} times their part"


@dataclass(slots=True)
class _Sums:
    wanted: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    spun: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    spins_in: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    on_cpu: int = 0
    spun_on_cpu: int = 0

    def add(self, one: Total) -> None:
        self.wanted[one.track] += one.ns
        is_on_cpu = one.kind == TotalKind.SAMPLED
        self.on_cpu += one.ns * is_on_cpu
        if one.pool:
            self.spun[one.pool] += one.ns
            self.spun_on_cpu += one.ns * is_on_cpu
            if one.location:
                self.spins_in[one.location] += one.ns


def own_threads(timeline: Timeline, turns: Collection[int]) -> OwnThreads:
    """All threads of the processes that some threads are of, and of those that they started."""
    mine = {timeline.tracks[track].pid for track in turns}
    pids = frozenset(
        pid
        for pid in {one.pid for one in timeline.tracks}
        if pid in mine or any(descends(timeline, pid, one) for one in mine)
    )
    sums = _Sums()
    for one in _of_processes(timeline, pids):
        sums.add(one)
    known = [timeline.scheduling[pid] for pid in sorted(mine) if pid in timeline.scheduling]
    allowed = max((one.cpus for one in known if one.cpus), default=timeline.cpus)
    return OwnThreads(
        pids=pids,
        wanted=sums.wanted,
        spun=sums.spun,
        on_cpu=sums.on_cpu,
        spun_on_cpu=sums.spun_on_cpu,
        spins_in=sums.spins_in,
        cpus=min(allowed, timeline.cpus) if timeline.cpus else allowed,
        nice=max(known, key=lambda one: abs(one.nice), default=Scheduling()).nice,
    )


def _of_processes(timeline: Timeline, pids: Collection[int]) -> Iterable[Total]:
    """Their totals of time on a CPU and in run queues."""
    for one in timeline.totals:
        track = timeline.tracks[one.track]
        is_busy = one.kind in (TotalKind.SAMPLED, TotalKind.RUNQUEUE)
        if is_busy and track.pid in pids and track.owner != ThreadOwner.SONDE:
            yield one
