# SPDX-License-Identifier: Apache-2.0
"""Of a capture of very many threads, the verdict by some of them is that by all."""

from __future__ import annotations

from pathlib import Path

import pytest

from captures import Writer
from sonde.analyze.bound import explain
from sonde.cli.main import main
from sonde.export.verdict import document
from sonde.query import chosen_threads
from sonde.query.capture import read
from sonde.query.chosen_threads import chosen_threads as choose
from sonde.recording import verdicts
from sonde.recording.timelines import timeline_of

DATA = Path(__file__).parents[1] / "data"
CAPTURES = [
    *sorted(DATA.glob("explain/host/*.sonde")),
    *sorted(DATA.glob("explain/own/*.sonde")),
    DATA / "h200_training.sonde",
]
BYSTANDERS = 40


def storm() -> Writer:
    """Two threads that work, one that waits for a CPU, and many that ran for a moment each."""
    w = Writer()
    main = w.process(100, "main", threads=[{"tid": 100, "comm": "main"}])
    step = ("step", "[python]", "train.py", 12, "python")
    w.on_cpu(main, 100, w.stack("run", step), 300)
    w.wait(main, 100, "preempted", 6.0, kind="runqueue", count=900)
    spinner = w.process(200, "spinner", threads=[{"tid": 200, "comm": "spinner"}])
    w.on_cpu(spinner, 200, w.stack("spin"), 200)
    w.wait(spinner, 200, "preempted", 3.0, kind="runqueue", count=900)
    for number in range(BYSTANDERS):
        one = w.process(1000 + number, "short", ppid=200)
        w.on_cpu(one, 1000 + number, w.stack("short", f"f{number}"), 4)
        if number % 2:
            w.wait(one, 1000 + number, "preempted", 0.2, kind="runqueue", count=9)
    return w


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(chosen_threads, "MANY_THREADS", 0)
    monkeypatch.setattr(chosen_threads, "MOST", 2)


def test_all_threads_of_an_ordinary_capture_are_chosen(tmp_path):
    tables = read(storm().write(tmp_path / "a.sonde")).tables
    found = choose(tables)
    assert found.tables is tables
    assert (len(found.others), found.note) == (0, "")


@pytest.mark.usefixtures("few")
def test_of_many_threads_some_are_chosen_and_the_others_summed(tmp_path):
    tables = read(storm().write(tmp_path / "a.sonde")).tables
    found = choose(tables)
    left = set(found.tables["sample"].column("tid").to_pylist())
    assert {100, 200} <= left
    assert len(left) < 10
    every, kept = (_cpu_ns(one["sample"]) for one in (tables, found.tables))
    queued = sum(tables["activity"].column("ns").to_pylist())
    assert found.others.ran_ns.sum() == pytest.approx(every - kept, rel=1e-6)
    assert 0 < found.others.queued_ns.sum() < queued
    assert found.tables["stack"].num_rows < tables["stack"].num_rows
    assert found.tables["frame"].num_rows < tables["frame"].num_rows
    assert f"of {tables['thread'].num_rows} threads, the {len(left)} that" in found.note


def _cpu_ns(sample):
    columns = (sample.column(name).to_pylist() for name in ("kind", "weight_ns"))
    return sum(ns for kind, ns in zip(*columns, strict=True) if kind == "cpu")


@pytest.mark.usefixtures("few")
def test_who_had_the_cpus_includes_the_others(tmp_path):
    capture = read(storm().write(tmp_path / "a.sonde"))
    whole, some = explain(timeline_of(capture)), verdicts.of_capture(capture).explanation
    assert [fact for one in whole.verdicts[0].causes for fact in one.facts]
    assert document(some)["verdicts"][0] == document(whole)["verdicts"][0]
    assert some.notes[0].startswith("of 42 threads")


@pytest.mark.usefixtures("few")
def test_a_report_of_many_threads_has_a_verdict_and_notes_of_how_many_it_is(tmp_path, capsys):
    path = storm().write(tmp_path / "a.sonde")
    assert main(["report", str(path), "--format", "summary"]) == 0

    text = capsys.readouterr().out
    assert "VERDICT  thread main (100)" in text
    assert "  note: of 42 threads, the " in text


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_the_verdict_by_some_threads_is_that_by_all(path, monkeypatch):
    monkeypatch.setattr(chosen_threads, "MANY_THREADS", 0)
    monkeypatch.setattr(chosen_threads, "MOST", 4)
    capture = read(path)
    whole, some = explain(timeline_of(capture)), verdicts.of_capture(capture).explanation
    wanted, found = (
        [
            (
                one.device_name,
                [(bound.key, round(bound.share, 2)) for bound in one.bounds],
                [(cause.key, round(cause.share, 2)) for cause in one.causes if cause.share > 0.02],
                [one.text for one in one.advice],
            )
            for one in explanation.verdicts
        ]
        for explanation in (whole, some)
    )
    assert found == wanted


def test_the_budget_is_as_before(tmp_path):
    capture = read(storm().write(tmp_path / "a.sonde"))
    before = capture.budget.held_bytes
    assert verdicts.of_capture(capture).explanation is not None
    assert capture.budget.held_bytes == before


def test_a_verdict_that_takes_too_much_memory_is_missing_with_the_reason(tmp_path, monkeypatch):
    capture = read(storm().write(tmp_path / "it is.sonde"))
    monkeypatch.setattr(capture.budget, "limit_bytes", 1)
    found = verdicts.of_capture(capture)
    assert found.explanation is None
    assert found.missing
    assert found.command == f"sonde explain '{tmp_path / 'it is.sonde'}'"
