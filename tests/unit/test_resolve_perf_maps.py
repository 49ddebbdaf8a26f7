# SPDX-License-Identifier: Apache-2.0
"""Names that just-in-time compilers leave: lines of anything, bounded, without folders."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from sonde import _native
from sonde.resolve.perf_maps import JitName, parse_name


def _read(path: Path, names: _native.PerfMap) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return names.read(fd)
    finally:
        os.close(fd)


def test_code_is_found_from_its_first_byte_to_its_last(tmp_path: Path) -> None:
    path, names = tmp_path / "perf.map", _native.PerfMap()
    path.write_text("1000 20 first\n0x2000 10 second one, with spaces\n")
    assert _read(path, names) == path.stat().st_size
    assert names.find(0xFFF) is None
    assert names.find(0x1000) == "first"
    assert names.find(0x101F) == "first"
    assert names.find(0x1020) is None
    assert names.find(0x2008) == "second one, with spaces"


def test_only_what_was_appended_is_read_and_half_a_line_waits(tmp_path: Path) -> None:
    path, names = tmp_path / "perf.map", _native.PerfMap()
    path.write_text("1000 10 one\n2000 10 tw")
    assert _read(path, names) == 12
    assert names.find(0x2000) is None
    with path.open("a") as out:
        out.write("o\n3000 10 three\n")
    assert _read(path, names) == path.stat().st_size - 12
    assert (names.find(0x2000), names.find(0x3000)) == ("two", "three")
    assert _read(path, names) == 0


def test_memory_that_is_used_again_gets_the_newer_name(tmp_path: Path) -> None:
    path, names = tmp_path / "perf.map", _native.PerfMap()
    path.write_text("1000 100 a\n1100 100 b\n1200 100 c\n1080 100 new\n1000 10 tiny\n")
    _read(path, names)
    assert names.find(0x1180) is None  # of b, whose memory was used again
    assert names.find(0x1090) == "new"
    assert names.find(0x1200) == "c"
    assert names.find(0x1005) == "tiny"


@pytest.mark.parametrize(
    "line",
    [
        *("", " ", "1000", "1000 10", "1000 10 ", "zz 10 x", "1000 zz x", "1000 0 x"),
        *("ffffffffffffffff ff x", "-1 10 x", "1" * 40 + " 1 x", "\x00\x00\x00", "1000  10 x"),
    ],
)
def test_lines_that_make_no_sense_are_passed_over(tmp_path: Path, line: str) -> None:
    path, names = tmp_path / "perf.map", _native.PerfMap()
    path.write_text(f"{line}\n5000 10 after\n")
    _read(path, names)
    assert names.find(0x5000) == "after"
    assert len(names) == 1


def test_garbage_is_bounded(tmp_path: Path) -> None:
    chance, path = random.Random(5), tmp_path / "perf.map"
    path.write_bytes(chance.randbytes(300_000) + b"x" * 300_000 + b"\n1000 10 after\n")
    names = _native.PerfMap(max_entries=100, max_name_bytes=10_000)
    while _read(path, names):
        pass
    assert names.find(0x1000) == "after"
    path.write_text("".join(f"{n * 16:x} 10 name_{n}\n" for n in range(1, 1000)))
    names = _native.PerfMap(max_entries=100, max_name_bytes=10_000)
    _read(path, names)
    assert (len(names), names.left_out) == (100, 899)


def test_names_show_no_control_characters_and_are_cut(tmp_path: Path) -> None:
    path, names = tmp_path / "perf.map", _native.PerfMap()
    path.write_bytes(b"1000 10 a\x1b]0;b\xff\n2000 10 " + b"n" * 9000 + b"\n")
    _read(path, names)
    assert names.find(0x1000) == "a?]0;b\ufffd"
    cut = names.find(0x2000)
    assert cut is not None
    assert len(cut) < 1100


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("py::step:/home/u/job/train.py", JitName("python", "step", "train.py")),
        ("py::Loader.__next__:<frozen x>", JitName("python", "Loader.__next__", "<frozen x>")),
        ("JS:*run /home/u/app/server.js:12:3", JitName("jit", "JS:*run server.js:12:3")),
        ("JS:~run file:///srv/a/b.mjs:1:1", JitName("jit", "JS:~run b.mjs:1:1")),
        ("Script:~/opt/x.js:1", JitName("jit", "Script:~/opt/x.js:1")),
        ("/opt/a/b.js", JitName("jit", "b.js")),
        ("Lcom/foo/Bar;::run", JitName("jit", "Lcom/foo/Bar;::run")),
        ("operator/ (a / b)", JitName("jit", "operator/ (a / b)")),
        ("plain", JitName("jit", "plain")),
    ],
)
def test_names_leave_without_folders(name: str, expected: JitName) -> None:
    assert parse_name(name) == expected
