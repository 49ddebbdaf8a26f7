# SPDX-License-Identifier: Apache-2.0
"""ELF files made to cost their reader time or memory: anybody may write one, and root reads it.

Each has something many times that honest files have once. What is far from the point lies in holes,
so that the files cost their makers nothing.
"""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sonde import _native

LIMIT_S = 2.0
"""Processor time of one call. Before there was a bound each of these took longer."""
SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_DYNSYM, PT_LOAD, PT_NOTE = 2, 3, 7, 11, 1, 4
FUNCTION, GLOBAL_UNTYPED = 0x12, 0x10
CODE_AT = 0x1000
MANY = 65_000


def section(name: int, kind: int, at: int, size: int, link: int = 0) -> bytes:
    return struct.pack("<IIQQQQIIQQ", name, kind, 2, CODE_AT + at, at, size, link, 0, 8, 24)


def segment(kind: int, at: int, size: int, address: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, 5, at, address, address, size, size, 8)


def symbol(address: int, name: int = 1, size: int = 8, info: int = FUNCTION) -> bytes:
    return struct.pack("<IBBHQQ", name, info, 0, 1, address, size)


class Image:
    """A file in the making: its parts stand behind its head, its tables at its end."""

    def __init__(self) -> None:
        self.parts = bytearray(64)
        self.sections: list[bytes] = [bytes(64)]
        self.segments: list[bytes] = []

    def put(self, raw: bytes) -> int:
        self.parts += bytes(-len(self.parts) % 16)
        at = len(self.parts)
        self.parts += raw
        return at

    def add(self, name: int, raw: bytes, kind: int = 1, link: int = 0) -> int:
        at = self.put(raw)
        self.sections.append(section(name, kind, at, len(raw), link))
        return at

    def add_symbols(self, table: bytes, names: bytes) -> None:
        self.add(0, table, SHT_SYMTAB, len(self.sections) + 1)
        self.add(0, names, SHT_STRTAB)

    def write(self, path: Path, names: bytes = b"\0", hole: int = 0) -> Path:
        self.add(0, names, SHT_STRTAB)
        names_at = len(self.sections) - 1
        if not self.segments:
            self.segments = [segment(PT_LOAD, 0, 1 << 30, CODE_AT)]
        segments_at = self.put(b"".join(self.segments))
        # More sections than their number has bits for: the first one holds the number (gabi).
        count = len(self.sections)
        if count >= 0xFF00:
            raise ValueError("too many sections")
        sections_at = self.put(b"".join(self.sections))
        self.parts[:64] = b"\x7fELF\2\1\1".ljust(16, b"\0") + struct.pack(
            "<HHIQQQIHHHHHH",
            *(3, 62, 1, 0, segments_at, sections_at, 0, 64, 56, len(self.segments), 64),
            *(count, names_at),
        )
        path.write_bytes(self.parts)
        with path.open("r+b") as file:
            file.truncate(len(self.parts) + hole)
        return path


