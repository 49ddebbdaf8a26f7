# SPDX-License-Identifier: Apache-2.0
"""Links by build id, where more than one user's file claims to be the one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sonde import procfs
from sonde.resolve import build_id_links
from sonde.resolve.binaries import Binaries
from sonde.resolve.binary import Binary
from sonde.resolve.build_id_links import BuildIdLinks
from sonde.resolve.counters import Counters

BUILD_ID = "ab" * 20
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make others' files")


@pytest.fixture
def file_of(tmp_path):
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")

    def make(owner, name):
        source, path = tmp_path / "one.c", tmp_path / f"{name}.so"
        source.write_text(f"int {name};\n")
        subprocess.run(
            [compiler, "-shared", f"-Wl,--build-id=0x{BUILD_ID}", "-o", path, source], check=True
        )
        os.chown(path, owner, owner)
        return path

    return make


@pytest.fixture
def links(tmp_path):
    return BuildIdLinks(tmp_path / "links")


def record(links, path):
    links.record(BUILD_ID, str(path), path.stat())


def made(links):
    """Names of links and marks."""
    folders = (links._folder / name for name in ("private", "public"))
    return [it.name for folder in folders for it in folder.iterdir()]


def test_a_users_file_does_not_take_the_place_of_roots(links, file_of):
    honest, hostile = file_of(0, "honest"), file_of(65534, "hostile")
    for path in (honest, hostile):
        record(links, path)
    assert links.find(BUILD_ID) == honest


def test_roots_file_takes_the_place_of_a_users(links, file_of):
    for path in (
        file_of(65534, "hostile"),
        file_of(65533, "other"),
        honest := file_of(0, "honest"),
    ):
        record(links, path)
    assert links.find(BUILD_ID) == honest


def test_of_two_users_files_that_claim_one_build_id_neither_is_believed(links, file_of):
    first, second = file_of(65533, "first"), file_of(65534, "second")
    record(links, first)
    assert links.find(BUILD_ID) == first
    record(links, second)
    assert links.find(BUILD_ID) is None
    record(links, first)
    assert links.find(BUILD_ID) is None


def _copy(of, path, owner, end=b""):
    path.write_bytes(of.read_bytes() + end)
    os.chown(path, owner, owner)
    return path


def test_of_alike_files_of_two_users_neither_is_believed(links, file_of, tmp_path):
    """Either may be changed once they were compared: through a mapping not even its ctime is."""
    first = file_of(65533, "first")
    copy = _copy(first, tmp_path / "copy.so", 65534)
    for path in (first, copy, first):
        record(links, path)
    assert links.find(BUILD_ID) is None


def test_each_of_two_users_has_the_lines_of_theirs(links, file_of, tmp_path, monkeypatch):
    first = file_of(65533, "first")
    copy = _copy(first, tmp_path / "copy.so", 65534)
    for path in (first, copy):
        record(links, path)
    for path, user in ((first, 65533), (copy, 65534)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert links.find(BUILD_ID) == path


def test_a_users_file_that_was_changed_or_replaced_is_not_believed(links, file_of, tmp_path):
    path = file_of(65534, "program")
    record(links, path)
    assert links.find(BUILD_ID) == path
    with path.open("ab") as file:
        file.write(b"forged")
    assert links.find(BUILD_ID) is None
    record(links, path)
    assert links.find(BUILD_ID) == path
    _copy(path, tmp_path / "other", 65534).replace(path)
    assert links.find(BUILD_ID) is None


def test_a_link_to_roots_file_does_not_become_one_to_a_users(links, file_of, tmp_path):
    path = file_of(0, "program")
    record(links, path)
    _copy(path, tmp_path / "other", 65534).replace(path)
    assert links.find(BUILD_ID) is None


def test_a_path_that_leads_elsewhere_for_a_while_takes_nothing_from_anybody(
    links, file_of, tmp_path
):
    """Its folder is another one while the other user's program is recorded."""
    folder = tmp_path / "folder"
    folder.mkdir()
    honest = file_of(65533, "honest")
    hostile = _copy(honest, folder / "prog", 65534, b"forged")
    record(links, hostile)
    folder.rename(tmp_path / "hidden")
    folder.mkdir()
    hostile.symlink_to("/bin/cat")
    record(links, honest)
    hostile.unlink()
    folder.rmdir()
    (tmp_path / "hidden").rename(folder)
    assert links.find(BUILD_ID) == honest
    record(links, hostile)
    assert links.find(BUILD_ID) is None


