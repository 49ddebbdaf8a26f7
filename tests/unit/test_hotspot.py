# SPDX-License-Identifier: Apache-2.0
"""Code and methods of a JVM, read from memory that may hold anything."""

from __future__ import annotations

import random
import struct
import time
from types import SimpleNamespace

import pytest

from sonde.agent.stacks import StackReader
from sonde.resolve.naming_budget import NamingBudget
from sonde.unwind.hotspot_code import CALLED, GENERATED, MAX_BLOBS, PUSHED, HotspotCode
from sonde.unwind.hotspot_layout import EXPORTS, HotspotLayout, UnsupportedJvmError, read_layout
from sonde.unwind.java_methods import JavaMethods, line_table
from sonde.unwind.jvm import JAVA_FRAME, UNREAD
from sonde.unwind.python_code import INTERPRETED_FRAME

BASE = 0x7000_0000_0000
LAYOUT = HotspotLayout(
    heaps=BASE,
    array_length=0,
    array_data=8,
    heap_bytes=128,
    heap_memory=0,
    heap_segments=32,
    heap_shift=64,
    space=(0, 8, 16, 24),
    block_bytes=16,
    blob_bytes=64,
    blob_name=0,
    code_begin=8,
    code_end=16,
    frame_size=24,
    frame_complete=28,
    nmethod_method=32,
    verified_entry=40,
    method_const=8,
    const_constants=0,
    const_code_size=8,
    const_name=10,
    const_flags=12,
    const_bytes=16,
    has_lines=1,
    pool_holder=0,
    pool_length=8,
    pool_source=12,
    pool_bytes=16,
    skips_zero=False,
    klass_name=0,
    symbol_length=0,
    symbol_body=2,
)
ARRAY, DATA, HEAP, SEGMENTS, NAME = (BASE + it for it in (0x100, 0x200, 0x300, 0x1000, 0x2000))
CODE = BASE + 0x10000
SEGMENT = 128
# push rbp; sub rsp, 0x20; nop ...; add rsp, 0x20; pop rbp; ret; nop
BODY = b"\x55\x48\x83\xec\x20" + 20 * b"\x90" + b"\x48\x83\xc4\x20\x5d\xc3\x90"


class Memory:
    """Bytes at BASE, and what was asked for."""

    def __init__(self, size=1 << 18):
        self.raw = bytearray(size)
        self.read = 0

    def read_at(self, size, at):
        self.read += 1
        assert 0 <= size <= 4 << 20
        if not BASE <= at < BASE + len(self.raw):
            raise OSError(5, "no memory")
        return bytes(self.raw[at - BASE : at - BASE + size])

    def put(self, at, *words, form="Q"):
        struct.pack_into(f"<{len(words)}{form}", self.raw, at - BASE, *words)

    def put_bytes(self, at, content):
        self.raw[at - BASE : at - BASE + len(content)] = content


def with_code(blobs=1, bytes_of_each=2 * SEGMENT):
    """A JVM with that many compiled methods."""
    memory = Memory()
    memory.put(BASE, ARRAY)
    memory.put(ARRAY, 1, form="i")
    memory.put(ARRAY + 8, DATA)
    memory.put(DATA, HEAP)
    end = CODE + blobs * bytes_of_each
    memory.put(HEAP, CODE, CODE + 0x20000, CODE, end)
    memory.put(HEAP + 32, 0, 0, SEGMENTS, 0)
    memory.put(HEAP + 64, 7, form="i")
    memory.put_bytes(NAME, b"nmethod\0")
    for number in range(blobs):
        put_blob(memory, CODE + number * bytes_of_each, bytes_of_each)
    return memory


