# SPDX-License-Identifier: Apache-2.0
"""What is kept from run to run of files without a device API."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

import disks
from disks import DISK
from sonde.agent.known_files import KnownFiles
from sonde.collect.mapped_files import MappedFile
from sonde.collect.plain_files import digest_of
from sonde.resolve.binary import Binary, FileIdentity
from sonde.unwind import plain_index
from sonde.unwind.code_files import key_of_file
from sonde.unwind.plain_index import NAME, PlainIndex


@pytest.fixture(autouse=True)
def sys_folder(tmp_path_factory, monkeypatch):
    disks.use(tmp_path_factory.mktemp("sys"), monkeypatch)


def test_the_next_run_knows_what_was_found(tmp_path):
    one = PlainIndex(tmp_path)
    assert not one.has("a", "calls")
    one.add("a", DISK, "calls")
    one.write()
    other = PlainIndex(tmp_path)
    assert other.has("a", "calls")
    assert not other.has("a", "other calls")
    assert not other.has("b", "calls")


def test_two_recorders_keep_what_both_found(tmp_path):
    one, other = PlainIndex(tmp_path), PlainIndex(tmp_path)
    for index, key in ((one, "a"), (other, "b")):
        index.add(key, DISK, "calls")
        index.write()
    assert all(PlainIndex(tmp_path).has(key, "calls") for key in "ab")


@pytest.mark.parametrize("device", [(0, 40), (7, 3), (43, 0)])
def test_what_users_choose_is_looked_at_again(tmp_path, device):
    """File systems without a device, and images that users have mounted."""
    index = PlainIndex(tmp_path)
    index.add("a", os.makedev(*device), "calls")
    index.write()
    assert not (tmp_path / NAME).exists()


def test_nothing_holds_after_the_next_boot(tmp_path, monkeypatch):
    index = PlainIndex(tmp_path)
    index.add("a", DISK, "calls")
    index.write()
    monkeypatch.setattr(plain_index, "boot_id", lambda: "another")
    assert not PlainIndex(tmp_path).has("a", "calls")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"boot": 1}', b"\xff"])
def test_a_damaged_file_holds_nothing(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    assert not PlainIndex(tmp_path).has("a", "calls")


def test_the_oldest_go(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_index, "MAX_ENTRIES", 2)
    for key in "abc":
        index = PlainIndex(tmp_path)
        index.add(key, DISK, "calls")
        index.write()
    assert list(json.loads((tmp_path / NAME).read_bytes())["plain"]) == ["b", "c"]


def test_other_functions_have_another_digest():
    assert digest_of(["a", "b"]) == digest_of(["b", "a"]) != digest_of(["a"])


def binary_of(ctime_ns=5, is_copy=False, is_everybodys=True):
    binary = Binary()
    binary.is_everybodys = is_everybodys
    binary.identity, binary.is_copy = FileIdentity(DISK, 7, 100, 4, ctime_ns), is_copy
    return binary


def resolver_of(binary):
    """One process, 30, that maps one file."""
    mapping = SimpleNamespace(start=4096, file=(8, 1, 7), binary=binary)
    space = SimpleNamespace(find_all=lambda _: [mapping])
    process = SimpleNamespace(image=SimpleNamespace(is_built=True, space=lambda: space))
    processes = SimpleNamespace(start_of=lambda pid: pid == 30, find=lambda *_: process)
    return SimpleNamespace(processes=processes)


FILE = MappedFile(30, (8, 1, 7), "/lib/x.so", 4096, 8192)


def test_a_file_is_known_as_long_as_it_is_the_same(tmp_path):
    first = KnownFiles(resolver_of(binary_of()), PlainIndex(tmp_path))
    first.add(FILE, "calls")
    first.close()
    assert KnownFiles(resolver_of(binary_of()), PlainIndex(tmp_path)).has(FILE, "calls")
    changed = KnownFiles(resolver_of(binary_of(ctime_ns=6)), PlainIndex(tmp_path))
    assert not changed.has(FILE, "calls")


@pytest.mark.parametrize(
    ("binary", "file"),
    [
        (binary_of(is_copy=True), FILE),
        (binary_of(is_everybodys=False), FILE),
        (Binary(), FILE),
        (None, FILE),
        (binary_of(), MappedFile(30, (8, 1, 8), "/lib/x.so", 4096, 8192)),
        (binary_of(), MappedFile(30, (8, 1, 7), "/lib/x.so", 0, 8192)),
        (binary_of(), MappedFile(31, (8, 1, 7), "/lib/x.so", 4096, 8192)),
    ],
    ids=[
        "copy",
        "image",
        "not read",
        "not found",
        "another file",
        "another mapping",
        "another process",
    ],
)
def test_what_the_resolver_has_not_opened_is_not_known(tmp_path, binary, file):
    index = PlainIndex(tmp_path)
    for one in (binary_of(), binary_of(is_copy=True), Binary()):
        index.add(key_of_file(one), DISK, "calls")
    index.write()
    assert not KnownFiles(resolver_of(binary), PlainIndex(tmp_path)).has(file, "calls")
