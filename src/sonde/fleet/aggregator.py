# SPDX-License-Identifier: Apache-2.0
"""Leader and helper without their sockets: admission, jobs, releases.

Refusals are an answer, not an error: `Refused` carries the HTTP status and a reason that is also
the name of a counter.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from sonde._native import signed_by
from sonde.fleet import seal
from sonde.fleet.budget import BudgetSpent, permit
from sonde.fleet.roster import Roster
from sonde.fleet.store import Batch, Store
from sonde.fleet.task import Task
from sonde.fleet.wire import (
    JOB_REPORTS,
    Item,
    Malformed,
    OtherCount,
    Reply,
    Report,
    aggregate_binding,
    decode_job,
    decode_replies,
    encode_job,
    encode_replies,
)
from sonde.fleet.work import Block, Keys, help_block, lead

CLOCK_SKEW_S = 300
_STATUS = {
    "malformed": 400,
    "misaligned": 400,
    "unknown task": 404,
    "unknown node": 403,
    "forged": 403,
    "tenant cap": 403,
    "early": 400,
    "late": 410,
    "expired": 410,
    "replayed": 409,
    "quota": 409,
    "oversized": 413,
    "too slow": 408,
    "still open": 425,
    "too few": 409,
    "mismatch": 409,
    "budget spent": 429,
}


class Refused(Exception):
    """A request that is not granted: `reason` is a key of the counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason

    @property
    def status(self) -> int:
        return _STATUS.get(self.reason, 400)


class HelperAway(Exception):
    """The helper cannot be reached now; the job stays and is tried again."""


Post = Callable[[str, bytes], bytes]
"""Sends a body to a path at the helper. Raises Refused or HelperAway."""


