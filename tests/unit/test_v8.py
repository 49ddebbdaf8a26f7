# SPDX-License-Identifier: Apache-2.0
"""Functions and code of a V8, read from memory that may hold anything."""

from __future__ import annotations

import os
import random
import struct
import time
from types import SimpleNamespace

import pytest

from sonde.unwind import v8
from sonde.unwind.v8_code import V8Codes
from sonde.unwind.v8_functions import (
    ANONYMOUS,
    MAX_ALL_BYTES,
    MAX_CALLS,
    TRUST_NS,
    V8Functions,
)
from sonde.unwind.v8_layout import EXPORTS, UnsupportedV8Error, read_layout
from sonde.unwind.v8_mappings import MAX_GENERATED, V8Mappings, generated
from sonde.unwind.v8_objects import MAX_NAME, V8Objects, position_at

BASE = 0x3000_0000_0000
SHARED, SCOPE, SCRIPT, CODE, BYTECODE, ARRAY, BYTES, TEXT, CONS, OTHER = range(10)
TYPES = {SHARED: 262, SCOPE: 261, SCRIPT: 167, CODE: 245, BYTECODE: 191, ARRAY: 175}
TYPES |= {BYTES: 190, TEXT: 8, CONS: 41, OTHER: 300}
NUMBERS = {
    "class_JSFunction__shared__SharedFunctionInfo": 24,
    "class_SharedFunctionInfo__name_or_scope_info__Object": 16,
    "class_SharedFunctionInfo__script_or_debug_info__HeapObject": 32,
    "class_Map__instance_type__uint16_t": 12,
    "class_Script__name__Object": 16,
    "class_Script__source__Object": 8,
    "class_Script__line_ends__Object": 56,
    "class_String__length__int32_t": 12,
    "scopeinfo_idx_ncontextlocals": 2,
    "scopeinfo_idx_first_vars": 3,
    "class_BytecodeArray__data__uintptr_t": 54,
    "CodeKindBaseline": 11,
    "type_SharedFunctionInfo__SHARED_FUNCTION_INFO_TYPE": TYPES[SHARED],
    "type_ScopeInfo__SCOPE_INFO_TYPE": TYPES[SCOPE],
    "type_Script__SCRIPT_TYPE": TYPES[SCRIPT],
    "type_Code__CODE_TYPE": TYPES[CODE],
    "FirstNonstringType": 128,
    "type_BytecodeArray__BYTECODE_ARRAY_TYPE": TYPES[BYTECODE],
    "type_FixedArray__FIXED_ARRAY_TYPE": TYPES[ARRAY],
}


class Heap:
    """Memory with objects in it."""

    def __init__(self):
        self.raw = bytearray(1 << 20)
        self.end = 64
        self.reads = 0
        self.maps = {
            kind: self.put(struct.pack("<QIHH", 1, 0, it, 0)) for kind, it in TYPES.items()
        }

    def put(self, content):
        """Its address plus 1."""
        at = self.end
        self.raw[at : at + len(content)] = content
        self.end = at + (len(content) + 63) // 32 * 32
        return BASE + at + 1

    def object(self, kind, content):
        return self.put(struct.pack("<Q", self.maps[kind]) + content)

    def text(self, text):
        return self.object(TEXT, struct.pack("<Ii", 0, len(text)) + text.encode("latin-1"))

    def bytes(self, content):
        return self.object(BYTES, struct.pack("<Q", len(content) << 32) + content)

    def read_at(self, size, at):
        self.reads += 1
        at -= BASE
        if not 0 <= at < len(self.raw) or size < 0:
            raise OSError("nothing there")
        return bytes(self.raw[at : at + size])


def layout_of(heap, changes=()):
    numbers = {f"v8dbg_{name}": value for name, value in NUMBERS.items()}
    numbers |= {"_ZN2v88internal7Version6major_E": 11, "_ZN2v88internal7Version6minor_E": 3}
    numbers |= dict(changes)
    assert set(numbers) - set(dict(changes)) <= set(EXPORTS)
    return read_layout(
        heap, {name: heap.put(struct.pack("<i", value)) - 1 for name, value in numbers.items()}
    )


def number(table, value):
    value = value << 1 if value >= 0 else ~value << 1 | 1
    while value > 0x7F:
        table.append(value & 0x7F | 0x80)
        value >>= 7
    table.append(value)


def table_of(*rows):
    table, place, position = bytearray(), -1, 0
    for at, offset, call in rows:
        number(table, at - place)
        number(table, (2 * (offset + 1) | call << 31) - position)
        place, position = at, 2 * (offset + 1) | call << 31
    return bytes(table)


