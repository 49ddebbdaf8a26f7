# SPDX-License-Identifier: Apache-2.0
"""Watches the jobs of this node. Where one makes no progress, its ranks are looked at twice (their
states and stacks), and what that shows is explained. A separate thread does it: ticks are not late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from sonde import procfs
from sonde.agent.job_finder import (
    BY_START,
    MAX_RANKS,
    CutLooks,
    Job,
    JobFinder,
    Rank,
    listening,
)
from sonde.agent.rank_dump import RankStacks
from sonde.agent.rank_stacks import RankStackReader
from sonde.agent.ras_client import ask
from sonde.agent.stall_reports import StallReports
from sonde.agent.victim_facts import FactReader
from sonde.diagnose.causes.stalled import victim
from sonde.diagnose.incident import Incident, Verdict
from sonde.diagnose.job import JobFacts, JobLook, RankLook, RankThread, RasReport
from sonde.diagnose.moments import Moment, Who, Window
from sonde.diagnose.pace import JobPace
from sonde.procfs.cgroup_paths import place_of

FIND_S: Final = 4.0
"""Between searches for jobs."""
BETWEEN_S: Final = 1.0
"""Between two looks at a job."""
STACKS_S: Final = 8.0
"""For all stacks of one look, and for the answer of NCCL RAS."""
VOLUNTARY_SWITCHES_A_SECOND: Final = 10
"""A process that gives up its CPU this often may be a rank, though it uses little CPU."""
AGAIN_S: Final = 2.0
"""Until a quiet job is looked at again; doubled each time."""
MAX_AGAIN_S: Final = 30.0
MAX_STACKS: Final = 16
"""Ranks of a job whose stacks are taken: those with a symptom first."""
MAX_JOBS: Final = 16
"""Jobs that are watched; more are left out and counted."""
PARTS: Final = 4
"""A party (`procfs.party_of`) may have MAX_JOBS / PARTS of them."""
ROOT: Final = 0
"""The party of the machine's root, which may have all of them."""
MAX_CANDIDATES: Final = 8_192
"""Processes that are noted between two searches; more are left out and counted."""
NOT_WALKED: Final = f"of a job, stacks of {MAX_STACKS} ranks at most are taken"
NOTICED_BY: Final = "progress of the job"
"""`Incident.noticed_by` of a stall."""


