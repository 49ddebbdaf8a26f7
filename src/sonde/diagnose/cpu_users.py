# SPDX-License-Identifier: Apache-2.0
"""Who uses more CPU time than before: a process, or one with those that it started.

Processes that live for a second each use little by themselves; together they may use more than any
other. So use is summed by owner, and below it by parent, and the largest sum is followed down for
as long as one process, or one with its descendants, has most of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from sonde.diagnose.case import Case
from sonde.diagnose.moments import Who

MOST: Final = 0.5
"""Part of a sum that one has who is followed, and no other of the same."""
ONE_OF_FEW: Final = 0.2
"""Part of a sum from which on a process is named though others like it use as much."""
LEAST_MORE: Final = 0.1
"""CPUs more by which a worker, and the family, have to do more than before."""
MAX_DEPTH: Final = 64
"""Generations that are followed; a window is part of what is written to a file, and may lie."""


@dataclass(frozen=True, slots=True)
class CpuUser:
    """A process that used more, or whose descendants did."""

    pid: int
    cpus: float
    """CPUs more, of all of them."""
    processes: int
    """That used more, with it; 1: it alone is meant."""
    among: str = ""
    """Whose processes, where no process started them all."""


def users(case: Case) -> list[CpuUser]:
    """Other processes than the victim's family that used more than before: first the one, or the
    ones together, that did so most; then single ones, most first."""
    more = _more(case)
    first = _Families(case, more).largest()
    if first is None:
        return []
    single = [CpuUser(pid, cpus, 1) for pid, cpus in more.items() if cpus > 0]
    single.sort(key=lambda user: -user.cpus)
    return [first, *(user for user in single if user.pid != first.pid)]


def own_workers(case: Case) -> CpuUser | None:
    """The process that the victim started that uses most more, with what all of the family use
    more; None: they use no more than before, or less than others do."""
    family = sum(case.grew("cpu", pid) for pid in case.own)
    workers = {pid: case.grew("cpu", pid) for pid in sorted(case.own - {case.victim})}
    most = max(workers, key=lambda pid: workers[pid], default=None)
    if most is None or workers[most] < LEAST_MORE or family < LEAST_MORE:
        return None
    others = users(case)
    if others and others[0].cpus > family:
        return None
    count = sum(cpus >= LEAST_MORE for cpus in workers.values())
    return CpuUser(most, family, count)


def _more(case: Case) -> dict[int, float]:
    """CPUs more by pid. Below 0: of those that have ended, as what others do in their place is no
    more. Who goes on with less is counted with 0: it may be as short of CPUs as the victim."""
    more: dict[int, float] = {}
    for pid in sorted({*case.before, *case.after} - case.own):
        if not case.who(pid).is_kernel:
            before, after = (side.get(pid) for side in (case.before, case.after))
            cpus = (after.cpu if after else 0.0) - (before.cpu if before else 0.0)
            more[pid] = max(0.0, cpus) if after else cpus
    return more


class _Families:
    """Sums by owner and by ancestor."""

    def __init__(self, case: Case, more: dict[int, float]) -> None:
        self._case, self._more = case, more
        self._above = _ancestors(case)
        self._of: dict[int, float] = defaultdict(float)
        """With descendants."""
        self._children: dict[int, set[int]] = defaultdict(set)
        self._tops: dict[str, set[int]] = defaultdict(set)
        """By owner: those whose parent is none of its processes."""
        for pid, cpus in more.items():
            for one in self._line(pid):
                self._of[one] += cpus

    def _line(self, pid: int) -> list[int]:
        """A process and its ancestors of the same owner; notes who is whose child."""
        owner = _owner(self._case.who(pid))
        line = [pid]
        while len(line) < MAX_DEPTH:
            parent = self._case.who(line[-1]).parent
            known = self._case.window.who.get(parent)
            if known is None or parent <= 1 or known.is_kernel or parent in line:
                break
            if _owner(known) != owner or parent in self._case.own or parent in self._above:
                break
            self._children[parent].add(line[-1])
            line.append(parent)
        self._tops[owner].add(line[-1])
        return line

    def largest(self) -> CpuUser | None:
        """Followed down from the owner with the largest sum; None: nobody uses more."""
        sums = {owner: sum(self._of[pid] for pid in tops) for owner, tops in self._tops.items()}
        owner = max(sums, key=lambda name: (sums[name], name), default="")
        whole, below = sums.get(owner, 0.0), self._tops[owner]
        if whole <= 0:
            return None
        at: int | None = None
        while below:
            best = max(below, key=lambda pid: (self._of[pid], -pid))
            if self._of[best] < MOST * whole or self._own(at) >= self._of[best]:
                break
            at, whole, below = best, self._of[best], self._children[best]
        return self._named(at, owner, whole)

    def _own(self, pid: int | None) -> float:
        return self._more.get(pid, 0.0) if pid is not None else 0.0

    def _named(self, at: int | None, owner: str, whole: float) -> CpuUser:
        """`at`: the process below which nobody has most of the sum."""
        tops = {at} if at is not None else self._tops[owner]
        found = [pid for pid in self._below(tops) if self._more.get(pid, 0.0) > 0]
        most = max(found, key=lambda pid: (self._more[pid], -pid))
        if self._own(most) >= ONE_OF_FEW * whole or len(found) < 2:
            return CpuUser(most, min(self._own(most), whole), 1)
        if at is None:
            return CpuUser(most, whole, len(found), owner or "one owner")
        return CpuUser(at, whole, len(found))

    def _below(self, tops: set[int]) -> set[int]:
        """These and their descendants."""
        seen: set[int] = set()
        left = [*tops]
        while left:
            pid = left.pop()
            if pid not in seen:
                seen.add(pid)
                left += self._children[pid]
        return seen


def _owner(who: Who) -> str:
    return who.owner or who.cgroup


def _ancestors(case: Case) -> set[int]:
    """Of the victim: what started it and others, as a shell or a launcher, is none of the others'
    use."""
    found: set[int] = set()
    pid = case.victim
    while len(found) < MAX_DEPTH and (parent := case.who(pid).parent) > 1 and parent not in found:
        found.add(parent)
        pid = parent
    return found