def function_of(heap, name, source, start, bytecode=0, path="/srv/app/main.js"):
    """Address of a SharedFunctionInfo."""
    script = heap.object(
        SCRIPT, struct.pack("<7Q", heap.text(source), heap.text(path), 0, 0, 0, 0, 0)
    )
    words = (0, 0, 0, heap.text(name), start << 32, 99 << 32, heap.maps[OTHER])
    scope = heap.object(SCOPE, struct.pack("<7Q", *words) + bytes(160))
    return heap.object(SHARED, struct.pack("<7Q", bytecode, scope, 0, script, 0, 0, 0)) - 1


def test_a_function_is_named_with_file_and_line():
    heap = Heap()
    functions = V8Functions(layout_of(heap))
    table = heap.bytes(table_of((0, 5, 0), (9, 12, 0)))
    bytecode = heap.object(BYTECODE, struct.pack("<7Q", 0, 0, 0, table, 0, 0, 0))
    at = function_of(heap, "serve", "a\nbb\r\nccc\ndddd\n", 2, bytecode)
    found = functions.find(heap, at, 0)
    assert (found.name, found.script.file, found.line) == ("serve", "main.js", 2)
    assert functions.line_of_bytecode(heap, found, 8) == 3
    assert functions.line_of_bytecode(heap, found, 9) == 4
    assert functions.find(heap, at + 32, 0) is None


def test_names_are_cut_and_printable():
    heap = Heap()
    functions = V8Functions(layout_of(heap))
    source = "\n"
    assert len(functions.find(heap, function_of(heap, 999 * "x", source, 0), 0).name) <= MAX_NAME
    found = functions.find(heap, function_of(heap, "a\x1b[2Jb", source, 0), 0)
    assert found.name == "a?[2Jb"
    assert functions.find(heap, function_of(heap, "", source, 0), 0).name == ANONYMOUS
    own = function_of(heap, "load", source, 0, path="node:internal/modules/run_main")
    assert functions.find(heap, own, 0).script.file == "node:internal/modules/run_main"


def test_inlined_calls_come_from_the_innermost_on():
    heap = Heap()
    layout = layout_of(heap)
    functions = V8Functions(layout)
    codes = V8Codes(layout, functions)
    source = "a\nb\nc\nd\n"
    outer = function_of(heap, "outer", source, 0)
    inner = function_of(heap, "inner", source, 4)
    calls = heap.bytes(struct.pack("<QiI", 2 * (2 + 1), 0, 0))
    literals = heap.object(ARRAY, struct.pack("<QQ", 1 << 32, inner + 1))
    words = (8 << 32, 0, 1 << 32, literals, 0, 0, 0, outer + 1, calls)
    undo = heap.object(ARRAY, struct.pack("<9Q", *words))
    table = heap.bytes(table_of((0, 0, 0), (16, 6, 1)))
    first = BASE + 0x80000
    content = struct.pack("<QQQQQIII", 0, undo, table, 0, first, 12, 0, 64)
    code = heap.object(CODE, content + bytes(120)) - 1

    def names(at):
        found = codes.calls_at(heap, functions.find(heap, outer, 0), at, first + 20 & 0xFFFFFFFF, 0)
        return [(it.name, line) for it, line in found]

    assert names(code) == [("inner", 4), ("outer", 2)]
    # By another Code: where it begins, or what lies before the instructions leads to its own.
    assert names(BASE) == [("outer", 1)]
    struct.pack_into("<QQ", heap.raw, first - BASE - 16, heap.maps[OTHER], code + 1)
    codes.generated = [(BASE + 0x70000, BASE + 0x90000)]
    assert names(BASE) == [("inner", 4), ("outer", 2)]


def test_texts_that_lead_to_themselves_end():
    heap = Heap()
    objects = V8Objects(layout_of(heap))
    at = heap.object(CONS, struct.pack("<IiQQ", 0, 1 << 30, 0, 0))
    struct.pack_into("<QQ", heap.raw, at - 1 - BASE + 16, at, at)
    before = heap.reads
    assert objects.text(heap, at, 1 << 20) == ""
    assert heap.reads - before < 100


@pytest.mark.parametrize(
    "changes",
    [
        {"v8dbg_class_JSFunction__shared__SharedFunctionInfo": 1 << 20},
        {"v8dbg_class_JSFunction__shared__SharedFunctionInfo": -8},
        {"v8dbg_class_JSFunction__shared__SharedFunctionInfo": 25},
        {"v8dbg_scopeinfo_idx_first_vars": 200},
        {"v8dbg_scopeinfo_idx_ncontextlocals": 20},
        {"v8dbg_DeoptimizationDataLiteralArrayIndex": 200},
        {"v8dbg_type_Script__SCRIPT_TYPE": -1},
        {"_ZN2v88internal7Version6major_E": 6},
        {"_ZN2v88internal7Version6major_E": 1 << 30},
    ],
)
def test_absurd_constants_are_refused(changes):
    with pytest.raises(UnsupportedV8Error):
        layout_of(Heap(), changes)


