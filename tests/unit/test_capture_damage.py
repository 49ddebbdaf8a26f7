# SPDX-License-Identifier: Apache-2.0
"""Damage costs what it hits and nothing else, and is reported, never a traceback."""

import json
import os
import random
import struct
import zlib

import pyarrow as pa
import pytest

from captures import START_NS, Writer, arrow_stream, chunk, file_header, filled, meta, scene
from sonde.errors import CaptureError, CaptureTooNew, CaptureTruncated, NotACapture
from sonde.query.capture import read

FILE_HEADER, CHUNK_HEADER = 16, 32
NOBODY = 65534


@pytest.fixture
def chunks():
    """Three chunks of the same machine; each holds one sample of another process."""
    made = []
    for seq in range(3):
        writer = Writer(seconds=1, chunk_seconds=1)
        key = writer.process(100 + seq, f"p{seq}")
        writer.on_cpu(key, 100 + seq, writer.stack("main", f"f{seq}"), 5)
        tables = {name: filled(name, rows) for name, rows in writer.rows.items()}
        made.append(chunk(tables, **meta(seq, last=seq == 2)))
    return made


@pytest.fixture
def put(tmp_path):
    def put(data):
        path = tmp_path / "a.sonde"
        path.write_bytes(data)
        return path

    return put


def pids(capture):
    return capture.tables["sample"].column("pid").to_pylist()


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def places(one):
    """Offsets in a chunk: in its header's fields, its meta, its payload, and at their edges."""
    meta_len, _, payload_len = struct.unpack_from("<IIQ", one, 8)
    payload = CHUNK_HEADER + meta_len
    assert payload + payload_len == len(one)
    edges = (0, 3, 4, 8, 12, 16, 24, 28, CHUNK_HEADER - 1, CHUNK_HEADER, payload - 1, payload)
    return (*edges, payload + payload_len // 2, len(one) - 1)


def test_cut_at_any_place_of_the_last_chunk_the_others_are_kept(chunks, put):
    whole = file_header() + b"".join(chunks)
    start = len(whole) - len(chunks[2])
    for place in places(chunks[2]):
        capture = read(put(whole[: start + place]))
        assert pids(capture) == [100, 101], place
        assert capture.info.tail_bytes == place
        assert not capture.info.clean_end


def test_cut_in_the_first_chunk_nothing_is_left(chunks, put):
    for place in (*places(chunks[0]), 0):
        with pytest.raises(CaptureTruncated):
            read(put(file_header() + chunks[0][:place]))


def test_a_flipped_bit_anywhere_in_a_chunk_costs_that_chunk(chunks, put):
    for place in places(chunks[1]):
        capture = read(put(file_header() + chunks[0] + flipped(chunks[1], place) + chunks[2]))
        assert pids(capture) == [100, 102], place
        assert capture.info.chunks_damaged == 1
        assert capture.info.chunks_missing == 0
        assert capture.info.clean_end


def test_a_damaged_last_chunk_is_no_clean_end(chunks, put):
    capture = read(put(file_header() + chunks[0] + chunks[1] + flipped(chunks[2], 200)))
    assert pids(capture) == [100, 101]
    assert not capture.info.clean_end


@pytest.mark.parametrize("size", [1, 31, 100, 5000])
def test_bytes_cut_out_of_the_middle_cost_the_chunk_they_were_in(chunks, put, size):
    middle = chunks[1][:40] + chunks[1][40 + size :]
    capture = read(put(file_header() + chunks[0] + middle + chunks[2]))
    assert pids(capture) == [100, 102]


def test_rubbish_between_chunks_is_stepped_over(chunks, put):
    rubbish = random.Random(1).randbytes(3000) + b"SCHK" + bytes(10) + b"SCH"
    capture = read(put(file_header() + chunks[0] + rubbish + chunks[1] + chunks[2]))
    assert pids(capture) == [100, 101, 102]
    assert capture.info.damaged_bytes == len(rubbish)


def test_rubbish_longer_than_a_block_of_the_scan(chunks, put):
    # The scan begins at the second byte; the next chunk's magic lies across the end of its block.
    for length in range((1 << 20) - 4, (1 << 20) + 3):
        data = file_header() + chunks[0] + bytes(length) + chunks[1]
        assert pids(read(put(data))) == [100, 101], length


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33])
def test_rubbish_shorter_than_a_header_is_stepped_over(chunks, put, length):
    capture = read(put(file_header() + chunks[0] + bytes(length) + chunks[1] + chunks[2]))
    assert pids(capture) == [100, 101, 102]
    assert (capture.info.chunks_damaged, capture.info.damaged_bytes) == (1, length)


def test_a_damaged_capture_never_surprises(put):
    whole = scene().bytes()
    dice = random.Random(7)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            read(put(bytes(data[: dice.randrange(len(data) + 1)])))
        except CaptureError as error:
            assert error.cause
            assert error.remedy
            assert "\n" not in str(error)


def test_a_foreign_file(put):
    for data in (
        b"\x7fELF" + bytes(100),
        b"#!/bin/sh\n",
        b"PAR1",
        b"x",
        flipped(scene().bytes(), 0),
    ):
        with pytest.raises(NotACapture, match="no Sonde capture"):
            read(put(data))


def test_an_empty_file_and_a_cut_header(put):
    for length in range(FILE_HEADER):
        with pytest.raises(CaptureTruncated, match="holds no chunk"):
            read(put(file_header()[:length]))


def test_a_header_alone(put):
    with pytest.raises(CaptureTruncated, match="no readable chunk"):
        read(put(file_header()))


