# SPDX-License-Identifier: Apache-2.0
"""Names of threads, processes and the program's own functions and files decide nothing.

Each record is explained as it is, and with all of them replaced at random.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from sonde.analyze.bound import explain
from sonde.analyze.launch_path import kind_of_frame
from sonde.analyze.merge import merged, with_interpreter_lock
from sonde.model.libraries import CodeKind, kind_of_file, kind_of_native
from sonde.model.timeline import HostKind, Timeline, TrackKind
from sonde.query.capture import Capture, read
from sonde.query.timeline import of_capture
from sonde.readers import kineto

DATA = Path(__file__).parents[1] / "data"
TRACES = sorted((DATA / "explain").glob("*.json.gz"))
CAPTURES = sorted([*(DATA / "explain/own").glob("*.sonde"), *DATA.glob("device_time/*.sonde")])
WORDS = ("loader", "prefetch", "sonde", "cuda-EvtHandlr", "gil", "dali", "lock", "main", "input")
"""Names that misled once, among the random ones."""
_FRAME = re.compile(r"^(?P<file>[^()]*)(?P<line>\(\d+\): )(?P<function>.*)$")


class Renamer:
    """Gives each name another one, the same each time."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if name not in self._known:
            word = self._random.choice(WORDS)
            self._known[name] = f"{word}_{self._random.randrange(1 << 40):x}"
        return self._known[name]


def of_timeline(timeline: Timeline, new: Renamer) -> Timeline:
    """A trace with other names of threads, of the program's functions, and of its ranges."""
    ranges = set(timeline.host.name[timeline.host.kind == HostKind.RANGE].tolist())

    def name(number: int, text: str) -> str:
        frame = _FRAME.match(text)
        if frame and kind_of_frame(text) == CodeKind.OWN_PYTHON:
            function = new(frame["function"])
            return f"{new(frame['file'])}.py{frame['line']}{function}"
        named = number in ranges and "#" not in text
        return new(text) if named else text

    tracks = [
        replace(one, name=new(one.name), process=new(one.process))
        if one.kind == TrackKind.THREAD
        else one
        for one in timeline.tracks
    ]
    names = [name(*one) for one in enumerate(timeline.names)]
    return replace(timeline, tracks=tracks, names=names)


def of_tables(capture: Capture, new: Renamer) -> Capture:
    """A capture with other names of threads, processes, and of the program's functions."""
    rows = capture.tables["frame"].to_pylist()
    for row in rows:
        own_python = row["kind"] == "python" and kind_of_file(row["file"]) == CodeKind.OWN_PYTHON
        native = row["kind"] == "user" and row["function"]
        native = native and kind_of_native(row["binary"], "") == CodeKind.OWN_NATIVE
        if own_python or native:
            row["function"] = new(row["function"])
        if own_python:
            row["file"] = new(row["file"]) + ".py"
    tables = {**capture.tables, "frame": changed(capture.tables["frame"], rows)}
    for table in ("thread", "process"):
        rows = capture.tables[table].to_pylist()
        rows = [{**row, "comm": new(row["comm"])} for row in rows]
        tables[table] = changed(capture.tables[table], rows)
    return replace(capture, tables=tables)


def changed(table: pa.Table, rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows, table.schema)


def told(timeline: Timeline) -> list[tuple[object, ...]]:
    return [
        (
            [(one.key, round(one.share, 6)) for one in verdict.bounds],
            sorted((one.key, one.detail, one.ns) for one in verdict.causes),
            round(verdict.computing, 6),
        )
        for verdict in explain(timeline).verdicts
    ]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.partition(".")[0])
def test_renaming_changes_no_verdict_on_a_trace(path: Path) -> None:
    trace = kineto.read(path)
    capture = read(path.with_name(path.name.replace(".json.gz", ".sonde")))
    new = Renamer(path.name)
    plain = with_interpreter_lock(merged(trace, of_capture(capture)))
    other = merged(of_timeline(trace, new), of_capture(of_tables(capture, new)))

    assert told(with_interpreter_lock(other)) == told(plain)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_renaming_changes_no_verdict_on_a_capture(path: Path) -> None:
    capture = read(path)

    assert told(of_capture(of_tables(capture, Renamer(path.name)))) == told(of_capture(capture))
