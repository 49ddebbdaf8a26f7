# SPDX-License-Identifier: Apache-2.0
"""Texts that profiled processes choose, and all that is made of them, have bounds in bytes of the
memory that they take."""

from __future__ import annotations

import re
import struct
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from sonde.agent import dictionary
from sonde.agent.dictionary import Dictionary
from sonde.agent.stacks import NOT_WALKED
from sonde.model.code import Frame, KnownFrame
from sonde.procfs.long_texts import NAME_BYTES, PATH_BYTES, short_end, short_name
from sonde.procfs.party_memory import PartyMemory
from sonde.resolve import frame_fields, processes
from sonde.resolve.frame_fields import frame_bytes, frame_id
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.processes import ProcessTable
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind import engines, php_layout
from sonde.unwind.engines import Engine
from sonde.unwind.php_names import PhpNames

WIDE = ("é", "λ", "\U0001f600")
EMPTY = sys.getsizeof("")
HEAD = 80
"""Bytes of a text beside its characters, at most."""


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("length", [100, 255, 600, 1_100, 5_000])
def test_a_text_takes_no_more_memory_whatever_its_characters_are(wide, length):
    text = wide + "x" * (length - 1)
    assert sys.getsizeof(short_name(text)) <= NAME_BYTES + HEAD
    assert sys.getsizeof(short_end(text)) <= PATH_BYTES + HEAD


