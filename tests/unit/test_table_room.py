# SPDX-License-Identifier: Apache-2.0
"""What unwind tables take on disk: in all, for one user, and for one file."""

from __future__ import annotations

import os
import struct
import sys
import time
import zlib

import pytest

from sonde import _native
from sonde.unwind import table_room
from sonde.unwind.table_cache import TableCache
from sonde.unwind.table_room import ENDING, TableRoom

MINE, OTHER, ROOT = 1001, 1002, 0


@pytest.fixture
def put(tmp_path):
    """Writes a table of that many bytes, the older the earlier."""
    made = []

    def write(name, size):
        path = tmp_path / f"{name}{ENDING}"
        path.write_bytes(bytes(size))
        made.append(path)
        os.utime(path, ns=(len(made) * 10**9,) * 2)
        return name

    return write


def kept(folder):
    return sorted(path.name.removesuffix(ENDING) for path in folder.iterdir())


def test_tables_of_the_runs_before_are_few_enough_once_there_is_a_new_one(tmp_path, put):
    for name in "abcd":
        put(name, 400)
    room = TableRoom(tmp_path, 1000)
    room.use("b")
    assert room.add(put("e", 100), ROOT)
    assert kept(tmp_path) == ["b", "d", "e"]


def test_each_new_table_makes_the_one_go_that_was_not_used_for_longest(tmp_path, put):
    for name in "abc":
        put(name, 300)
    room = TableRoom(tmp_path, 1000)
    room.use("a")
    assert room.add(put("d", 200), ROOT)
    assert kept(tmp_path) == ["a", "c", "d"]


def test_a_party_gets_no_more_tables_than_its_part(tmp_path, put):
    room = TableRoom(tmp_path, 1 << 20)
    had = [room.add(put(f"mine{number}", 100 << 10), MINE) for number in range(4)]
    assert had == [True, True, False, False]
    assert room.add(put("small", 50 << 10), MINE)
    assert room.add(put("other", 100 << 10), OTHER)
    assert room.add(put("root", 300 << 10), ROOT)
    assert kept(tmp_path) == ["mine0", "mine1", "other", "root", "small"]


def test_a_party_that_holds_most_by_far_gives_way_first(tmp_path, put):
    put("old", 700)
    room = TableRoom(tmp_path, 1000)
    assert room.add(put("mine", 200), MINE)
    assert room.add(put("other", 60), OTHER)
    assert room.add(put("root", 100), ROOT)
    assert kept(tmp_path) == ["old", "other", "root"]


def test_what_other_recorders_added_counts_too(tmp_path, put, monkeypatch):
    monkeypatch.setattr(table_room, "LOOK_EVERY", 1)
    room = TableRoom(tmp_path, 1000)
    put("theirs", 900)
    assert room.add(put("mine", 200), ROOT)
    assert kept(tmp_path) == ["mine"]


# Writes a table of 1,000 bytes for each request.
BUILDER = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    with open(os.path.join(asked["folder"], asked["prefix"] + "-0.unw"), "wb") as file:
        file.write(bytes(1000))
    print(json.dumps({"name": asked["prefix"] + "-0", "was_there": False}), flush=True)
"""


def test_a_cache_that_is_in_use_does_not_outgrow_its_limit(tmp_path):
    """However many files a process maps."""
    cache = TableCache(tmp_path, 10_000, builder=(sys.executable, "-c", BUILDER))
    names = [f"file{number}" for number in range(20)]
    for name in names:
        cache.request(name, os.open(os.devnull, os.O_RDONLY), MINE)
    until_s = time.monotonic() + 30
    while cache.is_busy and time.monotonic() < until_s:
        cache.poll()
        time.sleep(0.01)
    cache.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.unw")) == 2000
    assert (cache.built, cache.failed) == (2, 18)


def bomb(path, rows):
    """An ELF file with a compressed .debug_frame: its code has that many places of change."""

    def padded(raw, to=8):
        raw += bytes(-(len(raw) + 4) % to)
        return struct.pack("<I", len(raw)) + raw

    cie = padded(struct.pack("<IB", 0xFFFFFFFF, 1) + b"\0\1\x78\x10\x0c\7\x08\x90\1")
    steps = b"\x41\x0e\x10\x41\x0e\x08" * (rows // 2)
    raw = cie + padded(struct.pack("<IQQ", 0, 0x1000, rows + 16) + steps)
    packed = struct.pack("<IIQQ", 1, 0, len(raw), 1) + zlib.compress(raw, 1)
    size, names = (rows + 0x3000) & ~0xFFF, b"\0.debug_frame\0.shstrtab\0"
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 1, 1, 0x800, 0, size, len(packed), 0, 0, 1, 0)
    sections += struct.pack("<IIQQQQIIQQ", 14, 3, 0, 0, 8192 + 192, len(names), 0, 0, 1, 0)
    head = b"\x7fELF\2\1\1" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0x1000, 64, 8192, 0, 64, 56, 1, 64, 3, 2)
    head += struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    with path.open("wb") as file:
        for at, part in ((0, head), (8192, sections + names), (size, packed)):
            file.seek(at)
            file.write(part)


def test_a_small_file_gets_no_large_table(tmp_path):
    table = tmp_path / "t.unw"
    bomb(tmp_path / "few", 100_000)
    _native.build_unwind_table(str(tmp_path / "few"), str(table))
    assert 400_000 < table.stat().st_size < 500_000
    table.unlink()
    bomb(tmp_path / "many", 5_000_000)
    assert (tmp_path / "many").stat().st_blocks * 512 < 1 << 20
    with pytest.raises(OSError, match="too many rows"):
        _native.build_unwind_table(str(tmp_path / "many"), str(table))
    assert not table.exists()
