# SPDX-License-Identifier: Apache-2.0
"""What flame graphs and other answers take of the server's own process, whatever was stored."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sonde.errors import CaptureTooLarge
from sonde.export import strict_json
from sonde.export.pprof_profile_pb2 import Profile as PprofProfile
from sonde.limits import common_length
from sonde.model.collectives import is_collective
from sonde.query import (
    flame_boxes,
    stored,
    stored_flame,
    stored_objects,
    stored_ranks,
    stored_session,
)
from sonde.query.selection import Selection
from sonde.query.stored_session import QueryTimedOutError, StoredSession
from sonde.server import answers
from sonde.server.parameters import Form, Options, parse

WANTED = Selection(0, 1_000)
NAMES = ("frame", "stack", "sample")
PROMISED_BYTES = 256 << 20
"""Of one question: docs/guide/server.md."""


def store(
    folder: Path, stacks: list[list[int]], texts: dict[str, list[str]] | None = None
) -> dict[str, list[Path]]:
    """The files of a store with these stacks (leaf first), each heavier than the next by 1 ns, and
    of the frames that they have, functions called f1, f2, …, or what `texts` has."""
    count = len(stacks)
    keys = np.unique(np.concatenate([np.asarray(stack, np.int64) for stack in stacks]))
    names = [f"f{key}" for key in keys.tolist()]
    empty = [""] * len(keys)
    tables = {
        "frame": {
            "key": keys, "kind": ["user"] * len(keys), "function": names,
            "binary": ["b"] * len(keys), "file": empty,
            "line": np.zeros(len(keys), np.int64), **(texts or {}),
        },
        "stack": {"key": np.arange(count), "frame_keys": pa.array(stacks, pa.list_(pa.int64()))},
        "sample": {
            "node": ["n"] * count, "time_ns": np.full(count, 5), "kind": ["cpu"] * count,
            "pid": np.full(count, 7), "tid": np.full(count, 7), "start_ns": np.full(count, 1),
            "name": [""] * count, "stack": np.arange(count), "weight_count": np.ones(count),
            "weight_ns": 1e6 - np.arange(count), "weight_bytes": np.zeros(count),
        },
    }  # fmt: skip
    files = {}
    for name, columns in tables.items():
        path = folder / name / "day=1" / "hour=1" / "a.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table(columns), path)
        files[name] = [path]
    return files


def session_of(folder: Path, files: dict[str, list[Path]]) -> StoredSession:
    return StoredSession(folder, files)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[StoredSession]:
    """Twenty stacks of ten frames, all different."""
    stacks = [list(range(10 * at + 1, 10 * at + 11)) for at in range(20)]
    found = session_of(tmp_path, store(tmp_path, stacks))
    yield found
    found.close()


def kib(name: str) -> int:
    """A figure of this process in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def options(**changed: Any) -> Options:
    return replace(parse([]), selection=WANTED, **changed)


def answered(session: StoredSession, question: str, **changed: Any) -> Any:
    wanted = options(**changed)
    found = answers.written(answers.QUESTIONS[question].answer(session, wanted), wanted)
    return json.loads(found.content) if "json" in found.media_type else found.content