def test_arrays_that_end_where_memory_does_lead_to_no_error():
    heap = Heap()
    layout = layout_of(heap, {"v8dbg_DeoptimizationDataLiteralArrayIndex": 15})
    functions = V8Functions(layout)
    codes = V8Codes(layout, functions)
    outer = function_of(heap, "outer", "a\n", 0)
    found = functions.find(heap, outer, 0)
    first = BASE + 0x80000
    # Of the data by which code is undone, fewer words are there than the constants name.
    end = BASE + len(heap.raw)
    undo = end - 16 - 8 * 9 + 1
    words = (heap.maps[ARRAY], 16 << 32, 0, 1 << 32, *[0] * 5, heap.bytes(b""), 0)
    struct.pack_into("<11Q", heap.raw, undo - 1 - BASE, *words)
    content = struct.pack("<QQQQQIII", 0, undo, heap.bytes(b""), 0, first, 12, 0, 64)
    code = heap.object(CODE, content + bytes(120)) - 1
    assert codes.calls_at(heap, found, code, first + 20 & 0xFFFFFFFF, 0) == [(found, 1)]
    # So of a function's ScopeInfo.
    scope = end - 16
    struct.pack_into("<QQ", heap.raw, scope - BASE, heap.maps[SCOPE], 0)
    shared = heap.object(SHARED, struct.pack("<7Q", 0, scope + 1, 0, 0, 0, 0, 0)) - 1
    assert functions.find(heap, shared, 0) is None


@pytest.mark.parametrize("error", [IndexError, OverflowError, struct.error, RuntimeError])
def test_no_error_of_a_read_leaves_a_v8(error, monkeypatch):
    monkeypatch.setattr(v8, "read_layout", lambda *_: layout_of(Heap()))
    one = v8.V8(SimpleNamespace(pid=os.getpid(), key=(os.getpid(), 0), party=7), None, {})

    def find(*_):
        raise error

    monkeypatch.setattr(one._functions, "find", find)
    assert one.frame(v8.V8_FRAME | 1 << 63, 0, one.frame_cache()) is v8.UNREAD


def test_frames_that_are_known_with_others_stay_so(monkeypatch):
    monkeypatch.setattr(v8, "MAX_CACHED_FRAMES", 10)
    monkeypatch.setattr(v8, "read_layout", lambda *_: layout_of(Heap()))
    one = v8.V8(SimpleNamespace(pid=os.getpid(), key=(os.getpid(), 0), party=7), None, {})
    monkeypatch.setattr(one, "_frames_at", lambda *_: 4 * [v8.UNREAD])
    cache = one.frame_cache()
    put = {}
    taken = SimpleNamespace(
        put=lambda word, where, _, needs_reorder: put.update({(word, where): needs_reorder})
    )
    for where in range(20):
        one.frame(1 << 63, where, taken)
    assert {key for key, needs_reorder in put.items() if needs_reorder} == set(one.inlined)
    assert 10 <= sum(map(len, one.inlined.values())) < 14
    assert one.frame_cache() is not cache
    assert one.inlined == {}


def test_any_memory_costs_bounded_time_and_memory():
    generator = random.Random(7)
    heap = Heap()
    layout = layout_of(heap)
    good = function_of(heap, "f", "x\n" * 1000, 0)
    used = heap.end
    for _ in range(60):
        for at in range(64 + 32 * len(TYPES), used, 8):
            if generator.random() < 0.2:
                word = generator.choice(
                    [0, 1, (1 << 64) - 1, 1 << 62, BASE + generator.randrange(used) | 1]
                )
                struct.pack_into("<Q", heap.raw, at, word)
        functions = V8Functions(layout)
        codes = V8Codes(layout, functions)
        codes.generated = [(BASE, BASE + len(heap.raw))]
        began_s, heap.reads = time.process_time(), 0
        found = functions.find(heap, good, 0)
        if found is not None:
            functions.line_of_bytecode(heap, found, 5)
            codes.calls_at(heap, found, good, generator.randrange(1 << 32), 0)
        assert heap.reads < 1000
        assert time.process_time() - began_s < 2


def test_what_is_kept_has_a_limit():
    heap = Heap()
    functions = V8Functions(layout_of(heap))
    functions.keep(MAX_ALL_BYTES)
    assert not functions.drops
    functions.keep(1)
    assert functions.drops == 1


