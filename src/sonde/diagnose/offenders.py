# SPDX-License-Identifier: Apache-2.0
"""Who uses more of something than before: a process, or one with those that it started.

Processes that live for a second each use little by themselves; together they may use more than any
other. So use is summed by owner, and below it by parent, and the largest sum is followed down for
as long as one process, or one with its descendants, has most of it. What is summed is anything that
adds up: CPUs, bytes a second, shares of a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sonde.diagnose.moments import Who, Window

MOST: Final = 0.5
"""Part of a sum that one has who is followed, and no other of the same."""
ONE_OF_FEW: Final = 0.2
"""Part of a sum from which on a process is named though others like it use as much."""
MAX_DEPTH: Final = 64
"""Generations that are followed; a window is part of what is written to a file, and may lie."""


@dataclass(frozen=True, slots=True)
class User:
    """A process that used more, or whose descendants did."""

    pid: int
    more: float
    """By how much, of all of them; in the unit of what was compared."""
    processes: int
    """That used more, with it; 1: it alone is meant."""
    pids: frozenset[int]
    """Of all of them, those that have ended and those that use less, too."""
    among: str = ""
    """Whose processes, where no process started them all."""

    @property
    def is_alone(self) -> bool:
        """Whether one process is meant, and not what many do together."""
        return self.processes == 1

    def is_enough(self, alone: float, together: float) -> bool:
        """Whether it uses enough to be an offender, in the unit of `more`: `alone` where it is one
        process, `together` where it is many, as one owner's add up to little always."""
        return self.more >= (alone if self.is_alone else together)


def users(window: Window, own: Container[int], more: Mapping[int, float]) -> list[User]:
    """Other processes than the victim's family (`own`) that used more than before: first the one,
    or the ones together, that did so most; then single ones, most first. `more`: as of `rises`."""
    others = {
        pid: rise for pid, rise in more.items()
        if pid not in own and not _who(window, pid).is_kernel
    }  # fmt: skip
    first = _Families(window, own, others).largest()
    if first is None:
        return []
    single = [_alone(pid, rise) for pid, rise in others.items() if rise > 0]
    single.sort(key=lambda user: -user.more)
    return [first, *(user for user in single if user.pid != first.pid)]


def rises(
    before: Mapping[int, float], after: Mapping[int, float], goes_on: Container[int]
) -> dict[int, float]:
    """By pid, how much more it uses. Below 0: of those that have ended, as what others do in their
    place is no more. Who goes on with less is counted with 0: it may lack it like the victim."""
    found: dict[int, float] = {}
    for pid in sorted({*before, *after}):
        rise = after.get(pid, 0.0) - before.get(pid, 0.0)
        found[pid] = max(0.0, rise) if pid in goes_on else rise
    return found


def share_of_first(found: Sequence[User]) -> float:
    """The part, 0..1, that the first of `users` has of what all of them use more."""
    first = found[0]
    rest = sum(user.more for user in found[1:] if user.pid not in first.pids)
    return first.more / (first.more + rest)


def _alone(pid: int, more: float) -> User:
    return User(pid, more, 1, frozenset((pid,)))


class _Families:
    """Sums by owner and by ancestor."""

    def __init__(self, window: Window, own: Container[int], more: Mapping[int, float]) -> None:
        self._window, self._own, self._more = window, own, more
        self._above = ancestors(window, window.victim)
        """What started the victim and others, as a shell or a launcher, is none of others' use."""
        self._of: dict[int, float] = defaultdict(float)
        """With descendants."""
        self._children: dict[int, set[int]] = defaultdict(set)
        self._tops: dict[str, set[int]] = defaultdict(set)
        """By owner: those whose parent is none of its processes."""
        for pid, rise in more.items():
            for one in self._line(pid):
                self._of[one] += rise

    def _line(self, pid: int) -> list[int]:
        """A process and its ancestors of the same owner; notes who is whose child."""
        owner = _owner(_who(self._window, pid))
        line = [pid]
        while len(line) < MAX_DEPTH:
            parent = _who(self._window, line[-1]).parent
            known = self._window.who.get(parent)
            if known is None or parent <= 1 or known.is_kernel or parent in line:
                break
            if _owner(known) != owner or parent in self._own or parent in self._above:
                break
            self._children[parent].add(line[-1])
            line.append(parent)
        self._tops[owner].add(line[-1])
        return line

    def largest(self) -> User | None:
        """Followed down from the owner with the largest sum; None: nobody uses more."""
        sums = {owner: sum(self._of[pid] for pid in tops) for owner, tops in self._tops.items()}
        owner = max(sums, key=lambda name: (sums[name], name), default="")
        whole, below = sums.get(owner, 0.0), self._tops[owner]
        if whole <= 0:
            return None
        at: int | None = None
        while below:
            best = max(below, key=lambda pid: (self._of[pid], -pid))
            if self._of[best] < MOST * whole or self._by_itself(at) >= self._of[best]:
                break
            # What one has in the place of another that the same one started, and that has ended,
            # is no more.
            whole = self._of[best] if at is None else min(whole, self._of[best])
            at, below = best, self._children[best]
        return self._named(at, owner, whole)

    def _by_itself(self, pid: int | None) -> float:
        return self._more.get(pid, 0.0) if pid is not None else 0.0

    def _named(self, at: int | None, owner: str, whole: float) -> User:
        """`at`: the process below which nobody has most of the sum."""
        pids = self._below({at} if at is not None else self._tops[owner])
        found = [pid for pid in pids if self._more.get(pid, 0.0) > 0]
        most = max(found, key=lambda pid: (self._more[pid], -pid))
        if self._by_itself(most) >= ONE_OF_FEW * whole or len(found) < 2:
            return _alone(most, min(self._by_itself(most), whole))
        if at is None:
            return User(most, whole, len(found), frozenset(pids), owner or "one owner")
        return User(at, whole, len(found), frozenset(pids))

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


def _who(window: Window, pid: int) -> Who:
    return window.who.get(pid) or Who(pid, f"pid {pid}")


def ancestors(window: Window, pid: int) -> set[int]:
    """What started a process, what started that, and so on; without the first process of all."""
    found: set[int] = set()
    while len(found) < MAX_DEPTH:
        parent = _who(window, pid).parent
        if parent <= 1 or parent in found:
            break
        found.add(parent)
        pid = parent
    return found