def resident_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def timed(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hostile"


def test_a_build_id_is_not_searched_in_the_same_megabyte_again_and_again(path: Path) -> None:
    image = Image()
    image.sections += [section(0, SHT_NOTE, 5 << 20, 1 << 20)] * MANY  # in the hole: empty notes
    image.write(path, hole=8 << 20)

    assert timed(lambda: _native.build_id(str(path))) < LIMIT_S


def test_a_file_is_identified_by_its_first_headers_and_notes(path: Path) -> None:
    """Every file that anybody maps is asked for this, on the loop that all wait for."""
    image = Image()
    image.sections += [section(0, SHT_NOTE, 64, 16)] * MANY
    image.write(path, hole=1 << 20)

    with path.open("rb") as file:
        build_id_s = min(timed(lambda: _native.build_id(str(path))) for _ in range(5))
        segments_s = min(timed(lambda: _native.executable_segments(file.fileno())) for _ in "12345")
    assert build_id_s < 0.003
    assert segments_s < 0.003


@pytest.mark.parametrize("kind", [SHT_DYNSYM, SHT_SYMTAB])
def test_functions_are_looked_for_among_as_many_symbols_as_programs_have(
    path: Path, kind: int
) -> None:
    """A hole of 4 million symbols, none of them one; of exports, which come first, a wanted one
    that stands behind what the largest libraries export."""
    most = (1 << 19) if kind == SHT_DYNSYM else (1 << 21)
    image = Image()
    names_at = image.put(b"\0f\0")
    last_at = image.put(b"") + (1 << 20)
    image.sections += [section(0, kind, last_at, 24 << 22, 2), section(0, SHT_STRTAB, names_at, 3)]
    image.write(path, hole=(1 << 20) + (24 << 22))

    def found(place: int) -> int:
        with path.open("r+b", buffering=0) as file:
            file.seek(last_at + 24 * place)
            file.write(symbol(CODE_AT))
            assert timed(lambda: _native.find_functions(str(path), ["f"])) < LIMIT_S
            count = len(_native.find_functions(str(path), ["f"]))
            file.seek(last_at + 24 * place)
            file.write(bytes(24))
        return count

    assert found(most - 1) == 1
    assert found(most) == 0


def test_a_file_with_more_segments_than_any_program_is_none(path: Path) -> None:
    image = Image()
    image.segments = [segment(PT_LOAD, 0, 8, CODE_AT + 16 * it) for it in range(MANY)]
    table = b"".join(symbol(1 << 40, info=GLOBAL_UNTYPED) for _ in range(1 << 17))
    image.add_symbols(table, b"\0f\0")
    image.write(path)

    assert timed(lambda: _native.Symbolizer().elf(str(path), [64])) < LIMIT_S
    assert _native.Symbolizer().elf(str(path), [64]) == [None]


def test_section_names_are_not_searched_for_their_ends(path: Path) -> None:
    image = Image()
    image.sections += [section(0, 1, 64, 8)] * (MANY // 2)
    image.write(path, names=b"." * (1 << 20))

    out = str(path.with_suffix(".table"))

    assert timed(lambda: _native.build_unwind_table(str(path), out)) < LIMIT_S


def test_functions_of_one_name_are_not_held_against_each_other(path: Path) -> None:
    image = Image()
    distinct = [symbol(CODE_AT + 64 + it) for it in range(4095)]
    image.add_symbols(b"".join(distinct + distinct[-1:] * (1 << 20)), b"\0f\0")
    image.write(path)
    found: list[_native.FunctionSite] = []

    assert timed(lambda: found.extend(_native.find_functions(str(path), ["f"]))) < LIMIT_S
    assert len(found) == 4095


def test_all_functions_of_a_file_are_looked_at_for_little_more_than_one(path: Path) -> None:
    image = Image()
    image.sections += [section(0, 1, 64, 8)] * MANY
    code = image.put(b"\x55\xc3" * 4096)  # push %rbp, ret
    image.write(path)
    functions = [(code + 2 * it, 2, True) for it in range(4096)]
    found: list[tuple[int, str, str, bool]] = []

    def look(asked: list[tuple[int, int, bool]]) -> float:
        return timed(lambda: found.extend(_native.probe_sites(str(path), asked, 60.0)))

    one_s = max(look(functions[:1]) for _ in range(5))
    found.clear()
    all_s = look(functions)

    assert [offset for offset, *_ in found] == [offset for offset, *_ in functions]
    assert all_s < 100 * max(one_s, 0.001)  # 4,096 times as long where the file is read for each


def test_looking_at_functions_ends_when_its_time_is_over(path: Path) -> None:
    image = Image()
    size = 1 << 20
    code = image.put(b"\xf3\x0f\x1e\xfa\x55" + b"\x90" * size)  # a push behind endbr64: searched
    image.write(path)
    functions = [(code, size, False)] * 4096

    assert _native.probe_sites(str(path), functions, 0.0) == []
    assert _native.probe_sites(str(path), functions, -1.0) == []
    found: list[tuple[int, str, str, bool]] = []
    assert timed(lambda: found.extend(_native.probe_sites(str(path), functions, 0.2))) < LIMIT_S
    assert set(found) == {(code + 4, "emulated", "push rbp", False)}
    assert 1 <= len(found) < len(functions)


def frames(augmentation: bytes, count: int, address: int) -> bytes:
    """.eh_frame with one CIE, and `count` functions of 1 byte from `address` on, as absolutes."""
    body = struct.pack("<IB", 0, 1) + augmentation + b"\0" + bytes((1, 0x78, 16, 0))
    raw = struct.pack("<I", len(body)) + body
    for number in range(count):
        description = struct.pack("<IQQB", len(raw) + 4, address + number, 1, 0)
        raw += struct.pack("<I", len(description)) + description
    return raw


def test_symbols_that_begin_threads_are_left_out_in_one_pass(path: Path) -> None:
    image = Image()
    address = CODE_AT + (1 << 20)
    table = b"".join(symbol(address + 64 + 8 * it) for it in range(1 << 17))
    image.add_symbols(table, b"\0_start\0")
    image.add(1, frames(b"", 1, address))
    image.write(path, names=b"\0.eh_frame\0", hole=1 << 21)
    out = str(path.with_suffix(".table"))

    assert timed(lambda: _native.build_unwind_table(str(path), out)) < LIMIT_S


def test_code_without_descriptions_is_followed_so_far_and_no_further(path: Path) -> None:
    image = Image()
    # push %rax and a jump on: what holds behind them depends on the way there, so each is followed
    # as often as that changes.
    size = 1 << 18
    code = (b"\x50\x75\x7d" * size)[:size] * 64
    address = CODE_AT + image.put(code)
    table = b"".join(symbol(address + size * it, size=size) for it in range(64))
    image.add_symbols(table, b"\0f\0")
    image.add(1, frames(b"", 1, address + len(code) + 64))
    image.write(path, names=b"\0.eh_frame\0")
    out = str(path.with_suffix(".table"))

    assert timed(lambda: _native.build_unwind_table(str(path), out)) < 2 * LIMIT_S


def test_what_descriptions_refer_to_is_read_once(path: Path) -> None:
    names = b"\0_PyEval_EvalFrameDefault\0_PyRuntime\0"
    image = Image()
    code = CODE_AT + image.put(b"\xe9\0\1\0\0" * 64)
    loop = symbol(code, 1, 320)
    image.add_symbols(loop + symbol(code + 400, names.index(b"_PyR"), 16), names)
    image.add(1, frames(b"z" + b"S" * (1 << 18), 30_000, code))
    image.write(path, names=b"\0.eh_frame\0")

    assert timed(lambda: _native.find_cpython(str(path))) < LIMIT_S


def test_code_that_is_described_again_and_again_is_searched_for_rubys_loop_once(path: Path) -> None:
    names = b"\0rb_thread_current\0ruby_version\0"
    image = Image()
    code = CODE_AT + image.put(b"\xff\xe0" * (1 << 17))
    current = symbol(code, 1, 320)
    image.add_symbols(current + symbol(code, names.index(b"ruby_v"), 1 << 40), names)
    image.add(1, frames(b"z" + b"S" * (1 << 18), 30_000, code))
    image.write(path, names=b"\0.eh_frame\0")

    assert timed(lambda: _native.find_engine(str(path))) < LIMIT_S


def test_headers_count_for_the_memory_of_symbols(tmp_path: Path) -> None:
    symbolizer = _native.Symbolizer(cache_bytes=8 << 20)
    before_mb = resident_mb()
    for number in range(64):
        image = Image()
        image.sections += [bytes(64)] * MANY
        found = symbolizer.elf(str(image.write(tmp_path / str(number))), [64])
        assert found == [None]
    files, held_bytes, *_ = symbolizer.usage()

    assert files >= 1
    assert held_bytes <= 8 << 20
    assert resident_mb() - before_mb < 60
