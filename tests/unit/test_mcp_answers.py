# SPDX-License-Identifier: Apache-2.0
"""What assistants get is escaped and bounded; times and problems are as people mean them."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from sonde.errors import UsageError
from sonde.mcp import troubles
from sonde.mcp.selection import Selection, observed
from sonde.mcp.tools import Tools
from sonde.mcp.untrusted import (
    MAX_ANSWER_BYTES,
    MAX_TEXT_CHARS,
    clean,
    escaped,
    fitting,
    flame,
    size_of,
)
from sonde.server import times
from sonde.server.left_out import LeftOut

NOW_S = 1_795_500_000.0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train_step", "train_step"),
        ("ünïcode 🎈", "ünïcode 🎈"),
        ("a\x1b[2Jb\n", "a\\x1b[2Jb\\x0a"),
        ("safe\u202egnp.exe", "safe\\u202egnp.exe"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("lone\ud800", "lone\\ud800"),
        ("join\u034fed", "join\\u034fed"),
        ("\u115f\u1160\u3164\uffa0", "\\u115f\\u1160\\u3164\\uffa0"),
        ("\u17b4\u17b5\u2800", "\\u17b4\\u17b5\\u2800"),
        ("\u180b\u180c\u180d\u180e\u180f", "\\u180b\\u180c\\u180d\\u180e\\u180f"),
        ("a\ufe00b\ufe0f", "a\\ufe00b\\ufe0f"),
        ("a\U000e0100b\U000e01ef", "a\\U000e0100b\\U000e01ef"),
    ],
)
def test_what_is_not_printable_is_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown
    escaped(text).encode()


def test_a_long_name_keeps_its_ends() -> None:
    shown = escaped("begin" + "x" * 100_000 + "end")

    assert len(shown) <= MAX_TEXT_CHARS and shown.startswith("begin") and shown.endswith("end")


@pytest.mark.parametrize("text", ["\x1b" * 300, "\U000e0041" * 29 + "\u202e" * 100, "\x00" * 5_000])
def test_what_escapes_make_long_is_cut_between_them(text: str) -> None:
    shown = escaped(text)
    begin, end = shown.split("…")

    assert len(shown) <= MAX_TEXT_CHARS and len(begin) > MAX_TEXT_CHARS / 2 - 12 < len(end) + 10
    code = r"(\\x..|\\u....|\\U........)*"
    assert re.fullmatch(code, begin) and re.fullmatch(code, end)


def test_keys_and_what_is_nested_are_escaped() -> None:
    assert clean({"a\n": ["\x00", {"b": "\u2028"}], "n": 1, "t": True, "none": None}) == {
        "a\\x0a": ["\\x00", {"b": "\\u2028"}], "n": 1, "t": True, "none": None,
    }  # fmt: skip


def test_rows_beyond_the_bounds_are_left_out_and_counted() -> None:
    few, cut = fitting(list(range(10)), 3, "numbers")
    assert (few, cut) == ([0, 1, 2], ["7 of 10 numbers are left out"])
    rows = [{"name": "n" * 250} for _ in range(1_000)]
    many, cut = fitting(rows, 1_000, "rows")
    assert size_of(many) <= MAX_ANSWER_BYTES + len(many)
    assert cut == [f"{1_000 - len(many)} of 1,000 rows are left out"]
    assert fitting([1], 5, "rows") == ([1], [])
    huge = {"name": ["n" * 250] * 250}
    assert fitting([1, huge, 2], 5, "rows") == ([1, 2], ["1 of 3 rows are left out"])


def box(name: str, value: float, *children: dict[str, Any]) -> dict[str, Any]:
    own = value - sum(one["value"] for one in children)
    made = {"name": name, "binary": "", "kind": "", "value": value, "self": own}
    return made | ({"children": list(children)} if children else {})


def test_a_flame_graph_keeps_its_heaviest_boxes() -> None:
    leaves = [box(f"leaf {n}", 10.0 - n / 10) for n in range(50)]
    whole = sum(one["value"] for one in leaves)
    root = box("all", whole, box("main", whole, box("run", whole, *leaves)))
    tree, cut = flame(root, whole, 13)

    assert tree["frames"] == ["all", "main", "run"] and tree["share"] == 1.0
    assert [one["frames"][0] for one in tree["children"]] == [f"leaf {n}" for n in range(10)]
    assert cut == ["40 of 53 boxes, the lightest and the deepest, are left out"]


def test_a_deep_wide_hostile_graph_is_bounded() -> None:
    node = box("deepest", 1.0)
    for depth in range(250):
        node = box("\x1b" * 4_000, node["value"] + 1.0, node, box(str(depth), 0.5))
    tree, cut = flame(node, node["value"], 400)

    assert size_of(tree) <= MAX_ANSWER_BYTES and cut
    levels = 0
    while tree.get("children"):
        tree, levels = tree["children"][0], levels + 1
    assert levels <= 30


def test_a_chain_of_long_names_is_bounded_and_has_the_reason() -> None:
    """Each box weighs the same: none of them is the lightest."""
    node = box("last", 1.0)
    for _ in range(400):
        node = box("\U0001f388" * 400, 1.0, node) | {"binary": "b\x00" * 400}
    tree, cut = flame(node, 1.0, 400)

    assert size_of(tree) <= MAX_ANSWER_BYTES and len(tree["frames"]) >= 10
    assert cut[0].endswith("of 401 boxes, the lightest and the deepest, are left out")
    assert "names are so long" in cut[1]
    equal = [box(str(n), 1.0) for n in range(5_000)]
    tree, cut = flame(box("all", 5_000.0, *equal), 5_000.0, 100)
    assert len(tree["children"]) == 99 and cut[0].startswith("4,901 of 5,001")


class Answering:
    """A server that answers each question with a fixed value."""

    url = "http://server"

    def __init__(self, **answers: Any) -> None:
        self._answers = {"overview": [], "nodes": []} | answers

    def ask(self, question: str, _given: object = None) -> Any:
        return self._answers[question]

    def ask_with_left_out(self, question: str, _given: object = None) -> tuple[Any, LeftOut]:
        return self._answers[question], LeftOut.of({"x-sonde-rows-left-out": "7"})


def test_what_an_answer_has_no_room_for_is_in_the_answer_of_a_tool() -> None:
    point = {"series": "hw.power", "labels": "", "time_ns": 0, "value": 1, "least": 1, "most": 1}
    tools = Tools(Answering(charts=[point], metrics=[{"series": "hw.power"}]))  # type: ignore[arg-type]
    for metrics in ([], ["hw.power"]):
        lines = tools.node_series("n", metrics)["left_out"]
        assert len(lines) == 1 and lines[0].startswith("7 rows of ")
    owners = {"owners": [], "left_out": 0, "not_covered": ["x"] * 13}
    made = Tools(Answering(owners=owners)).owners()  # type: ignore[arg-type]
    assert made["left_out"] == ["3 of 13 lines of what is not covered are left out"]


def test_a_verdict_has_how_much_of_it_is_left_out() -> None:
    cause = {
        "title": "t", "share": 0.1, "ns": 1e9, "detail": "", "thread": "",
        "locations": [{"function": "f", "caller": "c"}] * 5,
    }  # fmt: skip
    verdict = {
        "device": -1, "device_name": "n", "bounds": [], "computing": 0.5, "causes": [cause] * 8,
        "evidence": ["e"] * 15, "advice": [{"text": "a"}] * 3,
    }  # fmt: skip
    answer = {"verdicts": [verdict], "notes": ["n"] * 12}
    made = Tools(Answering(verdict=answer)).why_waiting("n")  # type: ignore[arg-type]
    left_out = made["data"]["verdicts"][0]["left_out"]
    assert left_out == {"causes": 2, "places": 12, "evidence": 3, "steps": 1}
    assert made["left_out"] == ["2 of 12 notes are left out"]


def test_a_job_that_is_too_large_loses_rows_one_by_one() -> None:
    cause = {
        "title": "t" * 300, "share": 0.5, "ns": 1e9, "detail": "d" * 300, "thread": "x" * 300,
        "locations": [{"function": "f" * 300, "caller": "c" * 300}] * 3,
    }  # fmt: skip
    verdict = {
        "device": -1, "device_name": "n" * 300, "bounds": [], "computing": 0.5,
        "causes": [cause] * 6, "evidence": ["e" * 300] * 12, "advice": [],
    }  # fmt: skip
    found = {
        "by": "job", "id": "7", "held_h": 2.0, "not_covered": ["a\x1b[2J"],
        "nodes": ["n" * 300] * 100, "wasted": [{"cause": "idle", "gpu_h": 1.0}],
        "verdicts": [{"verdict": verdict}] * 3,
        "functions": [{"function": "\U0001f388" * 300, "own_ns": n} for n in range(10)],
    }  # fmt: skip
    made = Tools(Answering(job=found)).job("7")  # type: ignore[arg-type]
    data = made["data"]

    assert size_of(data) <= MAX_ANSWER_BYTES
    assert data["held_h"] == 2.0 and data["wasted"] and data["not_covered"] == ["a\\x1b[2J"]
    assert len(data["verdicts"]) == 2 and 1 <= len(data["functions"]) < 10
    assert made["left_out"][0] == "1 of 3 verdicts are left out"
    assert len(made["left_out"]) == 3, "functions and nodes, too"


def test_units_and_notes_of_a_server_are_escaped() -> None:
    tools = Tools(
        Answering(
            flametree={"unit": "n\u202es", "total": 1.0, "root": box("all", 1.0)},
            owners={"owners": [], "left_out": 0, "not_covered": ["a\u202eb"]},
        )  # type: ignore[arg-type]
    )
    assert tools.flame_graph()["data"]["unit"] == "n\\u202es"
    assert tools.owners()["data"]["not_covered"] == ["a\\u202eb"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("now", NOW_S),
        ("-15m", NOW_S - 900),
        ("-1.5h", NOW_S - 5_400),
        ("1795300000.5", 1_795_300_000.5),
        ("2026-11-24T10:00:00Z", datetime(2026, 11, 24, 10, tzinfo=UTC).timestamp()),
        ("2026-11-24 10:00:00", datetime(2026, 11, 24, 10, tzinfo=UTC).timestamp()),
        ("2026-11-24T10:00:00+02:00", datetime(2026, 11, 24, 8, tzinfo=UTC).timestamp()),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert times.seconds(text, NOW_S) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["yesterday", "nan", "inf", "-5", "9e99", "0001-01-01", "-1y"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match="is no time"):
        times.seconds(text, NOW_S)


class Server:
    """Which was sent nothing, ever, or one chunk by one node."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, question: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append((question, parameters))
        return self._rows


