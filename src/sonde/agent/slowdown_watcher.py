# SPDX-License-Identifier: Apache-2.0
"""Watches the rows of each tick for slowdowns, and has them explained.

The last minute is kept, so that what went before is there when something happens.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from sonde import procfs
from sonde.agent.explainer import Explainer
from sonde.agent.job_watch import JobWatch
from sonde.agent.moments import MomentMaker
from sonde.agent.stall_reports import StallReports
from sonde.agent.trends import Trends
from sonde.agent.victim_facts import FactReader
from sonde.collect.collector import Batch
from sonde.diagnose.detector import LARGE, Detector, Suspicion
from sonde.diagnose.early import EarlyWarning
from sonde.diagnose.incident import Incident, Verdict
from sonde.diagnose.moments import Facts, Moment, Place, Who, Window
from sonde.diagnose.selection import Selection
from sonde.diagnose.series import Series
from sonde.model.code import KnownFrame
from sonde.model.process import Process

KEPT_S: Final = 20.0
KEPT_MOMENTS: Final = 200
BEFORE_S: Final = 12.0
"""Of what went before, as much is compared with."""
LOOKS_S: Final = (0.6, 1.4)
"""After a suspicion, when it is looked at: what passes, or is no fault, shows in between."""
OPEN: Final = 16
"""Suspicions at a time; more are left out and counted."""
EXPLAINED_PER_S: Final = 1.5
"""In the long run: what explaining costs is bounded, whatever happens on the node."""
BURST: Final = 16.0
RESERVE: Final = 4.0
"""Of these, for large slowdowns alone."""
WAKERS: Final = 8
"""Processes of which it is asked whether they serve files."""
NAMES: Final = 8_192
GENERATIONS: Final = 16
LEAST_BEFORE_NS: Final = 1_500_000_000
"""Stacks must exist for this long before a change, to show it."""
LEAST_NAMED_NS: Final = 45_000_000
"""Two samples: most stacks are seen once and never again."""
SUSPECTED: Final = 1000.0
"""Names for a suspicion come first."""
AFFINITIES: Final = 12
"""Of a process, one each `AFFINITY_S`."""
AFFINITY_S: Final = 1.0


@dataclass(slots=True)
class _Open:
    suspicion: Suspicion
    since_ns: int = 0
    """When it was chosen: nobody counted its waits before."""
    stacks_ns: int = 0
    """From when on its stacks were usable; 0: they were not."""
    looks: int = 0
    facts: list[Facts] = field(default_factory=list)
    is_reported: bool = False


def _without_places(moment: Moment, pid: int) -> Moment:
    """Without what cannot be compared where some moments of a process have stacks and others none:
    of samples the thread alone is left."""
    if (one := moment.processes.get(pid)) is None or not one.places:
        return moment
    on_cpu = [Place(place.tid, "", 0, place.ns) for place in one.places if not place.reason]
    bare = msgspec.structs.replace(one, places=on_cpu)
    return msgspec.structs.replace(moment, processes={**moment.processes, pid: bare})


class _KernelThreads(Container[int]):
    """Threads of the kernel, looked up where somebody asks."""

    def __init__(self, who_of: Callable[[int], Who]) -> None:
        self._who_of = who_of

    def __contains__(self, pid: object) -> bool:
        return isinstance(pid, int) and pid > 0 and self._who_of(pid).is_kernel


class _Never(Container[int]):
    """Processes that are no victims: our own, and those of the kernel."""

    def __init__(self, mine: Container[int], kernel: Container[int]) -> None:
        self._mine, self._kernel = mine, kernel

    def __contains__(self, pid: object) -> bool:
        return pid in self._kernel or pid in self._mine


class Watcher:
    """An `Observer` of the agent."""

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
        """`frames_of` names a stack, `process_of` a process by pid and start, `running` the one
        that has a pid now. `report` is called for every incident, and every change that is no
        fault, from another thread; `note` at every tick with what is watched of each process;
        `failed` with what went wrong in a look that came to nothing; `warn` with what is about to
        go wrong."""
        self._note = note
        self._reports = StallReports(report)
        self._process_of = process_of
        self._running = running
        self._maker = MomentMaker(frames_of, 1e9 / hz)
        self._kept: deque[Moment] = deque(maxlen=KEPT_MOMENTS)
        self._who: dict[int, tuple[int, Who]] = {}
        self._kernel = _KernelThreads(self._who_of)
        self._selection = Selection()
        self._facts = FactReader()
        self._open: list[_Open] = []
        self._mine = {os.getpid()}
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
        self._tokens = BURST
        self._affinity: dict[int, deque[tuple[int, int]]] = {}
        self._affinity_ns = 0

    def start(self) -> None:
        """Get the child ready."""
        self._explainer.start()
        self._jobs.start()
        self._facts.cpu_busy()

    def close(self) -> None:
        """Explain no more."""
        self._explainer.close()  # its last answer may be kept back, which the other one reports
        self._jobs.close()

    @property
    def losses(self) -> dict[str, int]:
        """What was lost, by name."""
        return {
            "diagnose.suspicions": self.left_out,
            "diagnose.looks": self.looks_failed,
            "diagnose.levels": self._trends.left_out,
            "diagnose.windows": self._explainer.left_out,
            "diagnose.places": self._maker.left_out,
            "diagnose.processes": self._processes_left_out + self._selection.left_out,
            **self._jobs.losses,
        }

    def chosen(self) -> Mapping[int, bool]:
        """Processes that use a CPU enough to become slower, and ranks of jobs; True: with
        stacks."""
        return {**dict.fromkeys(self._jobs.ranks(), False), **self._selection.pids}

    def suspects(self) -> bool:
        """Whether a look is due soon."""
        return bool(self._open)

    def worth(self, pid: int, stack_id: int) -> float:
        """Of what may be a victim, the time (ns) that a stack stands for so far, once that is some;
        of what is suspected, of all stacks, times a factor."""
        if not self._detector.may_be_victim(pid):
            return 0.0
        ns = self._maker.unnamed_ns(stack_id)
        if any(one.suspicion.pid == pid for one in self._open):
            return SUSPECTED * ns
        return ns if ns >= LEAST_NAMED_NS else 0.0

    def on_tick(self, since_ns: int, now_ns: int, batches: Sequence[Batch]) -> None:
        """Take in a tick."""
        self._mine |= self._explainer.pids | self._jobs.pids
        chosen = self._selection.pids
        moment = self._maker.make(since_ns, now_ns, batches, self.chosen())
        self._processes_left_out += moment.left_out
        self._kept.append(moment)
        while len(self._kept) > 1 and now_ns - self._kept[0].start_ns > KEPT_S * 1e9:
            self._kept.popleft()
        passed_s = (now_ns - since_ns) / 1e9
        self._tokens = min(BURST, self._tokens + passed_s * EXPLAINED_PER_S)
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
            for warning in self._trends.look(now_ns, self._selection.pids):
                self._warn(warning)

    def _choose(self, moment: Moment) -> None:
        before = self._selection.pids
        boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        self._selection.take(moment, self._maker.starts, self._never, boot_ns)
        is_due = moment.end_ns - self._affinity_ns >= AFFINITY_S * 1e9
        if is_due or before.keys() != self._selection.pids.keys():
            self._affinity_ns = moment.end_ns
            self._note_affinity(moment.end_ns)

    def _suspect(self, found: Iterable[Suspicion], now_ns: int) -> None:
        # Where there is no room for all, those that lost most come first.
        for suspicion in sorted(found, key=lambda it: -it.lost):
            kept = 0 if suspicion.lost >= LARGE else RESERVE
            if len(self._open) >= OPEN or self._tokens < 1 + kept:
                self.left_out += 1
                self._detector.forget_rest(suspicion.pid)  # as long as it lasts, maybe later
                continue
            self._tokens -= 1
            one = _Open(
                suspicion,
                self._selection.since_ns(suspicion.pid),
                self._selection.stacks_since_ns(suspicion.pid),
            )
            self._selection.take_stacks(suspicion.pid, now_ns)
            try:
                facts = self._facts.read(suspicion.pid, asks_peers=False)
            except Exception as error:  # its files have contents that nobody foresaw
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
        while len(self._who) > NAMES:
            del self._who[next(iter(self._who))]
        return known[1]

    def _all_who(self, pids: Iterable[int]) -> dict[int, Who]:
        """With those that started them, and so on: what is between two may be idle."""
        found: dict[int, Who] = {}
        for pid in pids:
            depth = 0
            while pid > 0 and pid not in found and depth < GENERATIONS:
                found[pid] = who = self._who_of(pid)
                pid, depth = who.parent, depth + 1
        return found

    def _note_affinity(self, now_ns: int) -> None:
        """How many CPUs those may use that may be victims: afterwards nobody knows."""
        for pid in self._selection.pids:
            known = self._affinity.pop(pid, None) or deque(maxlen=AFFINITIES)
            self._affinity[pid] = known
            try:
                known.append((now_ns, len(os.sched_getaffinity(pid))))
            except ProcessLookupError:
                self._selection.drop(pid)
            except (OSError, OverflowError):
                continue
        while len(self._affinity) > NAMES:
            del self._affinity[next(iter(self._affinity))]

    def _cpus_before(self, suspicion: Suspicion) -> int:
        known = self._affinity.get(suspicion.pid, ())
        # Of several: the last one was read after its tick, so maybe after the change.
        return max((cpus for end_ns, cpus in known if end_ns <= suspicion.began_ns), default=0)

    def _look(self, now_ns: int) -> None:
        for one in list(self._open):
            if one.is_reported:
                continue  # its answer came while this list was made
            if now_ns - one.suspicion.noticed_ns < LOOKS_S[one.looks] * 1e9:
                continue
            one.looks += 1
            is_last = one.looks == len(LOOKS_S)
            try:
                window = self._window(one)
                answer = self._answer(one, window)
                self._explainer.ask(window, is_last_look=is_last, answer=answer)
            except Exception as error:  # of what was looked at, others are not affected
                self.looks_failed += 1
                self._failed(error)
            if is_last:
                self._drop(one)

    def _drop(self, one: _Open) -> None:
        with suppress(ValueError):  # the other thread did
            self._open.remove(one)

    def _window(self, one: _Open) -> Window:
        began_ns, victim = one.suspicion.began_ns, one.suspicion.pid
        since_ns = max(one.since_ns, began_ns - int(BEFORE_S * 1e9))
        has_stacks = 0 < one.stacks_ns <= began_ns - LEAST_BEFORE_NS
        if has_stacks:
            since_ns = max(since_ns, one.stacks_ns)
        kept = [moment for moment in self._kept if moment.start_ns >= since_ns]
        if not has_stacks:
            kept = [_without_places(moment, victim) for moment in kept]
        before = [moment for moment in kept if moment.end_ns <= began_ns]
        after = [moment for moment in kept if moment.start_ns >= began_ns]
        one.facts = [one.facts[0], self._facts.read(victim, self._wakers(victim, after))]
        pids = {pid for moment in (*before, *after) for pid in moment.processes}
        pids |= self._all_wakers(victim, (*before, *after))
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

    @staticmethod
    def _wakers(victim: int, moments: Iterable[Moment]) -> list[int]:
        """Processes that ended its waits, those that ended the longest ones first."""
        sums: dict[int, int] = {}
        for moment in moments:
            one = moment.processes.get(victim)
            for wait in one.waits if one is not None else ():
                if wait.waker_pid not in (0, victim):
                    sums[wait.waker_pid] = sums.get(wait.waker_pid, 0) + wait.blocked_ns
        return sorted(sums, key=lambda pid: -sums[pid])[:WAKERS]

    @staticmethod
    def _all_wakers(victim: int, moments: Iterable[Moment]) -> set[int]:
        of_victim = [one for it in moments if (one := it.processes.get(victim)) is not None]
        return {wait.waker_pid for one in of_victim for wait in one.waits} - {0}

    def _answer(self, one: _Open, window: Window) -> Callable[[Verdict | None], None]:
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
            )  # fmt: skip
            self._reports.offer(incident, window)

        return answer

    def _explain_stall(self, window: Window, answer: Callable[[Verdict | None], None]) -> None:
        self._explainer.ask(window, is_last_look=True, answer=answer)

    def _known_who(self, pid: int) -> Who:
        """From any thread: what is known already, else by the kernel's name."""
        known = self._who.get(pid)
        return known[1] if known is not None else Who(pid, procfs.read_comm(pid, pid) or "")
