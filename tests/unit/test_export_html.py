# SPDX-License-Identifier: Apache-2.0
"""The page is one file, asks nobody for anything, and trusts no name. How it looks and works is
tested in a browser (tests/integration)."""

import base64
import gzip
import hashlib
import io
import json
import re

import pytest

from captures import Writer, scene
from sonde.export import call_tree, html
from sonde.model.profile import ProfileKind
from sonde.model.verdict import Explained
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.session import Session
from sonde.recording import verdicts

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>@data@ \"'&"


def page_of(writer, path):
    out, capture = io.BytesIO(), read(writer.write(path))
    html.write(Session(capture), out, explained=verdicts.of_capture(capture))
    return out.getvalue().decode()


def data_of(page):
    packed = re.search(r'id="data">([A-Za-z0-9+/=]*)</script>', page).group(1)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return page_of(scene(), tmp_path_factory.mktemp("html") / "a.sonde")


def test_the_page_refers_to_nothing_outside(page):
    assert not re.search(r'(?:src|href|action|srcset)\s*=\s*["\']?(?!data:)', page)
    assert not re.search(r"@import|url\(|https?://|fetch\(|XMLHttpRequest|WebSocket|import\(", page)


def test_the_policy_allows_just_what_is_in_the_page(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag, directive in (('script type="module"', "script-src"), ("style", "style-src")):
        content = re.search(rf"<{tag}>(.*?)</", page, re.DOTALL).group(1)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_the_script_never_makes_markup_of_text(page):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


def test_hostile_names_stay_data(tmp_path):
    writer = Writer()
    key = writer.process(7, EVIL)
    writer.on_cpu(key, 7, writer.stack(EVIL, (EVIL, EVIL, EVIL, 3)), 3)
    writer.wait(key, 7, EVIL, 1.0)
    writer.event("loss", EVIL, 1, EVIL)
    path = tmp_path / "<b>&@script@.sonde"
    page = page_of(writer, path)
    assert "alert(" not in page
    assert page.count("<script") == 2
    assert "<title>&lt;b&gt;&amp;@script@.sonde" in page
    assert EVIL in data_of(page)["tree"]["name"]
    (verdict,) = data_of(page)["verdict"]["explanation"]["verdicts"]
    assert verdict["device_name"] == f"{EVIL} (7)"


def test_the_verdict_has_what_is_drawn_of_it(page):
    shown = data_of(page)["verdict"]
    verdict = shown["explanation"]["verdicts"][0]
    assert (shown["missing"], shown["command"]) == ("", "")
    assert verdict["device_name"] == "python3 (4211)"
    assert verdict["bounds"][0]["share"] > 0
    assert verdict["causes"][0].keys() == {"key", "title", "bound", "share", "locations", "facts"}
    assert max(len(cause["locations"]) for cause in verdict["causes"]) == 1
    assert verdict["evidence"]
    assert [one["with_former"] for one in verdict["advice"]] == [False] * 3


def test_a_verdict_that_is_missing_has_its_reason(tmp_path):
    out, session = io.BytesIO(), Session(read(scene().write(tmp_path / "a.sonde")))
    html.write(session, out, explained=Explained(None, "it is too large", "sonde explain a.sonde"))
    shown = data_of(out.getvalue().decode())["verdict"]
    assert shown == {
        "missing": "it is too large",
        "command": "sonde explain a.sonde",
        "explanation": None,
    }
    html.write(session, out := io.BytesIO())
    assert data_of(out.getvalue().decode())["verdict"] is None


def test_the_data_holds_exact_tables(page):
    tables = data_of(page)["tables"]
    assert {(row["reason"], row["ns"]) for row in tables["waits"]} >= {("futex", 4_000_000_000)}
    assert sum(row["count"] for row in tables["calls"]) == 3000
    assert tables["losses"] == []


def test_sums_of_the_tree_are_those_of_the_profiles(page):
    kinds = data_of(page)["tree"]["kinds"]
    assert sum(kinds[ProfileKind.ON_CPU]["count"]) == 650
    assert sum(kinds[ProfileKind.OFF_CPU]["ns"]) == 25_500_000_000
    assert sum(kinds[ProfileKind.GPU_CALLS]["bytes"]) == 5_000_000_000


def test_files_of_the_page_are_small_enough_to_read():
    for path in html.files("sonde.export").joinpath("assets").iterdir():
        assert len(path.read_text().splitlines()) < 500, path.name


def test_each_class_that_the_script_gives_has_a_style():
    assets = html.files("sonde.export").joinpath("assets")
    style = assets.joinpath("page.css").read_text()
    scripts = [path.read_text() for path in assets.iterdir() if path.name.endswith(".js")]
    given = {name for text in scripts for name in re.findall(r'class: "([\w-]+)"', text)}
    assert "bars" in given
    assert [name for name in sorted(given) if f".{name}" not in style] == []


# ---- the tree ----


@pytest.fixture
def profiles(tmp_path):
    writer = Writer()
    key = writer.process(7, "p")
    for number in range(40):
        stack = writer.stack(
            "main", ("step", "app", "a.c", 10 + number), f"f{number}", f"g{number}"
        )
        writer.on_cpu(key, 7, stack, 40 - number)
    session = Session(read(writer.write(tmp_path / "b.sonde")))
    return [queries.profile(session, ProfileKind.ON_CPU)]


def paths(tree, kind=ProfileKind.ON_CPU):
    rows = tree.kinds[kind]
    found = {}
    for node, events in zip(rows.node, rows.events, strict=True):
        path = []
        while node > 0:
            path.insert(0, tree.functions[tree.function[node]].name)
            assert tree.parent[node] < node
            node = tree.parent[node]
        found[";".join(path)] = events
    return found


def test_stacks_share_their_nodes(profiles):
    tree = call_tree.build(profiles, max_nodes=1000)
    assert len(tree.parent) == 1 + 2 + 80
    assert tree.folded_nodes == 0
    assert paths(tree)["main;step;f0;g0"] == 40


def test_a_run_of_frames_without_a_symbol_is_one_node(tmp_path):
    writer = Writer()
    runs = (("", "a.so", "", 1), ("", "a.so", "", 2), ("", "b.so"), ("", "a.so"), "work", "work")
    writer.on_cpu(writer.process(7, "p"), 7, writer.stack(*runs), 3)
    session = Session(read(writer.write(tmp_path / "c.sonde")))
    tree = call_tree.build([queries.profile(session, ProfileKind.ON_CPU)], max_nodes=100)
    assert paths(tree) == {"[a.so];[b.so];[a.so];work;work": 3}


def test_a_function_keeps_the_lines_that_occur(profiles):
    tree = call_tree.build(profiles, max_nodes=1000)
    (step,) = (function for function in tree.functions if function.name == "step")
    assert (step.first_line, step.last_line) == (10, 49)


@pytest.mark.parametrize("max_nodes", [1, 2, 10, 30, 82])
def test_light_stacks_are_folded_and_no_weight_is_lost(profiles, max_nodes):
    tree = call_tree.build(profiles, max_nodes)
    assert len(tree.parent) <= 2 * max_nodes + 1
    assert tree.folded_nodes > 0
    assert sum(tree.kinds[ProfileKind.ON_CPU].events) == profiles[0].total_events
    assert sum(tree.kinds[ProfileKind.ON_CPU].ns) == profiles[0].total_ns
    light = [path for path in paths(tree) if "(lighter stacks)" in path]
    assert all(path.endswith("(lighter stacks)") for path in light)
    if max_nodes >= 10:
        assert paths(tree)["main;step;f0;g0"] == 40
