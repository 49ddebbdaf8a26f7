# SPDX-License-Identifier: Apache-2.0
"""Ranks by time and memory of processes, over a store with jobs that are made up here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from captures import SECOND_NS, START_NS, WALL_OFFSET_NS
from rank_job import BUCKETS, HOSTILE, LATE, RANKS, job_chunks
from sonde.query import stored_memory, stored_ranks
from sonde.query.selection import Selection
from sonde.query.stored_ranks import BinKind, TimeBin, parts_of
from sonde.query.stored_session import StoredSession
from sonde.server import timeline_answers
from sonde.server.service import Service
from sonde.store.flush import Flusher

BEGIN_NS = START_NS + WALL_OFFSET_NS
WANTED = Selection(BEGIN_NS, BEGIN_NS + BUCKETS * SECOND_NS)


@contextmanager
def opened(folder: Path, every: int) -> Iterator[StoredSession]:
    """A store with the job of which `runs` runs were timed."""
    service = Service(folder / "store", open_tenant="default", flushes=False)
    caller = service.caller("")
    assert caller
    for node, content in job_chunks(every=every).items():
        for future, _ in service.take(caller, node, content):
            future.result(20)
    service.wal.close()
    Flusher(service.folder, service.catalog).flush()
    session = service.session(caller, Selection(0, 1 << 62))
    yield session
    session.close()
    service.catalog.close()
    service.tokens.close()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredSession]:
    with opened(tmp_path_factory.mktemp("ranks"), 2) as session:
        yield session


def by_cell(answer: dict[str, Any], column: str) -> dict[tuple[int, int], float]:
    cells = answer["cells"]
    keys = zip(cells["rank"], cells["slot"], strict=True)
    return dict(zip(keys, cells[column], strict=True))


def test_the_late_rank_works_while_the_others_wait_in_collectives(session: StoredSession) -> None:
    found = stored_ranks.ranks(session, WANTED, parts_of(WANTED, BUCKETS), BinKind.TIME)
    assert [one["job"] for one in found["ranks"]] == ["train-7"] * RANKS
    assert [one["comm"] for one in found["ranks"]] == [HOSTILE] * RANKS
    assert found["left_out"] == 0
    assert found["collectives"] == 1
    work, waits = by_cell(found, "work_ns"), by_cell(found, "collective_ns")
    assert len(work) == RANKS * BUCKETS
    for slot in range(BUCKETS):
        late = max(range(RANKS), key=lambda rank: work[rank, slot])
        assert late == LATE
        assert waits[late, slot] < min(waits[rank, slot] for rank in range(RANKS) if rank != late)
    # The weights of sampled runs count.
    assert work[0, 0] == pytest.approx(0.4 * SECOND_NS)


def test_a_run_counts_in_each_part_of_the_time_that_it_lies_in(session: StoredSession) -> None:
    found = stored_ranks.ranks(session, WANTED, parts_of(WANTED, 4 * BUCKETS), BinKind.TIME)
    waits = by_cell(found, "collective_ns")
    # Of each second the others wait from 0.4 to 0.9, the late one from 0.8.
    others = [waits.get((0, slot), 0) / SECOND_NS for slot in range(4)]
    late = [waits.get((LATE, slot), 0) / SECOND_NS for slot in range(4)]
    assert others == pytest.approx([0, 0.1, 0.25, 0.15])
    assert late == pytest.approx([0, 0, 0, 0.1])


@pytest.mark.parametrize("length_s", [12, 60, 3_600, 86_400, 7 * 86_400])
def test_any_time_that_contains_the_job_has_the_same_columns(
    session: StoredSession, length_s: int
) -> None:
    end = BEGIN_NS + (BUCKETS * SECOND_NS if length_s == 12 else 17 * SECOND_NS)
    wanted = Selection(end - length_s * SECOND_NS, end)
    found = timeline_answers.ranks(session, wanted, 120)
    starts, ends = found["slots"]["start_ns"], found["slots"]["end_ns"]

    assert found["by"] == "time"
    assert (starts[0], ends[-1]) == (BEGIN_NS, BEGIN_NS + round(11.9 * SECOND_NS))
    assert all(b - a <= SECOND_NS for a, b in zip(starts, ends, strict=True))
    waits = by_cell(found, "collective_ns")
    spent = [sum(ns for (one, _), ns in waits.items() if one == rank) for rank in range(RANKS)]
    assert min(range(RANKS), key=lambda rank: spent[rank]) == LATE
    late_s = (sorted(spent)[RANKS // 2] - spent[LATE]) / SECOND_NS
    assert late_s == pytest.approx(0.4 * BUCKETS)


def test_columns_lie_in_each_of_several_recorded_times(session: StoredSession) -> None:
    pieces = stored_ranks.observed(session, WANTED, 120)
    assert [(one.start_ns, one.end_ns) for one in pieces] == [
        (BEGIN_NS, BEGIN_NS + round(11.9 * SECOND_NS))
    ]
    later = Selection(BEGIN_NS + 10**15, BEGIN_NS + 10**15 + 24 * SECOND_NS)
    bins = stored_ranks.bins_of([*pieces, later], 36)
    assert len(bins) == 36
    assert not any(one.end_ns > pieces[0].end_ns and one.start_ns < later.start_ns for one in bins)
    assert stored_ranks.observed(session, Selection(0, 10**18), 120) == []
    nothing = timeline_answers.ranks(session, Selection(0, 10**18), 120)
    assert nothing["ranks"] == [] and nothing["slots"]["start_ns"] == []


def test_slots_are_bounded_and_cover_the_time() -> None:
    for points in (1, 7, 240, 10**9):
        slots = parts_of(WANTED, points)
        assert len(slots) <= stored_ranks.MAX_BINS
        assert (slots[0].start_ns, slots[-1].end_ns) == (WANTED.start_ns, WANTED.end_ns)
        assert all(a.end_ns == b.start_ns for a, b in pairwise(slots))
    assert parts_of(Selection(5, 5), 10) == [TimeBin(5, 5)]


def test_ranks_beyond_the_limit_are_counted(
    session: StoredSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_ranks, "MAX_RANKS", 3)
    found = stored_ranks.ranks(session, WANTED, parts_of(WANTED, 5), BinKind.TIME)
    assert (len(found["ranks"]), found["left_out"]) == (3, RANKS - 3)
    assert set(found["cells"]["rank"]) <= {0, 1, 2}


def test_a_job_is_chosen_by_its_name_as_a_value(session: StoredSession) -> None:
    for job, count in (("train-7", RANKS), ("' OR 1=1 --", 0)):
        wanted = Selection(WANTED.start_ns, WANTED.end_ns, owners={"job": job})
        found = stored_ranks.ranks(session, wanted, parts_of(wanted, 5), BinKind.TIME)
        assert len(found["ranks"]) == count


def test_jobs_have_the_time_in_which_they_were_observed_in_any_range(
    session: StoredSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    week = 7 * 86_400 * SECOND_NS
    for around in (0, 60 * SECOND_NS, week):
        wanted = Selection(WANTED.start_ns - around, WANTED.end_ns + around)
        (row,) = stored_ranks.jobs(session, wanted, 10).to_pylist()
        assert (row["job"], row["ranks"]) == ("train-7", RANKS)
        assert WANTED.start_ns <= row["first_ns"] < WANTED.start_ns + SECOND_NS
        assert WANTED.end_ns - SECOND_NS < row["last_ns"] <= WANTED.end_ns
        assert row["start_ns"] == row["first_ns"], "shorter than what is opened"
    monkeypatch.setattr(stored_ranks, "LAST_NS", 3 * SECOND_NS)
    (row,) = stored_ranks.jobs(session, WANTED, 10).to_pylist()
    assert row["start_ns"] == row["last_ns"] - 3 * SECOND_NS
    assert stored_ranks.jobs(session, WANTED, 0).num_rows == 0
    assert stored_ranks.jobs(session, Selection(0, 1), 10).num_rows == 0


def test_steps_are_the_columns_where_every_run_was_timed(
    session: StoredSession, tmp_path: Path
) -> None:
    assert timeline_answers.ranks(session, WANTED, 12)["by"] == "time"
    with opened(tmp_path, 1) as whole:
        found = timeline_answers.ranks(whole, WANTED, 12)
    assert found["by"] == "steps"
    begins = [(start - BEGIN_NS) / SECOND_NS for start in found["slots"]["start_ns"]]
    assert len(begins) >= BUCKETS - 1
    # One a second: each is as long as the job's.
    assert all(b - a == pytest.approx(1, abs=1e-3) for a, b in pairwise(begins))
    waits = by_cell(found, "collective_ns")
    assert waits[LATE, 3] < waits[0, 3]


def test_memory_of_a_process_is_what_it_mapped_less_what_it_gave_back(
    session: StoredSession,
) -> None:
    rows = stored_memory.memory(session, WANTED).to_pylist()
    assert len(rows) == RANKS
    for row in rows:
        assert row["job"] == "train-7"
        assert (row["mapped"], row["unmapped"], row["grown"]) == (96 << 20, 32 << 20, 64 << 20)
        assert (row["faulted"], row["reserved"]) == (48 << 20, 1 << 30)
    assert stored_memory.memory(session, WANTED, 1).num_rows == 1
