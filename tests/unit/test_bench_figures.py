# SPDX-License-Identifier: Apache-2.0
"""Figures in the documentation are those of the committed results that they name."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from bench.beside import summary
from bench.stacks.__main__ import COLUMNS, NAMING, load, table

from sonde.analyze.run_difference import differ

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
RESULT = re.compile(r"`(bench/[\w/-]*results[\w/-]*\.(?:json|csv))`")
LOOPS = {"eager": "eager", "train": "training", "graph": "graph replay", "decode": "decode"}


def text_of(page: str) -> str:
    """A page, its lines joined, without emphasis."""
    return re.sub(r"\s+", " ", (ROOT / page).read_text().replace("**", ""))


def row_of(page: str, result: str, start: str) -> str:
    """The row that begins so, of a table below the place where a page names a result."""
    _, _, below = (ROOT / page).read_text().replace("**", "").partition(f"`{result}`")
    assert below, f"{page} does not name {result}"
    return next(line for line in below.splitlines() if line.startswith(f"| {start}"))


def loaded(result: str) -> Any:
    with (ROOT / result).open() as file:
        if result.endswith(".json"):
            return json.load(file)
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def interval(found: dict[str, float]) -> str:
    """+0.10 [−0.14, +0.62]"""
    mean, low, high = (f"{found[it]:+.2f}" for it in ("percent", "low", "high"))
    return f"{mean} [{low}, {high}]".replace("-", "−")


def claims() -> Iterator[tuple[str, str, str]]:
    """(page, result, what the page must have by it)"""
    page, result = "docs/lab/service.md", "bench/service/results/kills.json"
    killed = loaded(result)
    assert not killed["lost"] and not killed["doubled"]
    yield page, result, f"{sum(killed['kills'].values())} kills, {killed['noted']:,} chunks noted"
    yield page, result, f"{killed['stored']:,} stored, none doubled"
    assert killed["sample_rows_expected"] == killed["sample_rows_stored"]
    yield page, result, f"{killed['sample_rows_stored']:,} rows of `sample` expected and stored"
    again = killed["accepting_s"]
    yield page, result, f"after {again['median']} s (median), {again['most']} s (most)"
    yield page, result, f"Server {killed['server_rss_bytes']:,} bytes"
    page, result = "docs/lab/service.md", "bench/service/results/flush.json"
    flushed = loaded(result)
    rates: dict[str, list[float]] = {}
    for state in ("before", "now"):
        times = [run["cpu_s"] for run in flushed[state]]
        yield page, result, f"{min(times):.1f} to {max(times):.1f} s"
        rates[state] = sorted(flushed["log_bytes"] / 1e6 / time for time in times)
        yield page, result, f"{rates[state][0]:.1f} to {rates[state][-1]:.1f} MB"
    whole = [5_030 / rate for rate in reversed(rates["now"])]
    yield page, result, f"{whole[0]:.0f} to {whole[-1]:.0f} s of processor time"
    page = early = "docs/lab/exams_1_to_3.md"
    for result in (
        "bench/explain/results/exam-1-now.json",
        "bench/explain/results/exam-2-now.json",
    ):
        exam = loaded(result)
        wrong = {row["program"] for row in exam if not row["is_right"]}
        placed = [row["place_right"] for row in exam if row["place_right"] is not None]
        yield page, result, f"{27 - len(wrong)} of 27"
        yield page, result, f"{sum(row['is_right'] for row in exam)} of {len(exam)}"
        yield page, result, f"{placed.count(True)} of {len(placed)}"
    for result in ("bench/stalled/results/h200x4.json", "bench/stalled/results/h200x2.json"):
        runs = loaded(result)
        rows = [row for run in runs.get("runs", [runs]) for row in run["rows"]]
        right = [row["rank_right"] and row["line_right"] for row in rows]
        after = [row["after_s"] for row in rows]
        words = f"{sum(right)} of {len(rows)}, {min(after):.1f} to {max(after):.1f} s"
        yield "docs/lab/stalled.md", result, words
    result = "bench/faults/results/early.json"
    for state in loaded(result).values():
        every = next(row for row in state["scores"] if row["sign"] == "all")
        yield "docs/lab/faults.md", result, f"{every['warned_before']} of {every['reached']}"
        yield "docs/lab/faults.md", result, f"{every['right']} of {every['warnings']}"
        leads = f"{min(every['lead_s']):.0f}, {max(every['lead_s']):.0f}"
        yield "docs/lab/faults.md", result, f"{every['lead_median_s']:.0f} s ({leads})"
    result = "bench/faults/results/rank_replay.json"
    replayed = loaded(result)
    rank = replayed["rank"]["right"]
    assert rank == replayed["link"]["right"] == replayed["nothing"]["right"]
    for page_of_ranks in ("docs/lab/faults.md", "docs/reference/features.md"):
        yield page_of_ranks, result, f"{rank} of {replayed['seeds']}"
    result = "bench/explain/results/exam-2-sealed.json"
    exam = loaded(result)
    placed = [row["place_right"] for row in exam if row["place_right"] is not None]
    for page in (early, "docs/reference/features.md"):
        yield page, result, f"{sum(row['is_right'] for row in exam)} of 27"
        yield page, result, f"{placed.count(True)} of {len(placed)}"
    for number in (3, 5, 6, 7, 8, 9, 10, 11, 12):
        result = f"bench/explain/results/exam-{number}-sealed.json"
        exam = loaded(result)
        programs = {row["program"] for row in exam}
        wrong = {row["program"] for row in exam if not row["is_right"]}
        placed = [row["place_right"] for row in exam if row["place_right"] is not None]
        own_page = early if number == 3 else "docs/lab/exam.md"
        for one in (own_page, "docs/reference/features.md"):
            yield one, result, f"{len(programs) - len(wrong)} of {len(programs)}"
            yield one, result, f"{sum(row['is_right'] for row in exam)} of {len(exam)}"
            yield one, result, f"{placed.count(True)} of {len(placed)}"
    sealed = (f"exam-{number}-traces-sealed" for number in (9, 10, 11, 12))
    for name in ("exam-7-traces", *sealed):
        traces = f"bench/explain/results/{name}.json"
        traced = loaded(traces)
        right = sum(row["is_right"] for row in traced)
        yield "docs/lab/exam.md", traces, f"{right} of {len(traced)} right"
    page = early
    for state in ("before", "now"):
        result = f"bench/explain/results/exam-3-again-{state}.json"
        exam = loaded(result)
        wrong = {row["program"] for row in exam if not row["is_right"]}
        placed = [row["place_right"] for row in exam if row["place_right"] is not None]
        yield page, result, f"{11 - len(wrong)} of 11 programs, "
        yield page, result, f"{sum(row['is_right'] for row in exam)} of {len(exam)}"
        yield page, result, f"{placed.count(True)} of {len(placed)} places"
    page = "docs/lab/exam.md"
    left_out, renamed = (
        f"bench/explain/results/{name}.json" for name in ("exams-left-out", "renaming")
    )
    yield page, left_out, f"program left out: {loaded(left_out)['left_out']} of 54"
    yield page, renamed, f"{loaded(renamed)['same']} of {len(loaded(renamed)['captures'])} captures"
    result = "bench/explain/results/exam-4-sealed.json"
    exam = loaded(result)
    placed = [row["place_right"] for row in exam if row["place_right"] is not None]
    for one in (page, "docs/reference/features.md"):
        yield one, result, f"{sum(row['is_right'] for row in exam)} of {len(exam)}"
        yield one, result, f"{placed.count(True)} of {len(placed)}"
    result = "bench/explain/results/exam-4-now.json"
    exam = loaded(result)
    placed = [row["place_right"] for row in exam if row["place_right"] is not None]
    yield page, result, f"{sum(row['is_right'] for row in exam)} of {len(exam)} in"
    yield page, result, f"{placed.count(True)} of {len(placed)} places, with no false offender"
    assert not any(row["false_offender"] for row in exam)
    left_out, renamed = (
        f"bench/explain/results/exam-4-{name}.json" for name in ("left-out", "renaming")
    )
    yield page, left_out, f"with one program left out, {loaded(left_out)['left_out']} of 22"
    yield page, renamed, f"{loaded(renamed)['same']} of {len(loaded(renamed)['captures'])} captures"
    result = "bench/results/device_truth_h200.json"
    rows = loaded(result)
    for words, kinds in (
        ("hold the truth in ", ("computing", "kernel", "copy", "set")),
        ("kernels together ", ("computing",)),
        ("single kernels ", ("kernel",)),
        ("copies ", ("copy",)),
    ):
        held = [row["holds"] for row in rows if row["quantity"].split()[0] in kinds]
        yield "docs/design/explain.md", result, f"{words}{sum(held)} of {len(held)}"
    again = "bench/results/device_truth_h200_again.json"
    held = [row["holds"] for row in loaded(again)]
    yield (
        "docs/design/explain.md",
        again,
        f"recordings judged again hold {sum(held)} of {len(held)}",
    )
    for number in (5, 6, 7):
        result = f"bench/explain/results/exam-{number}-now.json"
        exam = loaded(result)
        wrong = {row["program"] for row in exam if not row["is_right"]}
        yield page, result, f"{sum(row['is_right'] for row in exam)} of 52, {26 - len(wrong)} of 26"
    left_out = "bench/explain/results/exams-5-6-left-out.json"
    yield page, left_out, f"chosen by the others: {loaded(left_out)['left_out']} of 52"
    left_out = "bench/explain/results/exams-5-to-7-left-out.json"
    yield page, left_out, f"chosen by the others: {loaded(left_out)['left_out']} of 78"
    page, result = "docs/lab/explain.md", "bench/explain/results/host-programs.json"
    yield page, result, f"{sum(row['is_right'] for row in loaded(result))} of 11"
    runs = ("second", "fourth", "fifth")
    for result in [f"bench/explain/results/h200-{run}.csv" for run in runs]:
        rows = loaded(result)
        right = sum(row["right"] == "True" for row in rows)
        blamed = [row for row in rows if row["truth"] not in ("", "None")]
        near = sum(abs(float(row["share"]) - float(row["truth"])) <= 5 for row in blamed)
        pages = [
            "docs/lab/explain.md",
            *(["docs/reference/features.md"] if "fifth" in result else []),
        ]
        for page in pages:
            yield page, result, f"{right} of {len(rows)}"
            yield page, result, f"within 5 points in {near} of {len(blamed)}"

    result = "bench/explain/results/h200-own.json"
    rows = loaded(result)
    right = sum(row["right"] for row in rows)
    same = sum(row["verdict"] == row["full"] for row in rows)
    kinds = len({row["kind"] for row in rows})
    yield "docs/lab/explain.md", result, f"the full trace's verdict in {same} of {len(rows)}"
    yield "docs/lab/explain.md", result, f"right by the clock in {right} of {len(rows)}"
    yield "docs/reference/features.md", result, f"{len(rows)} runs of {kinds} programs"
    yield (
        "docs/reference/features.md",
        result,
        f"right in {right}, a full trace's verdict in {same}",
    )

    result = "bench/explain/results/h200-x2-collectives.json"
    rows = loaded(result)
    near = sum(abs(row["share"] - row["truth"]) <= 0.1 for row in rows)
    late = [row for row in rows if row["straggler"]]
    named = sum(row["named"] for row in late)
    yield "docs/reference/features.md", result, f"within 0.1 points in {near} of {len(rows)}"
    for page in ("docs/reference/features.md", "docs/lab/explain.md"):
        yield page, result, f"the straggler named in {named} of {len(late)}"

    page, timing = "docs/design/attach.md", 0
    for part in (1, 2):
        result = f"bench/ground/results/h200-attach-cycles-now-{part}.json"
        cycles = loaded(result)
        loops = len(cycles["identical"])
        timing += cycles["cycles"]["timing"]
        assert cycles["cycles"]["timing"] == cycles["cycles"]["left"]
        assert cycles["cycles"]["timing"] == loops * cycles["cycles"]["each"]
        assert cycles["exits"] == [0] * 2 * loops
        for it in cycles["identical"].values():
            assert it["compared"] == it["equal"]
            yield page, result, f"{it['compared']:,} of "
    yield page, result, f"{timing} of {timing} timing, {timing} of {timing} detached"
    result = "bench/results/h100-trace-cost.json"
    for row in loaded(result)["rows"]:
        seen = [one["kernels_a_step"] for one in row["traces"]]
        whole = round(max(seen))
        assert row["identical"]
        for claim in (f"{seen.count(whole)} at {whole}.0", f"({row['result'][0]:,} steps)"):
            yield "docs/design/trace.md", result, claim
    result = "bench/results/on_gpu_cost.json"
    for loop, runs in loaded(result)["loops"].items():
        for number, run in enumerate(runs[1:3], 1):
            inside, all_of_it = round(run["inside_s"] * 1e3), round(run["inside_all_s"] * 1e3)
            start = "1 (nothing kept yet)" if (loop, number) == ("eager", 1) else number
            yield (
                "docs/design/cost.md",
                result,
                f"| {loop}, {start} | {inside} ms | {all_of_it} ms | {run['outside_s']:.2f} s "
                f"| {run['ready_s']:.2f} s | {run['wall_s']:.2f} s |",
            )

    for machine in ("h100", "h200_again"):
        result = f"bench/results/on_gpu_cost_{machine}.json"
        for loop, runs in loaded(result)["loops"].items():
            for number, run in enumerate(runs[1:], 1):
                cells = f"{run['outside_s']:.2f} s | {run['ready_s']:.2f} s | {run['wall_s']:.2f} s"
                inside = round(run["inside_s"] * 1e3)
                yield "docs/design/cost.md", result, f"| {loop}, {number} | {inside} ms |"
                yield "docs/design/cost.md", result, cells
    result = "bench/results/record_start.json"
    for title, is_first, name in (
        ("later: ready after", False, "ready_s"),
        ("later: CPU until then", False, "ready_cpu_s"),
        ("later: CPU in all", False, "cpu_s"),
        ("later: wall time in all", False, "wall_s"),
        ("first: ready after", True, "ready_s"),
        ("first: CPU in all", True, "cpu_s"),
    ):
        before, now = (
            [
                it[name]
                for it in loaded(result)["costs"]
                if it["tree"] == tree and it["is_first"] is is_first
            ]
            for tree in ("before", "now")
        )
        change = [after - first for first, after in zip(before, now, strict=True)]
        cells = [f"{median(it):.2f} ({min(it):.2f} to {max(it):.2f})" for it in (before, now)]
        changed = f"{median(change):+.2f} ({min(change):+.2f} to {max(change):+.2f})"
        row = f"| {title} | {cells[0]} | {cells[1]} | {changed} |".replace("-", "−")
        yield "docs/design/cost.md", result, row
    result = "bench/signals/results/h200.json"
    held = [row["holds"] for row in loaded(result)["rows"] if row["holds"] is not None]
    assert all(held)
    yield "docs/design/device_signals.md", result, f"all {len(held)} figures hold"

    result = "bench/mutation/results/mutants.json"
    for package, counts in loaded(result)["packages"].items():
        name = "native attach" if package == "attach, native" else package
        yield (
            "docs/reference/features.md",
            result,
            f"{name} {counts['share_killed']:.1%}".replace("%", " %"),
        )

    result = "bench/ground/results/h200-standing.json"
    names = {"eager": "launch-bound", "graph": "graph replay", "decode": "decode"}
    for loop, name in (names | {"train": "training"}).items():
        claim = interval(loaded(result)[loop]["attached"])
        claim = claim.replace(" [", " % [") if loop == "eager" else claim
        yield "docs/reference/features.md", result, f"{claim} {name}"

    result = "bench/ground/results/attach_storms.json"
    rows = [row for row in loaded(result)["rows"] if row["kind"] in ("plain", "namespaced")]
    sums = {it: sum(row[it] for row in rows) for it in ("loaded", "attaches", "whole", "processes")}
    yield "docs/reference/features.md", result, f"{sums['loaded']:,} of {sums['attaches']:,} loads"
    yield (
        "docs/reference/features.md",
        result,
        f"{sums['whole']} of {sums['processes']} programs whole",
    )

    result = "bench/ground/results/storms.json"
    rows = loaded(result)["rows"]
    free = [row for row in rows if row["kind"] in ("plain", "namespaced")]
    loaded_count, wanted = (sum(row[it] for row in free) for it in ("loaded", "attaches"))
    touched = [row for row in rows if row["kind"] in ("plain", "namespaced", "killed")]
    whole, processes = (sum(row[it] for row in touched) for it in ("survived", "processes"))
    killed = sum(row["attaches"] for row in rows if row["kind"] == "killed")
    yield "docs/reference/features.md", result, f"{loaded_count:,} of {wanted:,} loads"
    yield "docs/reference/features.md", result, f"{whole} of {processes} programs whole"
    yield "docs/reference/features.md", result, f"{killed} of those attempts killed"


@pytest.mark.parametrize(("page", "result", "claim"), list(claims()))
def test_a_page_has_what_the_result_holds(page: str, result: str, claim: str) -> None:
    assert claim in text_of(page), f"by {result}"


def test_the_table_of_standing_cost() -> None:
    page, result = "docs/design/device_time.md", "bench/ground/results/h200-standing.json"
    states = ("attached", "hooked", "timing", "quiet", "left", "again")
    for loop, name in LOOPS.items():
        cells = row_of(page, result, f"{name}, ").split(" | ")[1:7]
        assert cells == [interval(loaded(result)[loop][state]) for state in states], loop


def test_the_table_of_the_cost_of_timing() -> None:
    page, result = "docs/design/device_time.md", "bench/ground/results/h200-device-time.json"
    starts = {"eager": "eager, 524", "graph": "graph, 95", "decode": "decode, 129"}
    for loop, start in (starts | {"train": "transformer training, 13.3"}).items():
        cells = row_of(page, result, start).strip(" |").split(" | ")
        found = loaded(result)[loop]
        asked = ("1 %", "0.3 %", "3 %", "off against off")
        assert cells[1:5] == [interval(found[it]) for it in asked], loop
        peer = found["torch.profiler"]
        assert cells[5:] == [f"{peer[it]['percent']:+.1f}" for it in ("on", "after")], loop


def test_the_table_of_storms() -> None:
    page, result = "docs/design/attach.md", "bench/ground/results/attach_storms.json"
    kinds = {"plain": "attach", "namespaced": "attach, own mounts and pids"}
    for row in loaded(result)["rows"]:
        if row["kind"] in kinds:
            cells = row_of(page, result, f"{row['mode']} | {kinds[row['kind']]} |").split(" | ")
            processes = row["processes"]
            assert cells[2:7] == [
                *(str(row["attaches"]), str(row["loaded"])),
                *(f"{row['whole']} of {processes}", f"{row['identical']} of {processes}"),
                str(row["eintr"]),
            ], row["mode"]


REPORTS = "bench/results/reports.json"


@pytest.mark.parametrize("cost", loaded(REPORTS)["costs"], ids=lambda cost: cost["format"])
def test_the_costs_of_reports_are_those_measured(cost: dict[str, Any]) -> None:
    row = row_of("docs/guide/everyday.md", REPORTS, f"{cost['format']} |")
    assert f"| {cost['cpu_s']:.1f} s | {cost['peak_mb']} MB |" in row


def test_the_score_of_the_gate_is_the_one_measured() -> None:
    result = loaded("bench/results/diff.json")
    claim = (
        f"{result['found']} of {result['changed']} changes were found, "
        f"{result['false']} of {result['unchanged']} pairs without one"
    )
    assert claim in text_of("docs/guide/everyday.md")


TREE = "bench/results/tree.json"


def test_the_sizes_of_the_tree_are_those_measured() -> None:
    whole, node = loaded(TREE)["whole"], loaded(TREE)["node"]
    rows = {part: (whole[part], node[part]) for part in whole}
    rows["all"] = (sum(whole.values()), sum(node.values()))
    page = "docs/guide/deployment.md"
    for part, sizes in rows.items():
        cells = " | ".join(f"{size / 1000**2:.1f}" for size in sizes)
        assert row_of(page, TREE, f"{part} |") == f"| {part} | {cells} |"
    assert f"dist/sonde-tree: {rows['all'][0] / 1000**2:.0f} MB on disk" in text_of(page)
    assert f"dist/sonde-node # {rows['all'][1] / 1000**2:.0f} MB" in text_of(page)


@pytest.mark.parametrize(
    ("pairs", "claim"),
    [
        (4, "first four of the eight pairs alone: {} found, {} failed"),
        (3, "first three: {} and {}"),
    ],
)
def test_how_many_pairs_the_gate_needs(pairs: int, claim: str) -> None:
    result = loaded("bench/results/diff.json")
    failed: Counter[bool] = Counter()
    for pair in result["pairs"]:
        ratios = [math.log(ratio) for ratio in pair["ratios"][:pairs]]
        is_worse = math.expm1(fmean(ratios)) > float(result["above"].rstrip("%")) / 100
        failed[pair["kind"] != "none"] += is_worse and differ(ratios)
    assert claim.format(failed[True], failed[False]) in text_of("docs/guide/everyday.md")


BESIDE = "bench/results/beside_before_house.json"


@pytest.mark.parametrize("bench", loaded(BESIDE))
def test_the_differences_between_two_trees_are_those_measured(bench: str) -> None:
    for figure, it in loaded(BESIDE)[bench]["figures"].items():
        row = row_of("docs/lab/beside.md", BESIDE, f"{bench} | {figure} |")
        spread = f"[{it['least']:+g}, {it['greatest']:+g}]"
        cells = f"{it['turns']} | {it['before']:g} | {it['now']:g} | {it['difference']:+g} {spread}"
        assert row == f"| {bench} | {figure} | {cells} |"
        assert it == summary(loaded(BESIDE)[bench]["runs"])[figure]


def test_the_tables_of_stacks_are_those_measured() -> None:
    result = "bench/results/stacks.json"
    whole, named = load(ROOT / result)
    _, _, below = (ROOT / "docs/design/stacks.md").read_text().partition(f"`{result}`")
    assert table(whole, COLUMNS) in below
    assert table(named, NAMING) in below


def test_the_table_of_the_page() -> None:
    page, result = "docs/design/web.md", "bench/results/web_speed.json"
    found = loaded(result)
    for start, figure in {
        "timeline of 1,000,000 spans: answer": "timeline of 1,000,000 spans: answer to drawing",
        "timeline of 10,000,000 spans: answer": "timeline of 10,000,000 spans: answer to drawing",
        "flame graph of 100,000 nodes: click": (
            "flame graph of 100,000 nodes: click to zoomed drawing"
        ),
        "speedscope": "speedscope, the same flame graph: load to drawing",
        "24 h": "24 h of 184 series: answer to drawing",
        "overview of 10,000 nodes of one": "10,000 nodes of one GPU: answer to drawing",
    }.items():
        row = row_of(page, result, start)
        assert f"| {found[figure]:g} | {found[figure + ', CPU']:g} |" in row
    for count in ("1,000,000", "10,000,000"):
        for what in ("pan of all of it", "pan of a sixteenth", "pan among labels"):
            of = f"timeline of {count} spans"
            row = row_of(page, result, f"{of}, {what}")
            assert f"| {found[f'{of}: {what}: between two frames p95']:g} (median" in row
            assert f"| {found[f'{of}: {what}: CPU of a frame, mean']:g} a frame |" in row


def test_the_table_of_the_page_beside_perfetto() -> None:
    page, result = "docs/design/web.md", "bench/results/web_speed_perfetto.json"
    found = loaded(result)
    own, peer = "timeline of 1,000,000 spans", "Perfetto, 1,000,000 spans"
    pan, sideways = f"{own}: pan of all of it", "between two frames {}, moving sideways"
    cells = {
        "to the drawing, by the clock": (
            f"{found[f'{own}: answer to drawing']:.0f}",
            f"{found[f'{peer}: load to drawing']:.0f}",
        ),
        "to the drawing, CPU": (
            f"{found[f'{own}: answer to drawing, CPU']:g}",
            f"{found[f'{peer}: load to drawing, CPU of its main thread']:.0f}",
        ),
        "moving sideways": (
            f"{found[f'{pan}: between two frames p95']:g}"
            f" ({found[f'{pan}: between two frames median']:g})",
            f"{found[f'{peer}: ' + sideways.format('p95')]:g}"
            f" ({found[f'{peer}: ' + sideways.format('median')]:g})",
        ),
    }
    for start, (mine, its) in cells.items():
        assert f"| {mine} | {its} |" in row_of(page, result, start)


def test_every_result_is_named_and_every_name_is_a_result() -> None:
    named = {found for page in PAGES for found in RESULT.findall(page.read_text())}
    there = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("bench/**/*")
        if path.parent.name == "results" or path.name == "results.json"
        if path.suffix in (".json", ".csv")
    }
    assert named == there


def test_intervals_of_loops_that_nothing_was_fitted_by() -> None:
    rows = loaded("bench/results/device_truth_unseen_h200.json")
    held = sum(row["holds"] for row in rows)
    page = text_of("docs/design/explain.md")
    assert (
        f"{held} of {len(rows)} intervals hold the truth ({held / len(rows):.0%}".replace("%", " %")
        in page
    )
    for what, start in {"all\nkernels": "computing", "single kernels": "kernel "}.items():
        mine = [row for row in rows if row["quantity"].startswith(start)]
        text = f"{sum(row['holds'] for row in mine)} of {len(mine)}"
        assert text in page, what


def test_kernels_within_replays_are_those_measured() -> None:
    page, result = "docs/design/trace.md", "bench/results/replay_kernels_h200.json"
    names = {"graph_training": "training", "graph_denoising": "denoising",
             "graph_encoding": "encoding", "graph_decoding": "decoding (290 kernels)"}  # fmt: skip
    for one in loaded(result):
        if one["loop"] not in names:
            continue
        *points, whole = (kernel["points"] for kernel in one["kernels"])
        cells = [
            f"{median(one['before']):.0f}",
            f"{max(map(abs, points)):.1f}",
            f"{whole:+.1f}".replace("-", "−"),
            f"{one['slower']:+.2f} %".replace("-", "−"),
        ]
        row = row_of(page, result, names[one["loop"]])
        assert f"| {' | '.join(cells)} |" in row


def test_training_beside_a_twin_is_as_measured() -> None:
    (one,) = loaded("bench/results/h100-trace-train.json")["rows"]
    page = text_of("docs/design/trace.md")
    steps = {trace["kernels_a_step"] for trace in one["traces"]}
    assert one["identical"]
    assert steps == {734.0}
    assert f"in each of {len(one['traces'])} traces" in page
    profiled = one["profiler"]["kernels"] / one["profiler"]["steps"]
    assert f"torch.profiler {profiled:.1f} (" in page


def test_builds_of_the_field_are_as_measured() -> None:
    result = "bench/field_builds/results/vm.jsonl"
    for line in (ROOT / result).read_text("utf-8").splitlines():
        one = json.loads(line)
        hooks, _, inside = row_of("docs/design/cost.md", result, f"{one['build']} |").split(" | ")[
            2:5
        ]
        first = one["recordings"][0]
        assert hooks == str(first["hooks"]), one["build"]
        assert inside.startswith(f"{first.get('inside_ms', 0.0):.0f} ms"), one["build"]
        assert one["alive"] and not first["exit"]
