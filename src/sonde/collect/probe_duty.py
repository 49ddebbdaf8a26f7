# SPDX-License-Identifier: Apache-2.0
"""Probes that are on for a part of the time, where a program calls their functions very often.

A probe costs the caller a trap at the entry and one at the return, whatever its program does then;
a decoding loop that replays a graph, copies a token and waits for it pays 4 to 5 % for that
(docs/design/device_calls.md). So the cheap sites together have a budget for each process. Beyond it
those that are hit most come off, and are on again for one interval between two drains in several.
What is counted then stands for the time since they came off, too: from there on totals and weights
of stacks are estimates, of calls that go on as they were, and an event reports it.

They come off and on together, in all files: where the function of a runtime library has no probe,
what it calls in the driver would count as a call of the program.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sonde.collect.mapped_files import FileKey
from sonde.collect.probe_budget import Site
from sonde.collect.probes import Probes

PART: Final = 0.5
"""Of a site's budget: what all cheap sites may cost a process."""
BURST_S: Final = 5.0
"""Seconds of budget that may be used at once: a program that starts is counted exactly for as
long, at least until rows are read for the first time."""
HOT: Final = 1 / 32
"""Sites with a smaller part of the hits stay on: rare calls are counted exactly."""
NESTED: Final = 0.5
"""Where more of a site's hits are no calls by themselves, it comes off with the others."""
ON_S: Final = 0.4
"""Probes stay on for at least this long."""
MIN_OFF_S: Final = 2.0
MAX_OFF_S: Final = 60.0

Place = tuple[FileKey, Site]
What = tuple[str, str, str, str, int]
"""Function, API, operation, direction, status."""
Who = tuple[int, int, int]
"""Process, its start, thread."""
Counted = Mapping[tuple[int, What, Who], Sequence[int]]
"""By the index of a site, what, and whose: calls, ns, bytes, calls within them."""

_OTHERS: Final = 0
"""Stands for a process that is not watched."""


@dataclass(slots=True)
class Cycle:
    """Sites that are on for a part of the time, all at the same time."""

    sites: dict[int, Place]
    """By their index, as they were on last."""
    on_s: float
    """How long they were on last; while they are, how long that is expected to be."""
    since_s: float
    """When they came on or off (monotonic)."""
    nested: set[tuple[FileKey, int]] = field(default_factory=set)
    """Places (file, offset) whose calls are mostly within those of others. They come on last and
    off first, as they would count for themselves in between."""
    is_on: bool = True
    is_reported: bool = False
    is_partial: bool = False
    """This turn is the interval in which they were found to be over the budget: the program may
    have begun to call within it. The next turn comes soon, and stands for what follows this one."""
    turn_ended: bool = False
    """They came off, and the rows of that turn were not looked at yet."""
    unseen_from_s: float = 0.0
    """Off since then without an account of the calls."""
    stood_for_s: float = 0.0
    """The time without probes that the calls of this turn stand for, too."""
    was_off_s: float = 0.0
    """The same for its stacks."""
    off_s: float = MIN_OFF_S
    cost_ns: Counter[int] = field(default_factory=Counter)
    """By process, since they came on."""
    seen: dict[tuple[What, Who], list[int]] = field(default_factory=dict)
    """Calls, ns and bytes since they came on."""

    def has(self, site: Site | None) -> bool:
        """Whether a site is one of them: its index may have been another's before."""
        return site is not None and self.sites.get(site.index, (None, None))[1] is site

    def add(self, counted: Counted) -> None:
        """What was counted while they were on."""
        for (index, what, who), (count, ns, size, _) in counted.items():
            if index in self.sites:
                sums = self.seen.setdefault((what, who), [0, 0, 0])
                for at, number in enumerate((count, ns, size)):
                    sums[at] += number


