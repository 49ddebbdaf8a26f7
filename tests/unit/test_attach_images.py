# SPDX-License-Identifier: Apache-2.0
"""Libraries as they lie in memory, made by hand: what is found in them, and what is refused."""

from __future__ import annotations

import os
import struct

import pytest

from sonde.attach import glibc, process
from sonde.attach.glibc import Mapped, landmarks
from sonde.attach.image import LoadedImage, _gnu_hash
from sonde.errors import TargetRefused

BASE = 0x7F0000000000
DYNAMIC, HASH, STRINGS, SYMBOLS = 0x200, 0x400, 0x1000, 0x2000
DT_STRTAB, DT_SYMTAB, DT_GNU_HASH = 5, 6, 0x6FFFFEF5
FUNCTION, DATA = 2, 1


class Memory:
    """Bytes from BASE on."""

    def __init__(self, size=1 << 16):
        self.data = bytearray(size)

    def put(self, at, layout, *values):
        struct.pack_into(layout, self.data, at, *values)

    def read(self, address, size):
        at = address - BASE
        if at < 0 or at + size > len(self.data):
            raise OSError("no memory")
        return bytes(self.data[at : at + size])


def library(functions, buckets=1, first=1, bloom=1, dynamic=()):
    """An image with a hash table of `functions`: (name, value, kind of symbol, section)."""
    memory = Memory()
    memory.put(0, "<6s10xHH12xQ", b"\x7fELF\x02\x01", 3, 62, 64)
    memory.put(54, "<HH", 56, 2)
    memory.put(64, "<IIQQ", 1, 5, 0, 0)  # PT_LOAD comes first
    memory.put(64 + 56, "<IIQQ", 2, 6, DYNAMIC, DYNAMIC)
    entries = [
        *((DT_STRTAB, STRINGS), (DT_SYMTAB, BASE + SYMBOLS), (DT_GNU_HASH, HASH)),
        *(dynamic or ((0, 0),)),
    ]
    for index, entry in enumerate(entries):
        memory.put(DYNAMIC + 16 * index, "<QQ", *entry)
    memory.put(HASH, "<IIII", buckets, first, bloom, 6)
    ordered = sorted(functions, key=lambda it: _gnu_hash(it[0]) % buckets)
    name_at, buckets_at = 1, HASH + 16 + 8 * bloom
    for index, (name, value, kind, section) in enumerate(ordered, first):
        bucket = _gnu_hash(name) % buckets
        if struct.unpack_from("<I", memory.data, buckets_at + 4 * bucket) == (0,):
            memory.put(buckets_at + 4 * bucket, "<I", index)
        after = ordered[index - first + 1 :][:1]
        is_last = not after or _gnu_hash(after[0][0]) % buckets != bucket
        chain_at = buckets_at + 4 * buckets + 4 * (index - first)
        memory.put(chain_at, "<I", _gnu_hash(name) & ~1 | is_last)
        memory.put(SYMBOLS + 24 * index, "<IBBHQQ", name_at, 16 | kind, 0, section, value, 8)
        memory.put(STRINGS + name_at, f"{len(name) + 1}s", name.encode())
        name_at += len(name) + 1
    return memory


NAMES = [f"function_{number}" for number in range(7)]
WHOLE = [(name, 0x100 + 16 * number, FUNCTION, 1) for number, name in enumerate(NAMES)]


@pytest.mark.parametrize("buckets", [1, 2, 3, 64])
@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("bloom", [1, 4])
def test_every_exported_function_is_found_and_no_other(buckets, first, bloom):
    image = LoadedImage(library(WHOLE, buckets, first, bloom), BASE)
    assert image.machine == 62
    assert [image.function(name) for name in NAMES] == [BASE + value for _, value, _, _ in WHOLE]
    assert image.function("function_") is image.function("function_77") is None


def test_what_is_data_imported_or_of_no_address_is_no_function():
    image = LoadedImage(
        library([("data", 64, DATA, 1), ("imported", 64, FUNCTION, 0), ("none", 0, FUNCTION, 1)]),
        BASE,
    )
    assert [image.function(name) for name in ("data", "imported", "none")] == [None] * 3


def test_what_lies_behind_the_end_of_the_dynamic_section_is_none_of_it():
    memory = library(WHOLE, dynamic=[(0, 0), (DT_STRTAB, 0x9000), (DT_GNU_HASH, 0x9000)])
    assert LoadedImage(memory, BASE).function("function_3") == BASE + 0x130


