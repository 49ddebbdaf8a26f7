# SPDX-License-Identifier: Apache-2.0
"""What is mapped where: parsing, looking up, and new mappings in place of old ones."""

from __future__ import annotations

import os
import random
import time

import pytest

from sonde import procfs
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.mappings import MAX_MAPPINGS, AddressSpace, Mapping, parse_maps

MAPS = rb"""55d0c0a00000-55d0c0a01000 r--p 00000000 fe:01 1234             /opt/a b/tool
55d0c0a01000-55d0c0a02000 r-xp 00001000 fe:01 1234             /opt/a b/tool
7f0000000000-7f0000001000 rwxp 00000000 00:00 0
7f0000002000-7f0000003000 r-xp 00005000 00:1b 77             /usr/lib/libx.so.1 (deleted)
7f0000004000-7f0000005000 r-xs 00000000 00:01 9              /memfd:run\012ner (deleted)
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0              [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""


def test_only_executable_mappings_are_kept_unless_all_are_asked_for() -> None:
    executable = list(parse_maps(MAPS))
    assert [it.start for it in executable] == [
        *(0x55D0C0A01000, 0x7F0000000000, 0x7F0000002000, 0x7F0000004000),
        *(0x7FFD00000000, 0xFFFFFFFFFF600000),
    ]
    assert len(list(parse_maps(MAPS, executable_only=False))) == 7


def test_a_mapping_has_its_file_and_what_a_frame_may_show_of_it() -> None:
    tool, jit, gone, memory, vdso, vsyscall = parse_maps(MAPS)
    assert (tool.path, tool.name, tool.file, tool.offset) == (
        *("/opt/a b/tool", "tool"),
        *((0xFE, 1, 1234), 0x1000),
    )
    assert (gone.name, gone.deleted, tool.deleted) == ("libx.so.1", True, False)
    assert (jit.name, jit.has_file) == ("[anon]", False)
    assert (memory.name, memory.has_file) == ("[memfd:run\nner]", True)
    assert (vdso.name, vsyscall.name) == ("[vdso]", "[vsyscall]")


def test_every_address_of_a_real_process_is_found_in_its_mapping() -> None:
    text = procfs.read_maps(os.getpid())
    assert text
    space = AddressSpace(parse_maps(text))
    for mapping in space.mappings:
        assert space.find(mapping.start) is mapping
        assert space.find(mapping.end - 1) is mapping
    assert space.find(0) is None
    assert space.find(-1) is None
    assert space.find(1 << 64) is None


def test_a_new_mapping_takes_the_place_of_what_lay_there() -> None:
    space = AddressSpace([Mapping(0x1000, 0x5000, 0x100000, path="/old")])
    assert space.add(Mapping(0x2000, 0x3000, path="/new"))
    seen = [(it.start, it.end, it.path, it.offset) for it in space.mappings]
    assert seen == [
        (0x1000, 0x2000, "/old", 0x100000),
        (0x2000, 0x3000, "/new", 0),
        (0x3000, 0x5000, "/old", 0x102000),
    ]
    assert space.add(Mapping(0x0, 0x10000, path="/all"))
    assert [it.path for it in space.mappings] == ["/all"]
    assert not space.add(Mapping(0x10000, 0x11000, path="/beside"))


def test_mappings_stay_sorted_and_apart_whatever_is_added() -> None:
    chance = random.Random(7)
    space, truth = AddressSpace(), {}
    for n in range(500):
        start = chance.randrange(200)
        end = start + chance.randrange(1, 40)
        space.add(Mapping(start, end, offset=start, path=f"/{n}"))
        truth.update(dict.fromkeys(range(start, end), f"/{n}"))
    for address in range(260):
        found = space.find(address)
        assert (found.path if found else None) == truth.get(address)
        if found:
            assert found.offset == found.start  # offsets moved with the pieces
    starts = [it.start for it in space.mappings]
    assert starts == sorted(starts)


def test_the_number_of_mappings_is_bounded() -> None:
    space = AddressSpace(Mapping(n * 16, n * 16 + 8) for n in range(MAX_MAPPINGS + 10))
    assert len(space) == MAX_MAPPINGS
    assert space.left_out == 10


@pytest.mark.parametrize(
    "text",
    [b"", b"\n\n\n", b"zzz-1 r-xp 0 0:0 0 x", b"1-2 r-xp", b"\xff" * 1000, MAPS[:100], MAPS[37:]],
)
def test_text_that_is_no_list_of_mappings_yields_what_can_be_read(text: bytes) -> None:
    for mapping in parse_maps(text):
        assert mapping.start < mapping.end


def test_parsing_a_thousand_mappings_takes_milliseconds() -> None:
    line = b"7f%010x-7f%010x r-xp 00001000 fe:01 %d    /usr/lib/lib%d.so\n"
    text = b"".join(line % (n << 16, (n << 16) + 4096, n, n) for n in range(1000))
    best = min(_seconds(text) for _ in range(5))
    assert best < 0.03


def _seconds(text: bytes) -> float:
    start = time.perf_counter()
    assert len(AddressSpace(parse_maps(text))) == 1000
    return time.perf_counter() - start


def test_recent_keeps_what_is_used_and_drops_the_rest() -> None:
    recent: LruCache[int, str] = LruCache(100)
    for n in range(1000):
        recent.put(n, str(n))
        assert recent.get(0) == "0"  # asked for all along
        assert len(recent) <= 100
    assert recent.get(999) == "999"
    assert recent.get(500) is None
    assert recent.evicted >= 850