def put_blob(memory, at, size, method=0x1234, body=BODY):
    count = size // SEGMENT
    segments = bytes(min(i, 254) for i in range(count))
    memory.put_bytes(SEGMENTS + (at - CODE) // SEGMENT, segments)
    memory.put(at, count, 1)
    code = at + 16 + LAYOUT.blob_bytes
    memory.put(at + 16, NAME, code, code + len(body))
    memory.put(at + 16 + 24, 6, 5, form="i")
    memory.put(at + 16 + 32, method, code)
    memory.put_bytes(code, body)


def refreshed(memory):
    code = HotspotCode(LAYOUT)
    code.refresh(memory, time.monotonic() + 60)
    return code


def test_rules_follow_what_a_method_does_to_its_stack():
    start = CODE + 16 + LAYOUT.blob_bytes
    whole = (2, 1, 48, -16)
    assert refreshed(with_code()).rules() == [
        (CODE, GENERATED),
        (start, CALLED),
        (start + 1, PUSHED),
        (start + 5, whole),
        (start + 29, PUSHED),
        (start + 30, CALLED),
        (start + 31, whole),
        (start + 32, GENERATED),
    ]


def test_new_replaced_and_freed_code_is_found():
    memory = with_code(2)
    code = refreshed(memory)
    assert len(code) == 2
    assert not code.refresh(memory, time.monotonic() + 60)
    second = CODE + 2 * SEGMENT
    assert code.find(second + 16 + LAYOUT.blob_bytes).method == 0x1234
    put_blob(memory, second, 2 * SEGMENT, method=0x5678)
    for _ in range(16):
        code.refresh(memory, time.monotonic() + 60)
    assert code.find(second + 16 + LAYOUT.blob_bytes).method == 0x5678
    memory.put_bytes(SEGMENTS + 2, b"\xff\xff")
    assert code.refresh(memory, time.monotonic() + 60)
    assert code.has_replaced
    assert code.find(second + 16 + LAYOUT.blob_bytes) is None


def test_what_time_does_not_allow_is_read_at_the_next_look(monkeypatch):
    monkeypatch.setattr("sonde.unwind.hotspot_code.READ_BYTES", 1024)
    memory = with_code(100)
    code = HotspotCode(LAYOUT)
    code.refresh(memory, 0.0)
    assert code.is_behind
    assert 0 < len(code) < 100
    for _ in range(200):
        code.refresh(memory, 0.0)
    assert len(code) == 100


def put_heap(memory, number, low, blobs, segments):
    """One more heap, behind the first."""
    at = HEAP + 0x100 * number
    memory.put(ARRAY, number + 1, form="i")
    memory.put(DATA + 8 * number, at)
    memory.put(at, low, low + 0x4000, low, low + blobs * 2 * SEGMENT)
    memory.put(at + 32, 0, 0, segments, 0)
    memory.put(at + 64, 7, form="i")
    for it in range(blobs):
        put_blob(memory, low + it * 2 * SEGMENT, 2 * SEGMENT)


def test_an_empty_heap_is_one_without_code():
    memory = with_code(2)
    put_heap(memory, 1, CODE + 0x20000, 0, 0)
    code = refreshed(memory)
    assert len(code) == 2
    assert code.bounds == (CODE, CODE + 0x24000)


def test_a_heap_that_is_there_twice_is_read_once():
    memory = with_code(2)
    memory.put(ARRAY, 8, form="i")
    memory.put(DATA, *[HEAP] * 8)
    refreshed(memory)
    once = memory.read
    single = with_code(2)
    refreshed(single)
    assert once == single.read


@pytest.mark.parametrize(("name", "most"), [("MAX_BLOCKS", 3), ("MAX_SEGMENTS", 7)])
def test_limits_hold_for_all_heaps_together(monkeypatch, name, most):
    memory = with_code(2)
    put_heap(memory, 1, CODE + 0x20000, 2, SEGMENTS + 0x20000 // SEGMENT)
    assert len(refreshed(memory)) == 4
    monkeypatch.setattr(f"sonde.unwind.hotspot_code.{name}", most)
    with pytest.raises(ValueError, match="too many"):
        refreshed(memory)


def test_a_heap_for_which_time_ran_out_is_next(monkeypatch):
    monkeypatch.setattr("sonde.unwind.hotspot_code.READ_BYTES", 1024)
    memory = with_code(20)
    put_heap(memory, 1, CODE + 0x20000, 20, SEGMENTS + 0x20000 // SEGMENT)
    code = HotspotCode(LAYOUT)
    for heap in (CODE, CODE + 0x20000):
        code.refresh(memory, 0.0)
        assert code.is_behind
        assert code.find(heap + 16 + LAYOUT.blob_bytes) is not None
    for _ in range(100):
        code.refresh(memory, 0.0)
        assert not code.has_replaced
    assert len(code) == 40
    code.refresh(memory, time.monotonic() + 60)
    code.refresh(memory, time.monotonic() + 60)
    assert not code.is_behind
    memory.put_bytes(SEGMENTS, b"\xff\xff")
    memory.put_bytes(SEGMENTS + 0x20000 // SEGMENT, b"\xff\xff")
    code.refresh(memory, time.monotonic() + 60)
    assert len(code) == 38


def returning(times):
    """A method that returns in several places."""
    return BODY[:25] + times * b"\x48\x83\xc4\x20\x5d\xc3"


def test_code_that_is_replaced_stays_within_the_bounds_of_rules(monkeypatch):
    monkeypatch.setattr("sonde.unwind.hotspot_code.MAX_ROWS", 60)
    memory = with_code(8)
    code = refreshed(memory)
    assert len(code) == 8  # with 48 rules
    for number in range(4):
        put_blob(memory, CODE + 2 * SEGMENT * number, 2 * SEGMENT, body=returning(12))
    for _ in range(16):
        code.refresh(memory, time.monotonic() + 60)
        assert len(code.rules()) <= 60 + 1 + len(code)
    assert len(code) == code.left_out == 4
    for number in range(4):
        put_blob(memory, CODE + 2 * SEGMENT * number, 2 * SEGMENT)
    code.refresh(memory, time.monotonic() + 60)
    assert len(code) == 8


def test_code_with_too_many_rules_is_not_known(monkeypatch):
    monkeypatch.setattr("sonde.unwind.hotspot_code.MAX_BLOB_ROWS", 30)
    memory = with_code()
    put_blob(memory, CODE, 2 * SEGMENT, body=returning(12))
    start = CODE + 16 + LAYOUT.blob_bytes
    assert refreshed(memory).find(start).rules == [(start, GENERATED)]


@pytest.mark.parametrize(
    ("at", "words", "form"),
    [
        (ARRAY, [1 << 30], "i"),
        (ARRAY, [-1], "i"),
        (ARRAY + 8, [1 << 63], "Q"),
        (HEAP, [CODE, CODE + (1 << 40), CODE, CODE + (1 << 39)], "Q"),
        (HEAP, [CODE, CODE, CODE + 8, CODE], "Q"),
        (HEAP + 64, [63], "i"),
        (HEAP + 64, [-5], "i"),
        (HEAP + 48, [HEAP + (1 << 50)], "Q"),
    ],
)
def test_heaps_that_cannot_be_are_refused(at, words, form):
    memory = with_code()
    memory.put(at, *words, form=form)
    with pytest.raises((OSError, ValueError, struct.error)):
        refreshed(memory)
    assert memory.read < 20


def test_any_content_ends_in_time_and_within_bounds():
    chance = random.Random(20)
    began_s = time.monotonic()
    for _ in range(300):
        memory = with_code(20)
        for _ in range(chance.randrange(1, 200)):
            at = BASE + chance.choice((0, 0x100, 0x300, 0x1000, 0x10000)) + chance.randrange(512)
            if chance.random() < 0.5:
                value = BASE + chance.randrange(1 << 18)
            else:
                value = chance.getrandbits(64)
            memory.put(at & ~7, value)
        code = HotspotCode(LAYOUT)
        try:
            code.refresh(memory, time.monotonic() + 1)
        except (OSError, ValueError, struct.error):
            continue
        rules = code.rules()
        assert len(code) <= MAX_BLOBS
        assert [it[0] for it in rules] == sorted(it[0] for it in rules)
        methods = JavaMethods(LAYOUT)
        for _ in range(20):
            methods.find(memory, BASE + chance.randrange(1 << 18), 1)
    assert time.monotonic() < began_s + 20


def with_method(
    name=b"work", owner=b"com/example/Job$$Lambda$14+0x00000008000c0", source=b"Job.java"
):
    """A method at BASE + 0x8000."""
    memory = Memory()
    method, const, pool, klass = (BASE + it for it in (0x8000, 0x8100, 0x9000, 0xA000))
    memory.put(method + 8, const)
    memory.put(const, pool)
    memory.put(const + 8, 100, 1, 1, form="H")
    memory.put_bytes(const + 16 + 100, b"\x28" + b"\x52" + b"\xff\x14\x64" + b"\0")
    memory.put(pool, klass)
    memory.put(pool + 8, 3, form="i")
    memory.put(pool + 12, 2, form="H")
    for number, text in ((1, name), (2, source), (3, owner)):
        at = BASE + 0xB000 + 0x100 * number
        memory.put(at, len(text), form="H")
        memory.put_bytes(at + 2, text)
        memory.put(pool + 16 + 8 * number if number < 3 else klass, at)
    return memory, method, const + 16


def test_a_method_is_named_with_class_file_and_line():
    memory, at, bytecode = with_method()
    found = JavaMethods(LAYOUT).find(memory, at, 1)
    assert found.name == "com.example.Job$$Lambda$14.work"
    assert found.file == "Job.java"
    assert found.lines == b"\x28\x52\xff\x14\x64"
    assert line_table(found.lines, skips_zero=False) == [(5, 0), (15, 2), (25, 52)]
    assert [found.line_at(bytecode + it) for it in (0, 6, 15, 99, 100, -1)] == [0, 0, 2, 52, 0, 0]


def test_names_and_line_tables_of_a_jvm_are_bounded(monkeypatch):
    memory, at, bytecode = with_method()
    memory.put_bytes(bytecode + 100, 2000 * b"\x09" + b"\0")
    methods = JavaMethods(LAYOUT)
    assert methods.find(memory, at, 1).line_at(bytecode + 99) == 99
    size = methods.find(memory, at, 1).bytes
    assert 2000 < size < 2500
    monkeypatch.setattr("sonde.unwind.java_methods.MAX_ALL_BYTES", 3 * size)
    for number in range(30):
        memory.put(at + 8 * number + 8, bytecode - 16)
        assert methods.find(memory, at + 8 * number, 1).name == "com.example.Job$$Lambda$14.work"
        assert len(methods._known) <= 3
    assert methods.drops == 9
    before = methods.drops
    for read in range(1, 10):  # the same one again and again takes no more
        methods.find(memory, at + 8 * 29, read * 20_000_000_000)
    assert methods.drops == before


def test_frames_of_a_jvm_cost_its_user_time(monkeypatch):
    monkeypatch.setattr("sonde.resolve.naming_budget.FREE_S", 1.0)
    budget = NamingBudget()
    read = []

    def frame(*asked):
        read.append(asked)
        until_s = time.thread_time() + 0.001
        while time.thread_time() < until_s:
            pass
        return UNREAD

    process = SimpleNamespace(party=1000, image=SimpleNamespace(pending=False), frames={})
    unwinding = SimpleNamespace(
        runtime_of=lambda _: SimpleNamespace(frame=frame), python_of=lambda _: None
    )
    resolver = SimpleNamespace(
        budget=budget,
        resolve=lambda *_: [],
        update_mappings=lambda _: None,
        processes=SimpleNamespace(parent=lambda _: None),
    )
    process.key = (1, 1)
    stacks = StackReader(resolver, unwinding)
    words = [INTERPRETED_FRAME | 0x1000 | JAVA_FRAME, 5]
    monkeypatch.setattr("sonde.resolve.naming_budget.TURN_S", 0.005)
    for _ in range(50):
        assert stacks.frames(process, [], words) == [UNREAD]
    assert 1 <= len(read) <= 5
    assert budget.left_out[1000] == 50 - len(read)


def test_names_are_cut_and_printable():
    memory, at, _ = with_method(name=b"a\n\x1b[31m", source=b"/secret/place/Job.java")
    found = JavaMethods(LAYOUT).find(memory, at, 1)
    assert found.name.endswith("a??[31m")
    assert found.file == "Job.java"


def test_a_method_that_is_none_has_no_name():
    memory, at, _ = with_method()
    memory.put(at + 8, 1 << 62)
    assert JavaMethods(LAYOUT).find(memory, at, 1) is None


def test_numbers_of_newer_line_tables():
    assert line_table(b"\xff\x15\x65\0", skips_zero=True) == [(10, 50)]
    assert line_table(b"\xff" * 4000, skips_zero=True)[1:] == []


def test_tables_that_cannot_be_are_refused():
    chance = random.Random(7)
    for _ in range(100):
        memory = Memory()
        exports = {name: BASE + 8 * i for i, name in enumerate(EXPORTS)}
        for at in exports.values():
            memory.put(at, chance.choice((0, 8, 48, 1 << 62, BASE + chance.randrange(1 << 17))))
        memory.put_bytes(BASE + 0x1000, chance.randbytes(1 << 16))
        with pytest.raises((UnsupportedJvmError, OSError)):
            read_layout(memory, exports)
    with pytest.raises(UnsupportedJvmError):
        read_layout(Memory(), {})