class Aggregator:
    """What both parties do alike."""

    role = b""

    def __init__(
        self,
        task: Task,
        keys: Keys,
        roster: Roster,
        state: Path,
        threads: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.task, self.keys, self.roster = task, keys, roster
        self.store = Store(state, task, roster.tenant_of)
        self.store.own_reports()
        self.threads = threads
        self.clock = clock
        self._releasing = threading.Lock()
        self.expire()

    def expire(self) -> int:
        """Forgets batches that nobody has collected in time (`Task.keep_s`), and answers that were
        given so long ago; how many reports were lost by it.
        """
        with self._releasing:
            return self.store.expire(self.task.expired_before(self.clock()))

    def noise(self) -> list[int]:
        """This party's noise of one release."""
        return self.task.mechanism.sample(self.task.buckets)

    def refuse_origin(self, node: bytes, time_s: int) -> str:
        """Reasons that lie in who reports, and for when; "" if there is none."""
        now, batch = self.clock(), self.task.batch_of(time_s)
        if node not in self.roster:
            return "unknown node"
        if time_s > now + CLOCK_SKEW_S:
            return "early"
        if batch < self.task.expired_before(now):
            return "late"
        if not self.roster.counts(node, batch, self.task.privacy.tenant_cap):
            return "tenant cap"
        return ""

    def check_release(self, start_s: int, duration_s: int) -> None:
        """Batches lie on one grid and none is released before it is closed.

        Two releases can so never overlap, and no difference of two can single anyone out.
        """
        if start_s % self.task.release_s or duration_s != self.task.release_s:
            raise Refused("misaligned", "releases lie on the task's grid and never overlap")
        if self.clock() < self.task.due_s(start_s):
            raise Refused("still open", "the batch is still open")
        if start_s < self.task.expired_before(self.clock()):
            raise Refused(
                "expired",
                f"what a batch summed is kept for {_days(self.task.keep_s)} after it is due",
            )

    def _publish(self, start_s: int, batch: Batch) -> bytes:
        """Noise, seal and book, once; what was published before is given again."""
        task = self.task
        try:
            entry = permit(task, self.store.ledger(), start_s)
        except BudgetSpent as error:
            raise Refused("budget spent", str(error)) from error
        share = task.aggregation().add_noise(batch.share, self.noise())
        binding = aggregate_binding(self.role, task.id, start_s, task.release_s)
        return self.store.release(start_s, seal.seal(share, task.collector_key, binding), entry)


class Leader(Aggregator):
    """Takes reports, drives the proof check, answers the collector."""

    role = seal.LEADER
    job_size = JOB_REPORTS

    def __init__(
        self,
        task: Task,
        keys: Keys,
        roster: Roster,
        state: Path,
        post: Post,
        threads: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(task, keys, roster, state, threads, clock)
        self._post = post
        self._busy: set[bytes] = set()
        self._taking = threading.Lock()

    def admit(self, bodies: Sequence[bytes | memoryview]) -> list[str]:
        """Takes a group of uploads; per upload "" or the reason. Durable when it returns."""
        reasons = [""] * len(bodies)
        good: list[tuple[int, Report]] = []
        for at, body in enumerate(bodies):
            if len(body) > self.task.max_report_bytes:
                reasons[at] = "oversized"
                continue
            try:
                report = Report.decode(body)
            except Malformed:
                reasons[at] = "malformed"
                continue
            reasons[at] = self._refuse(report)
            if not reasons[at]:
                good.append((at, report))
        self.store.note_refusals(Counter(reason for reason in reasons if reason))
        taken = self.store.admit([(report, bodies[at]) for at, report in good], self.clock())
        for (at, _), reason in zip(good, taken, strict=True):
            reasons[at] = reason
        return reasons

    def is_of_a_node(self, body: bytes | memoryview) -> bool:
        """Whether an enrolled node has made this report, whenever that was."""
        try:
            report = Report.decode(body)
        except Malformed:
            return False
        return (
            report.task == self.task.id
            and signed_by(report.node, report.signature, report.signed())
            and report.node in self.roster
        )

    def _refuse(self, report: Report) -> str:
        """Nothing is told about a node but to who has its key: who is enrolled is no one else's."""
        if report.task != self.task.id:
            return "unknown task"
        closed_s = self.task.batch_of(report.time_s) + self.task.release_s + self.task.grace_s
        if self.clock() > closed_s:
            return "late"
        if report.time_s > self.clock() + CLOCK_SKEW_S:
            return "early"
        if not signed_by(report.node, report.signature, report.signed()):
            return "forged"
        return self.refuse_origin(report.node, report.time_s)

    def step(self) -> int:
        """Takes one job through; how many reports it held. Raises HelperAway to be retried.

        Several threads may step: while one waits for the helper, the next works.
        """
        with self._taking:
            taken = self.store.take_job(os.urandom(16), self.job_size, self._busy)
            if taken is None:
                return 0
            self._busy.add(taken[0])
        try:
            self._do(*taken)
        finally:
            self._busy.discard(taken[0])
        return len(taken[1])

    def _do(self, job: bytes, reports: list[Report]) -> None:
        def exchange(items: list[Item]) -> list[Reply]:
            answer = self._post("jobs", encode_job(job, items))
            try:
                return decode_replies(answer, len(items))
            except OtherCount as error:
                # The helper answers a job as it did before, when this party's disk had all of it.
                raise Refused("mismatch", "an answer that does not fit the job") from error

        try:
            block = lead(self.task, self.keys, reports, exchange, self.threads)
        except Malformed as error:
            raise HelperAway("an answer that makes no sense") from error
        except Refused as refused:  # the job as a whole; it has counted for neither
            zero = self.task.aggregation().zero()
            block = Block(zero, refused={report.id: refused.reason for report in reports})
        block.refused = {id_: known_reason(reason) for id_, reason in block.refused.items()}
        self.store.finish_job(job, block, self.clock())

    def release(self, start_s: int, duration_s: int) -> tuple[bytes, bytes]:
        """Both parties' noised shares of a batch, sealed for the collector."""
        with self._releasing:
            self.check_release(start_s, duration_s)
            own, pending = self.store.released(start_s), self.store.pending(start_s)
            batch = self.store.batch(start_s)  # with all that was pending before
            if own is None:
                if pending:
                    raise Refused("still open", "reports of this batch are still being checked")
                if batch.count < self.task.min_batch:
                    raise Refused("too few", f"fewer than {self.task.min_batch} reports")
                try:  # before the helper spends anything
                    permit(self.task, self.store.ledger(), start_s)
                except BudgetSpent as error:
                    raise Refused("budget spent", str(error)) from error
            theirs = self._post("releases", release_request(start_s, duration_s, batch))
            if own is None:
                own = self._publish(start_s, batch)
            return own, theirs


class Helper(Aggregator):
    """Checks what the leader hands on; trusts it with nothing but availability."""

    role = seal.HELPER

    def __init__(
        self,
        task: Task,
        keys: Keys,
        roster: Roster,
        state: Path,
        threads: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(task, keys, roster, state, threads, clock)
        self._working = threading.Lock()

    def job(self, body: bytes) -> bytes:
        """Does a job, or repeats the answer it gave before."""
        job, items = decode_job(body)
        with self._working:
            done = self.store.reply_of(job)
            if done is not None:
                return done
            return self._do(job, items)

    def _do(self, job: bytes, items: list[Item]) -> bytes:
        batches = {self.task.batch_of(item.time_s) for item in items}
        if len(batches) != 1 or len({item.id for item in items}) != len(items):
            raise Refused("malformed", "a job holds different reports of one batch")
        refused = {item.id: self.refuse_origin(item.node, item.time_s) for item in items}
        refused = {id_: reason for id_, reason in refused.items() if reason}
        welcome = [item for item in items if item.id not in refused]
        claims = [(item.id, item.node, item.time_s) for item in welcome]
        claimed = zip(welcome, self.store.claim(claims), strict=True)
        refused |= {item.id: reason for item, reason in claimed if reason}
        fresh = [item for item in welcome if item.id not in refused]
        if not fresh:  # nothing is booked, so nothing is kept
            self.store.note_refusals(Counter(refused.values()))
            return encode_replies(Reply(None, refused[item.id]) for item in items)
        block, answers = help_block(self.task, self.keys, fresh, self.threads)
        by_id = {item.id: answer for item, answer in zip(fresh, answers, strict=True)}
        replies = [
            Reply(None, refused[item.id]) if item.id in refused else by_id[item.id]
            for item in items
        ]
        block = Block(block.aggregate, block.accepted, {**block.refused, **refused})
        reply = encode_replies(replies)
        taken = [(item.id, item.node, item.time_s) for item in fresh]
        self.store.record_job(job, batches.pop(), taken, block, reply)
        return reply

    def release(self, body: bytes) -> bytes:
        """The helper's noised share, if both counted the same reports and the budget allows."""
        start_s, duration_s, count, check = parse_release_request(body)
        with self._releasing, self._working:  # no job adds to what is being released
            self.check_release(start_s, duration_s)
            done = self.store.released(start_s)
            if done is not None:
                return done
            batch = self.store.batch(start_s)
            if batch.count < self.task.min_batch:
                raise Refused("too few", f"fewer than {self.task.min_batch} reports")
            if (batch.count, batch.checksum) != (count, check):
                raise Refused("mismatch", "leader and helper hold different reports")
            return self._publish(start_s, batch)


def _days(seconds: int) -> str:
    return f"{seconds / 86_400:.3g} days" if seconds >= 86_400 else f"{seconds} s"


def known_reason(reason: str) -> str:
    """The helper's reason, if it is one: what else it says fills no table of the leader's."""
    return reason if reason in _STATUS else "refused by the helper"


def release_request(start_s: int, duration_s: int, batch: Batch) -> bytes:
    numbers = (start_s, duration_s, batch.count)
    return b"".join(n.to_bytes(8, "big") for n in numbers) + batch.checksum


def parse_release_request(body: bytes) -> tuple[int, int, int, bytes]:
    if len(body) != 56:
        raise Refused("malformed")
    start_s, duration_s, count = (int.from_bytes(body[at : at + 8], "big") for at in (0, 8, 16))
    return start_s, duration_s, count, body[24:]
