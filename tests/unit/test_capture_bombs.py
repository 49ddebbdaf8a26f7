# SPDX-License-Identifier: Apache-2.0
"""Captures that unpack to far more than they are: an error or a damaged chunk, in little memory."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib

import pyarrow as pa
import pytest
from test_capture_damage import raw_chunk

from captures import SECOND_NS, START_NS, Writer, arrow_stream, chunk, file_header, filled, meta
from hostile_inputs import holes, metadata
from sonde.cli import main as cli
from sonde.errors import CaptureTooLarge, CaptureTruncated, UsageError
from sonde.limits import JSON_BYTES, Budget, most_bytes
from sonde.query import messages
from sonde.query.capture import read
from sonde.query.framing import most_packed_bytes

ROWS = (1 << 31) - 1


def a_chunk(stream: bytes, table: str = "metric", seq: int = 0) -> bytes:
    listed = [{"name": table, "offset": 0, "length": len(stream), "rows": 1}]
    about = {**meta(seq), "raw_len": len(stream), "tables": listed}
    packed = pa.compress(stream, codec="zstd", asbytes=True)
    return raw_chunk(json.dumps(about).encode(), packed)


def metrics(rows: int) -> pa.Table:
    """A table of metrics, all zeros, which is nothing at all once it is compressed."""
    return pa.table(
        {
            "time_ns": pa.repeat(pa.scalar(START_NS, pa.uint64()), rows),
            "series": pa.repeat(pa.scalar(""), rows),
            "labels": pa.repeat(pa.scalar(""), rows),
            "value": pa.repeat(pa.scalar(0.0), rows),
        }
    )


def written(table: pa.Table, **options) -> bytes:
    sink = pa.BufferOutputStream()
    chosen = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, table.schema, options=chosen) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def zeros() -> bytes:
    """The first bomb found: chunks of zeros, each within what one chunk may claim."""
    one = arrow_stream(metrics(15_000_000))
    packed = pa.compress(one, codec="zstd", asbytes=True)
    listed = [{"name": "metric", "offset": 0, "length": len(one), "rows": 1}]
    return b"".join(
        raw_chunk(json.dumps({**meta(seq), "raw_len": len(one), "tables": listed}).encode(), packed)
        for seq in range(20)
    )


def within_the_ratio_of_each_chunk() -> bytes:
    """No chunk of it stands out, all of them together do."""
    one = arrow_stream(metrics(2_000_000))
    return b"".join(a_chunk(one, seq=seq) for seq in range(30))


def compressed_on_its_own() -> bytes:
    return a_chunk(written(metrics(3_000_000), compression="zstd"))


def lies_of_its_length(field: int = 8_000_000) -> bytes:
    """A compressed buffer begins with how long it will be: this one claims 2^40 bytes."""
    stream = written(metrics(1_000_000), compression="zstd")
    sound = struct.pack("<q", field)
    assert sound in stream
    return a_chunk(stream.replace(sound, struct.pack("<q", 1 << 40)))


def a_dictionary() -> bytes:
    """One name of 60 kB in a million rows."""
    names = pa.DictionaryArray.from_arrays(
        pa.array(bytes(1_000_000), pa.int8()), pa.array(["n" * 60_000])
    )
    table = metrics(1_000_000)
    return a_chunk(written(table.set_column(1, "series", names)))


def a_run() -> bytes:
    ends = pa.array([ROWS], pa.int32())
    run = pa.RunEndEncodedArray.from_arrays(ends, pa.array([0.0]))
    return a_chunk(written(pa.table({"value": run})))


def nulls() -> bytes:
    return a_chunk(written(pa.table({name: pa.nulls(ROWS) for name in metrics(1).column_names})))


def rows_that_are_not_there() -> bytes:
    """The batch claims 2^31 rows; its buffers hold three."""
    stream = arrow_stream(metrics(3))
    table = stream.find(struct.pack("<qq", 3, 0))
    assert table > 0
    return a_chunk(stream.replace(struct.pack("<q", 3), struct.pack("<q", ROWS)))


def many_columns() -> bytes:
    return a_chunk(
        arrow_stream(pa.table({f"c{n}": pa.array([], pa.int8()) for n in range(50_000)}))
    )


def many_batches() -> bytes:
    sink = pa.BufferOutputStream()
    none = metrics(0)
    with pa.ipc.new_stream(sink, none.schema) as stream:
        for _ in range(100_000):
            stream.write_batch(pa.RecordBatch.from_pylist([], none.schema))
    return a_chunk(sink.getvalue().to_pybytes())


def deep_types() -> bytes:
    kind = pa.int8()
    for _ in range(60):
        kind = pa.list_(kind)
    return a_chunk(arrow_stream(pa.table({"value": pa.array([], kind)})))


def long_name() -> bytes:
    return chunk({"metric": filled("metric", [{"series": "n" * 30_000_000}])}, **meta())


def bits_as_numbers() -> bytes:
    """A bit a row that becomes a name of five bytes, or a number of eight."""
    rows = 40_000_000
    table = pa.table(
        {
            **{name: pa.repeat(pa.scalar(True), rows) for name in ("time_ns", "value", "series")},
            "labels": pa.repeat(pa.scalar(True), rows),
        }
    )
    return a_chunk(arrow_stream(table))


BOMBS = {
    make.__name__: make
    for make in (
        zeros, within_the_ratio_of_each_chunk, compressed_on_its_own, lies_of_its_length,
        a_dictionary, a_run, nulls, rows_that_are_not_there, many_columns, many_batches,
        deep_types, long_name, bits_as_numbers,
    )
}  # fmt: skip

READ = """
import resource, sys, time
from pathlib import Path
from sonde.errors import CaptureError
from sonde.query.capture import read
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.monotonic()
try:
    found = f"damaged={read(Path(sys.argv[1])).info.chunks_damaged}"
