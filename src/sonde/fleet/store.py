# SPDX-License-Identifier: Apache-2.0
"""What an aggregator remembers: one step of its file (`journal`) for each thing that happens.

Only the bodies of reports that wait for their proof check lie beside it (`spool`).

What must survive `kill -9` and must not happen twice is decided here and nowhere else: a report is
admitted once, a job is counted once, a batch is released once and its cost is booked with it.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import SinkError, UsageError
from sonde.fleet.budget import Entry
from sonde.fleet.journal import Journal, count_refusals, mark, set_mark
from sonde.fleet.spool import Place, Spool
from sonde.fleet.task import Task
from sonde.fleet.wire import Malformed, Report
from sonde.fleet.work import Block, checksum

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
"""Tables that hold anything of a batch until it is released or expires, and its column in them."""


KEPT_REPORTS = 4096  # in memory besides on disk; more are read back when their turn comes


@dataclass(frozen=True)
class Batch:
    """What one party holds of a batch."""

    share: bytes
    count: int
    checksum: bytes


class Store:
    """The state of one aggregator for one task. Threads may share it.

    `tenant_of` names a node's tenant, so that the cap on a tenant's nodes holds for what a batch
    has taken already, whatever the roster said when it took it.
    """

    def __init__(
        self, path: Path, task: Task, tenant_of: Callable[[bytes], str] = lambda node: ""
    ) -> None:
        self._task, self._tenant_of = task, tenant_of
        self._fresh: dict[bytes, Report] = {}  # bodies on disk that need not be read back
        self._journal = Journal(path, _SCHEMA, self._look)
        self._spool = Spool(path.with_name(f"{path.name}-reports"))

    def _look(self, db: sqlite3.Connection) -> None:
        self._waiting = len(_segments(db))
        self._expired_before = int(mark(db, "expired before") or 0)
        """Batches that begin before this are forgotten."""

    def close(self) -> None:
        self._journal.close()
        self._spool.close()

    # --- admission ---------------------------------------------------------------------------

    def admit(
        self, reports: Sequence[tuple[Report, bytes | memoryview]], now_s: float
    ) -> list[str]:
        """Takes reports, each with its body, in one transaction; per report "" or the reason of
        its refusal.
        """
        reasons = self.claim([(r.id, r.node, r.time_s) for r, _ in reports])
        places = self._spool.append(
            [body for (_, body), reason in zip(reports, reasons, strict=True) if not reason]
        )
        taken: dict[bytes, Report] = {}
        spare: Counter[int] = Counter()

        def keep() -> None:  # before anyone takes them, or what is kept would never be asked for
            self._waiting += len(taken)
            if len(self._fresh) < KEPT_REPORTS:
                self._fresh.update(taken)

        try:
            with self._journal.step(then=keep) as db:
                rest = iter(places)
                for at, (report, _) in enumerate(reports):
                    if reasons[at]:
                        continue
                    place = next(rest)
                    reasons[at] = self._claim(db, report.id, report.node, report.time_s)
                    if reasons[at]:  # the first of its kind came in this very group
                        spare[place.segment] += 1
                        continue
                    db.execute(
                        "INSERT INTO waiting VALUES (?, ?, NULL, ?, ?, ?, ?)",
                        (report.id, self._task.batch_of(report.time_s), now_s, *place),
                    )
                    taken[report.id] = report
                count_refusals(db, Counter(reason for reason in reasons if reason))
        except BaseException:
            self._spool.drop(Counter(place.segment for place in places))
            raise
        self._spool.drop(spare)
        return reasons

    def own_reports(self) -> None:
        """Makes this process the one that takes reports. Raises SinkError if another does, and
        UsageError if the state was made for another task: its ledger and what it holds of reports
        mean nothing in this one.
        """
        self._spool.own(self._held_segments)
        self._waiting = len(self._held_segments())
        with self._journal.step(thorough=True) as db:
            held = mark(db, "task")
            if held is None:
                set_mark(db, "task", self._task.id)
        if held is not None and held != self._task.id:
            self.close()
            raise UsageError(
                "this state belongs to another task",
                "put task.json back as it was, or begin anew in another directory",
            )

    def _held_segments(self) -> list[int]:
        with self._journal.reading() as db:
            return _segments(db)

    @property
    def waiting(self) -> int:
        """Reports that are admitted and not yet through the proof check."""
        return self._waiting

    def _claim(self, db: sqlite3.Connection, id_: bytes, node: bytes, time_s: int) -> str:
        """Books a report's id and its node's period, once; or says why not."""
        batch = self._task.batch_of(time_s)
        if batch < self._expired_before:  # whatever the clock says: what was seen is forgotten
            return "late"
        if db.execute("SELECT 1 FROM release WHERE start = ?", (batch,)).fetchone():
            return "late"
        if db.execute("SELECT 1 FROM seen WHERE id = ?", (id_,)).fetchone():
            return "replayed"
        period = time_s // self._task.period_s
        taken = db.execute(
            "INSERT OR IGNORE INTO contribution VALUES (?, ?, ?)", (node, period, batch)
        )
        if taken.rowcount == 0:
            return "quota"
        if not self._within_cap(db, node, batch):
            db.execute("DELETE FROM contribution WHERE node = ? AND period = ?", (node, period))
            return "tenant cap"
        db.execute("INSERT INTO seen VALUES (?, ?)", (id_, batch))
        return ""

    def _within_cap(self, db: sqlite3.Connection, node: bytes, batch: int) -> bool:
        """Books a node under its tenant; False where as many others of the tenant are in."""
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

    def claim(self, claims: Sequence[tuple[bytes, bytes, int]]) -> list[str]:
        """Whether these (id, node, time) could be taken; nothing is booked yet."""
        with self._journal.trying() as db:
            return [self._claim(db, *claim) for claim in claims]

    def note_refusals(self, reasons: Counter[str]) -> None:
        """Counts refusals that took nothing (`Journal.note`)."""
        self._journal.note(reasons)

    # --- jobs --------------------------------------------------------------------------------

    def take_job(
        self, new_id: bytes, limit: int, busy: Collection[bytes] = ()
    ) -> tuple[bytes, list[Report]] | None:
        """An unfinished job that nobody is busy with, else a new one of up to `limit` reports."""
        with self._journal.step() as db:
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
            found = {id_: self._fresh.pop(id_, None) or self._read_back(db, id_) for (id_,) in ids}
            lost = [id_ for id_, report in found.items() if report is None]
            spare = Counter(self._drop_lost(db, id_) for id_ in lost)
        if spare:
            self._spool.drop(spare)
        return job, [report for report in found.values() if report is not None]

    def _drop_lost(self, db: sqlite3.Connection, id_: bytes) -> int:
        """Takes a report that cannot be read out of the others' way; the segment that had it."""
        (segment,) = db.execute("SELECT segment FROM waiting WHERE id = ?", (id_,)).fetchone()
        db.execute("DELETE FROM waiting WHERE id = ?", (id_,))
        count_refusals(db, Counter({"lost on disk": 1}))
        self._waiting -= 1
        return int(segment)

    def finish_job(self, job: bytes, block: Block, now_s: float) -> None:
        """The leader's end of a job: counted, and its reports forgotten, in one step."""
        gone: list[tuple[int, float]] = []

        def forget() -> None:
            self._waiting -= len(gone)

        with self._journal.step(then=forget) as db:
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
        """A report as it lies on disk; None if that is not what was once written."""
        row = db.execute("SELECT segment, offset, size FROM waiting WHERE id = ?", (id_,))
        try:
            report = Report.decode(self._spool.read(Place(*row.fetchone())))
        except (Malformed, FileNotFoundError):
            return None
        return report if report.id == id_ else None

    def reply_of(self, job: bytes) -> bytes | None:
        """The helper's stored answer, if it has done this job before."""
        with self._journal.reading() as db:
            row = db.execute("SELECT reply FROM job WHERE id = ?", (job,)).fetchone()
        return None if row is None else row[0]

    def record_job(
        self,
        job: bytes,
        batch: int,
        claims: Sequence[tuple[bytes, bytes, int]],
        block: Block,
        reply: bytes,
    ) -> None:
        """The helper's end of a job: ids booked, sum and answer kept, in one step."""
        with self._journal.step() as db:
            for claim in claims:
                if reason := self._claim(db, *claim):
                    raise SinkError(f"a report of this job was taken meanwhile ({reason})")
            self._add(db, batch, block)
            db.execute("INSERT INTO job VALUES (?, ?, 1, ?)", (job, batch, reply))
            count_refusals(db, Counter(block.refused.values()))

    def _add(self, db: sqlite3.Connection, start: int, block: Block) -> None:
        if not block.accepted:
            return
        row = db.execute("SELECT share, count, checksum FROM batch WHERE start = ?", (start,))
        held = row.fetchone()
        share, count, check = block.aggregate, len(block.accepted), checksum(block.accepted)
        if held is not None:
            share = self._task.aggregation().merge([held[0], share])
            count += held[1]
            check = bytes(a ^ b for a, b in zip(held[2], check, strict=True))
        db.execute("INSERT OR REPLACE INTO batch VALUES (?, ?, ?, ?)", (start, share, count, check))

    # --- releases ----------------------------------------------------------------------------

    def pending(self, start: int) -> int:
        """Reports of a batch that are not yet through the proof check."""
        with self._journal.reading() as db:
            query = "SELECT count(*) FROM waiting WHERE batch = ?"
            return int(db.execute(query, (start,)).fetchone()[0])

    def batch(self, start: int) -> Batch:
        with self._journal.reading() as db:
            row = db.execute(
                "SELECT share, count, checksum FROM batch WHERE start = ?", (start,)
            ).fetchone()
        return Batch(self._task.aggregation().zero(), 0, bytes(32)) if row is None else Batch(*row)

    def released(self, start: int) -> bytes | None:
        """The answer that was given for a batch: noise is drawn once and never again. It is empty
        once the batch has expired.
        """
        with self._journal.reading() as db:
            row = db.execute("SELECT answer FROM release WHERE start = ?", (start,)).fetchone()
        return None if row is None else bytes(row[0])

    def release(self, start: int, answer: bytes, entry: Entry) -> bytes:
        """Books a release with its cost and forgets the raw share; the first answer wins.

        What is forgotten is overwritten, in the file and in its log.
        """
        with self._journal.step(thorough=True) as db:
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
        """Forgets all of the batches that begin before this but what they have cost; how many
        reports of theirs were never released. From then on no report of that age is taken.
        """
        gone: list[tuple[bytes, int]] = []

        def forget() -> None:
            self._expired_before = before
            self._waiting -= len(gone)
            for id_, _ in gone:
                self._fresh.pop(id_, None)

        if before <= self._expired_before:
            self._journal.tidy()
            return 0
        with self._journal.step(thorough=True, then=forget) as db:
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
            set_mark(db, "expired before", before)
            count_refusals(db, Counter({"expired": lost + len(gone)} if lost or gone else {}))
        self._spool.drop(Counter(segment for _, segment in gone))
        return lost + len(gone)

    def ledger(self) -> list[Entry]:
        with self._journal.reading() as db:
            rows = db.execute(
                "SELECT start, gpu_rho, gpu_epsilon, tenant_rho, tenant_epsilon FROM release "
                "ORDER BY start"
            ).fetchall()
        return [Entry(*row) for row in rows]

    # --- status ------------------------------------------------------------------------------

    def refusals(self) -> dict[str, int]:
        return self._journal.refusals()

    def counts(self) -> dict[int, int]:
        """Verified reports a batch that is not yet released."""
        with self._journal.reading() as db:
            return dict(db.execute("SELECT start, count FROM batch ORDER BY start"))

    def latencies(self) -> list[tuple[int, float]]:
        """(reports, seconds since its oldest report was admitted) of each finished job."""
        with self._journal.reading() as db:
            return list(db.execute("SELECT count, oldest_s FROM latency"))


def _segments(db: sqlite3.Connection) -> list[int]:
    """Where the bodies of reports lie that wait, one each."""
    return [segment for (segment,) in db.execute("SELECT segment FROM waiting")]