def test_sums_stay_right_where_stacks_have_no_room(
    session: StoredSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answered(session, "flamegraph")
    assert len(whole["stacks"]) == 20 and session.rows_left_out == 0
    monkeypatch.setattr(stored_flame, "MAX_FRAMES", 55)

    graph = answered(session, "flamegraph")
    assert session.rows_left_out == 15
    assert graph["stacks"][:5] == whole["stacks"][:5]  # the heaviest, as they were
    *shown, rest = graph["stacks"]
    assert len(shown) == 5 and len(graph["frames"]) == 51
    assert graph["frames"][rest["frames"][0]]["function"] == "[other stacks]"
    for name in ("n", "ns", "bytes"):
        assert sum(row[name] for row in graph["stacks"]) == pytest.approx(graph["total"][name])
        assert rest[name] == sum(row[name] for row in whole["stacks"][5:])

    tree = answered(session, "flametree")
    assert tree["root"]["value"] + tree["not_shown"] == tree["total"] == whole["total"]["ns"]
    assert tree["not_shown"] == rest["ns"]

    profile = PprofProfile()
    profile.ParseFromString(gzip.decompress(answered(session, "pprof")))
    assert [sum(one.value[at] for one in profile.sample) for at in (0, 1)] == [
        whole["total"]["n"], whole["total"]["ns"],
    ]  # fmt: skip
    assert len(profile.location) == 51 and "[other stacks]" in profile.string_table


def test_what_the_statement_leaves_out_is_in_the_sums(
    session: StoredSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_STACK_FRAMES", 30)
    graph = answered(session, "flamegraph")
    assert len(graph["stacks"]) == 4
    assert sum(row["ns"] for row in graph["stacks"]) == graph["total"]["ns"]


def test_deep_stacks_keep_both_ends_and_leave_others_their_room(tmp_path: Path) -> None:
    deep = [list(range(1, 65_001)), *([at] for at in range(70_000, 70_010))]
    session = session_of(tmp_path, store(tmp_path, deep))
    graph = answered(session, "flamegraph")
    first, *others = graph["stacks"]
    names = [graph["frames"][at]["function"] for at in first["frames"]]
    assert len(names) == stored.MAX_DEPTH and len(others) == 10
    assert names[:512] == [f"f{at}" for at in range(1, 513)]
    assert names[512] == "[frames left out]"
    assert names[513:] == [f"f{at}" for at in range(65_001 - 511, 65_001)]
    assert "[frames left out]" in str(gzip.decompress(answered(session, "pprof")))
    box = answered(session, "flametree")["root"]["children"][0]
    assert box["name"] == "f65000"
    session.close()


def test_texts_are_cut_before_they_are_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide character makes four bytes of each other one."""
    frames = list(range(1, 101))
    long = [f"{at:05}" + "a" * 4_000 + "\U0001f600" for at in frames]
    files = store(tmp_path, [frames], {"function": long, "file": ["x.py"] * 100})
    session = session_of(tmp_path, files)
    whole = stored.frames(session, frames)
    assert whole.column("function").to_pylist() == long

    monkeypatch.setattr(stored_flame, "TEXTS_BYTES", 100_000)
    graph = answered(session, "flamegraph")
    sizes = [sys.getsizeof(one["function"]) for one in graph["frames"]]
    assert 50_000 < sum(sizes) < 130_000
    assert all(one["function"].endswith("…") for one in graph["frames"])
    assert {one["file"] for one in graph["frames"]} == {"x.py"}

    monkeypatch.setattr(stored, "TEXTS_CHARS", 40_000)
    few = stored.frames(session, frames)
    assert pc.max(pc.utf8_length(few.column("function"))).as_py() == 40_000 // (4 * 100)
    assert few.column("file").to_pylist() == ["x.py"] * 100
    session.close()


@pytest.mark.parametrize("most", [0, 10, 100, 1_000, 4_000, 100_000])
def test_only_the_longest_texts_are_cut(most: int) -> None:
    sizes = [3, 500, 17, 1_000, 1_000, 90, 0]
    assert stored_objects.common_bytes(np.array(sizes), most) == common_length(sizes, most)
    table = pa.table({"text": ["a" * size for size in sizes], "number": range(len(sizes))})
    cut = stored_objects.fitting(table, most, 32).column("text").to_pylist()
    length = max(32, common_length([size for size in sizes if size > 32], most))
    for text, size in zip(cut, sizes, strict=True):
        assert len(text) == (min(size, length) if size > 32 else size)


@pytest.mark.parametrize("most", [0, 1, 9, 10, 11, 35, 200, 10_000])
def test_the_heaviest_stacks_within_a_number_of_frames_are_chosen(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_flame, "_AT_ONCE", 64)
    chance = np.random.default_rng(7)
    lists = [chance.integers(0, 60, int(size)) for size in chance.integers(0, 20, 200)]
    ends = np.cumsum([len(one) for one in lists])
    count, keys = stored_flame.within(np.concatenate(lists), ends, most, lambda: None)
    known: set[int] = set()
    expected = 0
    for one in lists:
        if len(known | {*one.tolist()}) > most:
            break
        known |= {*one.tolist()}
        expected += 1
    assert (count, keys.tolist()) == (expected, sorted(known))


def test_rows_become_objects_some_at_a_time() -> None:
    table = pa.table({"n": range(10_000), "text": ["x" * 3_000] * 10_000})
    parts: list[int] = []
    made = stored_objects.rows(table, lambda: parts.append(1))
    assert next(made)["n"] == 0 and len(parts) == 1
    assert [row["n"] for row in made] == list(range(1, 10_000))
    assert len(parts) >= 10_000 * 3_000 / stored_objects.TEXT_BYTES
    assert stored_objects.lists(table.slice(0, 5_000)) == table.slice(0, 5_000).to_pydict()
    assert list(stored_objects.rows(table.slice(0, 0))) == []


def test_a_question_ends_in_time_while_rows_become_objects(session: StoredSession) -> None:
    stacks = stored_flame.FlameStacks(session, WANTED)
    with session.deadline(0.0), pytest.raises(QueryTimedOutError):
        flame_boxes.merged(stacks, stacks.frames(), "ns")


@pytest.mark.parametrize("boxes", [50, 20_000])
def test_level_by_level_gives_the_same_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boxes: int
) -> None:
    """Stacks that call themselves, share names, are deeper than is shown, of code that is not
    known, and with frames left out."""
    draw = random.Random(1)
    stacks = [[draw.randrange(1, 30) for _ in range(draw.randrange(1, 60))] for _ in range(300)]
    stacks += [[*range(100, 100 + 2 * flame_boxes.DEEPEST)], [stored.CUT_KEY, 3, 4]]
    files = store(tmp_path, stacks)
    (path,) = files["frame"]
    frames = pq.read_table(path)
    names = [f"f{key % 7}" if key % 5 else "" for key in frames.column("key").to_pylist()]
    at = frames.column_names.index("function")
    frames = frames.set_column(at, "function", pa.array(names))
    is_known = pc.invert(pc.is_in(frames.column("key"), pa.array([9, 11, stored.CUT_KEY])))
    pq.write_table(frames.filter(is_known), path)
    monkeypatch.setattr(flame_boxes, "MAX_NODES", boxes)
    with closing(session_of(tmp_path, files)) as session:
        found = stored_flame.FlameStacks(session, WANTED)
        quickly = flame_boxes.merged_by_level(found, "ns")
        one_by_one = flame_boxes.merged(found, found.frames(), "ns")
        monkeypatch.setattr(flame_boxes, "MAX_MADE", 100)
        few = flame_boxes.merged_by_level(found, "ns")
    assert len(few.values) <= 101
    assert few.values[0] == quickly.values[0]
    assert quickly.left_out == one_by_one.left_out
    assert sorted(quickly.values) == sorted(one_by_one.values)
    if boxes > 50:  # of boxes that weigh the same others may be left out
        assert quickly.nested() == one_by_one.nested() == json.loads(quickly.as_json())


def test_boxes_that_weigh_the_same_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flame_boxes, "MAX_NODES", 100)
    rows = [{"frame_keys": [at, at + 1], "ns": 1.0} for at in range(0, 1_000, 2)]
    frames = {at: {"function": f"f{at}", "binary": "", "kind": ""} for at in range(1_000)}
    tree = flame_boxes.merged(rows, {}, "ns")
    assert tree.left_out == 0  # one function
    tree = flame_boxes.merged(rows, frames, "ns")
    assert json.dumps(tree.nested()).count('"name"') == 102
    assert (tree.left_out, tree.values[0]) == (899, 500.0)


def test_boxes_are_written_as_they_are_nested() -> None:
    rows = [{"frame_keys": [at, at % 9, 5_000], "ns": 1.0 + at} for at in range(3_000)]
    frames = {
        at: {"function": f'f"{at}\n\x01é', "binary": "b", "kind": "user"} for at in range(5_001)
    }
    boxes = flame_boxes.merged(rows, frames, "ns")
    assert json.loads(boxes.as_json()) == boxes.nested()
    boxes.own = [float("nan"), *boxes.own[1:]]
    boxes.values = [float("inf"), *boxes.values[1:]]
    expected = json.loads(strict_json.dumps(boxes.nested()))
    written = answers.written({"root": strict_json.Encoded(boxes.as_json())}, options()).content
    assert json.loads(written) == {"root": expected}


def test_rows_of_long_texts_are_refused_before_they_are_many(
    session: StoredSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that a file has once can be in each row of an answer."""
    monkeypatch.setattr(stored_session, "MAX_BYTES", 1 << 20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = kib("VmHWM")
    with pytest.raises(CaptureTooLarge):
        session.arrow("SELECT repeat('x', 10000) AS t FROM range(60000)")
    assert kib("VmHWM") - before < 250 << 10


def test_columns_of_long_texts_are_refused_before_they_are_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "ANSWER_BYTES", 100_000)
    wide = pa.table({"text": [f"{at}" + "a" * 400 + "\U0001f600" for at in range(100)]})
    with pytest.raises(CaptureTooLarge):
        answers.written(wide, options(form=Form.COLUMNS))
    assert answers.written(wide.slice(0, 10), options(form=Form.COLUMNS)).content


def test_kernels_that_exchange_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"ncclAllReduce{at:04}" for at in range(50)] + ["gemm"]
    rows = {"name": names, "kind": ["kernel"] * 51, "start_time_ns": [5] * 51}
    path = tmp_path / "device_run.parquet"
    pq.write_table(pa.table(rows), path)
    session = StoredSession(tmp_path, {"device_run": [path]})
    assert stored_ranks.kernels_like(session, WANTED, is_collective) == names[:50]
    assert session.rows_left_out == 0
    monkeypatch.setattr(stored_ranks, "_MATCHING_BYTES", 30 * len(names[0]))
    assert stored_ranks.kernels_like(session, WANTED, is_collective) == names[:30]
    assert session.rows_left_out == 20
    session.close()


ASKING = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import test_server_flame_bounds as it
from sonde.export import stored_pprof
folder = Path({folder!r})
files = {{name: [folder / name / "day=1/hour=1/a.parquet"] for name in it.NAMES}}
before = it.kib("VmRSS")
it.ask_once(folder, files, {question!r})
print(1024 * (it.kib("VmHWM") - before))
"""


def ask_once(folder: Path, files: dict[str, list[Path]], question: str) -> None:
    """For `ASKING`: answer a question as the server does, and drop the answer."""
    session = session_of(folder, files)
    found = answers.QUESTIONS[question].answer(session, options())
    session.close()
    answers.written(found, options())


@pytest.fixture(scope="module")
def very_many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with 300,000 code locations."""
    folder = tmp_path_factory.mktemp("many")
    keys = np.arange(1, 300_001)
    stacks = [part.tolist() for part in np.split(keys, 3_000)]
    names = ("function", "binary", "file")
    store(folder, stacks, {name: [f"{name}_{key:x}" for key in keys] for name in names})
    return folder


@pytest.mark.parametrize("question", ["flametree", "flamegraph", "pprof"])
def test_very_many_frames_take_no_more_than_is_promised(very_many: Path, question: str) -> None:
    script = ASKING.format(path=sys.path, folder=str(very_many), question=question)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert 0 < int(done.stdout) < PROMISED_BYTES
