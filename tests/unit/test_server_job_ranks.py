# SPDX-License-Identifier: Apache-2.0
"""Whom the ranks of a job wait for, at a store: jobs that others labelled, and synthetic ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from bench.faults.rank_replay import COMPUTE, EXCHANGE, named, replay

from captures import SECOND_NS, START_NS, WALL_OFFSET_NS, Writer
from rank_job import LATE, job_chunks
from sonde.cli.job import _waiting
from sonde.query.stored import Selection, StoredSession
from sonde.query.stored_ranks import TimeBin
from sonde.server import job_ranks
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
    service.catalog.close()
    service.tokens.close()


def chunks_of(rows: list[Row], seconds: float, a_node: int = 8) -> dict[str, bytes]:
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
            weight=1.0, device=rank % a_node, start_time_ns=START_NS + round(start * SECOND_NS),
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
    assert found["kind"] == "slow-worker"
    assert [one["pid"] for one in found["ranks"]] == [100 + LATE]
    assert found["node"]["node"] == "gpu-b"
    assert found["lost_s"] == pytest.approx(0.4, abs=0.05) and found["per"] == "second"
    assert any("unequal sequences" in text for text in found["missing"])
    text = "\n".join(_waiting(found))
    assert "slow worker: the others wait for train (105) on GPU 1 of gpu-b" in text
    assert of_user["kind"] == nobody["kind"] == "unknown"
    assert "ask about one job" in of_user["text"]


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


def test_an_incident_text_that_is_none_has_no_cause() -> None:
    for text in ("", "[]", "{", '{"cause": 3}', "[" * 100_000):
        assert job_ranks._cause(text) == ""
    assert job_ranks._cause(json.dumps({"cause": "cpu-quota"})) == "cpu-quota"
