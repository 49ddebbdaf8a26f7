# SPDX-License-Identifier: Apache-2.0
"""Which processes are looked at closely: those that use a CPU enough to become slower.

Chosen by CPU time alone, which the kernel counts for every process anyway. A process that was
chosen stays so for a while after it stopped using a CPU: a slowdown may look like that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from sonde.diagnose.moments import Moment

BEGINS = 0.03
"""CPUs that a process uses on average over `SHORT_S`, from which on it is chosen."""
ENDS = 0.008
"""Average over `LONG_S` below which it no longer is."""
SHORT_S, LONG_S = 2.0, 15.0
"""Time constants of these averages, which are exponentially weighted."""
LEAST_AGE_S = 1.0
"""Most processes of a machine that builds or tests live shorter than that."""
STACKS_AFTER_S = 0.5
"""Stacks of a process are taken once it has been chosen for this long: for the first of them its
code has to be read, which costs some 50 ms."""
STACKS_A_SECOND = 1.0
STACKS_AT_ONCE = 16.0
"""A token bucket: by how many processes a second, and at once, those with stacks may grow."""
NAMES_NS = 500_000_000
"""Stacks have no names for this long after the first one."""
MOST = 256
"""Processes that are chosen at once: parties take turns, and of each those with the largest average
come first."""
KNOWN = 4_096
"""Processes whose averages are kept, those that used a CPU last."""
BUSY_CPUS = 1e3
"""No process uses more: a larger figure is no CPU time."""


@dataclass(slots=True)
class _Use:
    short: float = 0.0
    long: float = 0.0
    """CPUs, on average over `SHORT_S` and `LONG_S`."""
    seen_ns: int = 0
    """When it last used a CPU."""
    since_ns: int = 0
    """When it was chosen."""
    stacks_ns: int = 0
    """Since when stacks are taken; 0: they are not."""


class Selection:
    """The processes of one node that are looked at closely."""

    def __init__(self, party_of: Callable[[int], int] = lambda _: 0) -> None:
        """`party_of`: whose a process is, of those who must not use up others' part."""
        self._party_of = party_of
        self._uses: dict[int, _Use] = {}
        self._marked: dict[int, _Use] = {}
        """Processes that used enough, until their long average is below `ENDS`."""
        self.pids: Mapping[int, bool] = {}
        """Chosen now; True: with stacks."""
        self._stacks = STACKS_AT_ONCE
        self.left_out = 0
        """Times that a process used enough and `MOST` others came before it."""

    def take(
        self,
        moment: Moment,
        starts: Mapping[int, int],
        never: Container[int],
        boot_offset_ns: int = 0,
    ) -> None:
        """Take in a tick. `starts`: start times of processes by CLOCK_BOOTTIME, which is
        `boot_offset_ns` ahead of the moment's clock; `never`: processes that are no victims."""
        now_ns = moment.end_ns + boot_offset_ns
        for pid, one in moment.processes.items():
            if not one.usage.cpu_ns:
                continue
            use = self._uses.pop(pid, None) or self._marked.get(pid)
            use = use or _Use(seen_ns=moment.start_ns)
            self._uses[pid] = use  # the last one in order
            if pid in self._marked:
                self._marked[pid] = use
            cpus = min(one.usage.cpu_ns / 1e9 / moment.seconds, BUSY_CPUS)
            passed_s = max(0.0, (moment.end_ns - use.seen_ns) / 1e9)
            # What it did not use since it was seen last counts, too.
            idle_s = max(0.0, passed_s - moment.seconds)
            short = _blend(use.short, 0.0, idle_s, SHORT_S)
            long = _blend(use.long, 0.0, idle_s, LONG_S)
            use.short = _blend(short, cpus, moment.seconds, SHORT_S)
            use.long = _blend(long, cpus, moment.seconds, LONG_S)
            use.seen_ns = moment.end_ns
            is_grown = now_ns - starts.get(pid, 0) >= LEAST_AGE_S * 1e9
            is_enough = use.short >= BEGINS and is_grown and pid not in self._marked
            if is_enough and pid not in never:  # the costliest condition last
                self._marked[pid] = use
                use.since_ns = moment.end_ns
                use.long = max(use.long, use.short)
        self._stacks = min(STACKS_AT_ONCE, self._stacks + moment.seconds * STACKS_A_SECOND)
        self._choose(moment.end_ns)
        while len(self._uses) > KNOWN:
            del self._uses[next(iter(self._uses))]

    def _choose(self, now_ns: int) -> None:
        """Choose among the marked processes, and which of them have stacks."""
        found: list[tuple[float, int]] = []
        for pid, use in list(self._marked.items()):
            now = _blend(use.long, 0.0, max(0.0, (now_ns - use.seen_ns) / 1e9), LONG_S)
            if now < ENDS:
                del self._marked[pid]
            else:
                found.append((now, pid))
        pids = [pid for _, pid in found]
        if len(found) > MOST:
            found.sort(reverse=True)
            self.left_out += len(found) - MOST
            pids = self._in_turn(pid for _, pid in found)[:MOST]
        self._give_stacks(pids, now_ns)
        self.pids = {pid: self._marked[pid].stacks_ns > 0 for pid in pids}

    def _in_turn(self, pids: Iterable[int]) -> list[int]:
        """The first process of each party, the second of each, and so on."""
        turns: Counter[int] = Counter()
        found = []
        for pid in pids:
            party = self._party_of(pid)
            found.append((turns[party], pid))
            turns[party] += 1
        return [pid for _, pid in sorted(found, key=lambda it: it[0])]

    def _give_stacks(self, pids: Iterable[int], now_ns: int) -> None:
        """Take stacks of more of the chosen: of those next that were chosen first, parties in turn,
        where those count that have stacks already."""
        by_time = sorted(
            pids, key=lambda it: (not self._marked[it].stacks_ns, self._marked[it].since_ns)
        )
        waiting = [
            pid for pid in by_time
            if not self._marked[pid].stacks_ns
            and now_ns - self._marked[pid].since_ns >= STACKS_AFTER_S * 1e9
        ]  # fmt: skip
        if self._stacks < len(waiting):
            is_waiting = frozenset(waiting)
            waiting = [pid for pid in self._in_turn(by_time) if pid in is_waiting]
        for pid in waiting:
            if self._stacks < 1:
                break
            self._marked[pid].stacks_ns = now_ns
            self._stacks -= 1

    def take_stacks(self, pid: int, now_ns: int) -> None:
        """A chosen process is suspected: take its stacks from the next tick on."""
        if (use := self._marked.get(pid)) is not None and not use.stacks_ns:
            use.stacks_ns = now_ns

    def drop(self, pid: int) -> None:
        """The process has ended."""
        self._marked.pop(pid, None)
        self._uses.pop(pid, None)

    def since_ns(self, pid: int) -> int:
        """When a process was chosen: its waits are known from then on; 0: it is not."""
        use = self._marked.get(pid)
        return use.since_ns if use is not None else 0

    def stacks_since_ns(self, pid: int) -> int:
        """From when on stacks of a process are usable; 0: not yet."""
        use = self._marked.get(pid)
        return use.stacks_ns + NAMES_NS if use is not None and use.stacks_ns else 0


def _blend(before: float, now: float, seconds: float, span_s: float) -> float:
    """Exponentially weighted mean with the time constant `span_s`."""
    return now + (before - now) * math.exp(-seconds / span_s)
