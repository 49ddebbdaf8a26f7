# SPDX-License-Identifier: Apache-2.0
"""A window with figures that several causes need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from sonde.diagnose import device_calls, offenders
from sonde.diagnose.incident import Offender
from sonde.diagnose.lost_time import Lost, lost_time
from sonde.diagnose.moments import DiskUse, Facts, Moment, ProcessMoment, Who, Window
from sonde.diagnose.thread_time import Part, family

LEAST_HANDED = 0.05
"""Seconds more in each second that it waited for a process of its family."""
OWN = (Part.SLEEP, Part.DISK, Part.SYNC, Part.SERVED, Part.LOCK, Part.ASKED, Part.OTHER)
"""Waits of a worker neither for a CPU nor until its results are taken."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a process did, as a rate: `cpu` in CPUs, the rest per second."""

    cpu: float = 0.0
    disk_bytes: float = 0.0
    disk_s: float = 0.0
    disk_requests: float = 0.0
    major_faults: float = 0.0
    reclaim_s: float = 0.0


class Case:
    """One slowdown to be explained.

    `own`: pids of the victim and its descendants; `first`, `last`: the first and the last reading
    of facts.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.victim = window.victim
        self.own = family(window)
        self.lost: Lost = lost_time(window)
        self.first = window.facts[0] if window.facts else Facts()
        self.last = window.facts[-1] if window.facts else Facts()
        self.handed = self.lost.parts.get(Part.HANDED, 0.0)
        """Seconds more in each second that it waited for a process of its family."""
        self._take_over()

    def _take_over(self) -> None:
        """Waits for a process of the family that lacked a CPU itself are part of the time without a
        CPU, as far as that one did not work or wait longer by itself."""
        handed = self.handed
        if handed < LEAST_HANDED or self.handed_by is None:
            return
        its = self.of(self.handed_by).parts
        lacked = min(handed, its.get(Part.READY, 0.0))
        working = max(0.0, self.grew("cpu", self.handed_by)) + sum(its.get(it, 0.0) for it in OWN)
        if lacked > working:
            moved = handed * lacked / (lacked + working)
            self.lost.parts[Part.HANDED] = handed - moved
            self.lost.parts[Part.READY] = self.lost.parts.get(Part.READY, 0.0) + moved

    @cached_property
    def handed_by(self) -> int | None:
        """The process of the family that ended most of the waits for its results."""
        wakers = (pid for pid, _, _ in self.wakers(Part.HANDED))
        return next((pid for pid in wakers if pid in self.own and pid != self.victim), None)

    @cached_property
    def first_asked(self) -> bool:
        """Whether all peers to which it sends something are new: then their answers are not later
        than before."""
        before = segments(self.window.before, self.victim)
        now = segments(self.window.after, self.victim).keys() & self.last.peers.keys()
        return bool(now) and not any(before.get(peer) for peer in self.last.peers)

    def of(self, pid: int) -> Lost:
        """The lost time of another process, in the same moments."""
        return lost_time(msgspec.structs.replace(self.window, victim=pid))

    @property
    def between_s(self) -> float:
        """Seconds between the first and the last reading of facts."""
        return max(1e-3, (self.last.time_ns - self.first.time_ns) / 1e9)

    @cached_property
    def calls(self) -> tuple[dict[device_calls.Function, device_calls.Rate], ...]:
        """Rates of the victim's calls of devices, before and after."""
        window = self.window
        return tuple(
            device_calls.rates(side, self.victim) for side in (window.before, window.after)
        )

    @cached_property
    def before(self) -> dict[int, Rates]:
        """Rates in the moments before, by pid."""
        return _rates(self.window.before)

    @cached_property
    def after(self) -> dict[int, Rates]:
        """Rates in the moments after, by pid."""
        return _rates(self.window.after)

    def grew(self, field: str, pid: int) -> float:
        """By how much a rate of a process (a field of `Rates`) rose."""
        now = getattr(self.after.get(pid, Rates()), field)
        was = getattr(self.before.get(pid, Rates()), field)
        return float(now - was)

    def who(self, pid: int) -> Who:
        """Who a process is, as far as it is known."""
        return self.window.who.get(pid) or Who(pid, f"pid {pid}")

    @cached_property
    def cpu_users(self) -> list[offenders.User]:
        """Others who use more CPUs, as of `offenders.users`: several causes compare with them."""
        before = {pid: rates.cpu for pid, rates in self.before.items()}
        after = {pid: rates.cpu for pid, rates in self.after.items()}
        return self.users(before, after)

    def users(
        self, before: Mapping[int, float], after: Mapping[int, float]
    ) -> list[offenders.User]:
        """Others who use more of something, as of `offenders.users`; `before`, `after`: what each
        process used, by pid."""
        more = offenders.rises(before, after, self.after)
        return offenders.users(self.window, self.own, more)

    def others(self) -> Iterable[int]:
        """Pids that did something afterwards, not of the victim's family, and no kernel threads."""
        for pid in self.after:
            who = self.window.who.get(pid)
            if pid not in self.own and not (who is not None and who.is_kernel):
                yield pid

    def name(self, pid: int) -> str:
        """The name of a process."""
        return self.who(pid).name

    def does(self, user: offenders.User, did: str) -> str:
        """What a process, or many together, did: 'tar (77) used 1.20 CPUs more'."""
        one = f"{self.name(user.pid)} ({user.pid})"
        if user.is_alone:
            return f"{one} {did}"
        whose = f"of {user.among}, {one} among them," if user.among else f"that {one} started"
        return f"{user.processes} processes {whose} {did} together"

    def offender_of(
        self, user: offenders.User, did: str, share: float, since: str = " since then"
    ) -> Offender:
        """A process as offender, with what it did; or who started many, with what they did."""
        evidence = f"{did}{since}" if user.is_alone else self.does(user, did)
        return self.offender(user.pid, evidence, share)

    def offender(self, pid: int, evidence: str, share: float) -> Offender:
        """A process as offender."""
        who = self.who(pid)
        return Offender(pid, who.name, who.owner or who.cgroup, evidence, min(1.0, share))

    def disk(self, moments: Iterable[Moment], pids: Iterable[int]) -> dict[str, DiskUse]:
        """Requests of these processes, summed by device."""
        found: dict[str, DiskUse] = {}
        wanted = set(pids)
        for moment in moments:
            for pid in wanted & moment.processes.keys():
                for use in moment.processes[pid].disk:
                    one = found.setdefault(use.device, DiskUse(use.device, ""))
                    one.count += use.count
                    one.ns += use.ns
                    one.queue_ns += use.queue_ns
                    one.bytes += use.bytes
        return found

    def wakers(self, *parts: Part) -> list[tuple[int, int, float]]:
        """(pid, tid, seconds a second more) of threads that ended such waits, most first."""
        more: dict[tuple[int, int], float] = defaultdict(float)
        for part in parts:
            for who, seconds in self.lost.after.wakers.get(part, {}).items():
                more[who] += seconds
            for who, seconds in self.lost.before.wakers.get(part, {}).items():
                more[who] -= seconds
        return sorted(
            ((pid, tid, seconds) for (pid, tid), seconds in more.items() if seconds > 0),
            key=lambda it: -it[2],
        )

    def places(self, reason: str | None, tids: Iterable[int] = ()) -> list[tuple[str, float]]:
        """Places of the victim in the time after, with their share, most first. `reason`: of a
        wait, '' on a CPU, None any."""
        sums: dict[str, float] = defaultdict(float)
        chosen = set(tids)
        for moment in self.window.after:
            one = moment.processes.get(self.victim)
            for place in one.places if one is not None else ():
                if reason is not None and place.reason != reason:
                    continue
                if (not chosen or place.tid in chosen) and place.place < len(self.window.places):
                    sums[self.window.places[place.place].text] += place.ns
        whole = sum(sums.values())
        ranked = sorted(sums.items(), key=lambda it: -it[1])
        return [(text, ns / whole) for text, ns in ranked if text and whole]


def segments(moments: Iterable[Moment], pid: int) -> dict[str, float]:
    """TCP segments of a process by peer."""
    found: dict[str, float] = defaultdict(float)
    for moment in moments:
        one = moment.processes.get(pid)
        for flow in one.flows if one is not None else ():
            found[flow.peer] += flow.segments
    return found


def _rates(moments: list[Moment]) -> dict[int, Rates]:
    of: dict[int, list[ProcessMoment]] = defaultdict(list)
    for moment in moments:
        for pid, one in moment.processes.items():
            of[pid].append(one)
    seconds = max(1e-3, sum(moment.seconds for moment in moments))

    def each(values: Iterable[float]) -> float:
        return sum(values) / seconds

    return {
        pid: Rates(
            cpu=each(it.usage.cpu_ns / 1e9 for it in its),
            disk_bytes=each(use.bytes for it in its for use in it.disk),
            disk_s=each(use.ns / 1e9 for it in its for use in it.disk),
            disk_requests=each(use.count for it in its for use in it.disk),
            major_faults=each(it.usage.major_faults for it in its),
            reclaim_s=each(it.usage.reclaim_ns / 1e9 for it in its),
        )
        for pid, its in of.items()
    }
