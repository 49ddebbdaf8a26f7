# SPDX-License-Identifier: Apache-2.0
"""Processes are called by what their interpreter runs, wherever they are shown."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from captures import Writer, filled, meta
from captures import chunk as chunk_of
from sonde import procfs
from sonde.agent import commands
from sonde.agent.commands import Commands
from sonde.export import folded, json_report, pprof, speedscope, summary, table
from sonde.model.process import Process
from sonde.query import stored, stored_memory, stored_ranks, stored_views
from sonde.query.capture import read
from sonde.query.schema import TABLES, conform
from sonde.query.selection import Selection
from sonde.query.session import Session
from sonde.query.stored_capture import capture_of
from sonde.query.stored_ranks import BinKind, TimeBin
from sonde.query.stored_session import StoredSession
from sonde.query.timeline import of_capture
from sonde.resolve import Resolver
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.tracked_process import TrackedProcess
from sonde.store.chunks import open_chunk
from sonde.store.record import Record, digest_of
from sonde.store.row_reader import RowReader

NOW_NS = 1_800_001_800 * 10**9


def two_ranks() -> Writer:
    """Two ranks that wake each other, one with a loader, and a program that is no interpreter."""
    w = Writer()
    threads = [{"tid": 300, "comm": "python3"}, {"tid": 305, "comm": "loader"}]
    one = w.process(300, "python3", threads=threads, command="train.py rank 0")
    other = w.process(400, "python3", command="train.py rank 1")
    nginx = w.process(500, "nginx")
    for key, tid in ((one, 300), (one, 305), (other, 400), (nginx, 500)):
        w.on_cpu(key, tid, w.stack("main", "work"), 100)
    w.wait(other, 400, "futex", 2.0, count=9, stack=w.stack("main"), waker=(300, 300))
    return w


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(read(two_ranks().write(tmp_path / "a.sonde")))


def written(exporter: ModuleType, session: Session, **more: Any) -> bytes:
    out = io.BytesIO()
    exporter.write(session, out, **more)
    return out.getvalue()


def test_processes_and_first_threads_are_called_by_the_script(session: Session) -> None:
    names = {one.pid: one.name for one in session.processes}
    assert names == {300: "train.py rank 0", 400: "train.py rank 1", 500: "nginx"}
    assert session.processes.names == [one.name for one in session.processes]
    threads = {one.tid: one.name for one in session.threads}
    assert threads == {300: "train.py rank 0", 305: "loader", 400: "train.py rank 1", 500: "nginx"}
    assert session.threads.names == [one.name for one in session.threads]
    assert [*map(session.threads.name_of, range(4))] == session.threads.names


@pytest.mark.parametrize("exporter", [table, summary, folded, pprof, speedscope])
def test_every_format_has_the_script(exporter: ModuleType, session: Session) -> None:
    text = written(exporter, session)
    text = gzip.decompress(text) if exporter is pprof else text
    assert b"train.py rank 0" in text and b"train.py rank 1" in text and b"nginx" in text
    assert b"python3" not in text


def test_json_has_the_script_beside_the_kernels_name(session: Session) -> None:
    document = json.loads(written(json_report, session))
    found = {one["pid"]: (one["command"], one["comm"]) for one in document["processes"]}
    assert found[300] == ("train.py rank 0", "python3")
    assert found[500] == ("", "nginx")


def test_a_timeline_has_the_script(tmp_path: Path) -> None:
    timeline = of_capture(read(two_ranks().write(tmp_path / "a.sonde")))
    labels = {one.label: one.process for one in timeline.tracks}
    assert labels["train.py rank 1 (400)"] == "train.py rank 1"
    assert labels["loader (305)"] == "train.py rank 0"
    assert timeline.programs[300] == ("python3", "python3")


def test_earlier_captures_have_none(tmp_path: Path) -> None:
    w = two_ranks()
    rows = filled("process", w.rows["process"]).drop_columns(["command"])
    assert conform("process", rows).column("command").to_pylist() == ["", "", ""]
    tables = {name: filled(name, rows) for name, rows in w.rows.items() if name != "process"}
    body = two_ranks().bytes()[:16] + chunk_of({**tables, "process": rows}, **meta(last=True))
    path = tmp_path / "earlier.sonde"
    path.write_bytes(body)
    session = Session(read(path))
    assert {one.name for one in session.processes} == {"python3", "nginx"}


class Stored:
    """What a server keeps of `two_ranks`, as Parquet."""

    def __init__(self, folder: Path, without: tuple[str, ...] = ()) -> None:
        bodies = two_ranks().chunks()
        chunks = [
            open_chunk(Record("lab", "n", digest_of("lab", "n", body), NOW_NS, body))
            for body in bodies
        ]
        tables, *_ = RowReader(bytes(range(32))).read(chunks)
        files = {}
        for name, rows in tables.items():
            kept = rows.drop_columns([one for one in without if one in rows.column_names])
            path = folder / name / "day=1" / "hour=1" / "a.parquet"
            path.parent.mkdir(parents=True)
            pq.write_table(kept, path)
            files[name] = [path]
        self.session = StoredSession(folder, files)
        self.selection = Selection(0, 1 << 62)


def texts(table: pa.Table, column: str) -> list[str]:
    return sorted(table.column(column).to_pylist())


def test_a_server_answers_with_the_script(tmp_path: Path) -> None:
    one = Stored(tmp_path)
    found = stored_views.processes(one.session, one.selection)
    assert texts(found, "command") == ["", "train.py rank 0", "train.py rank 1"]
    assert texts(found, "comm") == ["nginx", "python3", "python3"]
    groups = stored.flame_graph(one.session, one.selection, by="process")
    assert set(texts(groups, "group_name")) == {
        "n nginx (500)", "n train.py rank 0 (300)", "n train.py rank 1 (400)"
    }  # fmt: skip
    groups = stored.flame_graph(one.session, one.selection, by="thread")
    assert set(texts(groups, "group_name")) == {
        *("n nginx (500)", "n train.py rank 0 (300)", "n train.py rank 1 (400)"),
        "n loader (305)",
    }
    stored_memory.memory(one.session, one.selection)
    stored_ranks.ranks(one.session, one.selection, [TimeBin(0, 1 << 62)], BinKind.TIME)
    found_capture = capture_of(one.session, Selection(0, 1 << 61, nodes=("n",)))
    assert texts(found_capture.tables["process"], "command")[-1] == "train.py rank 1"


def test_a_store_of_an_earlier_version_is_still_read(tmp_path: Path) -> None:
    one = Stored(tmp_path, without=("command", "inner_container"))
    found = stored_views.processes(one.session, one.selection)
    assert texts(found, "comm") == ["nginx", "python3", "python3"]
    assert found.column("command").null_count == 3
    groups = stored.flame_graph(one.session, one.selection, by="process")
    assert "n python3 (300)" in texts(groups, "group_name")
    capture = capture_of(one.session, Selection(0, 1 << 61, nodes=("n",)))
    assert set(texts(capture.tables["process"], "command")) == {""}


class Table:
    """Processes by pid, of two parties."""

    def __init__(self, count: int, party: int = 7) -> None:
        self.known = {pid: self._made(pid, party) for pid in range(10, 10 + count)}

    @staticmethod
    def _made(pid: int, party: int) -> TrackedProcess:
        process = TrackedProcess(pid, 1, 5, "python3", ProcessImage(pid, "exec"))
        process.set_exe("python3.11")
        process._party = party
        return process

    def find(self, pid: int, start_ns: int) -> TrackedProcess:
        return self.known[pid]

    @property
    def threads(self) -> list[tuple[int, int, int]]:
        return [(pid, 1, pid) for pid in self.known]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    calls: list[list[int]] = []

    def scripts_of(pids: list[int]) -> list[str | None]:
        calls.append(list(pids))
        return [None if pid == 11 else f"{pid}.py" for pid in pids]

    monkeypatch.setattr(procfs, "scripts_of", scripts_of)
    return calls


def reader_of(table: Table) -> Commands:
    resolver = Resolver()
    return Commands(SimpleNamespace(processes=table, python_budget=resolver.python_budget))  # type: ignore[arg-type]


def test_a_program_is_read_once_and_again_where_it_failed(asked: list[list[int]]) -> None:
    table = Table(2)
    table.known[12] = Table._made(12, 7)
    table.known[12].comm = "nginx"
    table.known[12].set_exe("nginx")
    reader = reader_of(table)
    reader.update(table.threads)
    reader.update(table.threads)
    assert [sorted(pids) for pids in asked] == [[10, 11], [11]]
    assert reader.unread == 2
    assert (table.known[10].command, table.known[12].command) == ("10.py", "")
    table.known[10].on_exec(5)
    reader.update(table.threads)
    assert 10 in asked[-1]


def test_a_flood_of_programs_is_bounded_counted_and_comes_last(asked: list[list[int]]) -> None:
    table = Table(commands.MOST_A_TICK + 30)
    table.known[5] = Table._made(5, 8)
    reader = reader_of(table)
    reader.update(table.threads)
    assert [len(pids) for pids in asked] == [1, commands.MOST_A_TICK]
    assert reader.unread - (11 in asked[1]) == 30
    reader.update(table.threads)
    assert len(asked[-1]) <= 31


def test_a_party_whose_programs_take_long_to_find_comes_last(
    asked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = procfs.Broker()
    monkeypatch.setattr(procfs, "BROKER", broker)
    monkeypatch.setattr(procfs, "read_exe", lambda pid: time.sleep(0.02) or "python3")
    monkeypatch.setattr(TrackedProcess, "party", property(lambda it: 7 if it.pid < 500 else 8))
    table = Table(200)
    for process in table.known.values():
        process.set_exe("")
    table.known[500] = Table._made(500, 8)
    reader = reader_of(table)
    began_s = time.monotonic()
    reader.update(table.threads)
    reader.update(table.threads)
    assert time.monotonic() - began_s < 1.0  # not 8
    assert any(500 in pids for pids in asked)
    assert broker.late() == {7}
    assert reader.unread > 300


def test_the_name_in_a_row_follows_forks_and_programs() -> None:
    process = TrackedProcess(9, 1, 5, "python3", ProcessImage(9, "exec"))
    process.command = "train.py rank 0"
    assert process.record().name == "train.py rank 0"
    process.set_thread_name(9, "pt_data_worker")
    assert process.record() == Process(
        9, 1, 5, "pt_data_worker", "", command="pt_data_worker of train.py rank 0"
    )
    process.on_exec(7)
    assert process.record().name == "pt_data_worker"


def test_the_table_has_the_column() -> None:
    assert TABLES["process"].names[-1] == "command"


def test_explain_reads_standard_input_and_takes_a_script_by_name(tmp_path: Path) -> None:
    def explained(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "sonde", "explain", "-", *arguments],
            input=two_ranks().bytes(),
            capture_output=True,
            check=False,
        )

    done = explained("--pid", "train.py rank 1")
    assert done.returncode == 0, done.stderr
    assert b"train.py rank 1 (400)" in done.stdout
    done = explained("--pid", "trian.py rank 1")
    assert done.returncode == 2
    assert b"did you mean train.py rank 1?" in done.stderr