class DutyCycle:
    """Which probes are on now, and what the calls counted by them stand for."""

    def __init__(self, probes: Probes, budget: float) -> None:
        """`budget`: share of one core that a site may cost."""
        self._probes = probes
        self._share = PART * budget
        self._excess_ns = 0.0
        self._cycle: Cycle | None = None
        self._joining: dict[int, Place] = {}
        """Sites that come off with the others at the end of a turn, from then on."""
        self._charged_s = time.monotonic()

    def __bool__(self) -> bool:
        """Whether any probe is on in turns."""
        return self._cycle is not None

    def factors(self, index: int) -> tuple[float, float]:
        """How many calls one that was counted at a site stands for: in totals, and in stacks."""
        cycle = self._cycle
        if cycle is None or not cycle.has(self._probes.sites.get(index)):
            return 1.0, 1.0
        return 1 + cycle.stood_for_s / cycle.on_s, 1 + cycle.was_off_s / cycle.on_s

    def end_turn(self) -> None:
        """Before rows are read: take off what was on for its time."""
        cycle = self._cycle
        if cycle is None:
            return
        cycle.sites = self._still(cycle.sites)
        if not cycle.sites:
            self._forget()
        elif cycle.is_on and time.monotonic() - cycle.since_s >= ON_S:
            joining, self._joining = self._still(self._joining), {}
            if self._take_off(cycle, joining):
                cycle.turn_ended = True

    def unseen(self, ended_s: Mapping[int, float]) -> Iterator[tuple[What, Who, list[int]]]:
        """Calls, ns and bytes of the time without probes, as what was counted last would have gone
        on; that time is accounted for then. `ended_s`: when processes ended (monotonic)."""
        cycle = self._cycle
        if cycle is None or cycle.is_on:
            return
        now_s = time.monotonic()
        from_s, cycle.unseen_from_s = cycle.unseen_from_s, now_s
        for (what, who), sums in cycle.seen.items():
            times = (min(now_s, ended_s.get(who[0], now_s)) - from_s) / cycle.on_s
            if times > 0:
                yield what, who, [round(number * times) for number in sums]

    def charge(self, counted: Counted, hits: Mapping[int, int]) -> None:
        """After rows were read: what comes off now, and what comes on again. `hits`: by site, of
        all processes, since the last time."""
        before_s, self._charged_s = self._charged_s, time.monotonic()
        elapsed_s = max(self._charged_s - before_s, 1e-3)
        if self._cycle is not None:
            self._charge_turn(self._cycle, counted, hits)
        self._charge_exact(counted, hits, elapsed_s)

    def _charge_turn(self, cycle: Cycle, counted: Counted, hits: Mapping[int, int]) -> None:
        if cycle.is_on or cycle.turn_ended:
            cycle.add(counted)
            cycle.cost_ns.update(self._cost_ns(cycle.sites, counted, hits))
        if cycle.turn_ended:
            cycle.turn_ended = False
            share = max(cycle.cost_ns.values(), default=0) / 1e9 / cycle.on_s
            cycle.off_s = min(max(MIN_OFF_S, cycle.on_s * (share / self._share - 1)), MAX_OFF_S)
            if share <= self._share and self._put_on(cycle):
                self._forget()
            elif not cycle.is_reported:
                self._report(cycle, share)
            if cycle.is_partial:
                cycle.off_s, cycle.is_partial = MIN_OFF_S, False
        elif not cycle.is_on and self._charged_s - cycle.since_s >= cycle.off_s:
            self._put_on(cycle)

    def _charge_exact(self, counted: Counted, hits: Mapping[int, int], elapsed_s: float) -> None:
        """Sites that are always on: where they are over the budget, those that are hit most come
        off, for the first time or with the others when their turn ends."""
        cycle = self._cycle
        sites = {
            site.index: (key, site)
            for key, file in self._probes.files.items()
            for on_link in file.links.values()
            for site in on_link
            if site.is_cheap and hits.get(site.index) and not (cycle and cycle.has(site))
        }
        cost_ns = max(self._cost_ns(sites, counted, hits).values(), default=0)
        burst_ns = BURST_S * self._share * 1e9
        excess_ns = max(0.0, self._excess_ns + cost_ns - self._share * elapsed_s * 1e9)
        self._excess_ns = min(excess_ns, 2 * burst_ns)
        if excess_ns <= burst_ns:
            return
        hot, nested = self._hot(sites, counted, hits)
        if cycle is not None:
            self._joining = hot
            cycle.nested |= nested
            return
        self._excess_ns = 0.0
        self._cycle = self._begin(hot, nested, counted, hits, elapsed_s)
        self._set_places(self._cycle)

    def _begin(
        self,
        hot: dict[int, Place],
        nested: set[tuple[FileKey, int]],
        counted: Counted,
        hits: Mapping[int, int],
        elapsed_s: float,
    ) -> Cycle:
        """The interval that has just ended was their first turn; where it was short, or they do not
        come off now, the first one begins."""
        cycle = Cycle(hot, 1.0, self._charged_s - elapsed_s, nested)
        cycle.add(counted)
        cycle.cost_ns.update(self._cost_ns(hot, counted, hits))
        if elapsed_s >= ON_S and self._take_off(cycle, {}):
            # What was counted since rows were read comes with the next ones.
            cycle.turn_ended = cycle.is_partial = True
            return cycle
        return Cycle(hot, 1.0, self._charged_s, nested)

    @staticmethod
    def _hot(
        sites: Mapping[int, Place], counted: Counted, hits: Mapping[int, int]
    ) -> tuple[dict[int, Place], set[tuple[FileKey, int]]]:
        """Those that are hit most, and those that are mostly hit within other calls: these would
        count for themselves while the outer ones have no probes. Places of these by themselves,
        too."""
        calls: Counter[int] = Counter()
        for (index, *_), (count, *_) in counted.items():
            calls[index] += count
        enough = HOT * sum(hits[index] for index in sites)
        inner = {index for index in sites if calls[index] < (1 - NESTED) * hits[index]}
        hot = {at: place for at, place in sites.items() if hits[at] > enough or at in inner}
        return hot, {(key, site.offset) for at, (key, site) in hot.items() if at in inner}

    def _cost_ns(
        self,
        sites: Mapping[int, Place],
        counted: Counted,
        hits: Mapping[int, int],
    ) -> Counter[int]:
        """What calls at some sites cost, by process; empty where there were none. Hits that made no
        row are of the other processes that map one of the files, in equal parts."""
        cost_ns: Counter[int] = Counter()
        for (index, _, who), (count, _, _, nested) in counted.items():
            if index in sites:
                cost_ns[who[0]] += (count + nested) * sites[index][1].each_ns
        all_ns = sum(hits.get(index, 0) * site.each_ns for index, (_, site) in sites.items())
        if (left_ns := all_ns - cost_ns.total()) > 0:
            users = {len(self._probes.users_of(key)) for key, _ in sites.values()}
            cost_ns[_OTHERS] += left_ns // max(1, max(users) - len(cost_ns))
        return cost_ns

    def _still(self, sites: Mapping[int, Place]) -> dict[int, Place]:
        """Those of files that some process maps."""
        return {at: place for at, place in sites.items() if place[0] in self._probes.files}

    def _take_off(self, cycle: Cycle, joining: Mapping[int, Place]) -> bool:
        """End a turn; False where a process keeps the kernel waiting."""
        sites = {**cycle.sites, **joining}
        outer, inner = self._apart(cycle, sites)
        off_s = self._probes.take_off_together(inner, outer)
        if off_s is None:
            return False
        cycle.sites, cycle.on_s = sites, max(off_s - cycle.since_s, 1e-3)
        cycle.is_on, cycle.since_s, cycle.unseen_from_s = False, off_s, off_s
        self._set_places(cycle)
        return True

    def _put_on(self, cycle: Cycle) -> bool:
        """Begin a turn; False where a process keeps the kernel waiting."""
        done = self._probes.put_on(*self._apart(cycle, self._still(cycle.sites)))
        if done is None:
            return False
        places, now_s = done
        cycle.sites = {site.index: (key, site) for key, site in places}
        cycle.stood_for_s = now_s - cycle.unseen_from_s
        cycle.was_off_s = now_s - cycle.since_s
        cycle.is_on, cycle.since_s = True, now_s
        cycle.seen.clear()
        cycle.cost_ns.clear()
        return True

    @staticmethod
    def _apart(cycle: Cycle, sites: Mapping[int, Place]) -> tuple[list[Place], list[Place]]:
        """Outer ones, and nested ones."""
        outer: list[Place] = []
        inner: list[Place] = []
        for key, site in sites.values():
            (inner if (key, site.offset) in cycle.nested else outer).append((key, site))
        return outer, inner

    def _set_places(self, cycle: Cycle) -> None:
        self._probes.in_turns = {(key, site.offset) for key, site in cycle.sites.values()}

    def _forget(self) -> None:
        """Nothing is on in turns any more."""
        self._cycle, self._joining = None, {}
        self._probes.in_turns = set()

    def _report(self, cycle: Cycle, share: float) -> None:
        """`share`: of a core, which the process that pays most would pay."""
        cycle.is_reported = True
        names = " ".join(sorted({site.call.function for _, site in cycle.sites.values()}))
        calls = sum(count for count, *_ in cycle.seen.values()) / cycle.on_s
        on = cycle.on_s / (cycle.on_s + cycle.off_s)
        text = (
            f"{names}: {calls:,.0f} calls/s would cost a process {share:.1%} of a core;"
            f" counted {on:.0%} of the time from here on, totals are estimates"
        )
        self._probes.report("calls_sampled", calls, text)
