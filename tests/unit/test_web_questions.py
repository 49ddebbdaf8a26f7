# SPDX-License-Identifier: Apache-2.0
"""Questions of the web page, over chunks of a real GPU, and the page's files."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.applications import Starlette

from sonde.analyze.bound import explain
from sonde.errors import CaptureError
from sonde.export import packed, strict_json, timeline_columns
from sonde.query import framing, stored, stored_charts
from sonde.query.capture import read
from sonde.query.run_columns import no_runs, run_columns
from sonde.query.selection import Selection
from sonde.query.stored_capture import capture_of
from sonde.query.stored_session import StoredSession
from sonde.query.table_columns import columns
from sonde.query.timeline import of_capture
from sonde.recording.timelines import open_timeline
from sonde.server import answers, pages, timeline_answers
from sonde.server.parameters import parse
from sonde.server.service import Service
from sonde.store.flush import Flusher

CAPTURE = Path(__file__).parents[1] / "data" / "explain" / "own" / "cpu_quota.sonde"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredSession]:
    """A store that holds the capture as node `one`, and other chunks as node `two`."""
    yield from in_a_store(tmp_path_factory.mktemp("web") / "store")


@pytest.fixture
def earlier(tmp_path: Path) -> Iterator[StoredSession]:
    """The same, stored before frames had an origin."""
    yield from in_a_store(tmp_path / "store", without="origin")


def in_a_store(folder: Path, without: str = "") -> Iterator[StoredSession]:
    service = Service(folder, open_tenant="default", flushes=False)
    caller = service.caller("")
    assert caller
    content = CAPTURE.read_bytes()[framing.FILE_HEADER.size :]
    for node in ("one", "two"):
        for future, _ in service.take(caller, node, content):
            future.result(20)
    everything = Selection(0, 1 << 62)
    service.wal.close()
    assert Flusher(service.folder, service.catalog).flush().chunks == 6
    for path in service.folder.rglob("*.parquet") if without else ():
        table = pq.read_table(path)
        if without in table.column_names:
            pq.write_table(table.drop_columns([without]), path)
    session = service.session(caller, everything)
    yield session
    session.close()
    service.catalog.close()
    service.tokens.close()


def selected(start_s: float = 0.0, end_s: float = 0.0) -> Selection:
    info = read(CAPTURE).info
    begin = info.start_ns + info.wall_offset_ns  # rows of samples may begin up to a tick earlier
    end = info.end_ns + info.wall_offset_ns
    return Selection(
        begin + round((start_s or -5) * 1e9),
        begin + round(end_s * 1e9) if end_s else end + 5_000_000_000,
        nodes=["one"],
    )


def test_a_stored_node_reads_as_the_capture_that_it_sent(session: StoredSession) -> None:
    found, sent = capture_of(session, selected()), read(CAPTURE)
    for name in ("sample", "activity", "span", "device_run", "metric", "thread", "frame"):
        assert found.tables[name].num_rows == sent.tables[name].num_rows, name
    of_store, of_file = of_capture(found), of_capture(sent)
    shift = sent.info.wall_offset_ns
    # Each chunk has its own offset to the time since 1970: the clocks drift apart in between.
    drift = np.abs(of_store.states.start_ns - shift - of_file.states.start_ns)
    assert drift.max() < 10_000
    one, other = explain(of_store).verdicts[0], explain(of_file).verdicts[0]
    assert one.bound == other.bound
    assert [cause.key for cause in one.causes[:2]] == [cause.key for cause in other.causes[:2]]
    assert len(run_columns(found)) == sent.tables["device_run"].num_rows


def test_a_store_of_earlier_versions_is_read(earlier: StoredSession) -> None:
    assert "origin" not in earlier.arrow("SELECT * FROM frame LIMIT 0").column_names
    found, sent = capture_of(earlier, selected()), read(CAPTURE)
    assert found.tables["frame"].num_rows == sent.tables["frame"].num_rows
    assert set(found.tables["frame"].column("origin").to_pylist()) == {""}


def test_a_timeline_is_json_with_times_after_its_origin(session: StoredSession) -> None:
    wanted = selected(3, 6)
    drawn = packed.plain(timeline_answers.timeline(session, wanted))
    assert len(strict_json.dumps(drawn)) < 1 << 20
    assert drawn["origin_ns"] == wanted.start_ns
    for name in ("calls", "states"):
        columns = drawn[name]
        assert columns["start"]
        assert all(start <= 3e9 for start in columns["start"])
        assert all(end >= 0 for end in columns["end"])
        assert max(columns["track"]) < len(drawn["tracks"])
    assert drawn["sampled"]
    assert drawn["runs"]["weight"][0] > 1


def unpacked(content: bytes) -> Any:
    """As web/src/packed.ts reads it."""
    length, version = struct.unpack_from("<II", content)
    assert version == 1
    base = 8 + -(-length // 8) * 8

    def column(value: dict[str, Any]) -> Any:
        if "$" not in value:
            return value
        kind, at, count = value["$"]
        assert at % 8 == 0
        dtype = {"f64": "<f8", "i32": "<i4", "u8": "u1"}[kind]
        return np.frombuffer(content, dtype, count, base + at).tolist()

    return json.loads(content[8 : 8 + length], object_hook=column)


def test_a_packed_timeline_holds_what_the_plain_one_does(session: StoredSession) -> None:
    drawn = timeline_answers.timeline(session, selected(3, 6))
    assert unpacked(packed.encode(drawn)) == json.loads(strict_json.dumps(packed.plain(drawn)))
    few = timeline_answers.timeline(session, selected(3, 6), 10)
    assert len(few["states"]["start"]) == 10
    assert few["states"]["left_out"] == len(drawn["states"]["start"]) - 10


def test_names_cannot_stand_for_columns() -> None:
    document = {"names": ['{"$":["f64",0,9]}'], "big": np.array([1 << 40]), "no": np.array([], int)}
    assert unpacked(packed.encode(document)) == packed.plain(document)


def test_tables_come_in_columns(session: StoredSession) -> None:
    table = stored_charts.devices(session, selected())
    found = unpacked(packed.encode(columns(table)))
    assert found["rows"] == table.num_rows
    series = found["texts"]["series"]
    names = [series["values"][index] for index in series["index"]]
    assert names == table.column("series").to_pylist()
    assert found["numbers"]["mean"] == table.column("mean").to_pylist()


@pytest.mark.parametrize("encoded", [False, True])
def test_a_missing_text_of_a_table_in_columns_is_empty(encoded: bool) -> None:
    owner = pa.array([None, "a", None, "b"])
    texts = columns(pa.table({"owner": owner.dictionary_encode() if encoded else owner}))["texts"]
    found = texts["owner"]
    assert [found["values"][index] for index in found["index"]] == ["", "a", "", "b"]


def test_a_timeline_needs_one_node_that_sent_something(session: StoredSession) -> None:
    with pytest.raises(CaptureError, match="one node"):
        timeline_answers.timeline(session, Selection(0, 1 << 62))
    with pytest.raises(CaptureError, match="sent nothing"):
        timeline_answers.timeline(session, Selection(0, 1_000_000_000, nodes=["one"]))


def test_charts_hold_metrics_and_what_was_observed(session: StoredSession) -> None:
    rows = stored_charts.charts(session, selected(), ["hw.power"], 100).to_pylist()
    series = {row["series"] for row in rows}
    assert series == {"hw.power", "sonde.cpu", "sonde.device.busy", "sonde.device.launches"}
    assert {row["node"] for row in rows} == {"one"}
    sent = read(CAPTURE).tables["sample"].to_pylist()
    on_cpu = sum(row["weight_ns"] for row in sent if row["kind"] == "cpu")
    shown = sum(row["value"] for row in rows if row["labels"] == "cpu")
    assert shown * 1e9 == pytest.approx(on_cpu, rel=1e-6)


def test_devices_and_kernels_add_up(session: StoredSession) -> None:
    devices = stored_charts.devices(session, selected()).to_pylist()
    power = next(row for row in devices if row["series"] == "hw.power")
    assert power["least"] <= power["mean"] <= power["most"]
    kernels = stored_charts.kernels(session, selected()).to_pylist()
    runs = [row for row in read(CAPTURE).tables["device_run"].to_pylist() if row["kind"] != "sync"]
    assert sum(row["runs"] for row in kernels) == pytest.approx(sum(row["weight"] for row in runs))


def got(static: Path, path: str) -> tuple[int, dict[str, str], str]:
    """(status, headers, body) of a GET."""
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "root_path": "",
    }

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    app = Starlette(routes=list(pages.routes(static)))
    asyncio.run(app(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], headers, body.decode()


def test_without_a_built_page_the_server_answers_how_to_build_it(tmp_path: Path) -> None:
    status, headers, body = got(tmp_path, "/")
    assert status == 503
    assert "scripts/setup build" in body
    assert "default-src 'none'" in headers["content-security-policy"]


def test_only_files_of_the_page_are_served(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "secret.js").write_text("no")
    (tmp_path / "assets" / "a.js").write_text("1")
    assert got(tmp_path, "/")[1]["cache-control"] == "no-cache"
    assert got(tmp_path, "/assets/a.js")[1]["content-type"].startswith("text/javascript")
    for name in ("../secret.js", "..%2fsecret.js", "b.js", "../index.html", ".."):
        assert got(tmp_path, f"/assets/{name}")[0] == 404, name


@pytest.mark.parametrize("by", ["process", "thread"])
def test_stacks_kept_apart_add_up_to_all_of_them(session: StoredSession, by: str) -> None:
    wanted = selected()
    together = stored.flame_graph(session, wanted).to_pylist()
    apart = stored.flame_graph(session, wanted, by=by).to_pylist()
    assert sum(row["ns"] for row in apart) == pytest.approx(sum(row["ns"] for row in together))
    names = {row["group_name"] for row in apart}
    assert "python3 (1097)" in names
    assert len(names) >= (1 if by == "process" else 3)
    both = stored.flame_graph(session, replace(wanted, nodes=[]), by=by).to_pylist()
    assert {row["group_name"].split(" ")[0] for row in both} == {"one", "two"}


def test_stacks_of_a_group_have_it_as_their_outermost_frame(session: StoredSession) -> None:
    options = replace(parse([("group", "thread")]), selection=selected())
    answer = answers.QUESTIONS["flamegraph"].answer(session, options)
    found = json.loads(answers.written(answer, options).content)
    outermost = {found["frames"][stack["frames"][-1]]["kind"] for stack in found["stacks"]}
    assert outermost == {"thread"}
    with pytest.raises(CaptureError, match="not kept by 'evil'"):
        stored.flame_graph(session, selected(), by="evil")


def test_counters_of_a_timeline_are_on_its_clock() -> None:
    found = of_capture(read(CAPTURE))
    begin = found.start_ns
    drawn = timeline_columns.document(found, (), run_columns(read(CAPTURE)), begin)
    power = next(one for one in drawn["counters"] if one["label"].endswith("hw.power"))
    assert len(power["time"]) == len(power["value"]) > 1
    assert power["time"].min() >= 0 and power["time"].max() <= found.end_ns - begin
    assert unpacked(packed.encode(drawn))["counters"][0]["value"]


def test_steps_and_launches_of_a_trace_are_on_its_clock() -> None:
    found = open_timeline([CAPTURE.parents[1] / "transformer.json.gz"])
    begin = found.start_ns
    steps = timeline_columns.steps(explain(found), begin)
    assert len(steps["start"]) == len(steps["end"]) == len(steps["like"]) > 3
    assert steps["anchor"] and (steps["end"] > steps["start"]).all()
    assert steps["start"].min() >= 0 and steps["end"].max() <= found.end_ns - begin
    drawn = timeline_columns.document(found, (), no_runs(), begin)
    runs = drawn["device"]["correlation"]
    assert set(runs[runs > 0]) & set(drawn["calls"]["correlation"])
    assert len(drawn["host"]["start"]) == len(found.host)


def test_a_timeline_without_steps_has_none() -> None:
    steps = timeline_columns.steps(explain(of_capture(read(CAPTURE))), 0)
    assert [len(steps[name]) for name in ("start", "end", "like")] == [0, 0, 0]
