# SPDX-License-Identifier: Apache-2.0
"""Watches the rows of each tick for slowdowns of processes, and has them explained.

A slowdown is first a suspicion of the detector. It is looked at twice, and becomes an incident
where the explainer finds a fault. The moments of the last `KEPT_S` are kept, as an explanation
compares the time before a slowdown with the time after it began.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import msgspec

from sonde import procfs
from sonde.agent.explainer import Explainer
from sonde.agent.job_watch import JobWatch
from sonde.agent.look_shares import LookShares, Parties
from sonde.agent.moments import MomentMaker
from sonde.agent.stall_reports import StallReports
from sonde.agent.trends import Trends
from sonde.agent.victim_facts import FactReader
from sonde.collect.collector import Batch
from sonde.diagnose.detector import Detector, Suspicion
from sonde.diagnose.early import EarlyWarning
from sonde.diagnose.incident import Incident, Verdict
from sonde.diagnose.moments import Facts, Moment, Place, Who, Window
from sonde.diagnose.open_incidents import OpenIncidents
from sonde.diagnose.selection import Selection
from sonde.diagnose.series import Series
from sonde.model.code import KnownFrame
from sonde.model.process import Process

KEPT_S: Final = 20.0
MAX_MOMENTS: Final = 200
BEFORE_S: Final = 12.0
"""How much of the time before a slowdown is compared with."""
LOOKS_S: Final = (0.6, 1.4)
"""When a suspicion is looked at, after it was noticed: what passes by itself, or is no fault, shows
between the two."""
LOOKS_AT_DEVICES_S: Final = (0.6, 1.4, 2.8)
"""The same of a process that calls a device: what its driver knows comes once a second."""
MAX_WAKERS: Final = 8
"""Processes that ended the victim's waits and are checked for whether they serve files (FUSE)."""
MAX_BUSIEST: Final = 8
"""Processes that used most CPU time, which are named with their scripts."""
MAX_COMMAND: Final = 160
"""Characters of a name with its script: a process may give itself any."""
MAX_NAMES: Final = 8_192
"""Processes whose names, and whose CPU affinities, are remembered."""
MAX_ANCESTORS: Final = 16
"""Of a process in a window, whose names are in it, too."""
MIN_BEFORE_NS: Final = 1_500_000_000
"""Stacks are used where they were taken for at least this long before a slowdown."""
MIN_NAMED_NS: Final = 15_000_000
"""A stack is named once it stands for this much time: less than one sample of a CPU. Programs that
compute are seen at other addresses in each sample."""
CALM_CPUS: Final = 0.25
"""While the chosen processes use less together, and none of them a device, ticks may be further
apart: until a series of one of them rises."""
SUSPECTED: Final = 1000.0
"""What naming a stack of a suspected process is worth, times that of others."""
MAX_AFFINITIES: Final = 12
"""Of a process that are remembered, one each `AFFINITY_S`."""
AFFINITY_S: Final = 1.0


@dataclass(slots=True)
class _OpenSuspicion:
    suspicion: Suspicion
    since_ns: int = 0
    """Since when its process is chosen: its waits were not counted before."""
    stacks_ns: int = 0
    """Since when its stacks are taken; 0: they were not."""
    looks: int = 0
    """Looks at it so far."""
    facts: list[Facts] = field(default_factory=list)
    """Those of when it was noticed, and of the last look."""
    is_reported: bool = False
    calls_devices: bool | None = None
    """Not known yet: None."""


def _without_places(moment: Moment, pid: int) -> Moment:
    """The moment without what can be compared only where all moments of a process have stacks: of
    its on-CPU samples only the thread and the time are left."""
    if (one := moment.processes.get(pid)) is None or not one.places:
        return moment
    on_cpu = [Place(place.tid, "", 0, place.ns) for place in one.places if not place.reason]
    bare = msgspec.structs.replace(one, places=on_cpu)
    return msgspec.structs.replace(moment, processes={**moment.processes, pid: bare})


