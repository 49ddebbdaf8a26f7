# SPDX-License-Identifier: Apache-2.0
"""Executable segments of real and of damaged files, and the load bias of their mappings."""

from __future__ import annotations

import ctypes
import random
import re
import subprocess
import sys
from pathlib import Path

from sonde._native import ExecutableSegment, executable_segments
from sonde.resolve.mappings import Mapping, parse_maps
from sonde.unwind.load_bias import load_bias


def segments_of(path: Path | str) -> list[ExecutableSegment]:
    with Path(path).open("rb") as file:
        return executable_segments(file.fileno())


def test_segments_are_those_that_readelf_shows() -> None:
    shown = subprocess.run(
        ["readelf", "-lW", sys.executable], capture_output=True, text=True, check=True
    ).stdout
    loads = re.findall(r"LOAD +(0x\w+) (0x\w+) 0x\w+ 0x\w+ (0x\w+) R[W ]E", shown)

    assert loads
    assert segments_of(sys.executable) == [
        ExecutableSegment(*(int(number, 16) for number in load)) for load in loads
    ]


def test_the_bias_leads_from_a_linked_address_to_the_function_in_memory() -> None:
    libc = ctypes.CDLL("libc.so.6")
    address = ctypes.cast(libc.malloc, ctypes.c_void_p).value or 0
    maps = Path("/proc/self/maps").read_bytes()
    mapping = next(it for it in parse_maps(maps) if it.start <= address < it.end)
    bias = load_bias(mapping, segments_of(mapping.path))
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", mapping.path], capture_output=True, text=True, check=True
    ).stdout
    linked = re.search(r"^(\w+) \w malloc(@|$)", shown, re.MULTILINE)

    assert linked is not None
    assert bias == address - int(linked[1], 16)


def test_a_mapping_without_a_segment_has_no_bias() -> None:
    segment = ExecutableSegment(0x1000, 0x401000, 0x500)

    assert load_bias(Mapping(0x10000, 0x11000, 0x1000), [segment]) == 0x10000 - 0x401000
    assert load_bias(Mapping(0x10000, 0x11000, 0x2000), [segment]) is None
    assert load_bias(Mapping(0x10000, 0x11000, 0x1000), []) is None


def test_what_is_no_elf_file_has_none_and_damaged_headers_do_no_harm(tmp_path: Path) -> None:
    whole = Path(sys.executable).resolve().read_bytes()[:4096]
    path = tmp_path / "file"
    chance = random.Random(1)
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(8):
            damaged[chance.randrange(64 + 56 * 12)] = chance.randrange(256)
        path.write_bytes(damaged[: chance.randrange(len(damaged))])
        assert len(segments_of(path)) <= 256
    path.write_bytes(b"#!/bin/sh\n")
    assert segments_of(path) == []
    assert executable_segments(-1) == []
    with Path("/dev/null").open("rb") as device:
        assert executable_segments(device.fileno()) == []
