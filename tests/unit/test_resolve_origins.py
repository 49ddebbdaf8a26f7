# SPDX-License-Identifier: Apache-2.0
"""What frames show of a file that has several paths: that of the process whose frames they are."""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

import pytest

from sonde import procfs
from sonde.model.code import CodeOrigin
from sonde.resolve import Resolver
from sonde.resolve.mappings import AddressSpace, parse_maps


def libc():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if "/libc.so.6" in line or "/ld-musl-" in line)


@pytest.fixture
def frames_of():
    """What frames show of files that this process maps, in order: all are one file."""
    maps, prot = [], mmap.PROT_READ | mmap.PROT_EXEC
    resolver = Resolver()

    def frames(*paths):
        for path in dict.fromkeys(paths):
            with path.open("rb") as file:
                maps.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, prot))
        space = AddressSpace(parse_maps(Path("/proc/self/maps").read_bytes()))
        starts = {it.path: it.start for it in space.mappings}
        resolver.processes.scan()
        process = resolver.processes.find(os.getpid(), procfs.read_stat(os.getpid()).start_ns)
        return [
            resolver.resolve(process, (), [starts[os.fsdecode(path)] + 0x30000])[0].frame
            for path in paths
        ]

    yield frames
    assert resolver.usage()["files_open"] <= 1
    resolver.close()
    for it in maps:
        it.close()


def test_a_path_of_a_shared_file_is_of_its_mapping_alone(tmp_path, frames_of):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    first = packages / "libshared.so"
    shutil.copy(libc(), first)
    other = tmp_path / "libshared.so"
    other.hardlink_to(first)
    found = frames_of(first, other, first)

    assert {frame.binary for frame in found} == {"libshared.so"}
    of = [CodeOrigin.PACKAGE, CodeOrigin.PROGRAM, CodeOrigin.PACKAGE]
    assert [frame.origin for frame in found] == of


def test_the_name_of_a_shared_file_is_of_its_mapping_alone(tmp_path, frames_of):
    first, other = tmp_path / "libcuda.so.1", tmp_path / "libshared.so"
    shutil.copy(libc(), first)
    other.hardlink_to(first)
    found = frames_of(first, other, first)

    assert [frame.binary for frame in found] == [first.name, other.name, first.name]
    assert len({frame.function for frame in found}) == 1


def test_names_of_files_without_code_are_printable_and_short(tmp_path, frames_of):
    path = tmp_path / ("\x1b]0;title\x07\u202e" + 200 * "x")
    path.write_bytes(bytes(0x40000))
    (frame,) = frames_of(path)

    assert frame.binary.isprintable()
    assert frame.binary.startswith("\\x1b]0;title\\x07")
    assert len(frame.binary) <= 128
