# SPDX-License-Identifier: Apache-2.0
"""Whom the ranks of a job wait for, at a store: jobs that others labelled, and synthetic ones."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from bench.faults.rank_replay import COMPUTE, EXCHANGE, named, replay

from captures import SECOND_NS, START_NS, WALL_OFFSET_NS, Writer
from rank_job import LATE, RANKS, job_chunks
from sonde.analyze import rank_tables
from sonde.analyze.slow_ranks import MAX_LONG, Pieces, _of_sequences, slow_links
from sonde.analyze.stragglers import Straggle, Work, straggling
from sonde.cli.job import _waiting, as_text
from sonde.errors import CaptureTooLarge
from sonde.query.selection import Selection
from sonde.query.stored_ranks import TimeBin
from sonde.query.stored_session import QueryTimedOutError, StoredSession
from sonde.server import job, job_ranks, timeline_answers
from sonde.server.service import Service
from sonde.store.flush import Flusher

LABELLED = Path(__file__).parents[1] / "data" / "stragglers"
BEGIN_NS = START_NS + WALL_OFFSET_NS
NCCL = "ncclDevKernel_"
SPREAD = np.exp(0.02 * np.random.default_rng(1).standard_normal(1000))
Row = tuple[int, str, float, float]
"""Rank, kernel, start and end in s."""


@contextmanager
def stored(folder: Path, chunks: dict[str, bytes]) -> Iterator[StoredSession]:
    service = Service(folder / "store", open_tenant="default", flushes=False)
    caller = service.caller("")
    assert caller
    for node, content in chunks.items():
        for future, _ in service.take(caller, node, content):
            future.result(30)
    service.wal.close()
    Flusher(service.folder, service.catalog).flush()
    session = service.session(caller, Selection(0, 1 << 62))
    yield session
    session.close()
    service.children.close()
    service.catalog.close()
    service.tokens.close()


def chunks_of(
    rows: list[Row], seconds: float, a_node: int = 8, weight: float = 1.0
) -> dict[str, bytes]:
    writers: dict[int, Writer] = {}
    keys: dict[int, dict[str, int]] = {}
    for rank, name, start, end in rows:
        node = rank // a_node
        if node not in writers:
            writers[node] = Writer(seconds=seconds, chunk_seconds=seconds)
        if rank not in keys:
            keys[rank] = writers[node].process(1000 + rank, "train", job="7", user="ada")
        writers[node].add(
            "device_run", keys[rank], kind="kernel", name=name, tid=1000 + rank, source="cupti",
            weight=weight, device=rank % a_node, start_time_ns=START_NS + round(start * SECOND_NS),
            end_time_ns=START_NS + round(end * SECOND_NS),
        )  # fmt: skip
    return {f"node-{at:03}": b"".join(one.chunks()) for at, one in writers.items()}


def asked(session: StoredSession, seconds: float, **owner: str) -> dict[str, Any]:
    end = BEGIN_NS + round(seconds * SECOND_NS)
    return job_ranks.waiting(session, Selection(BEGIN_NS, end, owners=owner or {"job": "7"}))


def labelled(name: str) -> tuple[list[Row], float, dict[int, int]]:
    """(kernels, seconds, stage by rank); a step lasts a second at most, so that 6 fit a window."""
    table = pq.read_table(LABELLED / f"{name}.parquet").to_pylist()
    longest = max(row["start_ts"] + row["duration"] for row in table)
    rows: list[Row] = []
    steps = sorted({row["step"] for row in table})
    for row in table:
        what = row["optype"]
        if not any(part in what for part in ("compute", "send", "recv", "reduce", "gather")):
            continue
        kernel = "gemm" if "compute" in what else f"{NCCL}AllReduce"
        kernel = f"{NCCL}SendRecv" if "send" in what or "recv" in what else kernel
        begin = steps.index(row["step"]) * 1.01 + row["start_ts"] / longest
        rows.append((row["rank"], kernel, begin, begin + row["duration"] / longest))
    return rows, 1.01 * len(steps) + 0.1, {row["rank"]: row["stage"] for row in table}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("AR", "slow-worker"), ("ST", "slow-stage"), ("SE", "unequal-sequences")],
)
def test_jobs_that_others_labelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    rows, seconds, stages = labelled(name)
    steps = [TimeBin(BEGIN_NS + round(at * 1.01e9), BEGIN_NS + round((at + 1) * 1.01e9))
             for at in range(6)]  # fmt: skip
    # The traces lack the launches by which steps are found.
    monkeypatch.setattr("sonde.server.timeline_answers._steps", lambda *_: steps)
    with stored(tmp_path, chunks_of(rows, seconds)) as session:
        found = asked(session, seconds)
    ranks = sorted(stages)
    slow = {ranks[one["number"]] if name != "AR" else one["pid"] - 1000 for one in found["ranks"]}
    assert found["kind"] == kind, found
    if name == "AR":
        assert slow == {0}
    elif name == "ST":
        assert {one["pid"] - 1000 for one in found["ranks"]} == {
            rank for rank, stage in stages.items() if stage == 3
        }
    else:
        assert not found["ranks"]


def test_a_late_rank_is_named_with_its_node_and_what_it_costs(tmp_path: Path) -> None:
    with stored(tmp_path, job_chunks(comm="train", every=2)) as session:
        found = asked(session, 12, job="train-7")
        of_user = asked(session, 12, user="ada")
        nobody = asked(session, 12, job="x")
        several = [asked(session, 12, **{by: "x"}) for by in ("comm", "exe", "container", "unit")]
    assert found["kind"] == "slow-worker"
    assert [one["pid"] for one in found["ranks"]] == [100 + LATE]
    assert found["node"]["node"] == "gpu-b"
    assert found["lost_s"] == pytest.approx(0.4, abs=0.05) and found["per"] == "second"
    assert any("unequal sequences" in text for text in found["missing"])
    assert found["compared"] == RANKS
    text = "\n".join(_waiting(found))
    assert "slow worker: the others wait for train (105) on GPU 1 of gpu-b" in text
    assert of_user["kind"] == nobody["kind"] == "unknown"
    assert all("ask about one job" in one["text"] for one in [of_user, *several])


def test_the_late_rank_is_the_same_in_any_time_that_contains_the_job(tmp_path: Path) -> None:
    owner = {"job": "train-7"}
    with stored(tmp_path, job_chunks(comm="train", every=2)) as session:
        found = [
            job_ranks.waiting(
                session, Selection(BEGIN_NS - s * SECOND_NS, BEGIN_NS + 10**11, owners=owner)
            )
            for s in (0, 30, 3_600, 7 * 86_400)
        ]
        ranks = timeline_answers.ranks(
            session, Selection(BEGIN_NS - 10**14, BEGIN_NS + 10**11), 120
        )
    first = found[0]["ranks"][0]
    assert [one["kind"] for one in found] == ["slow-worker"] * 4
    assert all(one["ranks"][0] == first for one in found)
    # One basis for one fact: the page of ranks divides by the same time.
    cells = ranks["cells"]
    its = [at for at, rank in enumerate(cells["rank"]) if rank == LATE]
    slots = ranks["slots"]
    length = sum(
        slots["end_ns"][cells["slot"][at]] - slots["start_ns"][cells["slot"][at]] for at in its
    )
    assert sum(cells["work_ns"][at] for at in its) / length == pytest.approx(
        first["work"], abs=1e-3
    )


@pytest.mark.parametrize("kind", ["rank", "link", "nothing"])
def test_1024_ranks_through_a_store(tmp_path: Path, kind: str) -> None:
    truth, runs = replay(kind, 3, SPREAD)
    names = {COMPUTE: "gemm", EXCHANGE: f"{NCCL}SendRecv"}
    columns = zip(runs.rank.tolist(), runs.kind.tolist(), (runs.start + 0.01).tolist(),
                  (runs.end + 0.01).tolist(), strict=True)  # fmt: skip
    rows = [(rank, names.get(what, f"{NCCL}AllReduce"), a, b) for rank, what, a, b in columns]
    seconds = float(runs.end.max()) + 0.1
    with stored(tmp_path, chunks_of(rows, seconds)) as session:
        found = asked(session, seconds)
    assert found["compared"] == 1024
    assert tuple(one["pid"] - 1000 for one in found["ranks"]) == truth.ranks
    assert found["kind"] == {"rank": "slow-worker", "link": "slow-link"}.get(kind, "nothing")


@pytest.mark.parametrize("kind", ["rank", "link", "nothing"])
def test_the_rule_on_a_few_seeds(kind: str) -> None:
    for seed in range(4):
        truth, runs = replay(kind, seed, SPREAD, replicas=32)
        assert named(runs, 256) == truth


def steady(ranks: int, seconds: int, work: dict[int, float], waits: float) -> list[Row]:
    """In each second all work, 0.3 s if nothing else is given, then are in a collective."""
    rows: list[Row] = []
    for second in range(seconds):
        for rank in range(ranks):
            took = work.get(rank, 0.3) + 0.005 * ((second + rank) % 3)
            rows.append((rank, "gemm", second, second + took))
            rows.append((rank, f"{NCCL}AllReduce", second + took, second + took + waits))
    return rows


def test_more_work_for_which_nobody_waits_costs_nothing(tmp_path: Path) -> None:
    with stored(tmp_path, chunks_of(steady(8, 8, {3: 0.5}, 0.1), 9)) as session:
        found = asked(session, 9)
    assert (found["kind"], found["lost_s"]) == ("unequal-work", 0.0), found
    assert [one["pid"] for one in found["ranks"]] == [1003]
    assert "wait" not in found["text"]


def test_a_rank_without_runs_between_others_of_its_own_was_idle() -> None:
    answer = {
        "by": "time", "slots": {"start_ns": [0, 10, 20, 30, 40], "end_ns": [10, 20, 30, 40, 50]},
        "ranks": [{"all_timed": True}, {"all_timed": False}],
        "cells": {"rank": [0, 0, 1, 1], "slot": [1, 3, 1, 3], "work_ns": [5, 5, 5, 5],
                  "collective_ns": [1, 1, 1, 1]},
    }  # fmt: skip
    work = rank_tables.times_of(answer).work
    nan = np.nan
    np.testing.assert_array_equal(work, [[nan, 5, 0, 5, nan], [nan, 5, nan, 5, nan]])


def test_ranks_that_were_timed_one_after_the_other_are_not_compared(tmp_path: Path) -> None:
    early = steady(2, 6, {}, 0.3)
    later = [(rank + 2, name, a + 7, b + 7 + 0.1 * (name == "gemm")) for rank, name, a, b in early]
    with stored(tmp_path / "a", chunks_of([*early, *later], 14, weight=2.0)) as session:
        apart = asked(session, 14)
    short = [row for row in steady(2, 3, {1: 0.6}, 0.2) if row[2] < 1]
    with stored(tmp_path / "b", chunks_of(short, 3)) as session:
        few = asked(session, 3)
    assert apart["kind"] == "unknown" and "too few of the same parts" in apart["text"]
    assert (few["kind"], few["compared"]) == ("unknown", 0) and "no rank" not in few["text"]


def test_what_a_sender_makes_of_exchanges_costs_little_and_is_not_known() -> None:
    """Half of the ranks are in long exchanges all the time, which all end together."""
    chance = np.random.default_rng(2)
    rank = chance.integers(0, 4096, 200_000)
    end = np.where(rank < 1500, 10**12 + chance.integers(0, 10**6, len(rank)), 10**9)
    begin = end - np.where(rank < 1500, 10**9, 10**5)
    calls: list[int] = []
    tracemalloc.start()
    began = time.thread_time()
    assert slow_links(rank, begin, end, check=lambda: calls.append(1)) is None
    kept = (rank >= 1500) | (np.cumsum(rank < 1500) <= MAX_LONG)
    assert slow_links(rank[kept], begin[kept], end[kept], check=lambda: calls.append(1)) is None
    assert time.thread_time() - began < 5 and tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()
    assert len(calls) > 2

    def late() -> None:
        raise QueryTimedOutError("late")

    with pytest.raises(QueryTimedOutError):
        slow_links(rank, begin, end, check=late)


def test_too_many_exchanges_make_the_answer_unknown_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(rank, name.replace("AllReduce", "SendRecv"), a, b)
            for rank, name, a, b in steady(4, 6, {}, 0.3)]  # fmt: skip
    with stored(tmp_path, chunks_of(rows, 7)) as session:
        assert asked(session, 7)["kind"] == "nothing"
        monkeypatch.setattr("sonde.query.stored_pieces.MAX_EXCHANGES", 20)
        found = asked(session, 7)
    assert found["kind"] == "unknown" and "more than 20 exchanges" in found["text"]


def test_sequences_are_compared_as_single_pieces_are() -> None:
    chance = np.random.default_rng(3)
    rows = [(rank, step, piece) for rank in range(12) for step in range(5)
            for piece in range(4 + rank % 2) if chance.random() > 0.02]  # fmt: skip
    rank, step, piece = np.array(rows).T
    seconds = chance.exponential(1, len(rows)) * (chance.random(len(rows)) > 0.05)
    counts = Counter((one[0], one[1]) for one in rows)
    work = [
        Work(f"{a in (3, 4)} {counts[a, b]} {c}", int(a in (3, 4)), a, b, c, float(took))
        for (a, b, c), took in zip(rows, seconds, strict=True)
    ]
    found = _of_sequences(Pieces(rank, step, piece, seconds), np.array([3, 4]), lambda: None)
    assert found == pytest.approx(straggling(work).excess[Straggle.SEQUENCES])


def test_ranks_that_cannot_be_compared_cost_the_answer_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(error: Exception) -> None:
        def waiting(*_: object) -> None:
            raise error

        monkeypatch.setattr(job_ranks, "waiting", waiting)

    with stored(tmp_path, job_chunks(comm="train", every=2)) as session:
        wanted = Selection(BEGIN_NS, BEGIN_NS + 12 * SECOND_NS, owners={"job": "train-7"})
        raising(CaptureTooLarge("the query needs more memory than it may use"))
        found = job.job(session, wanted, 5)
        raising(QueryTimedOutError("late"))
        with pytest.raises(QueryTimedOutError):
            job.job(session, wanted, 5)
    assert found["waiting"]["kind"] == "unknown"
    assert "more memory" in found["waiting"]["text"]
    text = as_text(found)
    assert "more memory" in text
    del found["waiting"]  # as servers of earlier versions answer
    assert as_text(found) == "\n".join(
        line for line in text.split("\n") if "more memory" not in line
    )


def test_an_incident_text_that_is_none_has_no_cause() -> None:
    for text in ("", "[]", "{", '{"cause": 3}', "[" * 100_000):
        assert job_ranks._cause(text) == ""
    assert job_ranks._cause(json.dumps({"cause": "cpu-quota"})) == "cpu-quota"
