# SPDX-License-Identifier: Apache-2.0
"""Names and lines of PHP's functions, read from memory that may hold anything."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest

from sonde.unwind.chain import CFA_LOOP, CFA_RSP, UnsupportedEngineError
from sonde.unwind.function_names import FAILURES
from sonde.unwind.php_layout import generated_rule, php_layout
from sonde.unwind.php_names import MAX_NAME, PhpNames

BASE = 0x5000_0000_0000
BUILDS = ("20210902,NTS", "20220829,NTS", "20230831,NTS", "20240924,NTS")


class Heap:
    """Memory of a PHP with functions in it."""

    def __init__(self, built):
        self.layout = php_layout(built)
        self.raw = bytearray(1 << 14)
        self.end = 64

    def read_at(self, size, at):
        start = at - BASE
        if not 0 <= start < len(self.raw):
            raise OSError("no memory there")
        return bytes(self.raw[start : start + size])

    def put(self, raw):
        at = self.end
        self.raw[at : at + len(raw)] = raw
        self.end += (len(raw) + 7) & ~7
        return BASE + at

    def string(self, text):
        raw = text.encode()
        return self.put(struct.pack("<QQQ", 1, 0, len(raw)) + raw)

    def function(self, kind, name, owner="", path="", first=0, last=0):
        raw = bytearray(200)
        raw[0] = kind
        scope = self.put(struct.pack("<QQ", 0, self.string(owner))) if owner else 0
        struct.pack_into("<QQ", raw, 8, self.string(name) if name else 0, scope)
        struct.pack_into("<Q", raw, self.layout.filename, self.string(path))
        struct.pack_into("<II", raw, self.layout.first_line, first, last)
        return self.put(bytes(raw))

    def operation(self, line):
        return self.put(
            struct.pack("<QIIIII", 0, 0, 0, 0, line, 0)[:24] + struct.pack("<II", line, 0)
        )


@pytest.fixture(params=BUILDS)
def heap(request):
    return Heap(request.param)


@pytest.mark.parametrize(
    ("kind", "name", "owner", "expected"),
    [
        (2, "spin", "", "spin"),
        (2, "method", "Shop\\Tree", "Shop\\Tree::method"),
        (2, "", "", "{main}"),
        (4, "", "", "eval()'d code"),
    ],
)
def test_a_function_has_its_name_class_file_and_line(heap, kind, name, owner, expected):
    at = heap.function(kind, name, owner, "/srv/shop/tree.php", 8, 15)
    names = PhpNames(heap.layout)
    found = names.read(heap, at, False, 1)
    assert (found.name, found.file, found.line) == (expected, "/srv/shop/tree.php", 8)
    assert names.line_at(heap, found, heap.operation(12)) == 12


def test_an_instruction_that_is_not_the_functions_has_the_line_of_its_begin(heap):
    names = PhpNames(heap.layout)
    found = names.read(heap, heap.function(2, "f", path="/a.php", first=8, last=15), False, 1)
    assert [names.line_at(heap, found, heap.operation(it)) for it in (7, 8, 15, 16)] == [
        8,
        8,
        15,
        8,
    ]


def test_a_function_in_c_has_its_name_alone(heap):
    names = PhpNames(heap.layout)
    found = names.read(heap, heap.function(1, "sort", "ArrayObject"), False, 1)
    assert (found.name, found.file, found.line) == ("ArrayObject::sort", "", 0)
    assert names.line_at(heap, found, 1) == 0


def test_a_class_that_is_gone_leaves_the_name(heap):
    at = heap.function(2, "f", "Tree", "/a.php", 1, 2)
    struct.pack_into("<Q", heap.raw, at - BASE + 16, 0x1000)
    assert PhpNames(heap.layout).read(heap, at, False, 1).name == "f"


def test_lengths_are_bounded(heap):
    at = heap.function(2, "f", "", "/a.php", 1, 2)
    name = struct.unpack_from("<Q", heap.raw, at - BASE + 8)[0]
    struct.pack_into("<Q", heap.raw, name - BASE + 16, 1 << 62)
    assert len(PhpNames(heap.layout).read(heap, at, False, 1).name) <= MAX_NAME


def test_memory_that_holds_anything_is_a_failure_or_a_function(heap):
    at = heap.function(2, "f", "Tree", "/a.php", 1, 2)
    whole, chance = bytes(heap.raw), random.Random(1)
    for _ in range(2000):
        heap.raw = bytearray(whole)
        for _ in range(chance.randrange(1, 20)):
            word = chance.choice([chance.getrandbits(64), BASE + chance.randrange(heap.end), 0])
            struct.pack_into("<Q", heap.raw, chance.randrange(heap.end - 8), word)
        names = PhpNames(heap.layout)
        with suppress(*FAILURES):
            found = names.read(heap, at, False, 1)
            names.line_at(heap, found, chance.getrandbits(47))


@pytest.mark.parametrize(
    "built", ["20190902,NTS", "20220829,TS", "20220829,NTS,debug", "", "x" * 99]
)
def test_other_builds_are_refused_with_the_reason(built):
    with pytest.raises(UnsupportedEngineError, match=r"^PHP") as error:
        php_layout(built)
    assert len(str(error.value)) < 100


def test_generated_code_is_left_by_the_frame_of_the_loop_that_it_runs_in():
    assert generated_rule((CFA_RSP, 1, 160, -40)) == (CFA_LOOP, 1, 160, -40)
    assert generated_rule((3, 1, 160, -40)) is None
    assert generated_rule(None) is None
