# SPDX-License-Identifier: Apache-2.0
"""Leader and helper without their sockets: admission of reports, verification jobs, releases.

A refusal is a result, not a failure: `Refused` carries the HTTP status and a reason, which is also
the name of a counter.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from sonde._fleet import signed_by
from sonde.fleet import hpke
from sonde.fleet.budget import BudgetSpent, authorize_release
from sonde.fleet.refusals import FINAL_FOR_JOB, STATUS_OF_REASON
from sonde.fleet.roster import Roster
from sonde.fleet.store import Batch, Store
from sonde.fleet.task import Task
from sonde.fleet.verification import AggregatorKeys, BlockResult, verify_as_helper, verify_as_leader
from sonde.fleet.wire import (
    JOB_REPORTS,
    Item,
    Malformed,
    Reply,
    Report,
    WrongCount,
    aggregate_binding,
    decode_job,
    decode_replies,
    encode_job,
    encode_replies,
)

CLOCK_SKEW_S = 300
"""How far a node's clock may be ahead of the aggregator's; `clock.SKEW_S` is that of parties."""
_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is refused. `reason` names a counter; the exception's text is `detail`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason

    @property
    def status(self) -> int:
        return STATUS_OF_REASON.get(self.reason, 400)


class HelperUnavailable(Exception):
    """The helper does not answer, not validly, or with a refusal that is not final (`refusals`):
    the leader keeps the job and repeats it.
    """


Post = Callable[[str, bytes], bytes]
"""Sends a body to a path at the helper and returns the answer. Raises Refused or HelperUnavailable.
"""


class Aggregator:
    """The part that is the same for leader and helper: expiry, origin checks, releases.

    `state` is the path of the database, `threads` those of one verification, `clock` gives the
    time in seconds since 1970. Raises SinkError or UsageError (`Store.take_ownership`).
    """

    role = b""
    """`hpke.LEADER` or `hpke.HELPER`."""

    def __init__(
        self,
        task: Task,
        keys: AggregatorKeys,
        roster: Roster,
        state: Path,
        threads: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.task, self.keys, self.roster = task, keys, roster
        self.store = Store(state, task, roster.tenant_of)
        self.store.take_ownership()
        self.threads = threads
        self.clock = clock
        self._release_lock = threading.Lock()
        self.expire()

    def expire(self) -> int:
        """Deletes batches that were not collected in time (`Task.keep_s`) and the stored answers of
        releases that old. Returns the number of reports that were lost.
        """
        with self._release_lock:
            return self.store.expire(self.task.expired_before(self.clock()))

    def noise(self) -> list[int]:
        """One draw of this aggregator's noise: an integer per bucket."""
        return self.task.mechanism.sample(self.task.buckets)

    def origin_refusal(self, node: bytes, time_s: int) -> str:
        """Reason to refuse a report because of its node or its time; "" if there is none."""
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
        """Raises Refused unless the interval is one batch of the task's grid that is due and not
        expired.

        Two releases therefore never overlap, and the difference of two releases isolates nobody.
        """
        if start_s % self.task.release_s or duration_s != self.task.release_s:
            raise Refused("misaligned", "releases lie on the task's grid and never overlap")
        if self.clock() < self.task.due_s(start_s):
            raise Refused("still open", "the batch is still open")
        if start_s < self.task.expired_before(self.clock()):
            raise Refused(
                "expired",
                f"a batch is kept for {_days(self.task.keep_s)} after it is due",
            )

    def _publish(self, start_s: int, batch: Batch) -> bytes:
        """Adds noise, seals the share and records the cost, once. Repeats the answer of an earlier
        release.
        """
        task = self.task
        try:
            entry = authorize_release(task, self.store.ledger(), start_s)
        except BudgetSpent as error:
            raise Refused("budget spent", str(error)) from error
        share = task.aggregation().add_noise(batch.share, self.noise())
        binding = aggregate_binding(self.role, task.id, start_s, task.release_s)
        return self.store.release(start_s, hpke.seal(share, task.collector_key, binding), entry)


