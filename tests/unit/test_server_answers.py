# SPDX-License-Identifier: Apache-2.0
"""Answers of a server's questions: as the description has them, and equal to a recount."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from sonde.errors import CaptureTooLarge, SondeError, UsageError
from sonde.export.pprof_profile_pb2 import Profile as PprofProfile
from sonde.query import flame_boxes, stored_capture
from sonde.query.flame_boxes import Boxes
from sonde.query.selection import Selection
from sonde.query.stored_session import QueryTimedOutError
from sonde.server import answers
from sonde.server.openapi import document
from sonde.server.parameters import parse
from sonde.server.schemas import ANSWERS, FLAME_NODE, UNDESCRIBED
from sonde.server.served_session import ServedSession
from sonde.server.service import Service
from sonde.server.tokens import Caller, Scope
from sonde.store.flush import Flusher
from stored_chunks import as_of, recorded, rows_of

NOW_NS = 1_800_001_800 * 10**9
CHUNKS = recorded()
ME = Caller("test", "default", frozenset(Scope))
TYPES = {
    "string": str, "integer": int, "number": (int, float), "array": list, "object": dict,
    "null": type(None), "boolean": bool,
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("store")
    service = Service(folder, open_tenant="default", flushes=False)
    for node in ("one", "two"):
        for seq, chunk in enumerate(CHUNKS):
            body = as_of(chunk, node, seq, NOW_NS + seq * 10**9)
            for future, _ in service.take(ME, node, body):
                future.result(10)
    service.wal.close()
    Flusher(folder, service.catalog).flush()
    yield service
    service.children.close()
    service.catalog.close()
    service.tokens.close()


def ask(service: Service, question: str, **given: object) -> Any:
    items = [("from", "1799990000"), ("to", "1800090000")]
    options = parse(items + [(name, str(value)) for name, value in given.items()])
    answer = answers.ask(service, ME, answers.QUESTIONS[question], options)
    return answer.content if "json" not in answer.media_type else json.loads(answer.content)


def check(value: Any, schema: dict[str, Any], where: str) -> None:
    if "$ref" in schema:
        schema = FLAME_NODE
    if "enum" in schema:
        assert value in schema["enum"], where
        return
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    fits = [kind for kind in kinds if isinstance(value, TYPES[kind])]
    assert fits and isinstance(value, bool) == (kinds == ["boolean"]), (
        f"{where}: {value!r} is no {kinds}"
    )
    if "properties" in schema:
        assert set(schema["required"]) <= set(value) <= set(schema["properties"]), where
        for name, one in value.items():
            check(one, schema["properties"][name], f"{where}.{name}")
    if "items" in schema:
        for one in value:
            check(one, schema["items"], f"{where}[]")


@pytest.mark.parametrize("question", sorted(ANSWERS))
def test_answers_are_as_described(service: Service, question: str) -> None:
    for kind in ("cpu", "blocked", "faulted"):
        given = {"kind": kind, "series": "sonde.agent.cpu_seconds"}
        if question == "job":
            given["user"] = "root"
        check(ask(service, question, **given), ANSWERS[question], question)


def test_every_question_is_described() -> None:
    described = {name.removeprefix("/v1/") for name in document()["paths"]}

    assert set(answers.QUESTIONS) <= described
    assert set(answers.QUESTIONS) - set(ANSWERS) == UNDESCRIBED


@pytest.mark.parametrize("kind", ["cpu", "blocked", "device"])
def test_a_tree_holds_what_its_stacks_hold(service: Service, kind: str) -> None:
    tree = ask(service, "flametree", kind=kind)
    totals = ask(service, "totals", kind=kind)

    def own(node: dict[str, Any]) -> float:
        below = sum(child["value"] for child in node.get("children", ()))
        assert node["value"] == pytest.approx(node["self"] + below, abs=10)
        return node["self"] + sum(own(child) for child in node.get("children", ()))

    assert totals["ns"] > 0
    assert tree["total"] == pytest.approx(totals["ns"])
    assert own(tree["root"]) == pytest.approx(totals["ns"] - tree["not_shown"])


def test_a_tree_is_bounded_in_depth_and_boxes() -> None:

    frames = {key: {"function": f"f{key}", "binary": "b", "kind": "user"} for key in range(60_000)}
    deep = [{"frame_keys": list(range(3_000)), "ns": 5.0}]
    wide = [{"frame_keys": [key], "ns": float(key)} for key in range(1, 60_000)]

    tree = flame_boxes.merged(deep, frames, "ns")
    assert len(tree.values) == flame_boxes.DEEPEST + 1
    assert json.loads(tree.as_json()) == tree.nested()
    tree = flame_boxes.merged(wide, frames, "ns")
    assert len(tree.nested()["children"]) <= flame_boxes.MAX_NODES + 1
    assert tree.left_out > 30_000


def test_boxes_are_bounded_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(flame_boxes, "MAX_MADE", 100)
    frames = {key: {"function": f"f{key}", "binary": "b", "kind": "user"} for key in range(1_000)}
    rows = [{"frame_keys": list(range(at, at + 20)), "ns": 1e3 - at} for at in range(900)]

    tree = flame_boxes.merged(rows, frames, "ns")
    assert len(tree.values) == 101
    assert tree.values[0] == sum(row["ns"] for row in rows)


def computed_here(session: ServedSession, name: str, selection: Selection, *_: object) -> None:
    """In place of a child, which has no patches of a test."""
    stored_capture.capture_of(session, selection)


def test_nodes_of_impossibly_many_devices_are_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_capture, "MAX_DEVICES", 0)
    monkeypatch.setattr(ServedSession, "computed", computed_here)
    for question in ("timeline", "verdict"):
        with pytest.raises(CaptureTooLarge, match="devices"):
            ask(service, question, node="one")


@pytest.mark.parametrize(("start", "end"), [("-4e9", "4e9"), ("4e9", "-4e9")])
def test_every_question_is_answered_for_the_longest_time(
    service: Service, start: str, end: str
) -> None:
    given = [("from", start), ("to", end), ("node", "one"), ("limit", "2147483647")]
    for question in answers.QUESTIONS.values():
        with contextlib.suppress(SondeError):
            answers.ask(service, ME, question, parse(given))
    with pytest.raises(UsageError, match="no time"):
        parse([("from", "5e9")])


def test_a_kind_that_is_none_is_refused(service: Service) -> None:
    with pytest.raises(UsageError, match="no kind of sample is called 'gpu'") as error:
        ask(service, "top", kind="gpu")
    assert "kernel" in error.value.remedy


def test_a_trace_is_chosen_where_it_applies(service: Service) -> None:
    none = ask(service, "totals", trace="0af7651916cd43dd8448eb211c80319c")
    assert none["n"] == 0 < ask(service, "totals")["n"]
    with pytest.raises(UsageError, match="trace is no trace id"):
        ask(service, "totals", trace="' OR 1=1")
    with pytest.raises(UsageError, match="not about one request"):
        ask(service, "overview", trace="0af7651916cd43dd8448eb211c80319c")


def test_every_function_has_a_name(service: Service) -> None:
    rows = ask(service, "top", limit=1_000)
    assert all(row["function"] for row in rows)
    bare = [row for row in rows if row["function"].startswith("[")]
    assert bare  # recorded code without symbols: one row a binary
    assert all(row["binary"].strip("[]") in row["function"] for row in bare)
    boxes = [ask(service, "flametree")["root"]]
    for box in boxes:
        boxes += box.get("children", ())
    assert bare[0]["function"] in {box["name"] for box in boxes}  # as a flame graph calls it
    assert all(row["function"] for row in ask(service, "diff", before_from=1799990000))


def test_processes_and_names_sum_to_the_total(service: Service) -> None:
    for question in ("processes", "names"):
        for kind in ("cpu", "blocked", "kernel"):
            rows = ask(service, question, kind=kind, limit=10_000)
            total = ask(service, "totals", kind=kind)
            assert sum(row["ns"] for row in rows) == pytest.approx(total["ns"])


def test_an_overview_counts_both_nodes_alike(service: Service) -> None:
    rows = ask(service, "overview")

    assert [row["node"] for row in rows] == ["one", "two"]
    assert rows[0]["chunks"] == len(CHUNKS)
    assert rows[0]["cpu_ns"] == pytest.approx(ask(service, "totals", node="one")["ns"])
    assert rows[0]["cpu_ns"] == pytest.approx(rows[1]["cpu_ns"])


def test_a_timeline_keeps_count_and_time_at_every_level_of_detail(service: Service) -> None:
    expected = 2 * sum(rows_of(chunk, "span") + rows_of(chunk, "device_run") for chunk in CHUNKS)
    sums = []
    for points in (1, 100, 1_440):
        answer = ask(service, "lanes", points=points, limit=500)
        boxes = answer["boxes"]
        assert sum(boxes["n"]) == expected
        sums.append(sum(boxes["ns"]))
        assert sum(lane["ns"] for lane in answer["lanes"]) == sums[-1]
        assert min(boxes["start"]) >= 0
    assert len(set(sums)) == 1


def test_a_timeline_of_a_moment_is_cut_at_its_ends(service: Service) -> None:
    options = [("from", "1800001801"), ("to", "1800001802"), ("limit", "500")]
    answer = answers.ask(service, ME, answers.QUESTIONS["lanes"], parse(options))
    boxes = json.loads(answer.content)["boxes"]

    assert boxes["n"]
    assert all(start >= 0 for start in boxes["start"])
    assert all(end <= 10**9 + 10**6 for end in boxes["end"])


@pytest.mark.parametrize("kind", ["cpu", "blocked", "device", "kernel", "faulted"])
def test_pprof_of_a_selection_holds_its_weights(service: Service, kind: str) -> None:
    message = PprofProfile()
    message.ParseFromString(gzip.decompress(ask(service, "pprof", kind=kind)))
    totals = ask(service, "totals", kind=kind)
    second = sum(sample.value[1] for sample in message.sample)

    assert second == pytest.approx(totals["bytes" if kind == "faulted" else "ns"], rel=1e-3, abs=1)
    ids = {location.id for location in message.location}
    assert all(set(sample.location_id) <= ids for sample in message.sample)
    assert message.string_table[0] == ""


def long_texts(rows: int, chars: int) -> pa.Table:
    texts = ["\x01" * chars + f"{at}" for at in range(rows)]
    return pa.table({"function": texts, "line": list(range(rows))})


def test_an_answer_is_written_in_pieces_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse([])
    table = long_texts(600, 10)
    written = json.loads(answers.written(table, options).content)
    assert written == table.to_pylist()
    assert json.loads(answers.written(table.slice(0, 0), options).content) == []

    monkeypatch.setattr(answers, "ANSWER_BYTES", 1 << 20)
    table = long_texts(400, 1_000)
    tracemalloc.start()
    for found, form in (
        (table, "json"),
        (table, "columns"),
        ({"frames": table.to_pylist()}, "json"),
    ):
        with pytest.raises(CaptureTooLarge, match="larger than 1 MiB"):
            answers.written(found, parse([("format", form)]))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    with pytest.raises(CaptureTooLarge, match="larger than 1 MiB"):
        answers.written(long_texts(2_000, 1_000), parse([("format", "arrow")]))


def test_long_texts_of_answers_are_cut() -> None:
    (row,) = json.loads(answers.written(long_texts(1, 16_000), parse([])).content)
    assert len(row["function"]) == answers.TEXT_CHARS


def test_an_answer_that_takes_too_long_to_write_is_given_up() -> None:
    with pytest.raises(QueryTimedOutError):
        answers.written(long_texts(10, 10), parse([]), time.monotonic() - 1)


def test_long_texts_of_nested_boxes_are_cut_and_short_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names of one user's endless code must not keep its node's flame graphs from everybody."""
    names = ["main", *(chr(97 + n) * 1_000 for n in range(9)), "train_step"]
    boxes = boxes_called(names)
    answers._fit_texts(boxes)
    assert [name for name, _, _ in boxes.texts] == names
    monkeypatch.setattr(answers, "TEXTS_BYTES", 1_800)
    answers._fit_texts(boxes)
    shown = [name for name, _, _ in boxes.texts]
    assert (shown[0], shown[-1]) == ("main", "train_step")
    assert [len(name.encode()) for name in shown[1:-1]] == [200] * 9


def test_nested_boxes_with_long_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = boxes_called(["\x01" * 1_000], 10)
    answers._fit_texts(boxes)
    monkeypatch.setattr(answers, "ANSWER_BYTES", 40_000)
    with pytest.raises(CaptureTooLarge):
        answers._fit_texts(boxes)


def boxes_called(names: list[str], each: int = 1) -> Boxes:
    count = len(names) * each
    texts = [(name, "", "") for name in names]
    numbers = [at // each for at in range(count)]
    return Boxes([0] * count, numbers, [1.0] * count, [0.0] * count, texts, 0)
