# SPDX-License-Identifier: Apache-2.0
"""A capture is read into one set of tables, whatever its chunks repeat."""

import pyarrow as pa
import pytest

from captures import SECOND_NS, START_NS, Writer, chunk, file_header, filled, meta, scene
from sonde.limits import Budget
from sonde.query.capture import read
from sonde.query.framing import CHUNK_HEADER
from sonde.query.merging import Merge
from sonde.query.validation import ROW_BYTES


@pytest.fixture
def capture(tmp_path):
    return read(scene().write(tmp_path / "a.sonde"))


def write(path, *chunks):
    path.write_bytes(file_header() + b"".join(chunks))
    return path


def test_info_has_what_was_recorded(capture):
    info = capture.info
    assert (info.start_ns, info.duration_ns) == (START_NS, 10_000_000_000)
    assert (info.chunks, info.chunks_damaged, info.chunks_missing, info.tail_bytes) == (2, 0, 0, 0)
    assert (info.cpus, info.hz, info.version) == (4, 99, "0.1.0")
    assert info.clean_end


def test_dictionary_rows_that_chunks_repeat_appear_once(capture):
    for name, key in (("stack", "stack_id"), ("frame", "frame_id"), ("process", "pid")):
        keys = capture.tables[name].column(key).to_pylist()
        assert len(keys) == len(set(keys)) > 0


def test_rows_are_put_one_after_another(tmp_path):
    rows = [{"time_ns": START_NS + i, "kind": "cpu", "pid": i} for i in range(3)]
    chunks = [chunk({"sample": filled("sample", [row])}, **meta(i)) for i, row in enumerate(rows)]
    table = read(write(tmp_path / "a.sonde", *chunks)).tables["sample"]
    assert table.column("pid").to_pylist() == [0, 1, 2]


def test_the_last_name_of_a_process_holds(tmp_path):
    def named(comm):
        return {"process": filled("process", [{"pid": 7, "start_ns": 1, "comm": comm}])}

    path = write(
        tmp_path / "a.sonde", chunk(named("sh"), **meta(0)), chunk(named("cc1"), **meta(1))
    )
    assert read(path).tables["process"].column("comm").to_pylist() == ["cc1"]


def test_a_pid_that_was_used_again_is_another_process(tmp_path):
    rows = [{"pid": 7, "start_ns": start, "comm": f"at{start}"} for start in (1, 2)]
    path = write(tmp_path / "a.sonde", chunk({"process": filled("process", rows)}, **meta(0)))
    assert read(path).tables["process"].num_rows == 2


def test_unknown_tables_columns_and_meta_are_ignored(tmp_path):
    thread = filled("thread", [{"pid": 1, "tid": 2, "comm": "a"}])
    tables = {
        "thread": thread.append_column("mood", pa.array(["fine"])),
        "weather": pa.table({"rain": [1.5]}),
    }
    capture = read(write(tmp_path / "a.sonde", chunk(tables, **meta(0, colour="red"))))
    assert capture.tables["thread"].column_names == thread.column_names
    assert "weather" not in capture.tables
    assert capture.info.chunks_damaged == 0


def test_a_chunk_without_any_table_is_read(tmp_path):
    capture = read(write(tmp_path / "a.sonde", chunk({}, **meta(0, last=True))))
    assert all(table.num_rows == 0 for table in capture.tables.values())


def test_a_killed_recorder_is_known_by_the_missing_end(tmp_path):
    path = tmp_path / "a.sonde"
    path.write_bytes(scene().bytes(last=False))
    assert not read(path).info.clean_end


def test_chunks_that_never_reached_the_file_are_counted(tmp_path):
    first, _, third = Writer(seconds=3, chunk_seconds=1).chunks()
    assert read(write(tmp_path / "a.sonde", first, third)).info.chunks_missing == 1


def test_progress_is_reported_up_to_the_end(tmp_path):
    path = scene().write(tmp_path / "a.sonde")
    progress = []
    read(path, lambda done, whole: progress.append((done, whole)))
    assert progress[-1] == (path.stat().st_size, path.stat().st_size)
    assert len(progress) == 2


def test_the_end_is_clean_only_where_the_last_chunk_is_the_last(tmp_path):
    for lasts, clean in (((False, True), True), ((True, False), False)):
        chunks = [chunk({}, **meta(seq, last=last)) for seq, last in enumerate(lasts)]
        assert read(write(tmp_path / "a.sonde", *chunks)).info.clean_end is clean


def test_pauses_are_left_out_of_the_length_and_there_are_none_where_none_is_recorded(tmp_path):
    first = chunk({}, **meta(0, START_NS, 5.0, paused_ns=2 * SECOND_NS))
    second = chunk({}, **meta(1, START_NS + 5 * SECOND_NS, 5.0))
    info = read(write(tmp_path / "a.sonde", first, second)).info
    assert (info.paused_ns, info.duration_ns) == (2 * SECOND_NS, 8 * SECOND_NS)
    assert read(write(tmp_path / "a.sonde", second)).info.duration_ns == 5 * SECOND_NS


@pytest.mark.parametrize("cpus", [0, -1, 1 << 31, 4.0, "4", None])
def test_a_number_of_cpus_that_no_machine_has_is_unknown(tmp_path, cpus):
    capture = {"host": {"cpus": cpus, "hz": (1 << 31) - 1}}
    info = read(write(tmp_path / "a.sonde", chunk({}, **meta(0, capture=capture)))).info
    assert (info.cpus, info.hz) == (0, (1 << 31) - 1)


def test_what_makes_no_sense_is_counted_by_its_bytes(tmp_path):
    broken = chunk({}, **meta(1, raw_len=-1))
    info = read(write(tmp_path / "a.sonde", chunk({}, **meta(0)), broken)).info
    assert (info.chunks_damaged, info.damaged_bytes) == (1, len(broken) - CHUNK_HEADER.size)


def test_of_a_process_that_every_chunk_names_one_row_is_held(monkeypatch):
    monkeypatch.setattr("sonde.query.merging._COMPACT_ROWS", 10)
    table = filled("process", [{"pid": pid, "start_ns": 1} for pid in range(4)])
    merge = Merge(Budget("a", 1, 1 << 40))
    held = []
    for _ in range(9):
        merge.add("process", table)
        held.append(merge.budget.held_bytes // ROW_BYTES["process"])
    # 4 more each time, and 4 in all once more than 10 were added to those that are left.
    assert held == [4, 8, 4, 8, 12, 16, 4, 8, 12]
    assert merge.budget.held_bytes == 12 * ROW_BYTES["process"]
    assert merge.tables()["process"].num_rows == 4
