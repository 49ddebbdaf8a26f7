# SPDX-License-Identifier: Apache-2.0
"""Files that processes map, opened as what they are, and the libraries of the linker's cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from sonde import system_libraries
from sonde.collect.mapped_files import identity, installed, mapped_by, open_mapped


def test_opens_the_file_that_is_mapped_after_its_path_was_taken_by_another(tmp_path):
    path = tmp_path / "sleep"
    shutil.copy("/bin/sleep", path)
    process = subprocess.Popen([str(path), "30"])
    try:
        while not (files := [f for f in mapped_by(process.pid) if f.path == str(path)]):
            pass
        content = path.read_bytes()
        path.unlink()
        path.write_text("another")
        [file] = [f for f in mapped_by(process.pid) if f.key == files[0].key]
        assert file.name == "sleep"
        fd = open_mapped(file)
        assert os.read(fd, len(content)) == content
        os.close(fd)
    finally:
        process.kill()
        process.wait()
    with pytest.raises(FileNotFoundError):
        open_mapped(files[0])


def test_identity_is_what_mappings_say(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    fd = os.open(path, os.O_RDONLY)
    with mmap.mmap(fd, 0, mmap.MAP_PRIVATE) as view:
        anchor = ctypes.c_char.from_buffer(view)
        start = f"{ctypes.addressof(anchor):x}-"
        del anchor
        [line] = [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.startswith(start)
        ]
    device, inode = line.split()[3:5]
    assert identity(fd) == (*(int(part, 16) for part in device.split(":")), int(inode))
    os.close(fd)
    assert identity(os.open("/dev/null", os.O_RDONLY)) is None


def test_finds_executable_mappings_only():
    files = list(mapped_by(os.getpid()))
    assert any(Path(file.path).name.startswith("libc.so") for file in files)
    assert all(file.start < file.end and file.key[2] for file in files)
    assert list(mapped_by(2**22 + 1)) == []


def write_cache(path, entries, prefix=b""):
    """An ld.so.cache of (name, path) pairs."""
    strings, rows = b"", b""
    at = 48 + 24 * len(entries)
    for name, target in entries:
        for text in (name, target):
            strings += text.encode() + b"\0"
        key = at + len(strings) - len(target) - 1 - len(name) - 1
        rows += struct.pack("<iIIIQ", 3, key, key + len(name) + 1, 0, 0)
    header = b"glibc-ld.so.cache1.1" + struct.pack("<II", len(entries), len(strings)) + b"\0" * 20
    path.write_bytes(prefix + header + rows + strings)


def test_reads_the_linkers_cache(tmp_path, monkeypatch):
    real = tmp_path / "libOpenCL.so.1.0.0"
    real.touch()
    (tmp_path / "libOpenCL.so.1").symlink_to(real)
    cache = tmp_path / "ld.so.cache"
    monkeypatch.setattr(system_libraries, "CACHE", cache)
    entries = [
        ("libOpenCL.so.1", str(tmp_path / "libOpenCL.so.1")),
        ("libOpenCL.so", str(tmp_path / "libOpenCL.so.1")),
        ("libc.so.6", "/lib/libc.so.6"),
    ]
    write_cache(cache, entries, prefix=b"ld.so-1.7.0\0")
    assert list(installed(lambda name: name.startswith("libOpenCL"))) == [str(real)]


@pytest.mark.parametrize("content", [b"", b"glibc-ld.so.cache1.1", b"\xff" * 500])
def test_a_broken_cache_is_an_empty_one(tmp_path, monkeypatch, content):
    cache = tmp_path / "ld.so.cache"
    cache.write_bytes(content)
    monkeypatch.setattr(system_libraries, "CACHE", cache)
    assert list(installed(lambda name: True)) == []
    cache.unlink()
    assert list(installed(lambda name: True)) == []


def test_a_cache_cut_short_gives_what_is_whole(tmp_path, monkeypatch):
    cache = tmp_path / "ld.so.cache"
    monkeypatch.setattr(system_libraries, "CACHE", cache)
    write_cache(cache, [(f"lib{i}.so", f"/lib/lib{i}.so") for i in range(50)])
    whole = cache.read_bytes()
    for length in (30, 60, 500, 1300, len(whole) - 5):
        cache.write_bytes(whole[:length])
        list(installed(lambda name: True))


def test_the_real_cache_names_libraries_that_exist():
    assert all(Path(path).exists() for path in installed(lambda name: name.startswith("libc.so")))
