# SPDX-License-Identifier: Apache-2.0
"""Names and lines of Ruby's functions, read from memory that may hold anything."""

from __future__ import annotations

import random
import struct

import pytest

from sonde.unwind import ruby_names
from sonde.unwind.chain import UnsupportedEngineError
from sonde.unwind.function_names import FAILURES
from sonde.unwind.ruby_layout import ruby_layout
from sonde.unwind.ruby_names import MAX_NAME, RubyNames

BASE = 0x5000_0000_0000
STRING, ARRAY = 5, 7
APART = INSIDE = 1 << 13
METHOD = 6 << 12
SVAR = 2 << 12
VERSIONS = ("3.1.2", "3.2.9", "3.3.8", "3.4.1")


class Heap:
    """Memory of a Ruby with objects in it."""

    def __init__(self, version):
        self.layout = ruby_layout(version)
        self.raw = bytearray(1 << 18)
        self.end = 64
        self.reads = 0

    def read_at(self, size, at):
        self.reads += 1
        start = at - BASE
        if not 0 <= start < len(self.raw):
            raise OSError("no memory there")
        return bytes(self.raw[start : start + size])

    def put(self, raw):
        at = self.end
        self.raw[at : at + len(raw)] = raw
        self.end += (len(raw) + 7) & ~7
        return BASE + at

    def set(self, at, raw):
        self.raw[at - BASE : at - BASE + len(raw)] = raw

    def string(self, text):
        raw = text.encode()
        if len(raw) > 15:
            where = self.put(raw)
            return self.put(struct.pack("<QQQQ", STRING | APART, 0, len(raw), where))
        if self.layout.has_short_length:
            return self.put(struct.pack("<QQ16s", STRING | len(raw) << 14, 0, raw))
        return self.put(struct.pack("<QQQ16s", STRING, 0, len(raw), raw))

    def array(self, items, is_inside=True):
        raw = struct.pack(f"<{len(items)}Q", *items)
        if is_inside:
            return self.put(struct.pack("<QQ", ARRAY | INSIDE, 0) + raw)
        return self.put(struct.pack("<QQQQQ", ARRAY, 0, len(items), 0, self.put(raw)))

    def function(self, label, path, rows=(), instructions=64):
        """rows: (index of its first instruction, line)."""
        encoded = self.put(bytes(8 * instructions))
        body = bytearray(160)
        table = self.put(table_of([index for index, _ in rows], instructions))
        lines = self.put(b"".join(struct.pack("<iiI", line, 0, 0) for _, line in rows))
        struct.pack_into("<Q", body, 8, encoded)
        struct.pack_into("<QQQ", body, 64, path, 0, self.string(label))
        struct.pack_into("<QQIxxxxQ", body, self.layout.lines, lines, 0, len(rows), table)
        return self.put(struct.pack("<QQQ", 0, 0, self.put(bytes(body)))), encoded


def table_of(starts, size):
    """succ_index_table (iseq.c): how many of the starts are at each index or before."""
    upto = [sum(it <= index for it in starts) for index in range(max(size, 54))]
    parts = [sum(upto[9 * i + j] << 7 * j for j in range(9)) for i in range(6)]
    raw = struct.pack("<6Q", *parts)
    for block in range(54, size, 512):
        marks = [
            sum(1 << bit for bit in range(64) if block + 64 * w + bit in starts) for w in range(8)
        ]
        ranks, sum_ = 0, 0
        for word in range(1, 8):
            sum_ += marks[word - 1].bit_count()
            ranks |= sum_ << 9 * (word - 1)
        raw += struct.pack("<I4xQ8Q", upto[block - 1], ranks, *marks)
    return raw


@pytest.fixture(params=VERSIONS)
def heap(request):
    return Heap(request.param)


def test_a_block_has_its_label_the_real_path_and_the_line_before_its_place(heap):
    path = heap.array([heap.string("a.rb"), heap.string("/srv/shop/app/models/order_line.rb")])
    starts = [(0, 10), (7, 11), (30, 12), (60, 13), (600, 14)]
    at, encoded = heap.function("block in sum", path, starts, 700)
    names = RubyNames(heap.layout, 0, 0)
    found = names.read(heap, at, False, 1)
    assert (found.name, found.file) == ("block in sum", "/srv/shop/app/models/order_line.rb")
    assert [
        names.line_at(heap, found, encoded + 8 * (it + 1))
        for it in (0, 6, 7, 29, 30, 59, 60, 599, 600)
    ] == [10, 10, 11, 11, 12, 12, 13, 13, 14]


