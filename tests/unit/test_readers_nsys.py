# SPDX-License-Identifier: Apache-2.0
"""Nsight Systems' SQLite export: what is read of it, and what a hostile database costs."""

from __future__ import annotations

import os
import sqlite3
import struct
import time
from pathlib import Path

import pytest

from charged import charged
from sonde.analyze.bound import explain
from sonde.errors import CaptureError, NotACapture
from sonde.model.causes import Bound
from sonde.model.timeline import CallKind, CopyDirection, DeviceKind, Memory, WaitDetail
from sonde.readers import nsys_sqlite
from sonde.recording.timelines import open_timeline

SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT,
  contextId INT, streamId INT, correlationId INT, globalPid INT, demangledName INT, shortName INT,
  gridX INT, gridY INT, gridZ INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, contextId INT,
  streamId INT, correlationId INT, globalPid INT, bytes INT, copyKind INT, srcKind INT,
  dstKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, eventClass INT, globalTid INT,
  correlationId INT, nameId INT, returnValue INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT);
CREATE TABLE OSRT_API (start INT, end INT, globalTid INT, nameId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT (deviceId INT, contextId INT, streamId INT,
  correlationId INT, globalPid INT, eventId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INT, end INT, deviceId INT, contextId INT,
  streamId INT, correlationId INT, globalPid INT, syncType INT, eventId INT);
CREATE TABLE ENUM_CUDA_MEM_KIND (id INT, name TEXT, label TEXT);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT, smCount INT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT);
"""
PID, TID = 4121, 4122
GLOBAL_PID = 1 << 56 | PID << 24
GLOBAL_TID = GLOBAL_PID | TID
STRINGS = {
    1: "cudaLaunchKernel_v7000", 2: "void gemm<float>()", 3: "gemm", 4: "cudaMemcpyAsync_v3020",
    5: "pthread_mutex_lock", 6: "pthread_cond_wait", 7: "cudaGetDevice_v3020", 8: "train step",
}  # fmt: skip


class Export:
    """A database as `nsys export` makes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA)
        self.rows("StringIds", *STRINGS.items())
        self.rows("ENUM_CUDA_MEM_KIND", (0, "x", "Pageable"), (1, "x", "Pinned"))
        self.rows("TARGET_INFO_GPU", (0, "NVIDIA H200", 132))
        self.rows("TARGET_INFO_SESSION_START_TIME", (1_700_000_000_000_000_000,))
        self.number = 0

    def rows(self, table: str, *rows: tuple[object, ...]) -> None:
        for row in rows:
            holes = ", ".join("?" * len(row))
            self.database.execute(f"INSERT INTO {table} VALUES ({holes})", row)

    def call(self, start: int, end: int, name: int) -> int:
        self.number += 1
        self.rows("CUPTI_ACTIVITY_KIND_RUNTIME", (start, end, 0, GLOBAL_TID, self.number, name, 0))
        return self.number

    def kernel(self, start: int, end: int, launched: int, stream: int = 7) -> None:
        number = self.call(launched, launched + 4_000, 1)
        self.rows(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            (start, end, 0, 1, stream, number, GLOBAL_PID, 2, 3, 8, 4, 1),
        )

    def opened(self):
        self.database.commit()
        self.database.close()
        return open_timeline([self.path])


@pytest.fixture
def export(tmp_path):
    return Export(tmp_path / "report.sqlite")


