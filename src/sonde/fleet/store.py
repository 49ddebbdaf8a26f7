# SPDX-License-Identifier: Apache-2.0
"""The persistent state of an aggregator: one database transaction for each event.

Only the bodies of reports that wait for verification are stored beside the database (`spool`).

This module alone decides what must survive `kill -9` and must not happen twice: a report is
admitted once, a job is counted once, a batch is released once and its cost is recorded with it.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import SinkError, UsageError
from sonde.fleet.budget import LedgerEntry
from sonde.fleet.database import Database, count_refusals, get_metadata, set_metadata
from sonde.fleet.spool import Extent, ReportSpool
from sonde.fleet.task import Task
from sonde.fleet.verification import BlockResult, checksum
from sonde.fleet.wire import Malformed, Report

# waiting: reports to be verified, with their spool extent. seen: ids of reports that were
# registered. contribution: the periods for which a node has reported. contributor: a tenant's nodes
# in a batch. job: done is 1 once it is counted; reply is the helper's. batch: the sums. latency:
# per finished job.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS waiting (
    id BLOB PRIMARY KEY, batch INTEGER NOT NULL, job BLOB, admitted REAL NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS waiting_by_job ON waiting (job, batch);
CREATE TABLE IF NOT EXISTS seen (
    id BLOB PRIMARY KEY, batch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contribution (
    node BLOB, period INTEGER, batch INTEGER NOT NULL, PRIMARY KEY (node, period)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contributor (
    batch INTEGER, tenant TEXT, node BLOB, PRIMARY KEY (batch, tenant, node)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS job (
    id BLOB PRIMARY KEY, batch INTEGER NOT NULL, done INTEGER NOT NULL, reply BLOB);
CREATE TABLE IF NOT EXISTS batch (
    start INTEGER PRIMARY KEY, share BLOB NOT NULL, count INTEGER NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS release (
    start INTEGER PRIMARY KEY, answer BLOB NOT NULL,
    gpu_rho REAL, gpu_epsilon REAL, tenant_rho REAL, tenant_epsilon REAL);
CREATE TABLE IF NOT EXISTS latency (
    job BLOB PRIMARY KEY, count INTEGER NOT NULL, oldest_s REAL NOT NULL);
"""
_OF_A_BATCH = (
    ("batch", "start"),
    ("seen", "batch"),
    ("contribution", "batch"),
    ("contributor", "batch"),
    ("job", "batch"),
)
"""Tables with data of a batch until it is released or expires, and the column of its start."""

MAX_CACHED_REPORTS = 4096
"""Above this many, reports that wait are not kept in memory, too: their job reads them from disk.
"""


@dataclass(frozen=True)
class Batch:
    """One party's sum of a batch: aggregate share, number of reports, checksum of their ids."""

    share: bytes
    count: int
    checksum: bytes


