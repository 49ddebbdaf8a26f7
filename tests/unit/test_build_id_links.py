# SPDX-License-Identifier: Apache-2.0
"""Links by build id, where more than one user's file claims to be the one."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from sonde.resolve.build_id_links import BuildIdLinks

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


def test_nobody_else_can_list_whose_program_lies_where(links, file_of, tmp_path):
    folder = tmp_path / "links"
    folder.mkdir(mode=0o755)  # as an earlier version made it
    record(links, file_of(65534, "program"))
    assert folder.stat().st_mode & 0o777 == 0o711
