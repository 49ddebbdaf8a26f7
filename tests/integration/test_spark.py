# SPDX-License-Identifier: Apache-2.0
"""Every question to a store, on Spark and on DuckDB, over the same Parquet of two servers."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from captures import Writer
from sonde.errors import CaptureError
from sonde.export.pprof_profile_pb2 import Profile
from sonde.query import stored, stored_memory
from sonde.query.selection import SUMS_VIEW, Selection
from sonde.query.stored_capture import capture_of
from sonde.query.stored_session import StoredSession
from sonde.server import answers
from sonde.server.parameters import parse
from sonde.store.catalog import Catalog
from sonde.store.compaction import compact
from sonde.store.flush import Flusher
from sonde.store.readable_files import in_bucket
from sonde.store.record import Record, digest_of
from sonde.store.storage import BucketSettings, BucketStorage
from sonde.store.wal import Wal
from stored_chunks import as_of, chunks_of, recorded

if shutil.which("java") is None:
    pytest.skip("needs Java 17 (openjdk-17-jre-headless)", allow_module_level=True)
pytest.importorskip("pyspark", reason="needs the extra `spark`")

from pyspark.sql import SparkSession

from sonde.query.spark import SparkTables


def of_traced_requests() -> list[bytes]:
    """Chunks of a server, two of whose requests were traced: the recorded ones have none."""
    writer = Writer(seconds=4.0)
    key = writer.process(42, "serve")
    stack = writer.stack("main", "answer")
    for number in range(40):
        weights = {"weight_count": 1.0, "weight_ns": 1e7 * (1 + number % 3)}
        ids = {"trace_id": f"{number % 2:032x}", "span_id": f"{number:016x}"}
        kind = ("cpu", "blocked", "runqueue")[number % 3]
        name = "futex" if kind == "blocked" else ""
        writer.add("traced", key, kind=kind, name=name, tid=42, stack_id=stack, **ids, **weights)
    return list(chunks_of(writer.bytes()))


CHUNKS = recorded()[::2]
NOW_NS = 1_800_001_800 * 10**9
FLOAT, NS = 1e-9, 1.0
"""Engines add doubles in other orders: differences, relative and absolute, that are none."""
ITEMS = [("from", "1800001000"), ("to", "1800003000"), ("before_from", "1800001800"),
         ("before_to", "1800001804")]  # fmt: skip
ELSEWHERE = {"timeline", "memory", "job"}
"""Compared by the rows that they are made of: a job's GPU hours are those of `owners`, and its
verdict reads a timeline."""
GIVEN = {
    "timeline": [("node", "a")],
    "verdict": [("node", "a")],
    "series": [("series", "sonde.agent.cpu_seconds")],
    "charts": [("series", "sonde.agent.cpu_seconds"), ("series", "hw.gpu.utilization")],
}


def fill(folder: Path, uri: str, server: str, parts: int, chunks: Sequence[bytes] = CHUNKS) -> None:
    """A server of the bucket with these chunks, in that many flushes."""
    folder.mkdir()
    catalog = Catalog(folder)
    copies = BucketStorage(folder, catalog, BucketSettings(uri, server, 1 << 40))
    copies.join()
    flusher = Flusher(folder, catalog, copies)
    for part in range(parts):
        wal = Wal(folder / "wal")
        for seq in range(part, len(chunks), parts):
            body = as_of(chunks[seq], server, seq, NOW_NS + seq * 10**9)
            digest = digest_of("lab", server, body)
            wal.append(Record("lab", server, digest, NOW_NS, body)).result(10)
        wal.close()
        flusher.flush()
    compact(folder, catalog, copies)
    catalog.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("spark")
    uri = f"file://{folder / 'bucket'}"
    fill(folder / "one", uri, "a", 1)
    fill(folder / "two", uri, "b", 13)
    found = in_bucket(uri, "lab", 1_800_001_000 * 10**9, 1_800_003_000 * 10**9)
    assert Counter("/sample_summed/" in path for path in found[SUMS_VIEW]) == {True: 1, False: 1}
    fill(folder / "three", uri, "c", 1, of_traced_requests())
    return in_bucket(uri, "lab", 1_800_001_000 * 10**9, 1_800_003_000 * 10**9)


@pytest.fixture(scope="module")
def spark(files: dict[str, list[str]]) -> Iterator[SparkTables]:
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.adaptive.enabled", "false")
        # Little data: compilers of Spark and Java would take longer than what they save.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    yield SparkTables(session, files)
    session.stop()


@pytest.fixture(scope="module")
def duck(files: dict[str, list[str]]) -> Iterator[StoredSession]:
    paths = {
        name: [Path(one.removeprefix("file://")) for one in some] for name, some in files.items()
    }
    top = next(path for some in paths.values() for path in some).parents[6]
    session = StoredSession(top, paths)
    yield session
    session.close()


def key_of(row: dict[str, Any]) -> str:
    return repr([value for value in row.values() if not isinstance(value, float)])


def differing(one: Any, two: Any, where: str = "") -> str:
    """Where two answers differ; '': nowhere."""
    if isinstance(one, dict) and isinstance(two, dict):
        if list(one) != list(two):
            return f"{where}: {list(one)} {list(two)}"
        found = (differing(one[name], two[name], f"{where}.{name}") for name in one)
        return next(filter(None, found), "")
    if isinstance(one, list) and isinstance(two, list):
        if len(one) != len(two):
            return f"{where}: {len(one)} {len(two)}"
        pairs = enumerate(zip(one, two, strict=True))
        return next(filter(None, (differing(*pair, f"{where}[{at}]") for at, pair in pairs)), "")
    if isinstance(one, float) or isinstance(two, float):
        # What is not shown is the difference of two sums of 1e11 and more.
        least = NS if where.endswith(".not_shown") else FLOAT
        is_close = math.isclose(one, two, rel_tol=FLOAT, abs_tol=least)
        return "" if is_close else f"{where}: {one} {two}"
    return "" if one == two else f"{where}: {one!r} {two!r}"


def plain(answer: Any) -> Any:
    """An answer, without what no question promises: the order of equals, numbers given to names."""
    if isinstance(answer, pa.Table):
        return sorted(answer.to_pylist(), key=key_of)
    if isinstance(answer, answers.Answer):
        profile = Profile()
        import gzip

        profile.ParseFromString(gzip.decompress(answer.content))
        names = {one.id: profile.string_table[one.name] for one in profile.function}
        places = {
            one.id: [names[line.function_id] for line in one.line] for one in profile.location
        }
        stacks: Counter[str] = Counter()
        for sample in profile.sample:
            stacks[repr([places[at] for at in sample.location_id])] += sample.value[-1]
        return {name: float(stacks[name]) for name in sorted(stacks)}
    return json.loads(answers.written(answer, parse(())).content)


@pytest.mark.parametrize("name", sorted(set(answers.QUESTIONS) - ELSEWHERE))
def test_spark_answers_as_duckdb_does(name: str, spark: SparkTables, duck: StoredSession) -> None:
    options = parse(ITEMS + GIVEN.get(name, []))
    question = answers.QUESTIONS[name]

    expected = plain(question.answer(duck, options))
    found = plain(question.answer(spark, options))  # type: ignore[arg-type]

    assert expected
    assert differing(expected, found, name) == ""


def test_memory_is_summed_alike(spark: SparkTables, tmp_path: Path) -> None:
    kinds = [("mapped", ""), ("mapped", "reserved"), ("unmapped", ""), ("faulted", "")]
    rows = [
        {
            "node": "a", "kind": kind, "name": name, "pid": at % 3, "start_ns": 1,
            "time_ns": NOW_NS + at, "weight_bytes": 100.0 * at, "weight_count": 1.0,
        }
        for at in range(40)
        for kind, name in [kinds[at % 4]]
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sample.parquet", compression="zstd")
    path = tmp_path / "sample.parquet"
    on_spark = SparkTables(spark.session, {"sample": [f"file://{path}"]})
    on_duck = StoredSession(tmp_path, {"sample": [path]})
    wanted = parse(ITEMS).selection

    expected, found = (stored_memory.memory(one, wanted).to_pylist() for one in (on_duck, on_spark))
    on_duck.close()

    assert len(expected) == 3
    assert expected == found


def test_deep_stacks_are_cut_alike(spark: SparkTables, tmp_path: Path) -> None:
    lists = [list(range(1, length + 1)) for length in (0, 3, 1_024, 1_025, 5_000)]
    count = len(lists)
    frames = list(range(1, 5_001))
    tables = {
        "stack": {"key": range(count), "frame_keys": pa.array(lists, pa.list_(pa.int64()))},
        "sample": {
            "node": ["n"] * count, "time_ns": [NOW_NS] * count, "kind": ["cpu"] * count,
            "pid": [7] * count, "tid": [7] * count, "start_ns": [1] * count, "name": [""] * count,
            "stack": range(count), "weight_count": [1.0] * count,
            "weight_ns": [float(9 - at) for at in range(count)], "weight_bytes": [0.0] * count,
        },
        "frame": {
            "key": frames, "kind": ["user"] * 5_000, "function": ["x" * 9_000] * 5_000,
            "binary": ["b"] * 5_000, "file": [f"{at}.c" for at in frames], "line": frames,
        },
    }  # fmt: skip
    paths = {}
    for name, columns in tables.items():
        paths[name] = tmp_path / name / "day=1" / "hour=1" / "a.parquet"
        paths[name].parent.mkdir(parents=True)
        pq.write_table(pa.table(columns), paths[name], compression="zstd")
    on_spark = SparkTables(spark.session, {name: [f"file://{it}"] for name, it in paths.items()})
    on_duck = StoredSession(tmp_path, {name: [it] for name, it in paths.items()})
    wanted = parse(ITEMS).selection

    expected, found = (stored.flame_graph(one, wanted).to_pylist() for one in (on_duck, on_spark))
    assert expected == found
    assert [len(row["frame_keys"]) for row in found] == [0, 3, 1_024, 1_024, 1_024]
    assert found[4]["frame_keys"] == [*range(1, 513), stored.CUT_KEY, *range(4_490, 5_001)]
    for keys in (frames[:10], frames):
        expected, found = (stored.frames(one, keys).to_pylist() for one in (on_duck, on_spark))
        assert expected == found
        assert len(found[0]["function"]) == stored.TEXT_CHARS
    on_duck.close()


def test_spark_reads_a_node_as_a_capture(spark: SparkTables, duck: StoredSession) -> None:
    """What a timeline and a verdict are made from."""
    wanted = parse([*ITEMS, ("node", "a")]).selection
    expected, found = (capture_of(one, wanted) for one in (duck, spark))

    assert found.info == expected.info
    for name, table in expected.tables.items():
        rows = [Counter(map(repr, one.to_pylist())) for one in (table, found.tables[name])]
        assert rows[0] == rows[1], name


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "blocked", "nodes": ["b"]},
        {"kind": "kernel"},
        {"start_ns": NOW_NS + 3 * 10**9, "owners": {"user": "root"}},
        {"start_ns": 0, "end_ns": 1},
    ],
    ids=["blocked", "kernel", "owner", "nothing"],
)
def test_selections_choose_the_same_rows(
    changed: dict[str, Any], spark: SparkTables, duck: StoredSession
) -> None:
    wanted: Selection = replace(parse(ITEMS).selection, **changed)
    expected, found = (
        [stored.totals(one, wanted), plain(stored.flame_graph(one, wanted))]  # type: ignore[arg-type]
        for one in (duck, spark)
    )
    assert differing(expected, found) == ""


def test_what_spark_refuses_is_an_error_of_ours(spark: SparkTables) -> None:
    for sql in ("SELECT nothing FROM sample", "SELECT (", "SELECT ? + 9223372036854775807"):
        with pytest.raises(CaptureError, match="Spark cannot answer"):
            spark.arrow(sql, [1] if "?" in sql else [])
