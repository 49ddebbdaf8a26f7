# SPDX-License-Identifier: Apache-2.0
"""The memory that the build of an unwind table may take, where control groups limit it."""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path

import pytest
from test_hostile_elf import CODE_AT, Image, frames

from sonde import procfs
from sonde.unwind.build_memory import LEAST_BYTES, MOST_BYTES, SHARE, BuildMemory
from sonde.unwind.table_cache import TableCache

MB = 1 << 20
SHF_COMPRESSED = 0x800


def group(root: Path, version: int, limit: str, used: int, files: int) -> Path:
    """A control group of this process."""
    folder = root / "g"
    folder.mkdir(exist_ok=True)
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    for name, word in zip(names, (limit, used), strict=True):
        (folder / f"memory.{name}").write_text(f"{word}\n")
    what = "total_inactive_file" if version == 1 else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 1\n{what} {files}\n")
    return folder


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    line = b"4:memory:/g\n" if request.param == 1 else b"0::/g\n"
    own, read = f"/proc/{os.getpid()}/cgroup", procfs.read_file
    monkeypatch.setattr(
        "sonde.procfs.process_groups.read_file",
        lambda name, *most: line if name == own else read(name, *most),
    )
    return int(request.param)


@pytest.mark.parametrize(
    ("limit", "used", "files", "share"),
    [
        (str(512 * MB), 192 * MB, 0, 320 * MB // SHARE),
        # Pages of files are given back where memory is short.
        (str(512 * MB), 500 * MB, 308 * MB, 320 * MB // SHARE),
        (str(512 * MB), 600 * MB, 0, LEAST_BYTES),
        ("none", 192 * MB, 0, MOST_BYTES),
    ],
)
def test_a_build_gets_a_share_of_what_control_groups_leave(
    tmp_path: Path, version: int, limit: str, used: int, files: int, share: int
) -> None:
    no_limit = {1: str((1 << 63) - 4096), 2: "max"}[version]
    group(tmp_path, version, no_limit if limit == "none" else limit, used, files)

    mounts = {"memory" if version == 1 else "v2": str(tmp_path)}

    assert BuildMemory(mounts).bytes() == share


def unpacks_to(size: int, path: Path) -> Path:
    """A small file whose `.eh_frame` is compressed."""
    image = Image()
    code = CODE_AT + image.put(b"\xc3" * 64)
    raw = frames(b"", 64, code)
    raw += struct.pack("<I", 0) + bytes(size - len(raw) - 4)
    packed = struct.pack("<IIQQ", 1, 0, len(raw), 8) + zlib.compress(raw)
    image.add(1, packed)
    head = bytearray(image.sections[-1])
    struct.pack_into("<Q", head, 8, struct.unpack_from("<Q", head, 8)[0] | SHF_COMPRESSED)
    image.sections[-1] = bytes(head)
    return image.write(path, names=b"\0.eh_frame\0")


def request(cache: TableCache, key: str, path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    cache.request(key, fd)
    os.close(fd)
    until_s = time.monotonic() + 30
    while key not in cache.poll():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_file_that_needs_more_memory_is_refused_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb, plain = unpacks_to(96 * MB, tmp_path / "bomb"), unpacks_to(MB, tmp_path / "plain")
    left = [MOST_BYTES]
    monkeypatch.setattr(BuildMemory, "bytes", lambda _: left[0])
    (tmp_path / "cache").mkdir()
    cache = TableCache(tmp_path / "cache")
    try:
        request(cache, "large@1", bomb)
        assert not cache.has_failed("large@1")
        left[0] = LEAST_BYTES
        for table in (tmp_path / "cache").glob("*.unw"):
            table.unlink()

        request(cache, "small@2", bomb)
        request(cache, "plain@3", plain)

        assert cache.has_failed("small@2")
        assert not cache.has_failed("plain@3")
        assert (cache.built, cache.failed) == (2, 1)
    finally:
        cache.close()