class Store:
    """The state of one aggregator for one task. Thread-safe.

    `tenant_of` returns a node's tenant, so that the cap on a tenant's nodes also holds for reports
    that were admitted under an earlier roster.
    """

    def __init__(
        self, path: Path, task: Task, tenant_of: Callable[[bytes], str] = lambda node: ""
    ) -> None:
        self._task, self._tenant_of = task, tenant_of
        self._cached: dict[bytes, Report] = {}  # reports whose bodies need not be read back
        self._database = Database(path, _SCHEMA, self._load)
        self._spool = ReportSpool(path.with_name(f"{path.name}-reports"))

    def _load(self, db: sqlite3.Connection) -> None:
        self._waiting = len(_segments(db))
        self._expired_before = int(get_metadata(db, "expired before") or 0)
        """Batches that begin before this time were deleted."""

    def close(self) -> None:
        """Closes the database and the spool."""
        self._database.close()
        self._spool.close()

    # --- admission ---------------------------------------------------------------------------

    def admit(
        self, reports: Sequence[tuple[Report, bytes | memoryview]], now_s: float
    ) -> list[str]:
        """Admits reports, each with its body, in one transaction. Returns per report "" or the
        reason of refusal. If all are refused, nothing is written.
        """
        reasons = self.check_claims([(r.id, r.node, r.time_s) for r, _ in reports])
        if all(reasons):
            self.note_refusals(Counter(reasons))
            return reasons
        extents = self._spool.append(
            [body for (_, body), reason in zip(reports, reasons, strict=True) if not reason]
        )
        admitted: dict[bytes, Report] = {}
        unused: Counter[int] = Counter()  # bodies per segment that no row refers to

        def keep() -> None:  # before a job takes them, or the cache would keep them for ever
            self._waiting += len(admitted)
            if len(self._cached) < MAX_CACHED_REPORTS:
                self._cached.update(admitted)

        try:
            with self._database.transaction(on_commit=keep) as db:
                remaining = iter(extents)
                for at, (report, _) in enumerate(reports):
                    if reasons[at]:
                        continue
                    extent = next(remaining)
                    reasons[at] = self._register(db, report.id, report.node, report.time_s)
                    if reasons[at]:  # an earlier report of this group conflicts with it
                        unused[extent.segment] += 1
                        continue
                    db.execute(
                        "INSERT INTO waiting VALUES (?, ?, NULL, ?, ?, ?, ?)",
                        (report.id, self._task.batch_of(report.time_s), now_s, *extent),
                    )
                    admitted[report.id] = report
                count_refusals(db, Counter(reason for reason in reasons if reason))
        except BaseException:
            self._spool.drop(Counter(extent.segment for extent in extents))
            raise
        self._spool.drop(unused)
        return reasons

    def take_ownership(self) -> None:
        """Makes this process the owner of the state. Raises SinkError if another process is, and
        UsageError if the state belongs to another task: its ledger and reports are meaningless in
        this one.
        """
        self._spool.take_ownership(self._held_segments)
        self._waiting = len(self._held_segments())
        with self._database.transaction(erase=True) as db:
            stored = get_metadata(db, "task")
            if stored is None:
                set_metadata(db, "task", self._task.id)
        if stored is not None and stored != self._task.id:
            self.close()
            raise UsageError(
                "this state belongs to another task",
                "restore task.json, or start in an empty directory",
            )

    def _held_segments(self) -> list[int]:
        with self._database.reading() as db:
            return _segments(db)

    @property
    def waiting(self) -> int:
        """Number of reports that are admitted but not verified."""
        return self._waiting

    def _register(self, db: sqlite3.Connection, id_: bytes, node: bytes, time_s: int) -> str:
        """Registers a report's id and its node's period, once. Returns "" or the reason of
        refusal.
        """
        batch = self._task.batch_of(time_s)
        if batch < self._expired_before:  # whatever the clock: the ids of that age are deleted
            return "late"
        if db.execute("SELECT 1 FROM release WHERE start = ?", (batch,)).fetchone():
            return "late"
        if db.execute("SELECT 1 FROM seen WHERE id = ?", (id_,)).fetchone():
            return "replayed"
        period = time_s // self._task.period_s
        inserted = db.execute(
            "INSERT OR IGNORE INTO contribution VALUES (?, ?, ?)", (node, period, batch)
        )
        if inserted.rowcount == 0:
            return "quota"
        if not self._within_cap(db, node, batch):
            db.execute("DELETE FROM contribution WHERE node = ? AND period = ?", (node, period))
            return "tenant cap"
        db.execute("INSERT INTO seen VALUES (?, ?)", (id_, batch))
        return ""

    def _within_cap(self, db: sqlite3.Connection, node: bytes, batch: int) -> bool:
        """Registers a node under its tenant; False if the tenant has reached its cap in this
        batch.
        """
        cap = self._task.privacy.tenant_cap
        if cap is None:
            return True
        tenant = self._tenant_of(node)
        rows = db.execute(
            "SELECT node FROM contributor WHERE batch = ? AND tenant = ?", (batch, tenant)
        ).fetchall()
        if (node,) in rows:
            return True
        if len(rows) >= cap:
            return False
        db.execute("INSERT INTO contributor VALUES (?, ?, ?)", (batch, tenant, node))
        return True

    def check_claims(self, claims: Sequence[tuple[bytes, bytes, int]]) -> list[str]:
        """Per claim, the (id, node, time) of a report, "" or the reason to refuse it. Registers
        nothing.
        """
        with self._database.rolled_back() as db:
            return [self._register(db, *claim) for claim in claims]

    def note_refusals(self, reasons: Counter[str]) -> None:
        """Counts refusals in memory (`Database.note_refusals`)."""
        self._database.note_refusals(reasons)

    # --- jobs --------------------------------------------------------------------------------

    def next_job(
        self, new_id: bytes, limit: int, busy: Collection[bytes] = ()
    ) -> tuple[bytes, list[Report]] | None:
        """(id, reports) of an unfinished job that is not `busy`, else of a new one of up to `limit`
        reports of one batch, whose id is `new_id`; None if nothing waits. A report whose body is
        lost is counted and left out.
        """
        if not self._has_work():  # a transaction would write the refusals of strangers each time
            return None
        lost: list[bytes] = []  # ids of reports whose bodies cannot be read

        def forget() -> None:
            self._waiting -= len(lost)

        with self._database.transaction(on_commit=forget) as db:
            rows = db.execute("SELECT id FROM job WHERE done = 0").fetchall()
            job = next((id_ for (id_,) in rows if id_ not in busy), None)
            if job is None:
                first = db.execute("SELECT batch FROM waiting WHERE job IS NULL LIMIT 1").fetchone()
                if first is None:
                    return None
                job = new_id
                db.execute("INSERT INTO job VALUES (?, ?, 0, NULL)", (job, first[0]))
                db.execute(
                    "UPDATE waiting SET job = ? WHERE id IN "
                    "(SELECT id FROM waiting WHERE job IS NULL AND batch = ? LIMIT ?)",
                    (job, first[0], limit),
                )
            ids = db.execute("SELECT id FROM waiting WHERE job = ? ORDER BY id", (job,)).fetchall()
            found = {id_: self._cached.pop(id_, None) or self._read_back(db, id_) for (id_,) in ids}
            lost = [id_ for id_, report in found.items() if report is None]
            unused = Counter(self._drop_lost(db, id_) for id_ in lost)
        if unused:
            self._spool.drop(unused)
        return job, [report for report in found.values() if report is not None]

    def _drop_lost(self, db: sqlite3.Connection, id_: bytes) -> int:
        """Removes a report whose body cannot be read. Returns its segment."""
        (segment,) = db.execute("SELECT segment FROM waiting WHERE id = ?", (id_,)).fetchone()
        db.execute("DELETE FROM waiting WHERE id = ?", (id_,))
        count_refusals(db, Counter({"lost on disk": 1}))
        return int(segment)

    def _has_work(self) -> bool:
        query = (
            "SELECT EXISTS (SELECT 1 FROM job WHERE done = 0) "
            "OR EXISTS (SELECT 1 FROM waiting WHERE job IS NULL)"
        )
        with self._database.reading() as db:
            return bool(db.execute(query).fetchone()[0])

    def finish_job(self, job: bytes, block: BlockResult, now_s: float) -> None:
        """Finishes a job at the leader: counts it and removes its reports, in one transaction."""
        gone: list[tuple[int, float]] = []  # (segment, when it was admitted) of the job's reports

        def forget() -> None:
            self._waiting -= len(gone)

        with self._database.transaction(on_commit=forget) as db:
            row = db.execute("SELECT batch, done FROM job WHERE id = ?", (job,)).fetchone()
            if row is None or row[1]:
                return
            self._add(db, row[0], block)
            gone = db.execute(
                "SELECT segment, admitted FROM waiting WHERE job = ?", (job,)
            ).fetchall()
            db.execute("DELETE FROM waiting WHERE job = ?", (job,))
            db.execute("UPDATE job SET done = 1 WHERE id = ?", (job,))
            if gone:
                oldest_s = min(admitted for _, admitted in gone)
                db.execute(
                    "INSERT OR REPLACE INTO latency VALUES (?, ?, ?)",
                    (job, len(block.accepted), now_s - oldest_s),
                )
            count_refusals(db, Counter(block.refused.values()))
        self._spool.drop(Counter(segment for segment, _ in gone))

    def _read_back(self, db: sqlite3.Connection, id_: bytes) -> Report | None:
        """A report from disk; None if its body is missing or damaged."""
        row = db.execute("SELECT segment, offset, size FROM waiting WHERE id = ?", (id_,))
        try:
            report = Report.decode(self._spool.read(Extent(*row.fetchone())))
        except (Malformed, FileNotFoundError):
            return None
        return report if report.id == id_ else None

    def reply_of(self, job: bytes) -> bytes | None:
        """The helper's stored answer to a job; None if the job is new."""
        with self._database.reading() as db:
            row = db.execute("SELECT reply FROM job WHERE id = ?", (job,)).fetchone()
        return None if row is None else row[0]

    def record_job(
        self,
        job: bytes,
        batch: int,
        claims: Sequence[tuple[bytes, bytes, int]],
        block: BlockResult,
        reply: bytes,
    ) -> None:
        """Finishes a job at the helper: registers ids, adds the sum and stores the answer, in one
        transaction. Raises SinkError.
        """
        with self._database.transaction() as db:
            for claim in claims:
                if reason := self._register(db, *claim):
                    raise SinkError(f"a report of this job was registered meanwhile ({reason})")
            self._add(db, batch, block)
            db.execute("INSERT INTO job VALUES (?, ?, 1, ?)", (job, batch, reply))
            count_refusals(db, Counter(block.refused.values()))

    def _add(self, db: sqlite3.Connection, start: int, block: BlockResult) -> None:
        """Adds a block's accepted reports to the sum of their batch."""
        if not block.accepted:
            return
        row = db.execute("SELECT share, count, checksum FROM batch WHERE start = ?", (start,))
        sum_before = row.fetchone()
        share, count, check = block.aggregate, len(block.accepted), checksum(block.accepted)
        if sum_before is not None:
            share = self._task.aggregation().merge([sum_before[0], share])
            count += sum_before[1]
            check = bytes(a ^ b for a, b in zip(sum_before[2], check, strict=True))
        db.execute("INSERT OR REPLACE INTO batch VALUES (?, ?, ?, ?)", (start, share, count, check))

    # --- releases ----------------------------------------------------------------------------

    def pending(self, start: int) -> int:
        """Number of reports of a batch that wait for verification."""
        with self._database.reading() as db:
            query = "SELECT count(*) FROM waiting WHERE batch = ?"
            return int(db.execute(query, (start,)).fetchone()[0])

    def batch(self, start: int) -> Batch:
        """The sum of the batch that begins at `start` (s since 1970); empty where there is none."""
        with self._database.reading() as db:
            row = db.execute(
                "SELECT share, count, checksum FROM batch WHERE start = ?", (start,)
            ).fetchone()
        return Batch(self._task.aggregation().zero(), 0, bytes(32)) if row is None else Batch(*row)

    def released(self, start: int) -> bytes | None:
        """The stored answer of a released batch, else None: noise is drawn once and never again.
        Empty after the batch has expired.
        """
        with self._database.reading() as db:
            row = db.execute("SELECT answer FROM release WHERE start = ?", (start,)).fetchone()
        return None if row is None else bytes(row[0])

    def release(self, start: int, answer: bytes, entry: LedgerEntry) -> bytes:
        """Records a release (`answer`: the sealed, noised share) and its cost, and deletes all else
        of the batch. Returns the stored answer: that of an earlier call if there was one.

        Only for a closed batch without `pending` reports, as the caller has made sure: what waits
        is not deleted here. Deleted data is overwritten, in the file and in its log.
        """
        with self._database.transaction(erase=True) as db:
            row = db.execute("SELECT answer FROM release WHERE start = ?", (start,)).fetchone()
            if row is not None:
                return bytes(row[0])
            db.execute(
                "INSERT INTO release VALUES (?, ?, ?, ?, ?, ?)",
                (
                    start,
                    answer,
                    entry.gpu_rho,
                    entry.gpu_epsilon,
                    entry.tenant_rho,
                    entry.tenant_epsilon,
                ),
            )
            db.execute(
                "DELETE FROM latency WHERE job IN (SELECT id FROM job WHERE batch = ?)", (start,)
            )
            for table, column in _OF_A_BATCH:
                db.execute(f"DELETE FROM {table} WHERE {column} = ?", (start,))
        return answer

    def expire(self, before: int) -> int:
        """Deletes all data, except costs, of batches that begin before this time. Returns the
        number of their unreleased reports. Reports of that age are refused from then on.
        """
        gone: list[tuple[bytes, int]] = []  # (id, segment) of reports that waited

        def forget() -> None:
            self._expired_before = before
            self._waiting -= len(gone)
            for id_, _ in gone:
                self._cached.pop(id_, None)

        if before <= self._expired_before:
            self._database.erase_log()
            self._database.write_refusals()
            return 0
        with self._database.transaction(erase=True, on_commit=forget) as db:
            query = "SELECT coalesce(sum(count), 0) FROM batch WHERE start < ?"
            lost = int(db.execute(query, (before,)).fetchone()[0])
            gone = db.execute(
                "SELECT id, segment FROM waiting WHERE batch < ?", (before,)
            ).fetchall()
            db.execute("DELETE FROM waiting WHERE batch < ?", (before,))
            db.execute(
                "DELETE FROM latency WHERE job IN (SELECT id FROM job WHERE batch < ?)", (before,)
            )
            for table, column in _OF_A_BATCH:
                db.execute(f"DELETE FROM {table} WHERE {column} < ?", (before,))
            db.execute("UPDATE release SET answer = x'' WHERE start < ?", (before,))
            set_metadata(db, "expired before", before)
            count_refusals(db, Counter({"expired": lost + len(gone)} if lost or gone else {}))
        self._spool.drop(Counter(segment for _, segment in gone))
        return lost + len(gone)

    def ledger(self) -> list[LedgerEntry]:
        """What each release spent, the oldest first."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT start, gpu_rho, gpu_epsilon, tenant_rho, tenant_epsilon FROM release "
                "ORDER BY start"
            ).fetchall()
        return [LedgerEntry(*row) for row in rows]

    # --- status ------------------------------------------------------------------------------

    def refusals(self) -> dict[str, int]:
        """Reports and requests that were refused, by reason."""
        return self._database.refusals()

    def counts(self) -> dict[int, int]:
        """Number of verified reports of each batch that is not released."""
        with self._database.reading() as db:
            return dict(db.execute("SELECT start, count FROM batch ORDER BY start"))

    def latencies(self) -> list[tuple[int, float]]:
        """Per finished job of a batch that is not released: (accepted reports, seconds from the
        admission of its oldest report to its end).
        """
        with self._database.reading() as db:
            return list(db.execute("SELECT count, oldest_s FROM latency"))


def _segments(db: sqlite3.Connection) -> list[int]:
    """The segment of each waiting report."""
    return [segment for (segment,) in db.execute("SELECT segment FROM waiting")]