def _answering(moments: Iterable[Moment], victim: int) -> list[int]:
    """Processes that have connections with the same peers as the victim, as their rows name them:
    the one that answers it on this node has the most segments."""
    sums: dict[int, int] = {}
    peers = {
        flow.peer
        for moment in moments
        if (one := moment.processes.get(victim)) is not None
        for flow in one.flows
    }
    for moment in moments:
        for pid, one in moment.processes.items():
            sent = sum(flow.segments for flow in one.flows if flow.peer in peers)
            if sent and pid != victim:
                sums[pid] = sums.get(pid, 0) + sent
    return sorted(sums, key=lambda pid: -sums[pid])[:MAX_WAKERS]


def _busiest(moments: Sequence[Moment]) -> list[int]:
    """Processes that used most CPU time: one of them may be named as an offender."""
    used: Counter[int] = Counter()
    for moment in moments:
        for pid, one in moment.processes.items():
            used[pid] += one.usage.cpu_ns
    return [pid for pid, _ in used.most_common(MAX_BUSIEST)]


class _KernelThreads(Container[int]):
    """Contains the pids of kernel threads; looked up when it is asked for one."""

    def __init__(self, who_of: Callable[[int], Who]) -> None:
        self._who_of = who_of

    def __contains__(self, pid: object) -> bool:
        return isinstance(pid, int) and pid > 0 and self._who_of(pid).is_kernel


class _Never(Container[int]):
    """Contains processes that are no victims: Sonde's own, and kernel threads."""

    def __init__(self, mine: Container[int], kernel: Container[int]) -> None:
        self._mine, self._kernel = mine, kernel

    def __contains__(self, pid: object) -> bool:
        return pid in self._kernel or pid in self._mine


