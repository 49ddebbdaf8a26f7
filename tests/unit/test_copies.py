# SPDX-License-Identifier: Apache-2.0
"""Copies in memory of mapped files: what they take, and whose names they give."""

from __future__ import annotations

import os
import tempfile

import pytest

from sonde import procfs
from sonde.procfs import opening
from sonde.resolve import copies
from sonde.resolve.binaries import IDLE_NS, Binaries
from sonde.resolve.binary import Binary
from sonde.resolve.copies import Copies
from sonde.resolve.counters import Counters
from sonde.resolve.mappings import Mapping
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind.code_files import key_of_file

KIB = 1 << 10
PIECE = opening.COPY_PIECE
KEY = (0, 28, 2)
IDENTITY = (28, 2, 4096, 1, 1)
"""Of a file system that a user mounts: he chooses all of it."""


def process_of(party, pid):
    process = TrackedProcess(pid, 1, 0, "x", ProcessImage(pid, "exec"))
    process._party = party
    return process


def mapping_of(path="/lib/libx.so"):
    return Mapping(0x7F00_0000_0000, 0x7F00_0000_1000, 0, KEY, path)


def memory(content):
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.pwrite(fd, content, 0)
    return fd


@pytest.fixture
def contents(monkeypatch):
    """What each process's file holds, by pid: all have the same numbers."""
    files: dict[int, bytes] = {}

    def open_stable(path, *, copy_bytes=0, **_):
        content = files.get(int(path.split("/")[2]))
        if content is None or len(content) > copy_bytes:
            return None
        return procfs.Opened(memory(content), IDENTITY, True, True, KEY)

    monkeypatch.setattr(procfs, "open_stable", open_stable)
    return files


@pytest.fixture
def binaries():
    binaries = Binaries(Counters())
    yield binaries
    binaries.close()


def content_of(binary):
    return os.pread(binary.fd, 1 << 16, 0)


def test_a_copy_never_stands_for_the_file_of_another_user(binaries, contents):
    """Its device is gone and the number is another mount's, while the copy is still held."""
    contents[10], contents[20] = b"\x7fELF forged", b"\x7fELF theirs"
    forged = binaries.of(process_of(1001, 10), mapping_of())
    theirs = binaries.of(process_of(1002, 20), mapping_of())
    assert content_of(forged) == b"\x7fELF forged"
    assert content_of(theirs) == b"\x7fELF theirs"
    assert forged.key is theirs.key is None
    assert forged.index != theirs.index


def test_a_table_of_a_copy_is_never_taken_by_the_numbers_of_its_file(binaries, contents):
    contents[10], contents[20] = b"\x7fELF forged", b"\x7fELF theirs"
    one = binaries.of(process_of(1001, 10), mapping_of())
    other = binaries.of(process_of(1002, 20), mapping_of())
    assert one.identity == other.identity
    assert key_of_file(one) != key_of_file(other)
    device = int(key_of_file(one).partition("@")[2].partition("-")[0], 16)
    assert os.major(device) == 0  # what such a device's files have is not kept for the next run


def test_processes_of_one_party_share_a_copy_while_the_first_of_them_lives(binaries, contents):
    contents[10] = contents[11] = b"\x7fELF one"
    first = process_of(1001, 10)
    one = binaries.of(first, mapping_of())
    assert binaries.of(process_of(1001, 11), mapping_of()) is one
    assert binaries.of(process_of(1001, 11), mapping_of("/lib/other.so")) is not one
    first.dead_ns = 1
    assert binaries.of(process_of(1001, 11), mapping_of()) is not one


def test_a_copy_that_is_not_used_is_dropped_and_made_again(binaries, contents):
    contents[10] = b"\x7fELF one"
    process, mapping = process_of(1001, 10), mapping_of()
    one = binaries.of(process, mapping)
    assert binaries.copied_bytes == 4 * KIB
    binaries.expire(1 << 62)
    assert IDLE_NS < 1 << 62
    assert (binaries.copied_bytes, binaries.held_open) == (0, 0)
    before = one.index
    assert binaries.open(one, process, mapping)
    assert (one.index, content_of(one)) == (before, b"\x7fELF one")


def copy(fd_bytes):
    binary = Binary()
    binary.fd = memory(b"x" * fd_bytes)
    return binary


def test_copies_take_no_more_than_all_of_them_may():
    """The party's own go first, then those of who holds most."""
    held = Copies(1 << 20)
    mine = [copy(256 * KIB), copy(128 * KIB), copy(128 * KIB), copy(128 * KIB)]
    assert held.add(mine[0], 1) == []
    assert held.add(mine[1], 1) == [mine[0]]
    assert held.add(mine[2], 1) == []
    held.use(mine[1])
    assert held.add(mine[3], 1) == [mine[2]]
    small = copy(64 * KIB)
    assert held.add(small, 2) == []
    assert held.add(copy(256 * KIB), 3) == []
    assert held.held_bytes == 576 * KIB
    dropped = held.add(copy(256 * KIB), 4)
    assert small not in dropped
    assert held.held_bytes <= 768 * KIB


def test_a_party_cannot_have_one_copy_after_the_other_made():
    held = Copies(1 << 20)
    assert held.room_for(1) == 256 * KIB
    for _ in range(copies.BURST):
        one = copy(256 * KIB)
        held.add(one, 1)
        held.drop(one)
    assert held.room_for(1) < 64 * KIB
    assert held.room_for(2) == 256 * KIB


def test_what_is_zero_in_a_file_takes_no_memory_in_its_copy():
    with tempfile.TemporaryFile() as file:
        file.truncate(63 << 20)
        os.pwrite(file.fileno(), b"\x7fELF", 0)
        os.pwrite(file.fileno(), b"end", (63 << 20) - 3)
        os.pwrite(file.fileno(), bytes(4 * PIECE), 1 << 20)
        made = opening.copy_of(file.fileno(), 2 * PIECE)
        with os.fdopen(made, "rb") as copied:
            status = os.fstat(made)
            assert (status.st_size, status.st_blocks * 512 <= 2 * PIECE) == (63 << 20, True)
            assert copied.read(4) == b"\x7fELF"
            assert os.pread(made, 3, (63 << 20) - 3) == b"end"
        with pytest.raises(OSError, match="no room"):
            opening.copy_of(file.fileno(), PIECE)