@pytest.mark.parametrize(
    ("at", "value"), [(0, 0), (0, 1 << 20), (0, (1 << 20) + 5), (8, (1 << 20) + 1), (8, 1 << 31)]
)
def test_a_hash_table_beyond_all_measure_is_refused(at, value):
    memory = library(WHOLE)
    memory.put(HASH + at, "<I", value)
    with pytest.raises(ValueError, match="hash table"):
        LoadedImage(memory, BASE).function("function_3")


@pytest.mark.parametrize(("at", "value"), [(0, (1 << 20) - 1), (8, 1 << 20)])
def test_a_hash_table_as_large_as_they_may_be_is_read(at, value):
    memory = library(WHOLE)
    memory.put(HASH + at, "<I", value)
    with pytest.raises(OSError, match="no memory"):  # it would be there, were it so large
        LoadedImage(memory, BASE).function("function_3")


@pytest.mark.parametrize("tag", [DT_STRTAB, DT_SYMTAB, DT_GNU_HASH])
def test_an_image_without_a_table_is_refused(tag):
    memory = library(WHOLE)
    for index in range(3):
        if struct.unpack_from("<Q", memory.data, DYNAMIC + 16 * index) == (tag,):
            memory.put(DYNAMIC + 16 * index, "<Q", 0x6000000D)
    with pytest.raises(ValueError, match="no dynamic entry"):
        LoadedImage(memory, BASE).function("function_3")


# ---- of a real C library, this process's own ----


def test_an_address_outside_the_code_of_its_library_is_refused(monkeypatch):
    mappings = glibc.mappings_of(os.getpid())
    code = [m for m in mappings if m.leaf == "libc.so.6" and "x" in m.prot][-1]
    real = LoadedImage.function
    with glibc.ProcessMemory(os.getpid()) as memory:
        assert landmarks(memory, mappings).getppid == code.start + (
            real(LoadedImage(memory, glibc._base(mappings, glibc._LIBC)), "getppid") - code.start
        )
        for wrong in (code.start - 1, code.end, code.end + 4096):

            def moved(image, name, wrong=wrong):
                return wrong if name == "getppid" else real(image, name)

            monkeypatch.setattr(LoadedImage, "function", moved)
            with pytest.raises(TargetRefused, match="getppid lies outside"):
                landmarks(memory, mappings)


def test_a_way_back_from_a_signal_may_lie_at_the_very_beginning_of_the_code():
    mappings = glibc.mappings_of(os.getpid())
    start, _ = glibc._code(mappings, glibc._LIBC)
    stub = bytes.fromhex("48c7c00f0000000f05")  # mov $15,%rax; syscall

    class Other(glibc.ProcessMemory):
        def read(self, address, size):
            data = super().read(address, size)
            if address != start:
                return data
            return data.replace(stub, bytes(9)) if self.without else stub + data[9:]

    with Other(os.getpid()) as memory:
        memory.without = False
        assert landmarks(memory, mappings).sigreturn == start
        memory.without = True
        with pytest.raises(TargetRefused, match="no code for rt_sigreturn"):
            landmarks(memory, mappings)


def test_where_errno_lies_is_read_from_the_code_that_gives_its_address():
    with glibc.ProcessMemory(os.getpid()) as memory:
        mappings = glibc.mappings_of(os.getpid())
        libc = LoadedImage(memory, glibc._base(mappings, glibc._LIBC))
        function = libc.function("__errno_location")
        offset = glibc._errno_offset(memory, function)
        assert offset is not None and -(1 << 16) < offset < 0
        assert glibc._errno_offset(memory, function + 1) is None
        assert glibc._errno_offset(memory, None) is None


@pytest.mark.parametrize("lacks", ["libc", "code", "loader"])
def test_a_process_without_all_of_a_dynamic_glibc_is_refused(lacks):
    mapped = {
        "libc": Mapped(0x1000, 0x2000, "r--p", 0, 7, "/lib/libc.so.6"),
        "code": Mapped(0x2000, 0x3000, "r-xp", 0x1000, 7, "/lib/libc.so.6"),
        "loader": Mapped(0x8000, 0x9000, "r-xp", 0x1000, 9, "/lib/ld-linux-x86-64.so.2"),
    }
    with pytest.raises(TargetRefused, match="no dynamic glibc"):
        landmarks(None, [one for name, one in mapped.items() if name != lacks])


def test_a_machine_without_yama_restricts_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_YAMA", tmp_path / "ptrace_scope")
    assert process._yama() == 0
    (tmp_path / "ptrace_scope").write_text("2\n")
    assert process._yama() == 2