class Watcher:
    """An `Observer` of the agent that reports incidents."""

    def __init__(
        self,
        report: Callable[[Incident, Window], None],
        frames_of: Callable[[int], Sequence[KnownFrame]],
        process_of: Callable[[int, int], Process],
        running: Callable[[int], Process],
        hz: int,
        note: Callable[[Moment, dict[int, dict[Series, float]]], None] | None = None,
        failed: Callable[[BaseException], None] = lambda _: None,
        warn: Callable[[EarlyWarning], None] | None = None,
    ) -> None:
        """`frames_of`: the frames of a stack by its id; `process_of`: a process by pid and start,
        `running`: the one that has a pid now. `hz`: on-CPU samples a second. `report` is called for
        every incident, its parts, and every change that is no fault, from another thread; `note` at
        every tick with the values that are watched of each process; `failed` with the error of a
        look or an explanation; `warn` with what is about to go wrong."""
        self._note = note
        known = OpenIncidents()
        self._reports = StallReports(lambda it, rows: report(known.numbered(it), rows))
        self._process_of = process_of
        self._running = running
        self._maker = MomentMaker(frames_of, 1e9 / hz)
        self._kept: deque[Moment] = deque(maxlen=MAX_MOMENTS)
        self._who: dict[int, tuple[int, Who]] = {}
        """By pid: start, and who it is."""
        self._commands: dict[int, int] = {}
        """By pid: the start of a process that has its script in its name."""
        self._kernel = _KernelThreads(self._who_of)
        self._parties = Parties(self._maker.starts)
        self._selection = Selection(self._parties.of)
        self._facts = FactReader()
        self._open: list[_OpenSuspicion] = []
        self._mine = {os.getpid()}
        """The pids of Sonde's own processes."""
        self._never = _Never(self._mine, self._kernel)
        self._detector = Detector(self._mine)
        self._explainer = Explainer(failed)
        self._failed = failed
        self._warn = warn
        self._trends = Trends()
        self._jobs = JobWatch(self._reports, self._explain_stall, self._known_who, failed)
        self.looks_failed = 0
        self.left_out = 0
        """Suspicions for which there was no room."""
        self._processes_left_out = 0
        """Processes for which a moment had no room."""
        self._shares = LookShares(self._parties.of)
        self._affinity: dict[int, deque[tuple[int, int]]] = {}
        """By pid: (when, number of CPUs that it may use)."""
        self._affinity_ns = 0

    def start(self) -> None:
        """Start the explainer and the watch of jobs."""
        self._explainer.start()
        self._jobs.start()
        self._facts.cpu_busy()

    def close(self) -> None:
        """Explain no more; incidents that are kept back are reported."""
        self._explainer.close()  # first: its last answer may be kept back until the next line
        self._jobs.close()

    @property
    def losses(self) -> dict[str, int]:
        """What was lost, by name."""
        return {
            "diagnose.suspicions": self.left_out,
            "diagnose.looks": self.looks_failed,
            "diagnose.descriptors": self._facts.cut,
            "diagnose.connections": self._facts.connections_cut,
            "diagnose.groups": self._facts.groups_left_out,
            "diagnose.levels": self._trends.left_out,
            "diagnose.windows": self._explainer.left_out,
            "diagnose.places": self._maker.left_out,
            "diagnose.rows": self._maker.rows_left_out,
            "diagnose.processes": self._processes_left_out + self._selection.left_out,
            **self._jobs.losses,
        }

    def chosen(self) -> Mapping[int, bool]:
        """Processes that use a CPU enough to become slower, and ranks of jobs; True: with
        stacks."""
        return {**dict.fromkeys(self._jobs.ranks(), False), **self._selection.pids}

    def suspects(self) -> bool:
        """Whether a suspicion is open, which will be looked at soon."""
        return bool(self._open)

    def is_calm(self) -> bool:
        """Whether the chosen processes do little, none of them is a rank of a job or calls a
        device, and no series of any rose in the last tick."""
        if self._open or self._detector.is_alert or not self._kept or self._jobs.ranks():
            return False
        moment = self._kept[-1]
        its = [moment.processes[pid] for pid in self._selection.pids if pid in moment.processes]
        used_s = sum(one.usage.cpu_ns for one in its) / 1e9
        return used_s <= CALM_CPUS * moment.seconds and not any(one.calls for one in its)

    def worth(self, pid: int, stack_id: int) -> float:
        """Of a process that may be a victim: the time (ns) that the stack stands for so far, once
        that is `MIN_NAMED_NS`; of a suspected one, of every stack, times `SUSPECTED`; else 0."""
        if not self._detector.may_be_victim(pid):
            return 0.0
        ns = self._maker.unnamed_ns(stack_id)
        if any(one.suspicion.pid == pid for one in self._open):
            return SUSPECTED * ns
        return ns if ns >= MIN_NAMED_NS else 0.0

    def on_tick(self, since_ns: int, now_ns: int, batches: Sequence[Batch]) -> None:
        """Take in a tick: make its moment, find suspicions, and look at those that are due."""
        self._mine |= self._explainer.pids | self._jobs.pids
        chosen = self._selection.pids
        moment = self._maker.make(since_ns, now_ns, batches, self.chosen())
        self._processes_left_out += moment.left_out
        self._kept.append(moment)
        while len(self._kept) > 1 and now_ns - self._kept[0].start_ns > KEPT_S * 1e9:
            self._kept.popleft()
        self._shares.refill((now_ns - since_ns) / 1e9)
        self._suspect(
            self._detector.add(
                moment, self._maker.places, self._kernel, chosen, self._selection.stacks_since_ns
            ),
            now_ns,
        )
        self._choose(moment)
        self._jobs.on_moment(moment, self._selection.pids)
        if self._note is not None:
            self._note(moment, self._detector.latest(now_ns))
        self._look(now_ns)
        if self._warn is not None:
            for warning in self._trends.look(now_ns, self._selection.pids, self._parties.of):
                self._warn(warning)

    def _choose(self, moment: Moment) -> None:
        """Choose the processes whose waits and stacks are taken from now on."""
        before = self._selection.pids
        boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        self._selection.take(moment, self._maker.starts, self._never, boot_ns)
        is_due = moment.end_ns - self._affinity_ns >= AFFINITY_S * 1e9
        if is_due or before.keys() != self._selection.pids.keys():
            self._affinity_ns = moment.end_ns
            self._note_affinity(moment.end_ns)

    def _suspect(self, found: Iterable[Suspicion], now_ns: int) -> None:
        """Open suspicions; where there is no room for all, parties take turns, and of each those
        that lost most come first."""
        for suspicion in self._shares.in_turn(found):
            opened = [one.suspicion.pid for one in list(self._open)]
            if not self._shares.take(suspicion, opened):
                self.left_out += 1
                self._detector.forget_rest(suspicion.pid)  # so that it is suspected again
                continue
            one = _OpenSuspicion(
                suspicion,
                self._selection.since_ns(suspicion.pid),
                self._selection.stacks_since_ns(suspicion.pid),
            )
            self._selection.take_stacks(suspicion.pid, now_ns)
            try:
                facts = self._facts.read(suspicion.pid, asks_peers=False)
            except Exception as error:  # files of /proc may have anything in them
                self.looks_failed += 1
                self._failed(error)
                continue
            facts.cpus_before = self._cpus_before(suspicion)
            one.facts = [facts]
            self._open.append(one)

    def _who_of(self, pid: int) -> Who:
        start_ns = self._maker.starts.get(pid, 0)
        known = self._who.pop(pid, None)
        if known is None or known[0] != start_ns:
            process = self._process_of(pid, start_ns) if start_ns else self._running(pid)
            owner = process.owner
            who = Who(
                pid, process.exe or process.comm, process.ppid, owner.label, owner.cgroup,
                process.is_kernel,
            )  # fmt: skip
            known = (start_ns, who)
            if process.ppid in self._mine:
                self._mine.add(pid)
        self._who[pid] = known
        while len(self._who) > MAX_NAMES:
            del self._who[next(iter(self._who))]
        return known[1]

    def _all_who(self, pids: Iterable[int]) -> dict[int, Who]:
        """Who these processes are, and their ancestors: the tree between two of them, too."""
        found: dict[int, Who] = {}
        for pid in pids:
            depth = 0
            while pid > 0 and pid not in found and depth < MAX_ANCESTORS:
                found[pid] = who = self._who_of(pid)
                pid, depth = who.parent, depth + 1
        return found

    def _note_affinity(self, now_ns: int) -> None:
        """Remember how many CPUs each chosen process may use: after a change it cannot be read."""
        for pid in self._selection.pids:
            known = self._affinity.pop(pid, None) or deque(maxlen=MAX_AFFINITIES)
            self._affinity[pid] = known
            try:
                known.append((now_ns, len(os.sched_getaffinity(pid))))
            except ProcessLookupError:
                self._selection.drop(pid)
            except (OSError, OverflowError):
                continue
        while len(self._affinity) > MAX_NAMES:
            del self._affinity[next(iter(self._affinity))]

    def _cpus_before(self, suspicion: Suspicion) -> int:
        known = self._affinity.get(suspicion.pid, ())
        # The most of several: the last one may have been read after the change.
        return max((cpus for end_ns, cpus in known if end_ns <= suspicion.began_ns), default=0)

    def _look(self, now_ns: int) -> None:
        for one in list(self._open):
            if one.is_reported:
                continue  # its answer came meanwhile, from the explainer's thread
            looks_s = LOOKS_AT_DEVICES_S if self._calls_devices(one) else LOOKS_S
            if now_ns - one.suspicion.noticed_ns < looks_s[one.looks] * 1e9:
                continue
            one.looks += 1
            is_last = one.looks == len(looks_s)
            try:
                window = self._window(one)
                answer = self._answer(one, window)
                party = self._parties.of(one.suspicion.pid)
                self._explainer.ask(window, is_last_look=is_last, answer=answer, party=party)
            except Exception as error:  # the other suspicions are not affected
                self.looks_failed += 1
                self._failed(error)
            if is_last:
                self._drop(one)

    def _calls_devices(self, one: _OpenSuspicion) -> bool:
        """Whether a suspected process was seen to call a device; found out once."""
        if one.calls_devices is None:
            its = (moment.processes.get(one.suspicion.pid) for moment in self._kept)
            one.calls_devices = any(it is not None and bool(it.calls) for it in its)
        return one.calls_devices

    def _drop(self, one: _OpenSuspicion) -> None:
        with suppress(ValueError):  # the explainer's thread removed it
            self._open.remove(one)

    def _window(self, one: _OpenSuspicion) -> Window:
        """The moments before and after a suspicion, with all that an explanation needs."""
        began_ns, victim = one.suspicion.began_ns, one.suspicion.pid
        since_ns = max(one.since_ns, one.suspicion.since_ns, began_ns - int(BEFORE_S * 1e9))
        has_stacks = 0 < one.stacks_ns <= began_ns - MIN_BEFORE_NS
        if has_stacks:
            since_ns = max(since_ns, one.stacks_ns)
        kept = [moment for moment in self._kept if moment.start_ns >= since_ns]
        if not has_stacks:
            kept = [_without_places(moment, victim) for moment in kept]
        before = [moment for moment in kept if moment.end_ns <= began_ns]
        after = [moment for moment in kept if moment.start_ns >= began_ns]
        answering = _answering(after, victim)
        facts = self._facts.read(victim, self._wakers(victim, after), may_answer=answering)
        one.facts = [one.facts[0], facts]
        pids = {pid for moment in (*before, *after) for pid in moment.processes}
        wakers = self._all_wakers(victim, (*before, *after))
        holders = set(facts.holders.values()) - {0}
        pids |= wakers | holders
        self._find_commands({victim, *islice(wakers, MAX_WAKERS), *_busiest(after), *holders})
        return Window(
            victim=victim,
            cpus=os.cpu_count() or 1,
            before=before,
            after=after,
            who=self._all_who(pids),
            places=list(self._maker.places),
            facts=one.facts,
            noticed_by=[str(series) for series in one.suspicion.series],
        )

    def _find_commands(self, pids: Iterable[int]) -> None:
        """Have the names of these processes with their scripts: a file of each is read, once."""
        for pid in pids:
            known = self._who_of(pid)
            start_ns = self._who[pid][0]
            if known.is_kernel or self._commands.get(pid) == start_ns:
                continue
            self._commands[pid] = start_ns
            name = procfs.command_of(pid, known.name)[:MAX_COMMAND]
            self._who[pid] = (start_ns, msgspec.structs.replace(known, name=name))
        while len(self._commands) > MAX_NAMES:
            del self._commands[next(iter(self._commands))]

    @staticmethod
    def _wakers(victim: int, moments: Iterable[Moment]) -> list[int]:
        """Processes that ended its waits, those that ended the longest ones first."""
        sums: dict[int, int] = {}
        for moment in moments:
            one = moment.processes.get(victim)
            for wait in one.waits if one is not None else ():
                if wait.waker_pid not in (0, victim):
                    sums[wait.waker_pid] = sums.get(wait.waker_pid, 0) + wait.blocked_ns
        return sorted(sums, key=lambda pid: -sums[pid])[:MAX_WAKERS]

    @staticmethod
    def _all_wakers(victim: int, moments: Iterable[Moment]) -> set[int]:
        of_victim = [one for it in moments if (one := it.processes.get(victim)) is not None]
        return {wait.waker_pid for one in of_victim for wait in one.waits} - {0}

    def _answer(self, one: _OpenSuspicion, window: Window) -> Callable[[Verdict | None], None]:
        def answer(verdict: Verdict | None) -> None:
            if verdict is None or one.is_reported:
                return
            one.is_reported = True
            self._drop(one)
            who = window.who.get(window.victim) or Who(window.victim, f"pid {window.victim}")
            if not verdict.is_fault:
                self._detector.forget_rest(window.victim)
            incident = Incident(
                who.pid, who.name, who.owner or who.cgroup, one.suspicion.began_ns,
                one.suspicion.noticed_ns, time.monotonic_ns(), tuple(window.noticed_by), verdict,
                left_out=_left_out(window),
            )  # fmt: skip
            self._reports.offer(incident, window)

        return answer

    def _explain_stall(self, window: Window, answer: Callable[[Verdict | None], None]) -> None:
        self._explainer.ask(window, is_last_look=True, answer=answer)

    def _known_who(self, pid: int) -> Who:
        """Who a process is, from any thread: as known already, else by its comm alone."""
        known = self._who.get(pid)
        return known[1] if known is not None else Who(pid, procfs.read_comm(pid, pid) or "")


def _left_out(window: Window) -> int:
    """Waits and places of the victim for which its moments had no room."""
    moments = (*window.before, *window.after)
    return sum(
        it.left_out for one in moments if (it := one.processes.get(window.victim)) is not None
    )