def test_a_name_keeps_both_ends_and_a_path_its_end():
    name = f"ns::Kernel<{'float, ' * 400}int>::operator()(unsigned long)"
    short = short_name(name)
    assert short.startswith("ns::Kernel<float, ")
    assert short.endswith("int>::operator()(unsigned long)")
    assert short.count("…") == 1
    path = f"vendor/{'folder/' * 200}Job.php"
    assert short_end(path).startswith("…") and short_end(path).endswith("folder/Job.php")
    for whole in ("f", "x" * NAME_BYTES, "λ" * (NAME_BYTES // 2)):
        assert short_name(whole) is whole
    assert short_end("x" * PATH_BYTES) == "x" * PATH_BYTES


def test_a_cache_is_bounded_by_the_bytes_of_its_values():
    cache = LruCache(10_000, 100_000, len)
    for number in range(1_000):
        cache.put(number, "x" * (number % 2_000))
        assert cache.get(number) is not None
        assert cache.bytes <= 100_000 + 2_000
        if number > 50:
            cache.get(number - 40)
    assert cache.bytes == sum(map(len, (*cache._young.values(), *cache._old.values())))
    assert cache.evicted > 0


class Kept:
    def __init__(self, memory, party):
        self.party, self.held_bytes, self.memory = party, 0, memory
        memory.add(self)

    def grow(self, size):
        self.held_bytes += size
        self.memory.grew(size)

    def empty(self):
        self.held_bytes = 0


def test_the_party_that_holds_most_gives_up_its_largest_cache():
    memory = PartyMemory(1_000)
    honest, small, large = Kept(memory, 1), Kept(memory, 2), Kept(memory, 2)
    honest.grow(400)
    small.grow(200)
    large.grow(300)
    assert memory.emptied == 0
    large.grow(200)
    assert (honest.held_bytes, small.held_bytes, large.held_bytes) == (400, 200, 0)
    for _ in range(1_000):
        small.grow(100)
        large.grow(70)
        assert memory.bytes <= 1_000
    assert honest.held_bytes == 400


def test_what_is_gone_is_not_counted():
    memory = PartyMemory(1_000)
    kept = Kept(memory, 1)
    kept.grow(500)
    for _ in range(100):
        Kept(memory, 2).grow(90)
    assert kept.held_bytes == 500


# ---- an engine whose process has endless functions with long paths


class PhpMemory:
    """Function `i` is at 2^20 * i, in a file with a name of 4,000 characters, one of them wide."""

    def __init__(self, layout):
        self.layout = layout

    def read_at(self, size, at):
        number, offset = at >> 20, at & 0xFFFFF
        raw = bytearray(0x4000)
        raw[php_layout.TYPE] = php_layout.USER_FUNCTION
        struct.pack_into("<Q", raw, self.layout.filename, (number << 20) + 0x1000)
        struct.pack_into("<II", raw, self.layout.first_line, 1, 9)
        text = f"/vendor/\U0001f600{'x' * 4_000}{number:07}.php".encode()
        struct.pack_into("<Q", raw, 0x1000 + php_layout.STRING_LENGTH, len(text))
        at_text = 0x1000 + php_layout.STRING_TEXT
        raw[at_text : at_text + len(text)] = text
        return bytes(raw[offset : offset + size])

    def close(self):
        pass


@pytest.fixture
def php(monkeypatch):
    """Makes engines that have such a process."""
    monkeypatch.setattr(engines, "_root", lambda *_: engines.Root(engines.RootKind.AT_ADDRESS, 1))
    layout = php_layout.php_layout("20220829,NTS")
    monkeypatch.setattr(engines, "ProcessMemory", lambda *_: PhpMemory(layout))

    def make(memory, party):
        process = SimpleNamespace(pid=1, key=(1, 1), party=party)
        loop = (0x1000, 0x2000, 0x500, 0x600)
        found = engines.FoundEngine("php", "20220829,NTS", 1, 0x4000, loop, (0, 0))
        engine = Engine(process, found, 0, False, None, memory)
        assert isinstance(engine._names, PhpNames)
        return engine

    return make


def test_frames_of_php_show_the_end_of_a_path(php):
    engine = php(None, 1000)
    frame = engine.frame(5 << 20, 0x5000, engine.frame_cache()).frame
    assert frame.file.endswith("x0000005.php")
    assert sys.getsizeof(frame.file) <= PATH_BYTES + HEAD


def test_engines_of_a_party_share_one_bound(php):
    memory = PartyMemory(4 << 20)
    honest = php(memory, 1)
    honest.frame(1 << 20, 0x5000, honest.frame_cache())
    many = [php(memory, 1000) for _ in range(8)]
    for engine in many:
        for number in range(1, 1_001):
            engine.frame(number << 20, 0x5000, engine.frame_cache())
            assert memory.bytes <= 4 << 20
    assert memory.emptied > 0
    assert honest.held_bytes > 0


# ---- the dictionary


@pytest.fixture
def kept(monkeypatch):
    """A dictionary into which stacks are put one by one."""
    monkeypatch.setattr(dictionary, "MAX_BYTES", 1 << 20)
    one = Dictionary(SimpleNamespace(max_stacks=1_000), None, None)
    one._resolver = None
    return one


def stack(*names):
    frames = (Frame("jit", name, "[php]") for name in names)
    return tuple(KnownFrame(frame_id(it), it) for it in frames)


def keep(one, stack_id, frames, party=1, is_used=True):
    if is_used:
        one._used_stacks.add(stack_id)
    one._keep(SimpleNamespace(party=party), stack_id, frames, NOT_WALKED)


def test_frames_of_runtimes_count_with_their_texts(kept):
    for number in range(1, 5_000):
        keep(kept, number, stack(f"{number:0600}"), is_used=False)
        assert kept.bytes <= (1 << 20) + 2_000
    held = {it for known in kept._stacks.values() for it in known.frames}
    assert kept._held.bytes == sum(map(frame_bytes, held))
    assert 4_999 in kept._stacks and 1 not in kept._stacks


def test_a_frame_of_many_stacks_counts_once_and_as_long_as_one_of_them_is_there(kept):
    for number in range(1, 101):
        keep(kept, number, stack("common", str(number)))
    assert len(kept._held) == 101
    first, second = (kept.frames_of(it)[0] for it in (1, 2))
    assert first is second
    for number in range(1, 100):
        kept._forget(number)
    assert len(kept._held) == 2
    kept._forget(100)
    assert kept.bytes == 0


def test_a_party_with_endless_frames_in_one_chunk_takes_no_more_than_its_part(kept):
    for number in range(1, 51):
        keep(kept, number, stack(f"honest {number}"), party=1)
    for number in range(1_000, 6_000):
        keep(kept, number, stack(f"{number:0600}"), party=2)
        assert kept.bytes <= (1 << 20) + 2_000
    assert kept.left_out > 2_000
    for number in range(51, 101):
        keep(kept, number, stack(f"honest {number}"), party=1)
    assert all(kept.frames_of(it) for it in range(1, 101))
    kept._forget_old()
    keep(kept, 9_999, stack("x"), party=2)
    assert kept.frames_of(9_999)


def test_a_stack_that_is_named_again_counts_once(kept):
    for name in ("a" * 100, "b" * 200, "c"):
        keep(kept, 7, stack(name))
    assert kept._held.bytes == frame_bytes(stack("c")[0])
    assert kept.bytes == kept._held.bytes + kept._stacks[7].bytes


# ---- what frames show of a mapping's path


def test_paths_that_labels_are_found_by_count(monkeypatch):
    path = "/" + 4_000 * "\U0001f600"
    for number in range(frame_fields.MAX_LABELS):
        mapping = SimpleNamespace(name=f"{number}", path=f"{path}{number}")
        assert frame_fields.label_of(mapping).origin == "program"
    assert frame_fields._labels.bytes <= frame_fields.MAX_LABEL_BYTES + 40_000
    texts = [*frame_fields._labels._young, *frame_fields._labels._old]
    assert sum(sys.getsizeof(path) for _, path in texts) <= frame_fields.MAX_LABEL_BYTES + 40_000


# ---- names of threads


def test_names_of_threads_are_bounded_for_all_processes_of_a_party(monkeypatch):
    monkeypatch.setattr(processes, "MAX_THREAD_NAMES", 1_000)
    table = ProcessTable()

    def named(pid, party, count):
        process = table._live[pid] = TrackedProcess(pid, 1, 1, "x", ProcessImage(pid, "exec"))
        process._party = party
        for tid in range(count):
            process.set_thread_name(tid + 10_000, f"worker {tid}")
        return process

    honest = named(1, 1, 300)
    hostile = [named(pid, 2, 200) for pid in range(2, 12)]
    table._bound_thread_names()
    left = [len(it.threads or ()) for it in hostile]
    assert len(honest.threads or ()) == 300
    assert 0 < sum(left) <= 700
    assert table.counters.threads_evicted == 2_000 - sum(left)


# ---- what the documentation has of it


def test_bounds_in_the_documentation_are_those_of_the_code():
    text = (Path(__file__).parents[2] / "docs/design/overhead.md").read_text()
    by_bytes = re.findall(r"^\| [^|]* \| (\d+) \| `([a-z_.]+)\.([A-Z_]+)` \|$", text, re.MULTILINE)
    by_number = re.findall(r"([\d,]+) (?:each )?\(`(resolve[a-z_.]+)\.([A-Z_]+)`", text)
    assert len(by_bytes) == 17
    assert len(by_number) == 4
    for mib, module, name in by_bytes:
        assert getattr(import_module(f"sonde.{module}"), name) == int(mib) << 20, name
    for count, module, name in by_number:
        assert getattr(import_module(f"sonde.{module}"), name) == int(count.replace(",", "")), name
