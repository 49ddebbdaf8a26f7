# SPDX-License-Identifier: Apache-2.0
"""Links by build id, where more than one user's file claims to be the one."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from sonde.resolve.seen_files import SeenFiles

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
def seen(tmp_path):
    return SeenFiles(tmp_path / "links")


def note(seen, path):
    seen.note(BUILD_ID, str(path), path.stat())


def test_a_users_file_does_not_take_the_place_of_roots(seen, file_of):
    honest, hostile = file_of(0, "honest"), file_of(65534, "hostile")
    for path in (honest, hostile):
        note(seen, path)
    assert seen.find(BUILD_ID) == honest


def test_roots_file_takes_the_place_of_a_users(seen, file_of):
    for path in (
        file_of(65534, "hostile"),
        file_of(65533, "other"),
        honest := file_of(0, "honest"),
    ):
        note(seen, path)
    assert seen.find(BUILD_ID) == honest


def test_of_two_users_files_that_claim_one_build_id_neither_is_believed(seen, file_of):
    first, second = file_of(65533, "first"), file_of(65534, "second")
    note(seen, first)
    assert seen.find(BUILD_ID) == first
    note(seen, second)
    assert seen.find(BUILD_ID) is None
    note(seen, first)
    assert seen.find(BUILD_ID) is None


def test_nobody_else_can_list_whose_program_lies_where(seen, file_of, tmp_path):
    folder = tmp_path / "links"
    folder.mkdir(mode=0o755)  # as an earlier version made it
    note(seen, file_of(65534, "program"))
    assert folder.stat().st_mode & 0o777 == 0o711