def test_kernels_copies_calls_and_ranges_are_read(export):
    export.kernel(100_000, 200_000, 90_000)
    number = export.call(210_000, 214_000, 4)
    export.rows(
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        (220_000, 230_000, 0, 1, 7, number, GLOBAL_PID, 1 << 20, 1, 0, 2),
    )
    export.call(240_000, 241_000, 7)
    export.rows(
        "NVTX_EVENTS",
        (80_000, 250_000, 59, None, 8, GLOBAL_TID),
        (81_000, None, 34, "mark", None, GLOBAL_TID),
    )
    timeline = export.opened()
    device, calls, host = timeline.device, timeline.calls, timeline.host

    assert device.kind.tolist() == [DeviceKind.KERNEL, DeviceKind.COPY]
    assert timeline.names[device.name[0]] == "void gemm<float>()"
    assert device.blocks[0] == 32
    assert (device.direction[1], device.memory[1]) == (CopyDirection.H2D, Memory.PAGEABLE)
    assert device.correlation.tolist() == calls.correlation.tolist()
    assert calls.kind.tolist() == [CallKind.LAUNCH, CallKind.COPY]
    assert timeline.names[calls.name[0]] == "cudaLaunchKernel"
    assert [timeline.names[name] for name in host.name] == ["train step"]
    thread = timeline.tracks[calls.track[0]]
    assert (thread.pid, thread.number) == (PID, TID)
    assert timeline.devices == {0: "NVIDIA H200"}
    assert timeline.multiprocessors == {0: 132}
    assert timeline.wall_offset_ns == 1_700_000_000_000_000_000
    assert not timeline.notes


@pytest.mark.parametrize(("function", "bound"), [(5, Bound.LOCK), (6, Bound.INPUT)])
def test_waits_in_the_os_runtime_explain_stalls(export, function, bound):
    for step in range(20):
        t = 1_000_000 + step * 1_000_000
        export.kernel(t, t + 100_000, t - 10_000)
        export.rows("OSRT_API", (t + 10_000, t + 980_000, GLOBAL_TID, function))
    timeline = export.opened()
    (verdict,) = explain(timeline).verdicts

    assert verdict.bounds[0].key == bound
    in_queue = timeline.states.wait_detail[0] == WaitDetail.QUEUE
    assert in_queue == (bound == Bound.INPUT)


def test_waits_of_streams_are_joined_with_the_last_record_of_their_event(export):
    export.kernel(100_000, 200_000, 90_000)
    export.rows(
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
        (0, 1, 8, 10, GLOBAL_PID, 5), (0, 1, 9, 20, GLOBAL_PID, 5), (0, 1, 8, 40, GLOBAL_PID, 5),
    )  # fmt: skip
    export.rows(
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        (1, 2, 0, 1, 7, 30, GLOBAL_PID, 2, 5), (1, 2, 0, 1, 7, 31, GLOBAL_PID, 3, 5),
    )  # fmt: skip
    timeline = export.opened()
    waits = timeline.stream_waits

    assert len(waits) == 1
    assert timeline.tracks[waits.awaited[0]].number == 9
    assert (waits.wait[0], waits.record[0]) == (30, 20)


def test_rows_that_make_no_sense_are_counted(export):
    export.kernel(100_000, 200_000, 90_000)
    for bad in ("x", -5, (1 << 63) - 1, 2.5):
        export.rows("CUPTI_ACTIVITY_KIND_KERNEL", (bad, 9, 0, 1, 7, 1, GLOBAL_PID, 2, 3, 1, 1, 1))
    timeline = export.opened()

    assert len(timeline.device) == 1
    assert timeline.notes == ["4 rows not understood"]


def test_a_view_in_place_of_a_table_is_not_run(export):
    export.database.executescript(
        "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL;"
        "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(start) AS "
        "(SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end, 0 AS deviceId, "
        "7 AS streamId, 1 AS correlationId FROM n;"
    )
    export.call(1, 2, 1)

    assert not len(export.opened().device)


def test_a_database_of_rocprofv3_is_refused_as_such(tmp_path):
    path = tmp_path / "results.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE rocpd_kernel_dispatch_0f3a (id INTEGER, start INTEGER)")
    with pytest.raises(NotACapture, match="database of rocprofv3"):
        open_timeline([path])


