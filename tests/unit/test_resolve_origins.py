# SPDX-License-Identifier: Apache-2.0
"""Whose code a file is that has several paths: a process names the folders that it sees itself."""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

from sonde import procfs
from sonde.model.code import CodeOrigin
from sonde.resolve import Resolver


def libc():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if "/libc.so.6" in line or "/ld-musl-" in line)


def test_a_path_of_a_shared_file_is_of_its_mapping_alone(tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    first = packages / "libshared.so"
    shutil.copy(libc(), first)
    other = tmp_path / "libshared.so"
    other.hardlink_to(first)
    maps, prot = [], mmap.PROT_READ | mmap.PROT_EXEC
    for path in (first, other):
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, prot))
    lines = Path("/proc/self/maps").read_text().splitlines()
    starts = {line.split()[-1]: int(line.split("-")[0], 16) for line in lines if " r-xp " in line}
    resolver = Resolver()
    try:
        resolver.processes.scan()
        process = resolver.processes.find(os.getpid(), procfs.read_stat(os.getpid()).start_ns)
        found = [
            resolver.resolve(process, (), [starts[str(path)] + 0x30000])[0].frame
            for path in (first, other, first)
        ]
        assert {frame.binary for frame in found} == {"libshared.so"}
        assert resolver.usage()["files_open"] == 1
        of = [CodeOrigin.PACKAGE, CodeOrigin.PROGRAM, CodeOrigin.PACKAGE]
        assert [frame.origin for frame in found] == of
    finally:
        resolver.close()
        for it in maps:
            it.close()