def test_a_file_without_a_real_path_has_the_given_one(heap):
    at, _ = heap.function("<main>", heap.array([heap.string("(eval)"), 8], is_inside=False))
    assert RubyNames(heap.layout, 0, 0).read(heap, at, False, 1).file == "(eval)"


def symbols(heap):
    """(start, end) of variables, one of which is a table of symbols with one name of a method."""
    names = [0] * 1024
    for serial, text in ((43, "+"), (45, "-"), (42, "*"), (300, "each_with_index")):
        names[2 * serial] = heap.string(text)
    ids = heap.array([heap.array(names, is_inside=False)], is_inside=False)
    # What looks like it comes first.
    decoy = struct.pack("<4Q", 400, BASE + 64, BASE + 64, BASE + 64)
    start = heap.put(decoy + struct.pack("<4Q", 500, BASE + 64, ids, BASE + 64))
    return start, start + 64


@pytest.mark.parametrize("has_svar", [False, True])
def test_a_method_in_c_has_the_name_it_was_called_by(heap, has_svar):
    names = RubyNames(heap.layout, *symbols(heap))
    entry = heap.put(struct.pack("<5Q", METHOD, 0, 0, 300 << 4 | 1, 0))
    at = heap.put(struct.pack("<2Q", SVAR, entry)) if has_svar else entry
    found = names.read(heap, at, True, 1)
    assert (found.name, found.file, found.place) == ("each_with_index", "", 0)
    before = heap.reads
    assert names.read(heap, at, True, 1) == found
    assert heap.reads - before <= 3  # the name is known


def test_without_a_table_of_symbols_it_has_no_name_and_is_not_looked_for_again(heap):
    names = RubyNames(heap.layout, BASE + 64, BASE + 1024)
    at = heap.put(struct.pack("<5Q", METHOD, 0, 0, 300 << 4 | 1, 0))
    assert names.read(heap, at, True, 1).name == "(unnamed)"
    before = heap.reads
    names.read(heap, at, True, 1)
    assert heap.reads - before <= 2


def test_lengths_are_bounded(heap):
    text = heap.put(struct.pack("<QQQQ", STRING | APART, 0, 1 << 62, BASE + 64))
    at, encoded = heap.function("x", text)
    body = struct.unpack_from("<Q", heap.raw, at - BASE + 16)[0]
    heap.set(body + 80, struct.pack("<Q", text))
    names = RubyNames(heap.layout, 0, 0)
    assert len(names.read(heap, at, False, 1).name) <= MAX_NAME
    heap.set(body + heap.layout.lines + 16, struct.pack("<I", 0xFFFF_FFFF))
    assert names.line_at(heap, names.read(heap, at, False, 1), encoded + 8) == 0


def test_memory_that_holds_anything_ends_in_a_few_reads(heap):
    at, encoded = heap.function("x", heap.string("a.rb"), [(0, 1), (9, 2)])
    entry = heap.put(struct.pack("<5Q", METHOD, 0, 0, 300 << 4, 0))
    start, end = symbols(heap)
    whole, end_of_all = bytes(heap.raw), heap.end
    chance = random.Random(1)
    for _ in range(3000):
        heap.raw = bytearray(whole)
        for _ in range(chance.randrange(1, 40)):
            place = chance.randrange(0, end_of_all - 8)
            word = chance.choice(
                [chance.getrandbits(64), BASE + chance.randrange(end_of_all), 0, ~0]
            )
            struct.pack_into("<Q", heap.raw, place, word & (1 << 64) - 1)
        names, heap.reads = RubyNames(heap.layout, start, end), 0
        for it, is_native in ((at, False), (entry, True)):
            try:
                found = names.read(heap, it, is_native, 1)
                names.line_at(heap, found, encoded + chance.randrange(1 << 20))
            except FAILURES:
                pass
        assert heap.reads < 16 * ruby_names.MAX_CANDIDATES


@pytest.mark.parametrize(
    "version", ["2.7.8", "3.0.6", "3.5.0", "4.0.1", "", "3.1", "x" * 1000, "3.1.2\n"]
)
def test_other_versions_are_refused_with_the_reason(version):
    with pytest.raises(UnsupportedEngineError, match=r"^Ruby") as error:
        ruby_layout(version)
    assert len(str(error.value)) < 100