class Leader(Aggregator):
    """The aggregator that receives reports, starts verification jobs and answers the collector."""

    role = hpke.LEADER

    def __init__(
        self,
        task: Task,
        keys: AggregatorKeys,
        roster: Roster,
        state: Path,
        post: Post,
        threads: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(task, keys, roster, state, threads, clock)
        self._post = post
        self._busy: set[bytes] = set()  # ids of the jobs that some thread verifies now
        self._next_job_lock = threading.Lock()

    def admit(self, bodies: Sequence[bytes | memoryview]) -> list[str]:
        """Admits encoded reports. Returns for each "" or the reason of refusal. What is admitted
        is on disk when this returns. A stranger's report is refused without a write: only reports
        of enrolled nodes are written and synced.
        """
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
        if not good:
            return reasons
        refused = self.store.admit([(report, bodies[at]) for at, report in good], self.clock())
        for (at, _), reason in zip(good, refused, strict=True):
            reasons[at] = reason
        return reasons

    def is_from_enrolled_node(self, body: bytes | memoryview) -> bool:
        """Whether an enrolled node signed this report, whatever its time."""
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
        """Reason to refuse a report, or "". The signature is checked before the roster, so that
        only the holder of a key learns whether it is enrolled.
        """
        if report.task != self.task.id:
            return "unknown task"
        closed_s = self.task.batch_of(report.time_s) + self.task.release_s + self.task.grace_s
        if self.clock() > closed_s:
            return "late"
        if report.time_s > self.clock() + CLOCK_SKEW_S:
            return "early"
        if not signed_by(report.node, report.signature, report.signed()):
            return "forged"
        return self.origin_refusal(report.node, report.time_s)

    def process_job(self) -> int:
        """Verifies one job with the helper. Returns the number of its reports; 0 also if there is
        no job.

        Raises HelperUnavailable; the next call then repeats the job. Several threads may call this:
        while one waits for the helper, the next works.
        """
        with self._next_job_lock:
            found = self.store.next_job(os.urandom(16), JOB_REPORTS, self._busy)
            if found is None:
                return 0
            job, reports = found
            self._busy.add(job)
        try:
            self._verify_job(job, reports)
        finally:
            self._busy.discard(job)
        return len(reports)

    def _verify_job(self, job: bytes, reports: list[Report]) -> None:
        def exchange(items: list[Item]) -> list[Reply]:
            answer = self._post("jobs", encode_job(job, items))
            try:
                return decode_replies(answer, len(items))
            except WrongCount as error:
                # The helper repeats its stored answer to more reports: the disk here lost some
                # since.
                raise Refused("mismatch", "an answer that does not fit the job") from error

        try:
            block = verify_as_leader(self.task, self.keys, reports, exchange, self.threads)
        except Malformed as error:
            raise HelperUnavailable("a malformed answer") from error
        except Refused as refused:
            if refused.reason not in FINAL_FOR_JOB:
                raise HelperUnavailable(f"the job is refused: {refused.reason!r}") from refused
            # The whole job: this party counts none of its reports.
            _log.error(
                "%d reports are lost, their job is refused: %s (%r)",
                len(reports),
                refused.reason,
                str(refused),
            )
            zero = self.task.aggregation().zero()
            block = BlockResult(zero, refused={report.id: refused.reason for report in reports})
        block.refused = {id_: known_refusal_reason(reason) for id_, reason in block.refused.items()}
        self.store.finish_job(job, block, self.clock())

    def release(self, start_s: int, duration_s: int) -> tuple[bytes, bytes]:
        """Both aggregators' noised shares of a batch, sealed for the collector."""
        with self._release_lock:
            self.check_release(start_s, duration_s)
            own_share, pending = self.store.released(start_s), self.store.pending(start_s)
            batch = self.store.batch(start_s)  # after `pending`, so that it includes those reports
            if own_share is None:
                if pending:
                    raise Refused("still open", "reports of this batch are still being checked")
                if batch.count < self.task.min_batch:
                    raise Refused("too few", f"fewer than {self.task.min_batch} reports")
                try:  # before the helper records a cost
                    authorize_release(self.task, self.store.ledger(), start_s)
                except BudgetSpent as error:
                    raise Refused("budget spent", str(error)) from error
            helper_share = self._post("releases", release_request(start_s, duration_s, batch))
            if own_share is None:
                own_share = self._publish(start_s, batch)
            return own_share, helper_share


class Helper(Aggregator):
    """The aggregator that verifies the leader's jobs. It relies on the leader to send them, and
    checks all else itself: node, time, signature and proof.
    """

    role = hpke.HELPER

    def __init__(
        self,
        task: Task,
        keys: AggregatorKeys,
        roster: Roster,
        state: Path,
        threads: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(task, keys, roster, state, threads, clock)
        self._job_lock = threading.Lock()

    def process_job(self, body: bytes) -> bytes:
        """Verifies a job and returns the encoded replies; repeats the stored answer of a known
        job.
        """
        job, items = decode_job(body)
        with self._job_lock:
            done = self.store.reply_of(job)
            if done is not None:
                return done
            return self._verify_job(job, items)

    def _verify_job(self, job: bytes, items: list[Item]) -> bytes:
        batches = {self.task.batch_of(item.time_s) for item in items}
        if len(batches) != 1 or len({item.id for item in items}) != len(items):
            raise Refused("malformed", "a job must hold distinct reports of one batch")
        refused = {item.id: self.origin_refusal(item.node, item.time_s) for item in items}
        refused = {id_: reason for id_, reason in refused.items() if reason}
        admissible = [item for item in items if item.id not in refused]
        claims = [(item.id, item.node, item.time_s) for item in admissible]
        checked = zip(admissible, self.store.check_claims(claims), strict=True)
        refused |= {item.id: reason for item, reason in checked if reason}
        fresh = [item for item in admissible if item.id not in refused]
        if not fresh:  # nothing was recorded, so no answer is stored
            self.store.note_refusals(Counter(refused.values()))
            return encode_replies(Reply(None, refused[item.id]) for item in items)
        block, answers = verify_as_helper(self.task, self.keys, fresh, self.threads)
        by_id = {item.id: answer for item, answer in zip(fresh, answers, strict=True)}
        replies = [
            Reply(None, refused[item.id]) if item.id in refused else by_id[item.id]
            for item in items
        ]
        block = BlockResult(block.aggregate, block.accepted, {**block.refused, **refused})
        reply = encode_replies(replies)
        claims = [(item.id, item.node, item.time_s) for item in fresh]
        self.store.record_job(job, batches.pop(), claims, block, reply)
        return reply

    def release(self, body: bytes) -> bytes:
        """The helper's noised share. Raises Refused if the parties counted different reports, or if
        the budget is spent.
        """
        start_s, duration_s, count, checksum = parse_release_request(body)
        with self._release_lock, self._job_lock:  # no job may add to the batch meanwhile
            self.check_release(start_s, duration_s)
            done = self.store.released(start_s)
            if done is not None:
                return done
            batch = self.store.batch(start_s)
            if batch.count < self.task.min_batch:
                raise Refused("too few", f"fewer than {self.task.min_batch} reports")
            if (batch.count, batch.checksum) != (count, checksum):
                raise Refused("mismatch", "leader and helper hold different reports")
            return self._publish(start_s, batch)


def _days(seconds: int) -> str:
    return f"{seconds / 86_400:.3g} days" if seconds >= 86_400 else f"{seconds} s"


def known_refusal_reason(reason: str) -> str:
    """The helper's reason if it is a known one, else a fixed text: the helper must not fill the
    leader's table of counters.
    """
    return reason if reason in STATUS_OF_REASON else "refused by the helper"


def release_request(start_s: int, duration_s: int, batch: Batch) -> bytes:
    """The leader's request to the helper: start, duration, count (u64 each), checksum (32)."""
    numbers = (start_s, duration_s, batch.count)
    return b"".join(n.to_bytes(8, "big") for n in numbers) + batch.checksum


def parse_release_request(body: bytes) -> tuple[int, int, int, bytes]:
    """(start, duration, count, checksum). Raises Refused."""
    if len(body) != 56:
        raise Refused("malformed")
    start_s, duration_s, count = (int.from_bytes(body[at : at + 8], "big") for at in (0, 8, 16))
    return start_s, duration_s, count, body[24:]
