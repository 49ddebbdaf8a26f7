# SPDX-License-Identifier: Apache-2.0
"""Files behind mappings that cannot be opened for a while, and what stays open then."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde import procfs
from sonde.resolve import binaries
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.resolver import Resolver
from sonde.resolve.tracked_process import TrackedProcess


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    resolver = Resolver()
    resolver.processes.scan()
    yield resolver
    resolver.close()


def _process(resolver: Resolver) -> TrackedProcess:
    status = procfs.read_stat(os.getpid())
    assert status is not None
    return resolver.processes.find(os.getpid(), status.start_ns)


def _code_of_libc() -> int:
    return ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p).value or 0


def _later_ns() -> int:
    return time.monotonic_ns() + 60 * 10**9


@pytest.mark.parametrize("was_known", [False, True])
def test_a_file_that_could_not_be_opened_for_a_while_has_its_names_again(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch, was_known: bool
) -> None:
    process, address = _process(resolver), _code_of_libc()
    if was_known:
        assert resolver.resolve(process, (), [address])[0].frame.function
        resolver._binaries.close()
        resolver._by_offset = LruCache(16)
        process.forget_frames()
    tries = []

    def fails(path: str, **_: object) -> None:
        tries.append(path)

    monkeypatch.setattr(procfs, "open_stable", fails)
    monkeypatch.setattr(binaries, "RETRY_NS", 0)
    [nameless] = resolver.resolve(process, (), [address])
    assert (nameless.frame.function, nameless.frame.binary) == ("", "libc.so.6")
    monkeypatch.undo()
    monkeypatch.setattr(binaries, "RETRY_NS", 10**10)
    resolver.tick(time.monotonic_ns())

    [named] = resolver.resolve(process, (), [address])

    assert tries
    assert named.frame.function


def test_a_file_that_cannot_be_opened_is_looked_for_seldom(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, address = _process(resolver), _code_of_libc()
    tries = []

    def fails(path: str, **_: object) -> None:
        tries.append(path)

    monkeypatch.setattr(procfs, "open_stable", fails)
    for _ in range(5):
        process.forget_frames()
        [nameless] = resolver.resolve(process, (), [address])
        assert not nameless.frame.function
        resolver.tick(time.monotonic_ns())
    assert len(tries) == 4  # of the process, in its root, its parent's, and ours
    assert resolver.counters.files_unopened == 1
    assert resolver._binaries.to_retry(_later_ns()) == [process]
    assert resolver._binaries.to_retry(_later_ns()) == []


def test_a_vdso_that_cannot_be_kept_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_fd: int, _content: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "write", fails)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert binaries._dump_vdso() is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of other users")
@pytest.mark.parametrize(
    ("owner", "party", "is_taken"),
    [
        (4_000_001, -4711, False),
        (4_000_001, 4_000_002, False),
        (4_000_002, 4_000_002, True),
        (0, -4711, True),
    ],
)
def test_a_file_of_another_user_at_the_same_path_and_inode_is_not_that_of_an_ended_process(
    resolver: Resolver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    owner: int,
    party: int,
    is_taken: bool,
) -> None:
    """As on btrfs, where users choose inodes and no key can be compared."""
    process = _process(resolver)
    libc = next(it for it in process.space().mappings if it.path.endswith("/libc.so.6"))
    path = tmp_path / "same"
    path.write_bytes(b"theirs")
    os.chown(path, owner, owner)

    def at_our_root_alone(asked: str, **_: object) -> procfs.Opened | None:
        if asked.startswith("/proc/"):
            return None
        return procfs.Opened(os.open(path, os.O_RDONLY), (0, 0, 6, 0, 0), False, True, (0, 1, 2))

    monkeypatch.setattr(procfs, "open_stable", at_our_root_alone)
    monkeypatch.setattr(process, "_party", party)
    found = resolver._binaries._open_mapped(process, libc)
    assert (found is not None) == is_taken
    if found is not None:
        os.close(found.fd)