except CaptureError as error:
    assert error.remedy
    found = type(error).__name__
print(found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024,
      round(time.monotonic() - began, 1))
"""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_costs_little_memory_and_is_reported(tmp_path, bomb):
    path = tmp_path / "bomb.sonde"
    path.write_bytes(file_header() + BOMBS[bomb]())
    command = [sys.executable, "-c", READ, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found, grown_mb, took_s = ran.stdout.split()

    assert found in ("CaptureTooLarge", "CaptureTruncated")
    assert int(grown_mb) < 700, f"{path.stat().st_size:,} bytes took {grown_mb} MB"
    assert float(took_s) < 20


@pytest.mark.parametrize("bomb", [compressed_on_its_own, a_dictionary, a_run, many_batches])
def test_a_bomb_among_chunks_costs_its_chunk_alone(tmp_path, bomb):
    path = tmp_path / "a.sonde"
    good = chunk({"sample": filled("sample", [{"pid": 9, "kind": "cpu"}])}, **meta(1))
    path.write_bytes(file_header() + bomb() + good)
    capture = read(path)
    assert capture.tables["sample"].num_rows == 1
    assert capture.info.chunks_damaged == 1


def test_the_command_prints_the_remedy_and_ends_with_1(tmp_path, monkeypatch, capsys):
    writer = Writer(seconds=1, chunk_seconds=1)
    writer.metric("sonde.agent.cpu_ns", range(1))
    for number in range(3000):
        writer.process(number + 1, "p")
    path = writer.write(tmp_path / "a.sonde")
    assert cli.main(["report", str(path)]) == 0
    capsys.readouterr()

    monkeypatch.setenv("SONDE_READ_LIMIT", "1M")
    assert cli.main(["report", str(path)]) == 1
    message = capsys.readouterr().err
    assert "takes more than 0.001 GB of memory to read" in message
    assert "remedy: record for a shorter time, or allow more: SONDE_READ_LIMIT=16G" in message
    monkeypatch.setenv("SONDE_READ_LIMIT", "1G")
    assert cli.main(["report", str(path)]) == 0


@pytest.mark.parametrize(
    ("limit", "size"), [("8G", 8e9), ("500M", 5e8), ("12345", 12345), ("2gb", 2e9), ("1 ", 1)]
)
def test_a_limit_is_a_size(limit, size):
    assert most_bytes({"SONDE_READ_LIMIT": limit}) == size


@pytest.mark.parametrize("limit", ["many", "-1", "0", "1.5G", "1" * 99, "8X"])
def test_a_limit_that_is_no_size_is_refused(limit):
    with pytest.raises(UsageError, match="SONDE_READ_LIMIT"):
        most_bytes({"SONDE_READ_LIMIT": limit})


def test_without_a_limit_it_is_half_of_the_memory_and_4_gb_at_the_most():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert most_bytes({}) == min(4 << 30, memory // 2)


def test_what_is_let_go_of_may_be_held_again():
    budget = Budget("x", 1 << 30, 1000)
    for _ in range(5):
        budget.hold(900)
        budget.hold(-900)
    budget.unpack(1000)
    with pytest.raises(CaptureTooLarge):
        budget.unpack(1)


def test_processes_that_every_chunk_names_are_held_once(tmp_path, monkeypatch):
    """A long recording repeats its dictionaries; it must stay readable; the last name counts."""
    rows = [{"pid": pid, "start_ns": 1, "comm": "old"} for pid in range(1, 8001)]
    new = [{**row, "comm": "new"} for row in rows]
    chunks = [
        chunk({"process": filled("process", new if seq == 19 else rows)}, **meta(seq))
        for seq in range(20)
    ]
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + b"".join(chunks))
    monkeypatch.setenv("SONDE_READ_LIMIT", "300M")  # 20 times 8,000 rows at 3 kB are 490 MB
    processes = read(path).tables["process"]
    assert processes.num_rows == 8000
    assert set(processes.column("comm").to_pylist()) == {"new"}


def test_a_large_recording_is_read(tmp_path):
    """Five million rows of device runs, which differ as real ones do."""
    count = 250_000
    generator = pa.array(range(count), pa.uint64())
    columns = {}
    for field in filled("device_run", []).schema:
        if field.name in ("start_time_ns", "end_time_ns"):
            column = pa.compute.add(pa.compute.multiply(generator, 7919), START_NS)
        elif field.name == "correlation":
            column = generator
        elif pa.types.is_string(field.type):
            column = pa.array([f"kernel_{n % 50}" for n in range(count)])
        elif pa.types.is_floating(field.type):
            column = pa.repeat(pa.scalar(1.0), count)
        else:
            column = pa.repeat(pa.scalar(3, field.type), count)
        columns[field.name] = column
    one = {"device_run": pa.table(columns)}
    path = tmp_path / "a.sonde"
    with path.open("wb") as out:
        out.write(file_header())
        for seq in range(20):
            out.write(chunk(one, **meta(seq, START_NS + seq * SECOND_NS)))
    began = time.process_time()
    capture = read(path)
    assert capture.tables["device_run"].num_rows == 20 * count
    assert capture.info.rows_refused == 0
    assert time.process_time() - began < 60


def test_a_terabyte_that_was_never_written_is_passed_at_once(tmp_path):
    path = tmp_path / "a.sonde"
    good = chunk({"sample": filled("sample", [{"pid": 9, "kind": "cpu"}])}, **meta())
    path.write_bytes(file_header() + good)
    os.truncate(path, 1 << 40)
    began = time.process_time()
    capture = read(path)
    assert capture.tables["sample"].num_rows == 1
    assert time.process_time() - began < 5


def test_headers_that_each_claim_the_rest_are_not_all_believed(tmp_path):
    header = chunk({}, **meta())[:32]
    body = bytearray(header * 60_000)
    for at in range(0, len(body), 32):
        head = struct.pack("<4sHHIIQI", b"SCHK", 1, 0, 0, 0, len(body) - at - 32, 7)
        body[at : at + 32] = head + struct.pack("<I", zlib.crc32(head))
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + body)
    began = time.process_time()
    with pytest.raises(CaptureTruncated):
        read(path)
    assert time.process_time() - began < 10


def test_a_payload_that_no_memory_holds_is_not_read(tmp_path):
    """A header may claim a terabyte where the file has one, all holes."""
    head = struct.pack("<4sHHIIQI", b"SCHK", 1, 0, 0, 0, (1 << 40) - 48, 7)
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + head + struct.pack("<I", zlib.crc32(head)))
    os.truncate(path, 1 << 40)
    with pytest.raises(CaptureTruncated):
        read(path)


def test_payloads_that_decompress_to_far_less_are_not_read(tmp_path):
    """Holes in the file, with correct checksums; the chunks around them are read."""
    path = tmp_path / "a.sonde"
    holes(path, 8 << 20, 1_000, 3)
    tracemalloc.start()
    capture = read(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert capture.tables["sample"].num_rows == 2
    assert (capture.info.chunks, capture.info.chunks_damaged) == (2, 3)
    assert capture.info.chunks_missing == 0
    assert capture.info.damaged_bytes > 3 * (8 << 20)
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("size", [0, 1, 100, 5_000, 131_072, 3_000_000])
def test_what_does_not_compress_is_read(tmp_path, size):
    one = {"sample": filled("sample", [{"pid": 9, "kind": "cpu"}])}
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + chunk(one, **meta(), after=random.Random(1).randbytes(size)))
    capture = read(path)
    assert capture.tables["sample"].num_rows == 1
    assert capture.info.chunks_damaged == 0
    # Nothing but bytes that do not compress, and those of each writer.
    packed = pa.compress(random.Random(1).randbytes(size), codec="zstd", asbytes=True)
    assert len(packed) <= most_packed_bytes(size)


def test_payloads_with_wrong_checksums_hold_no_memory(tmp_path, monkeypatch):
    """They were read, and are let go of: many of them leave room for a good chunk."""
    noise = random.Random(1).randbytes(150_000)
    damaged = bytearray(a_chunk(noise))
    damaged[-1] ^= 1
    good = chunk({"sample": filled("sample", [{"pid": 9, "kind": "cpu"}])}, **meta(30))
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + damaged * 30 + good)
    monkeypatch.setenv("SONDE_READ_LIMIT", "1M")
    capture = read(path)
    assert capture.info.chunks_damaged == 30
    assert capture.tables["sample"].num_rows == 1


def test_metadata_of_many_values_is_damage(tmp_path):
    """Of each chunk a megabyte, whose lists would take forty times as much; the chunks around them
    are read."""
    path = tmp_path / "a.sonde"
    metadata(path, "[]", 8)
    with path.open("ab") as out:
        tables = {"sample": filled("sample", [{"pid": 9, "kind": "cpu"}])}
        out.write(chunk(tables, **meta(8)))
    tracemalloc.start()
    capture = read(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (capture.info.chunks, capture.info.chunks_damaged) == (1, 8)
    assert capture.tables["sample"].num_rows == 1
    assert peak_bytes < 16 << 20


def test_metadata_of_long_texts_is_read(tmp_path):
    """Of each chunk a megabyte, which is one value; of all of them one is kept."""
    path = tmp_path / "a.sonde"
    metadata(path, json.dumps("[," * 400_000), 8)
    tracemalloc.start()
    capture = read(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (capture.info.chunks, capture.info.chunks_damaged) == (8, 0)
    assert capture.tables["sample"].num_rows == 8
    assert [len(text) for text in capture.info.host["x"]] == [800_000]
    assert peak_bytes < 2 * JSON_BYTES * 1_000_000


def test_bytes_at_random_in_descriptions_are_refused_or_read():
    sound = bytearray(arrow_stream(filled("stack", [{"stack_id": 1, "frame_ids": [1, 2]}])))
    dice = random.Random(11)
    wanted = {"stack_id", "frame_ids"}
    for _ in range(3000):
        damaged = bytearray(sound)
        for _ in range(dice.randrange(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            messages.read_table(pa.py_buffer(bytes(damaged)), wanted, lambda _count: None)
        except (messages.RefusedError, pa.ArrowException, OSError, ValueError) as error:
            assert re.search(r"\S", str(error))