@pytest.mark.parametrize(
    ("node", "note"),
    [("", "no node has sent anything"), ("n\n1", "no node called n\n1 has sent anything")],
)
def test_where_nothing_was_ever_sent_a_node_is_named_only_if_one_was(node: str, note: str) -> None:
    found = observed(Server([]), Selection.of("-1h", "now", node))  # type: ignore[arg-type]
    assert found["note"] == note


def test_evidence_of_selected_owners_is_known_as_that_of_all() -> None:
    server: Any = Server([{"chunks": 2, "seconds": 1.0, "lost": 0}])
    every = observed(server, Selection.of("-1h", "now"))
    one = observed(server, Selection.of("-1h", "now", user="ann"))
    assert one == every | {"of": "all processes in the range, not only the selected ones"}


def test_a_link_leads_to_what_was_selected_as_far_as_the_page_selects() -> None:
    selection = Selection.of("-1h", "now", "n", pid=7, job="a&b", user="ann", pod="")
    url = urlsplit(selection.page_url("http://s", "range", kind="cpu"))
    found = dict(parse_qsl(url.query))
    assert {name: found[name] for name in sorted(found.keys() - {"from", "to"})} == {
        "job": "a&b", "kind": "cpu", "node": "n", "pid": "7", "view": "range",
    }  # fmt: skip


