# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.renaming FILE… --json OUT`: do names decide?

Each capture is explained as it is, and with all names of threads, of processes, and of the
program's own functions and files replaced at random. Names of libraries, their entry points, and of
kernels stay: they may decide. `tests/golden/test_explain_renamed.py` does the same with the records
that the tests have.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from sonde.analyze.bound import explain
from sonde.analyze.launch_path import kind_of_frame
from sonde.model.libraries import CodeKind, kind_of_file, kind_of_native
from sonde.model.timeline import HostKind, Timeline, TrackKind
from sonde.query.capture import Capture, read
from sonde.recording.timelines import timeline_of

WORDS = ("loader", "prefetch", "sonde", "cuda-EvtHandlr", "gil", "dali", "lock", "main", "input")
"""Names that misled once, among the random ones."""
TRAPS = ("take_gil", "munmap", "vfs_read", "sched_yield", "cuLaunchKernel", "exc_page_fault",
         "cudaStreamSynchronize", "all_reduce", "get", "recv_bytes", "wait")  # fmt: skip
"""Names of the kernel's and of libraries' functions, for Python functions of the program."""
_FRAME = re.compile(r"^(?P<file>[^()]*)(?P<line>\(\d+\): )(?P<function>.*)$")


class Renamer:
    """Gives each name another one, the same each time."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._known: dict[str, str] = {}
        self._traps = list(TRAPS)
        self._random.shuffle(self._traps)

    def __call__(self, name: str, trap: bool = False) -> str:
        """The other name; one of `TRAPS`, while there are any, for the first names with `trap`."""
        if name not in self._known and trap and self._traps:
            self._known[name] = self._traps.pop()
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
            function = new(frame["function"], trap=True)
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
        kind = kind_of_file(row["file"], origin=row["origin"])
        own_python = row["kind"] == "python" and kind == CodeKind.OWN_PYTHON
        native = row["kind"] == "user" and row["function"]
        kind = kind_of_native(row["binary"], "", row["origin"])
        native = native and kind == CodeKind.OWN_NATIVE
        if own_python or native:
            row["function"] = new(row["function"], trap=own_python)
        if own_python:
            row["file"] = new(row["file"]) + ".py"
    tables = {**capture.tables, "frame": _changed(capture.tables["frame"], rows)}
    for table in ("thread", "process"):
        rows = capture.tables[table].to_pylist()
        rows = [{**row, "comm": new(row["comm"])} for row in rows]
        tables[table] = _changed(capture.tables[table], rows)
    return replace(capture, tables=tables)


def _changed(table: pa.Table, rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows, table.schema)


def verdicts_of(timeline: Timeline) -> list[tuple[object, ...]]:
    """Every verdict without names: bounds, causes, and how long the device computed."""
    return [
        (
            [(one.key, round(one.share, 6)) for one in verdict.bounds],
            sorted((one.key, one.detail, one.ns) for one in verdict.causes),
            round(verdict.computing, 6),
        )
        for verdict in explain(timeline).verdicts
    ]


def main() -> int:
    """Prints and keeps which verdicts differ; 1 where any does."""
    parser = argparse.ArgumentParser(prog="python -m bench.explain.renaming")
    parser.add_argument("captures", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    rows = []
    for path in args.captures:
        capture = read(path)
        renamed = of_tables(capture, Renamer(path.name))
        before, after = (verdicts_of(timeline_of(one)) for one in (capture, renamed))
        rows.append({"capture": path.stem, "verdicts": len(before), "same": before == after})
        print(f"{path.stem:24} {len(before)} verdicts, {'same' if before == after else 'DIFFER'}")
    same = sum(bool(row["same"]) for row in rows)
    print(f"{same} of {len(rows)} captures have the same verdicts under other names")
    if args.json:
        args.json.write_text(json.dumps({"same": same, "captures": rows}, indent=1) + "\n")
    return int(same < len(rows))


if __name__ == "__main__":
    sys.exit(main())