def test_a_user_without_links_left_cannot_keep_one_that_is_disputed(
    links, file_of, tmp_path, monkeypatch
):
    monkeypatch.setattr(build_id_links, "LINKS_A_SECOND", 0)
    links = BuildIdLinks(tmp_path / "links")
    record(links, file_of(65534, "hostile"))
    links._allowance.take(procfs.party_of_user(65534), build_id_links.LINKS_AT_ONCE)
    record(links, file_of(65533, "honest"))
    assert links.find(BUILD_ID) is None


@pytest.mark.parametrize("gone", ["first", "second"])
def test_a_dispute_ends_when_one_of_the_files_is_gone(links, file_of, gone):
    paths = {"first": file_of(65533, "first"), "second": file_of(65534, "second")}
    for path in paths.values():
        record(links, path)
    assert links.find(BUILD_ID) is None
    paths.pop(gone).unlink()
    [left] = paths.values()
    record(links, left)
    assert links.find(BUILD_ID) == left
    assert made(links) == [BUILD_ID]


def _record_many(links, tmp_path, owner, count):
    for number in range(count):
        path = tmp_path / f"{owner}-{number}"
        path.touch()
        os.chown(path, owner, owner)
        links.record(f"{owner:08x}{number:08x}", str(path), path.stat())


def test_links_of_one_user_put_out_nobody_elses(links, tmp_path, monkeypatch):
    monkeypatch.setattr(build_id_links, "MAX_FILES", 20)
    monkeypatch.setattr(build_id_links, "SHRINK_EVERY", 5)
    _record_many(links, tmp_path, 65533, 8)
    _record_many(links, tmp_path, 65534, 100)
    left = made(links)
    assert len(left) < 20 + 5
    assert sum(name.startswith(f"{65533:08x}") for name in left) == 8


def test_new_links_of_one_user_are_bounded_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(build_id_links, "LINKS_AT_ONCE", 10)
    monkeypatch.setattr(build_id_links, "LINKS_A_SECOND", 0)
    links = BuildIdLinks(tmp_path / "links")
    _record_many(links, tmp_path, 65534, 30)
    _record_many(links, tmp_path, 65533, 5)
    _record_many(links, tmp_path, 0, 20)
    assert len(made(links)) == 10 + 5 + 20
    assert links.left_out == 20


def test_nobody_else_can_list_whose_program_lies_where(links, file_of, tmp_path):
    folder = tmp_path / "links"
    folder.mkdir(mode=0o755)  # as an earlier version made it
    record(links, file_of(65534, "program"))
    assert folder.stat().st_mode & 0o777 == 0o711
    folder.chmod(0o700)  # as root may, who wants nobody to
    record(BuildIdLinks(folder), file_of(65534, "program"))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_is_linked_once_for_its_content_and_never_by_a_copy():
    recorded, elsewhere = [], []
    links = SimpleNamespace(
        record=lambda *asked: recorded.append(asked[0]),
        note_elsewhere=lambda *asked: elsewhere.append(asked),
        left_out=0,
    )
    binaries = Binaries(Counters(), links=links)
    process, mapping = SimpleNamespace(pid=30, party=0), SimpleNamespace(path="/lib/x.so")
    with Path(sys.executable).open("rb") as file:
        binary = Binary()
        binary.use_descriptor(file.fileno())
        assert recorded == []  # it is mapped, and has no frame yet
        for build_id in ("aa" * 20, "bb" * 20):
            binary.build_id = build_id
            binaries.note_link(binary, process, mapping)
            binaries.note_link(binary, process, mapping)
            binary.index += 1  # another content
        binary.is_copy = True
        binaries.note_link(binary, process, mapping)
        binary.fd = -1
    assert recorded == ["aa" * 20, "bb" * 20]
    assert elsewhere == [("bb" * 20, 0)]