def test_the_node_in_the_worst_state_is_first() -> None:
    kinds = dict.fromkeys(("cpu_ns", "blocked_ns", "runqueue_ns", "device_ns", "kernel_ns"))
    seen = {"chunks": 1, "first_ns": 0, "last_ns": NOW_S * 1e9, "seconds": 1.0, "lost": 0, **kinds}
    nodes = [seen | {"node": name} for name in ("fine", "idle", "ill")]
    gpu = '{"hw.id":"GPU-1","hw.gpu.task":"general"}'
    error = '{"hw.id":"GPU-1","error.type":"uncorrected"}'
    rows = [
        {"node": "fine", "series": "hw.gpu.utilization", "labels": gpu, "mean": 0.9, "most": 1},
        {"node": "idle", "series": "hw.gpu.utilization", "labels": gpu, "mean": 0.1, "most": 1},
        {"node": "ill", "series": "hw.errors", "labels": error, "mean": 2, "most": 3},
        {"node": "ill", "series": "hw.errors", "labels": "[1", "mean": 2, "most": 3},
    ]
    found = troubles.ranked(nodes, rows, NOW_S + 1)

    assert [(one["node"], one["problems"]) for one in found] == [
        ("ill", ["3 uncorrected memory errors"]), ("idle", ["GPU-1: idle 90 %"]), ("fine", []),
    ]  # fmt: skip
    assert found[1]["gpu_used_share"] == 0.1


def test_a_silent_node_is_a_problem() -> None:
    kinds = dict.fromkeys(("cpu_ns", "blocked_ns", "runqueue_ns", "device_ns", "kernel_ns"), 0)
    row = {"node": "n", "last_ns": 0, "seconds": 1.0, "lost": 2, **kinds}
    (one,) = troubles.ranked([row], [], time.time())

    assert one["problems"][0].startswith("nothing sent for")
    assert one["problems"][1] == "2 events not observed"