def test_another_database_is_refused(tmp_path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE notes (text TEXT)")

    with pytest.raises(NotACapture, match="no table of Nsight Systems"):
        open_timeline([path])


def test_a_damaged_database_is_refused(export):
    for step in range(2_000):
        export.kernel(step * 10, step * 10 + 5, step * 10)
    export.database.commit()
    export.database.close()
    content = bytearray(export.path.read_bytes())
    content[5_000:60_000] = bytes(55_000)
    export.path.write_bytes(bytes(content))

    with pytest.raises(CaptureError):
        open_timeline([export.path])


def test_a_database_larger_than_the_limit_is_refused(export, monkeypatch):
    for step in range(5_000):
        export.kernel(step * 10, step * 10 + 5, step * 10)
    monkeypatch.setenv("SONDE_READ_LIMIT", "1M")

    with pytest.raises(CaptureError, match="memory to read"):
        export.opened()


def test_pages_that_name_one_another_end(tmp_path: Path) -> None:
    """401 to the power of 4 ways lead to the pages of the schema."""
    path = tmp_path / "hang.sqlite"
    path.write_bytes(_loop_of_pages(tmp_path / "template.sqlite"))
    began = time.process_time()
    with pytest.raises(NotACapture, match="interrupted"):
        nsys_sqlite.read(path)
    assert time.process_time() - began < 10


def test_the_time_that_reading_takes_is_bounded_too(export, monkeypatch) -> None:
    """A step may copy a long value, which millions of rows can share."""
    monkeypatch.setattr(nsys_sqlite, "_LEAST_S", 0.0)
    monkeypatch.setattr(nsys_sqlite, "_BYTES_A_S", 1 << 60)
    for step in range(5_000):
        export.kernel(step * 10, step * 10 + 5, step * 10)
    with pytest.raises(NotACapture, match="interrupted"):
        export.opened()


def test_of_a_sparse_file_what_is_on_the_disk_counts(tmp_path: Path) -> None:
    path = tmp_path / "hang.sqlite"
    path.write_bytes(_loop_of_pages(tmp_path / "template.sqlite"))
    os.truncate(path, 1 << 40)
    began_s = time.thread_time()
    with pytest.raises(NotACapture, match="interrupted"):
        nsys_sqlite.read(path)
    assert time.thread_time() - began_s < 10


def _loop_of_pages(template: Path) -> bytes:
    size = 4096
    database = sqlite3.connect(template)
    database.execute(f"PRAGMA page_size={size}")
    database.execute("CREATE TABLE t(a UNIQUE)")
    database.commit()
    database.close()
    content = template.read_bytes()

    def page(kind: int, cells: list[bytes], right: int = 0, at: int = 0) -> bytearray:
        found, end, places = bytearray(size), size, b""
        for cell in cells:
            end -= len(cell)
            found[end : end + len(cell)] = cell
            places += struct.pack(">H", end)
        head = struct.pack(">BHHHB", kind, 0, len(cells), end, 0)
        head += struct.pack(">I", right) if kind == 5 else b""
        found[at : at + len(head) + len(places)] = head + places
        return found

    def row(number: int, *values: str | int | None) -> bytes:
        types, body = b"", b""
        for value in values:
            if value is None:
                types += b"\x00"
            elif isinstance(value, int):
                types, body = types + b"\x01", body + bytes([value])
            else:
                types, body = types + bytes([13 + 2 * len(value)]), body + value.encode()
        record = bytes([len(types) + 1]) + types + body
        return bytes([len(record), number]) + record

    def inner(child: int, right: int, count: int = 400, at: int = 0) -> bytearray:
        return page(5, [struct.pack(">I", child) + b"\x01"] * count, right, at)

    first = page(13, [row(1, "table", "t", "t", 2, "CREATE TABLE t(a UNIQUE)")])
    second = page(13, [row(2, "index", "sqlite_autoindex_t_1", "t", 3, None)])
    pages = [
        inner(4, 9, 1, 100),
        bytearray(content[size : 2 * size]),
        bytearray(content[2 * size : 3 * size]),
        *(first, second, inner(5, 5), inner(6, 6), inner(7, 7), inner(8, 8)),
    ]
    head = bytearray(content[:100])
    head[28:32] = struct.pack(">I", len(pages))
    head[92:96] = head[24:28]
    pages[0][:100] = head
    return b"".join(map(bytes, pages))


def test_long_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    database.execute("INSERT INTO StringIds VALUES (1, ?)", ["x" * (1 << 20)])
    database.commit()
    database.close()
    with pytest.raises(NotACapture, match="too big"):
        nsys_sqlite.read(path)


def test_a_long_schema_is_refused(tmp_path: Path) -> None:
    """SQLite keeps it: rows that share pages could make gigabytes of a small file."""
    for count, sql, cause in (
        (1, f"(a CHECK(a IN ({', '.join('a' * 10_000)})))", "too big"),
        (1_500, "(a)", "interrupted"),
    ):
        path = tmp_path / f"{count}.sqlite"
        database = sqlite3.connect(path)
        database.execute("BEGIN")
        for number in range(count):
            database.execute(f"CREATE TABLE t{number} {sql}")
        database.commit()
        database.close()
        with pytest.raises(NotACapture, match=cause):
            nsys_sqlite.read(path)


EMOJI = "\N{GRINNING FACE}"
MANY = 2_000


def _kinds(export: Export, number: int) -> None:
    export.rows("ENUM_CUDA_MEM_KIND", (f"{number}{EMOJI}" + "x" * 2_000, "x", "Pinned"))


def _gpus(export: Export, number: int) -> None:
    export.rows("TARGET_INFO_GPU", (number, f"{number}{EMOJI}" + "x" * 2_000, 132))


def _nvtx(export: Export, number: int) -> None:
    text = f"{number}{EMOJI}" + "x" * 2_000
    export.rows("NVTX_EVENTS", (1, 2, 59, text, None, GLOBAL_TID))


def _threads(export: Export, number: int) -> None:
    export.rows("NVTX_EVENTS", (1, 2, 59, "x", None, GLOBAL_PID + number))


def _records(export: Export, number: int) -> None:
    event = f"{number}{EMOJI}" + "x" * 2_000
    export.rows("CUPTI_ACTIVITY_KIND_CUDA_EVENT", (0, 1, 7, number, GLOBAL_PID, event))


def _events(export: Export, number: int) -> None:
    # Beside the records, tracks of the streams and the ids of processes.
    row = (0, 1, number, number, GLOBAL_PID + (number << 24), 1 << 40 | number)
    export.rows("CUPTI_ACTIVITY_KIND_CUDA_EVENT", row)


@pytest.mark.parametrize("add", [_kinds, _gpus, _nvtx, _threads, _records, _events])
def test_all_that_is_kept_is_accounted_for(export: Export, monkeypatch, add) -> None:
    """A few kilobytes of shared pages can hold any number of long values."""
    export.kernel(1, 2, 0)
    for number in range(MANY):
        add(export, number)
    export.database.commit()
    export.database.close()
    taken_bytes, held_bytes = charged(nsys_sqlite, export.path, monkeypatch)
    assert taken_bytes < held_bytes


@pytest.mark.parametrize("name", ["_v1" * 5_000 + "x", "sem_" * 4_000])
def test_a_name_that_patterns_take_the_square_of_costs_each_row_little(tmp_path, name):
    export = Export(tmp_path / "a.sqlite")
    export.rows("StringIds", (9, name))
    export.kernel(1_000, 2_000, 500)
    for start in range(2_000, 4_000):
        export.call(start, start + 1, 9)
        export.rows("OSRT_API", (start, start + 1, GLOBAL_TID, 9))
    export.database.commit()
    began = time.process_time()
    assert len(nsys_sqlite.read(export.path).device) == 1
    assert time.process_time() - began < 3


def test_a_schema_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "a.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE AAAA (a)")
    database.commit()
    database.close()
    whole = path.read_bytes().replace(b"CREATE TABLE AAAA", b"CREATE TABLX AAAA")
    path.write_bytes(whole.replace(b"AAAAAAAA", b"AAA\xb6AAA\xb6"))  # its name, twice
    with pytest.raises(NotACapture):
        nsys_sqlite.read(path)