def test_a_newer_version(put):
    with pytest.raises(CaptureTooNew, match="format 2") as caught:
        read(put(file_header(version=2) + scene().bytes()[FILE_HEADER:]))
    assert "upgrade" in caught.value.remedy


@pytest.mark.parametrize("version", [0, 3])
def test_a_chunk_of_another_version_is_left_out(chunks, put, version):
    other = chunk({"sample": filled("sample", [{"pid": 9}])}, version=version, **meta(1))
    capture = read(put(file_header() + chunks[0] + other + chunks[2]))
    assert pids(capture) == [100, 102]
    assert capture.info.chunks_damaged == 1


def test_a_missing_file(tmp_path):
    with pytest.raises(CaptureError, match="does not exist"):
        read(tmp_path / "none.sonde")


def test_a_directory(tmp_path):
    with pytest.raises(CaptureError, match="is a directory"):
        read(tmp_path)


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CaptureError, match="is a pipe"):
        read(tmp_path / "pipe")


def test_no_permission(put):
    path = put(scene().bytes())
    path.chmod(0)
    pid = os.fork()
    if pid == 0:  # a user of this process's own is all its threads'
        code = 1
        try:
            if os.geteuid() == 0:
                os.setresuid(NOBODY, NOBODY, NOBODY)
            read(path)
        except CaptureError as error:
            code = 0 if "may not be read" in error.cause and "chown" in error.remedy else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# What a writer that is no friend could put behind checksums that hold.

HOSTILE_META = [
    {"raw_len": 1 << 62},
    {"raw_len": -1},
    {"raw_len": "many"},
    {"tables": None},
    {"tables": [7]},
    {"tables": [{"name": "sample", "offset": -5, "length": 10}]},
    {"tables": [{"name": "sample", "offset": 0, "length": 1 << 40}]},
    {"tables": [{"name": ["sample"], "offset": 0, "length": 1}]},
    {"seq": 1 << 60},
    {"seq": 1.5},
    {"seq": -1},
    {"seq": 1 << 40},
    {"start_ns": -1},
    {"end_ns": -1},
    {"paused_ns": -1},
    {"paused_ns": None},
    {"end_ns": 1 << 62},
    {"wall_offset_ns": -START_NS - 1},
    {"start_ns": 5, "end_ns": 9, "wall_offset_ns": -6},
    {"start_ns": 9, "end_ns": 5, "wall_offset_ns": -6},
    {"tables": [{"name": "none", "offset": 0, "length": 0}] * 257},
    {"start_ns": None},
    {"capture": []},
    {"capture": {"host": "me"}},
]


@pytest.mark.parametrize("wrong", HOSTILE_META, ids=str)
def test_meta_that_makes_no_sense_costs_its_chunk(chunks, put, wrong):
    tables = {"sample": filled("sample", [{"pid": 9, "kind": "cpu"}])}
    hostile = chunk(tables, **{**meta(1), **wrong})
    capture = read(put(file_header() + chunks[0] + hostile + chunks[2]))
    assert pids(capture) == [100, 102]
    assert capture.info.chunks_damaged == 1


SOUND_META = [
    {"start_ns": 0, "wall_offset_ns": 0},
    {"start_ns": 5, "end_ns": 9, "wall_offset_ns": -5},
    {"start_ns": 9, "end_ns": 9, "wall_offset_ns": 0},
    {"end_ns": (1 << 62) - 1},
    {"seq": (1 << 40) - 1},
    {"tables": [{"name": "none", "offset": 0, "length": 0}] * 256},
]


@pytest.mark.parametrize("right", SOUND_META, ids=str)
def test_meta_at_the_edge_of_sense_is_read(put, right):
    tables = {"sample": filled("sample", [{"pid": 9, "kind": "cpu"}])}
    info = read(put(file_header() + chunk(tables, **{**meta(0), **right}))).info
    assert (info.chunks, info.chunks_damaged) == (1, 0)


def raw_chunk(raw_meta, payload):
    head = struct.pack(
        "<4sHHIIQI",
        b"SCHK",
        1,
        0,
        len(raw_meta),
        zlib.crc32(raw_meta),
        len(payload),
        zlib.crc32(payload),
    )
    return head + struct.pack("<I", zlib.crc32(head)) + raw_meta + payload


@pytest.mark.parametrize("raw_meta", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_meta_that_is_no_meta_costs_its_chunk(chunks, put, raw_meta):
    data = file_header() + chunks[0] + raw_chunk(raw_meta, b"") + chunks[1]
    assert pids(read(put(data))) == [100, 101]


def test_columns_of_another_type_cost_their_chunk(chunks, put):
    table = filled("sample", [{"pid": 9, "kind": "cpu"}])
    strange = table.set_column(3, "pid", pa.array(["nine"]))
    data = file_header() + chunks[0] + chunk({"sample": strange}, **meta(1)) + chunks[2]
    assert pids(read(put(data))) == [100, 102]


def test_offsets_inside_arrow_that_lead_astray_cost_their_chunk(chunks, put):
    sound = arrow_stream(filled("sample", [{"pid": 9, "kind": "c" * 77}]))
    astray = sound.replace(struct.pack("<ii", 0, 77), struct.pack("<ii", 0, 1 << 30))
    assert astray != sound
    listed = [{"name": "sample", "offset": 0, "length": len(astray)}]
    about = {**meta(1), "raw_len": len(astray), "tables": listed}
    hostile = raw_chunk(json.dumps(about).encode(), pa.compress(astray, codec="zstd", asbytes=True))
    capture = read(put(file_header() + chunks[0] + hostile + chunks[2]))
    assert pids(capture) == [100, 102]
    assert capture.info.chunks_damaged == 1