@dataclass(slots=True)
class _Watched:
    job: Job
    pace: JobPace
    next_look_s: float = 0.0
    """Not before (CLOCK_MONOTONIC)."""
    again_s: float = AGAIN_S
    """Until the look after that."""
    is_reported: bool = False
    """The present pause was reported as a fault."""
    reported_change: bool = False
    """It was reported as a change that is no fault."""
    ended: set[int] = field(default_factory=set)
    """Pids of ranks that have ended."""
    guests: set[int] = field(default_factory=set)
    """Pids of ranks of other owners that joined it later."""
    is_warm: bool = False
    """The unwind tables of its program were made once."""
    looked: int = 0
    """Number of the last look at it, of all looks at jobs; 0: none yet."""

    def join(self, more: Sequence[Rank]) -> None:
        """Take in ranks that another owner has connected by shared memory. The job's numbers and
        its pace stay: who comes and goes makes it no new one."""
        room = max(0, MAX_RANKS - len(self.job.ranks))
        taken = {rank.number for rank in self.job.ranks}
        ranks = list(self.job.ranks)
        for rank in more[:room]:
            is_free = rank.number not in taken and self.job.numbered_by != BY_START
            number = rank.number if is_free else max(taken) + 1
            taken.add(number)
            ranks.append(replace(rank, number=number))
        ranks.sort(key=lambda it: it.number)
        self.job = replace(self.job, ranks=tuple(ranks))
        its = {rank.pid for rank in more[:room]}
        self.guests |= its
        self.pace.admit(its)

    def note_ended(self, pid: int) -> None:
        """A rank has ended; one that joined later is no rank any more."""
        if pid not in self.guests:
            self.ended.add(pid)
            return
        self.guests.discard(pid)
        left = tuple(rank for rank in self.job.ranks if rank.pid != pid)
        self.job = replace(self.job, ranks=left)

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have that it began with."""
        return len(self.ended) + len(self.guests) >= len(self.job.ranks)

    @property
    def owners(self) -> set[str]:
        """Whose the ranks are that it began with."""
        return {rank.owner for rank in self.job.ranks if rank.pid not in self.guests}


class JobWatch:
    """Watches the jobs of one node."""

    def __init__(
        self,
        reports: StallReports,
        explain: Callable[[Window, Callable[[Verdict | None], None]], None],
        who_of: Callable[[int], Who],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`reports` takes the incidents; `explain` has a window explained, and calls back from
        another thread; `who_of`: a process by pid, from any thread; `failed` is called with the
        error of a look."""
        self._reports = reports
        self._explain = explain
        self._who_of = who_of
        self._failed = failed
        self._finder = JobFinder(self._namespace_of)
        self._stacks = RankStackReader()
        self._facts = FactReader()
        self._lock = threading.Lock()
        self._jobs: list[_Watched] = []
        self._candidates: set[int] = set()
        """Processes that may be ranks, noted since the last search."""
        self._due = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="sonde-jobs", daemon=True)
        self._asking = ThreadPoolExecutor(1, "sonde-ras")
        self._looks = 0
        self._party_looked: dict[int, int] = {}
        """By party: the number of the last look at a job of it."""
        self.looks_failed = 0
        self.jobs_left_out = 0
        self._candidates_left_out = 0
        self._left_out: set[Rank] = set()
        """First ranks of jobs that are left out now: each job counts once."""

    def start(self) -> None:
        """Start the thread."""
        self._reports.start(self._note_failed)
        self._thread.start()

    def close(self) -> None:
        """End the thread, without waiting for a look that goes on."""
        self._ended = True
        self._due.set()
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._reports.close()

    @property
    def pids(self) -> set[int]:
        """The pid of the child that takes stacks; none where it does not run."""
        return self._stacks.pids

    @property
    def losses(self) -> dict[str, int]:
        """What was lost, by name."""
        failed = self.looks_failed + self._stacks.failed
        return {
            "diagnose.job_looks": failed,
            "diagnose.jobs": self.jobs_left_out,
            "diagnose.job_candidates": self._finder.left_out + self._candidates_left_out,
            "diagnose.waiting_ranks": self._reports.unreported,
            "diagnose.job_groups": self._facts.groups_left_out,
            "diagnose.job_connections": CutLooks.count,
        }

    def ranks(self) -> list[int]:
        """Pids of the ranks of known jobs."""
        with self._lock:
            return [rank.pid for one in self._jobs for rank in one.job.ranks if
                    rank.pid not in one.ended]  # fmt: skip

    def on_moment(self, moment: Moment, chosen: Iterable[int]) -> None:
        """Take in a tick; returns at once. `chosen`: the chosen processes, which may be ranks."""
        with self._lock:
            least = VOLUNTARY_SWITCHES_A_SECOND * moment.seconds
            busy = (pid for pid, it in moment.processes.items() if it.usage.voluntary >= least)
            for pid in chain(chosen, busy):
                if len(self._candidates) < MAX_CANDIDATES:
                    self._candidates.add(pid)
                else:
                    self._candidates_left_out += pid not in self._candidates
            for one in self._jobs:
                one.pace.add(moment, one.ended)
                if not one.pace.quiet_since_ns:
                    one.is_reported = one.reported_change = False
                    one.next_look_s, one.again_s = 0.0, AGAIN_S
                elif self._is_due(one):
                    self._due.set()
            quiet = [
                ([rank.pid for rank in one.job.ranks], one.pace.quiet_since_ns)
                for one in self._jobs if one.pace.quiet_since_ns
            ]  # fmt: skip
        self._reports.update(moment.end_ns, quiet)

    @staticmethod
    def _is_due(one: _Watched) -> bool:
        return one.pace.is_due and not one.is_reported and time.monotonic() >= one.next_look_s

    def _run(self) -> None:
        find_s = 0.0
        while not self._ended:
            self._due.wait(0.5 if self._jobs else FIND_S)
            self._due.clear()
            try:
                self._note_ended()
                # Only one at a time: `_next_due` gives each party its turn.
                if (one := self._next_due()) is not None:
                    self._look_into(one)
                if time.monotonic() >= find_s:
                    self._find()
                    find_s = time.monotonic() + FIND_S
            except Exception as error:  # the thread must go on
                self._due.clear()  # but not at once
                self._note_failed(error)
        self._stacks.close()

    def _note_failed(self, error: BaseException) -> None:
        self.looks_failed += 1
        self._failed(error)

    def _next_due(self) -> _Watched | None:
        """The job to look at now, of those that are due: parties take turns. Where there are more,
        the thread goes on with them without waiting."""
        with self._lock:
            due = [one for one in self._jobs if self._is_due(one)]
            parties = {one.job.party for one in self._jobs}
        seen = {party: self._party_looked.get(party, 0) for party in parties}
        if not due:
            return None
        one = min(due, key=lambda it: (seen[it.job.party], it.looked))
        self._looks += 1
        one.looked = seen[one.job.party] = self._looks
        self._party_looked = seen
        if len(due) > 1:
            self._due.set()
        return one

    def _find(self) -> None:
        with self._lock:
            known = {rank.pid for one in self._jobs for rank in one.job.ranks}
            candidates, self._candidates = self._candidates | known, set()
        jobs = self._finder.find(candidates, lambda pid: self._who_of(pid).owner, known)
        left_out: set[Rank] = set()
        with self._lock:
            for job in jobs:
                pids = {rank.pid for rank in job.ranks}
                its = [one for one in self._jobs if pids & {r.pid for r in one.job.ranks}]
                if any(pids <= {r.pid for r in one.job.ranks} for one in its):
                    continue  # known, or what is left of a known one that lost a rank
                if len(pids) < sum(len(one.job.ranks) - len(one.ended) for one in its):
                    continue  # not all of its ranks were examined this time
                if its and (joins := _joined(its, job)) is not None:
                    for one, more in joins:
                        one.join(more)
                    continue
                if not self._has_room(job, its):
                    left_out.add(job.ranks[0])
                    continue
                self._jobs = [one for one in self._jobs if one not in its]
                self._jobs.append(_Watched(job, JobPace(pids)))
            cold = next((one for one in self._jobs if not one.is_warm), None)
        self.jobs_left_out += len(left_out - self._left_out)
        self._left_out = left_out
        if cold is not None:
            # Has its unwind tables made now, while no look waits for them.
            cold.is_warm = True
            self._stacks.take([cold.job.ranks[0].pid], STACKS_S)

    def _namespace_of(self, pid: int, pod_uid: str) -> str:
        """See `rank_owners`. What is known of a pid may be of an earlier process in another pod."""
        who = self._who_of(pid)
        is_its = place_of(who.cgroup).pod_uid == pod_uid
        return who.owner.partition("/")[0] if is_its and "/" in who.owner else ""

    def _has_room(self, job: Job, replaced: Sequence[_Watched]) -> bool:
        """Whether `job` may be watched in place of `replaced`."""
        kept = [one for one in self._jobs if one not in replaced]
        its = sum(one.job.party == job.party for one in kept)
        return len(kept) < MAX_JOBS and (job.party == ROOT or its < MAX_JOBS // PARTS)

    def _note_ended(self) -> None:
        with self._lock:
            ranks = [
                (one, rank) for one in self._jobs for rank in one.job.ranks
                if rank.pid not in one.ended
            ]  # fmt: skip
        # Without the lock: ticks need it, and reading takes time.
        gone = [(one, rank.pid) for one, rank in ranks if _state(rank) == ""]
        with self._lock:
            for one, pid in gone:
                one.note_ended(pid)
            self._jobs = [one for one in self._jobs if not one.has_ended]

    def _look_into(self, one: _Watched) -> None:
        """Look at a quiet job twice, and have what that shows explained."""
        since_ns = one.pace.quiet_since_ns
        noticed_ns = time.monotonic_ns()
        pids = [rank.pid for rank in one.job.ranks if rank.pid not in one.ended]
        answer: Future[RasReport | None] = self._asking.submit(ask, pids)
        first = self._look(one, None)
        left_s = BETWEEN_S - (time.monotonic_ns() - noticed_ns) / 1e9
        time.sleep(min(BETWEEN_S, max(0.3, left_s)))
        if one.pace.quiet_since_ns != since_ns or not since_ns:
            return  # it went on
        last = self._look(one, answer)
        one.next_look_s = time.monotonic() + one.again_s
        one.again_s = min(MAX_AGAIN_S, 2 * one.again_s)
        job = one.job
        with self._lock:
            found, quiet_s = one.pace.symptoms, one.pace.quiet_s
            longest_s = one.pace.longest_pause_s
        if not quiet_s:
            return
        symptoms = [f"rank {r.number}: {found[r.pid]}" for r in job.ranks if r.pid in found]
        facts = JobFacts(
            job.name, quiet_s, longest_s, (first, last), job.numbered_by, tuple(symptoms[:4])
        )
        affected = victim(facts)
        if affected is None:
            return
        who = {rank.pid: self._who_of(rank.pid) for rank in job.ranks}
        window = Window(affected.pid, 0, [], [], who, [], [], [NOTICED_BY], facts)

        def answered(verdict: Verdict | None) -> None:
            if verdict is None or one.is_reported or one.pace.quiet_since_ns != since_ns:
                return
            if not verdict.is_fault and one.reported_change:
                return
            one.is_reported, one.reported_change = verdict.is_fault, not verdict.is_fault
            if verdict.is_fault:
                one.pace.note_stall()
            named = who[affected.pid]
            self._reports.stalled(
                Incident(
                    affected.pid, named.name or affected.name, named.owner or named.cgroup,
                    since_ns, noticed_ns, time.monotonic_ns(), tuple(window.noticed_by), verdict,
                ), window,
            )  # fmt: skip

        self._explain(window, answered)

    def _look(self, one: _Watched, answer: Future[RasReport | None] | None) -> JobLook:
        """All ranks of a job now. `answer`: that of NCCL RAS, which is waited for."""
        now_ns = time.monotonic_ns()
        states = {rank.pid: _state(rank) for rank in one.job.ranks}
        alive = [rank.pid for rank in one.job.ranks if states[rank.pid]]
        symptoms = one.pace.symptoms  # kept here: each tick may replace it
        alive.sort(key=lambda pid: pid not in symptoms)
        stacks = self._stacks.take(alive[:MAX_STACKS], STACKS_S)
        stacks |= {pid: RankStacks(pid, [], NOT_WALKED) for pid in alive[MAX_STACKS:]}
        listeners = listening(alive)
        ranks = tuple(self._rank(one, rank, states, stacks, listeners) for rank in one.job.ranks)
        report = None
        if answer is not None:
            try:
                report = answer.result(STACKS_S)
            except TimeoutError:
                report = RasReport(failed="it gave no answer in time")
        return JobLook(now_ns, ranks, report)

    def _rank(
        self, one: _Watched, rank: Rank, states: Mapping[int, str],
        stacks: Mapping[int, RankStacks], listeners: Container[int],
    ) -> RankLook:  # fmt: skip
        """One rank now. `listeners`: the ranks that take TCP connections."""
        pid, state = rank.pid, states[rank.pid]
        name = self._who_of(pid).name
        if not state:
            return RankLook(rank.number, pid, name, "")
        found = stacks.get(pid)
        failed = "its stack was not taken in time" if found is None else found.failed
        threads: Sequence[RankThread] = found.threads if found is not None else ()
        with self._lock:
            cpu, moved_bytes = one.pace.use_of(pid)
        is_frozen = self._facts.read(pid, asks_peers=False).is_frozen
        return RankLook(
            rank.number, pid, name, state, is_frozen, cpu, moved_bytes, pid in listeners,
            tuple(threads), failed,
        )  # fmt: skip


def _joined(known: Sequence[_Watched], job: Job) -> list[tuple[_Watched, Sequence[Rank]]] | None:
    """Which ranks join which of the known jobs that `job` has ranks of, where their owners are none
    of theirs; None where it takes the place of the known ones: it is of their owners."""
    owners = [one.owners for one in known]
    theirs = {rank.pid for one in known for rank in one.job.ranks}
    more = [rank for rank in job.ranks if rank.pid not in theirs]
    is_strange = not any(rank.owner in its for rank in more for its in owners)
    if len(known) == 1:
        return [(known[0], more)] if is_strange else None
    if all(its & owners[0] for its in owners):
        return None if not is_strange or not more else [(known[0], more)]
    return []  # jobs of different owners stay jobs by themselves


def _state(rank: Rank) -> str:
    """State of a rank's first thread, a letter as in /proc/PID/stat; '' where it has ended."""
    stat = procfs.read_stat(rank.pid)
    if stat is None or not stat.goes_on or stat.start_ns != rank.start_ns:
        return ""
    return stat.state