def test_what_is_kept_of_a_function_is_counted_and_bounded():
    heap = Heap()
    functions = V8Functions(layout_of(heap))
    found = functions.find(heap, function_of(heap, "f", "a\nb\n", 0, path=4000 * "x"), 0)
    assert len(found.script.file) == MAX_NAME
    assert found.script.file is found.script.file
    before = functions._bytes
    assert before >= found.bytes + found.script.bytes
    for bytecode in range(10 * MAX_CALLS):
        functions.line_of_bytecode(heap, found, bytecode)
    assert len(found.lines) == MAX_CALLS
    assert functions._bytes - before >= MAX_CALLS * 64


def test_lines_of_a_script_whose_text_is_another_one_are_read_again():
    heap = Heap()
    functions = V8Functions(layout_of(heap))
    at = function_of(heap, "f", "\n\n\n\n", 3, path="")
    assert functions.find(heap, at, 0).line == 4
    script = struct.unpack_from("<Q", heap.raw, at - BASE + 32)[0]
    struct.pack_into("<Q", heap.raw, script - 1 - BASE + 8, heap.text("abc\n"))
    assert functions.find(heap, at, 2 * TRUST_NS).line == 1
    assert functions.find(heap, at, 4 * TRUST_NS).script is functions.find(heap, at, 0).script


@pytest.mark.parametrize(
    "text",
    [
        *("a\u010d\nb\n", "\u0a0a\u0d0d\u000a\u0a00\u000d\n\u0d0a\n"),
        *("a\u2028b\u2029\r\u2028\n", "\u2800\u2820\u2028\u2900\u2028"),
    ],
)
def test_lines_of_two_byte_texts(text):
    heap = Heap()
    functions = V8Functions(layout_of(heap))
    raw = text.encode("utf-16-le")
    heap.maps["two"] = heap.put(struct.pack("<QIHH", 1, 0, 0, 0))
    source = heap.object("two", struct.pack("<Ii", 0, len(text)) + raw)
    first_of_two = {at for at in range(len(text)) if text[at : at + 2] == "\r\n"}
    ends = [
        at for at, it in enumerate(text) if it in "\r\n\u2028\u2029" and at - 1 not in first_of_two
    ]
    assert list(functions._line_ends(heap, source, 0)) == ends


def test_an_end_of_a_line_in_two_pieces_is_one():
    heap = Heap()
    functions = V8Functions(layout_of(heap))
    pair = struct.pack("<IiQQ", 0, 4, heap.text("a\r"), heap.text("\nb\n"))
    assert list(functions._line_ends(heap, heap.object(CONS, pair), 0)) == [1, 4]


def test_a_table_that_does_not_end():
    assert position_at(b"\xff" * 1000, 5) >= 0
    assert position_at(b"", 5) == 0


def mapping(start, end, prot, path=""):
    return SimpleNamespace(start=start, end=end, prot=prot, path=path)


def test_what_is_reserved_beside_generated_code_belongs_to_it():
    maps = [
        mapping(0, 10, "r-xp", "/usr/bin/node"),
        mapping(20, 30, "---p"),
        mapping(30, 40, "rwxp"),
        mapping(40, 50, "---p"),
        mapping(50, 60, "rw-p"),
        mapping(60, 70, "---p"),
    ]
    assert generated(maps) == ([(20, 30), (30, 40), (40, 50)], 0)


def test_mappings_of_any_size_make_few_ranges():
    huge = [mapping(0, 1 << 46, "---p"), mapping(1 << 46, (1 << 46) + 4096, "rwxp")]
    assert generated(huge) == ([(1 << 46, (1 << 46) + 4096)], 0)
    many = [mapping(at << 13, (at << 13) + 4096, "r-xp") for at in range(10_000)]
    found, left_out = generated(many)
    assert (len(found), left_out) == (MAX_GENERATED, len(many) - MAX_GENERATED)


def test_the_file_of_v8_is_the_library_where_there_is_one():
    mapped = V8Mappings()
    mapped.add(mapping(0, 4096, "r-xp", "/usr/bin/node"), 0)
    mapped.add(mapping(1 << 30, (1 << 30) + (30 << 20), "r-xp", "/usr/lib/libnode.so.108"), 1 << 30)
    mapped.add(mapping(1 << 40, (1 << 40) + 4096, "r-xp", "/usr/lib/libc.so.6"), 1 << 40)
    assert mapped.file.path == "/usr/lib/libnode.so.108"
    assert mapped.code == [(1 << 30, (1 << 30) + (30 << 20))]
