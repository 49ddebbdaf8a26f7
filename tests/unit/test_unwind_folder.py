# SPDX-License-Identifier: Apache-2.0
"""Where unwind tables are kept, and what is not taken for one."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

import pytest

import disks
from sonde import _native, procfs
from sonde.unwind import cache_folder, table_index
from sonde.unwind.table_cache import TableCache, key_of
from sonde.unwind.table_index import MAX_PAGED, MAX_PAGES, NAME, TableIndex

NOBODY = 65534
HEADER_BYTES = 64
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@pytest.fixture
def place():
    """A folder that only we can write to, below one that everybody can."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name).resolve()


@pytest.fixture
def no_shared(monkeypatch, place):
    monkeypatch.setattr(cache_folder, "SHARED", place / "absent")


@as_root
def test_root_keeps_no_tables_in_a_folder_of_the_user_who_called_sudo(
    monkeypatch, place, no_shared
):
    home = place / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    assert cache_folder.default_folder() is None
    assert not any(home.iterdir())
    cache = TableCache()
    assert cache._folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder.is_private(cache._folder)
    cache.close()


@as_root
def test_root_does_not_follow_a_link_to_where_tables_are_kept(monkeypatch, place, no_shared):
    target = place / "target"
    target.mkdir()
    (place / "link").symlink_to(target)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "link"))
    assert cache_folder.default_folder() is None
    assert not any(target.iterdir())


def test_a_folder_that_others_can_write_to_is_not_used(monkeypatch, place, no_shared):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    mine = cache_folder.default_folder()
    assert mine == place / "sonde/unwind"
    mine.chmod(0o777)
    assert cache_folder.default_folder() is None


@pytest.fixture
def library(place):
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    (place / "one.c").write_text("int one(int x) { return x + 1; }\n")
    path = place / "libone.so"
    subprocess.run([compiler, "-shared", "-o", path, place / "one.c"], check=True)
    return path


def answered(cache, key, path):
    with path.open("rb") as file:
        cache.request(key, file.fileno())
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        if key in cache.poll():
            return
        time.sleep(0.01)
    pytest.fail(f"{key} was never answered")


def test_a_file_that_cannot_be_read_does_not_cost_one_of_the_same_name_its_table(place, library):
    cache = TableCache(place)
    broken = place / "broken"
    broken.write_bytes(b"\x7fELF")
    answered(cache, "same@1", broken)
    answered(cache, "same@2", library)
    answered(cache, "same@3", library)
    assert cache.has_failed("same@1")
    assert cache.find("same@2") == cache.find("same@3") is not None
    assert cache.built == 1
    cache.close()


@pytest.mark.parametrize("damage", ["row", "page", "cut", "version"])
def test_a_table_that_leads_out_of_itself_is_not_taken(place, library, damage):
    table = place / "one.unw"
    _native.build_unwind_table(str(library), str(table))
    assert _native.is_unwind_table_of(str(table), str(library))
    raw = bytearray(table.read_bytes())
    pages, rows = struct.unpack_from("<2I", raw, 24)
    if damage == "row":
        struct.pack_into("<H", raw, HEADER_BYTES + 4 * (pages + rows - 1), 0xFFFF)
    elif damage == "page":
        struct.pack_into("<I", raw, HEADER_BYTES + 4 * (pages - 1), rows + 1)
    elif damage == "cut":
        del raw[-1]
    else:
        struct.pack_into("<I", raw, 8, 9)
    struct.pack_into("<I", raw, 12, zlib.crc32(raw[HEADER_BYTES:]))
    table.write_bytes(raw)
    with pytest.raises(OSError, match="table"):
        _native.find_unwind_rules(str(table), [0])


@pytest.mark.parametrize("changed", ["header", "length"])
def test_a_table_is_of_no_file_that_differs_where_it_was_read(place, library, changed):
    table, other = place / "one.unw", place / "other.so"
    _native.build_unwind_table(str(library), str(table))
    raw = bytearray(library.read_bytes())
    if changed == "header":
        raw[48] ^= 1  # the header's flags
    else:
        raw += b"\0"
    other.write_bytes(raw)
    assert not _native.is_unwind_table_of(str(table), str(other))


def built_for(cache, key, program):
    """Have the table of a file found or built; returns how many were built."""
    before = cache.built
    with program.open("rb") as file:
        cache.request(key, file.fileno())
    deadline_s = time.monotonic() + 20
    while cache.is_busy and time.monotonic() < deadline_s:
        cache.poll()
        time.sleep(0.01)
    return cache.built - before


def test_tables_of_one_run_are_known_to_the_next_without_a_look_at_the_file(place):
    program = Path("/bin/true").resolve()
    status = program.stat()
    key = key_of("b1d", (status.st_dev, status.st_ino, status.st_size, 1, 2))
    first = TableCache(place)
    assert first.find(key) is None
    assert built_for(first, key, program) == 1
    first.close()
    known = TableCache(place, builder=["/bin/false"]).find(key) is not None
    assert known == procfs.keeps_identity(status.st_dev)
    index = place / NAME
    if known:
        index.write_text(index.read_text().replace('"boot":"', '"boot":"0'))
        assert TableCache(place).find(key) is None, "of another boot"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": 1}', '{"boot": "x", "names": [1]}'])
def test_a_damaged_index_is_none(place, text):
    (place / NAME).write_text(text)
    assert TableIndex(place).read() == {}


def test_files_of_systems_that_a_user_may_serve_are_not_kept(place, tmp_path, monkeypatch):
    disks.use(tmp_path, monkeypatch)
    index = TableIndex(place)
    index.add("mine", os.makedev(0, 51), "table")
    index.add("disk", disks.DISK, "table")
    index.write()
    assert TableIndex(place).read() == {"disk": "table"}


def test_pages_are_kept_with_their_table_within_bounds(tmp_path):
    index = TableIndex(tmp_path)
    index.read()
    index.add_pages("one", range(2 * MAX_PAGES))
    index.add_pages("two", [7, 3])
    index.write()
    again = TableIndex(tmp_path)
    again.read()
    assert again.pages == {"one": list(range(MAX_PAGES)), "two": [7, 3]}
    for number in range(MAX_PAGED):
        again.add_pages(f"new{number}", [1])
    again.write()
    last = TableIndex(tmp_path)
    last.read()
    assert len(last.pages) == MAX_PAGED
    assert "one" not in last.pages


def test_the_names_that_were_kept_last_stay(tmp_path, monkeypatch):
    disks.use(tmp_path, monkeypatch)
    monkeypatch.setattr(table_index, "MAX_ENTRIES", 2)
    for key in ("a", "b", "a", "c"):
        index = TableIndex(tmp_path)
        index.add(key, disks.DISK, f"table of {key}")
        index.write()
    assert TableIndex(tmp_path).read().keys() == {"a", "c"}


@pytest.mark.parametrize("pages", ["x", [1], {"one": "x"}, {"one": [-1, 1 << 40]}, {"one": [[]]}])
def test_damaged_pages_cost_no_more_than_themselves(tmp_path, pages):
    index = TableIndex(tmp_path)
    index.add_pages("one", [1])
    index.write()
    kept = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps(kept | {"pages": pages}))
    again = TableIndex(tmp_path)
    again.read()
    assert all(0 <= page < 1 << 31 for one in again.pages.values() for page in one)
