# SPDX-License-Identifier: Apache-2.0
"""Marks of build ids that files of several users claim: none of them can avoid or remove one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sonde.resolve import build_id_links, dispute_marks
from sonde.resolve.build_id_links import BuildIdLinks

BUILD_ID = "ab" * 20
HONEST, HOSTILE, THIRD = 61_001, 61_002, 61_003
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make others' files")
Made = Callable[..., Path]


@pytest.fixture(params=["private", "public"])
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """With files of root's and their owners alone, or that everybody can reach."""
    if request.param == "private":
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="sonde-disputed-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("program")
    folder.joinpath("one.c").write_text("int one;\n")
    flags = ["-shared", f"-Wl,--build-id=0x{BUILD_ID}"]
    subprocess.run([compiler, *flags, "-o", "one", "one.c"], cwd=folder, check=True)
    return folder / "one"


@pytest.fixture
def made(program: Path, tmp_path: Path) -> Made:
    def make(owner: int, at: Path | str) -> Path:
        path = tmp_path / at
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(program, path)
        os.chown(path, owner, owner)
        return path

    return make


@pytest.fixture
def links(tmp_path: Path) -> BuildIdLinks:
    return BuildIdLinks(tmp_path / "links")


def record(links: BuildIdLinks, path: Path, at: Path | str | None = None) -> None:
    """`at`: where the file is for the process that ran it."""
    links.record(BUILD_ID, str(at or path), path.stat())


def made_in(links: BuildIdLinks) -> list[Path]:
    """Links and marks."""
    folders = (links._folder / name for name in ("private", "public"))
    return [it for folder in folders for it in folder.iterdir()]


def names(links: BuildIdLinks) -> set[str]:
    return {it.name.removeprefix(BUILD_ID) for it in made_in(links)}


@pytest.mark.parametrize("length", [900, 1_100, 4_040, 4_080])
@pytest.mark.parametrize("order", [(HOSTILE, HONEST), (HONEST, HOSTILE)])
def test_a_dispute_is_noted_however_long_a_path_is(
    links: BuildIdLinks, made: Made, tmp_path: Path, length: int, order: tuple[int, int]
) -> None:
    folder = str(tmp_path)
    while length - len(folder) > 220:
        folder += "/" + 200 * "a"
    hostile = Path(folder) / ("z" * (length - len(folder) - 1))
    of = {HONEST: made(HONEST, "honest"), HOSTILE: made(HOSTILE, hostile)}
    for user in order:
        record(links, of[user])
    assert links.find(BUILD_ID) is None


@pytest.mark.parametrize("order", [(HOSTILE, HONEST), (HONEST, HOSTILE)])
def test_a_program_in_a_container_disputes_what_others_claim(
    links: BuildIdLinks, made: Made, order: tuple[int, int]
) -> None:
    of = {HONEST: made(HONEST, "honest"), HOSTILE: made(HOSTILE, "hostile")}
    at = {HONEST: "/app/only/in/the/container", HOSTILE: None}
    for user in order:
        record(links, of[user], at[user])
    assert links.find(BUILD_ID) is None
    record(links, of[HONEST])
    assert links.find(BUILD_ID) is None
    of[HOSTILE].unlink()
    record(links, of[HONEST])
    assert links.find(BUILD_ID) is None  # that its other file is gone could not be seen


def test_who_owns_files_in_a_container_is_not_believed(links: BuildIdLinks, made: Made) -> None:
    mine = made(HOSTILE, "image")
    links.record(BUILD_ID, "/in/the/image", mine.stat(), party=-4_711)
    record(links, made(HOSTILE, "hostile"))
    assert links.find(BUILD_ID) is None


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_program_that_is_read_as_a_copy_disputes_what_others_claim(
    links: BuildIdLinks, made: Made, comes_first: bool
) -> None:
    """It lies on a file system of a user's (FUSE), also of a container's."""
    if comes_first:
        links.note_elsewhere(BUILD_ID, HONEST)
    record(links, made(HOSTILE, "hostile"))
    if not comes_first:
        links.note_elsewhere(BUILD_ID, HONEST)
    assert links.find(BUILD_ID) is None


def test_a_program_that_was_built_again_while_it_ran_is_in_no_dispute_with_itself(
    links: BuildIdLinks, made: Made
) -> None:
    path = made(HONEST, "program")
    before = path.stat()
    path.unlink()
    made(HOSTILE, "takes its inode")
    path = made(HONEST, "program")
    links.record(BUILD_ID, str(path) + " (deleted)", before)
    record(links, path)
    assert links.find(BUILD_ID) == path
    record(links, made(HOSTILE, "hostile"))
    assert links.find(BUILD_ID) is None


def test_roots_file_is_believed_beside_any_mark(links: BuildIdLinks, made: Made) -> None:
    record(links, made(HONEST, "honest"), "/in/a/container")
    record(links, made(HOSTILE, "hostile"))
    mine = made(0, "program")
    record(links, mine)
    record(links, made(HOSTILE, "hostile"))
    assert links.find(BUILD_ID) == mine


def _push_out(links: BuildIdLinks, tmp_path: Path, owner: int) -> None:
    for number in range(30):
        path = tmp_path / f"{owner}-{number}"
        path.touch()
        os.chown(path, owner, owner)
        links.record(f"{owner:08x}{number:08x}", str(path), path.stat())
        time.sleep(0.002)


@pytest.mark.parametrize("first", [HONEST, HOSTILE])
@pytest.mark.parametrize("whose", [HONEST, HOSTILE])
def test_a_dispute_outlives_the_links_that_it_is_about(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, first: int, whose: int
) -> None:
    monkeypatch.setattr(build_id_links, "MAX_FILES", 20)
    monkeypatch.setattr(build_id_links, "SHRINK_EVERY", 5)
    links = BuildIdLinks(tmp_path / "links")
    of = {HONEST: made(HONEST, "honest"), HOSTILE: made(HOSTILE, "hostile")}
    for user in (first, HONEST + HOSTILE - first):
        record(links, of[user])
    _push_out(links, tmp_path, whose)
    left = {it.lstat().st_uid for it in made_in(links) if it.name.startswith(BUILD_ID)}
    assert left == {0, HONEST + HOSTILE - whose}
    assert links.find(BUILD_ID) is None
    record(links, of[HOSTILE])
    assert links.find(BUILD_ID) is None
    record(links, third := made(THIRD, "third"))
    of[HOSTILE].unlink()
    record(links, third)
    assert links.find(BUILD_ID) is None


def test_a_third_claim_is_not_forgotten_when_one_of_the_first_is_gone(
    links: BuildIdLinks, made: Made
) -> None:
    first, second = made(HOSTILE, "first"), made(THIRD, "second")
    for path in (first, second, made(HONEST, "honest")):
        record(links, path)
    second.unlink()
    record(links, first)
    assert links.find(BUILD_ID) is None


def test_where_no_mark_can_be_made_nobody_is_believed(
    links: BuildIdLinks, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = made(HOSTILE, "hostile")
    record(links, hostile)
    assert links.find(BUILD_ID) == hostile

    def full(*_: object) -> None:
        raise OSError(28, "no space left on the device")

    monkeypatch.setattr(dispute_marks, "put_link", full)
    record(links, made(HONEST, "honest"))
    assert links.find(BUILD_ID) is None
    assert links.left_out == 1


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_where_there_are_as_many_marks_as_may_be_users_have_no_new_links(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    monkeypatch.setattr(dispute_marks, "MAX_MARKS", 3)
    links = BuildIdLinks(tmp_path / "links")
    hostile, honest = made(HOSTILE, "hostile"), made(HONEST, "honest")
    record(links, hostile)
    for number in range(5):
        links.record(f"{number:016x}", "/in/a/container", honest.stat())
    assert links.left_out == 2
    again = BuildIdLinks(tmp_path / "links")  # another recorder
    links.record("cd" * 20, str(honest), honest.stat())
    again.record("cd" * 20, str(honest), honest.stat())
    record(again, honest, "/in/a/container" if is_elsewhere else None)
    assert sorted(names(again)) == [f"{number:016x}.disputed" for number in range(3)]
    assert (links.left_out, again.left_out) == (3, 2)
    mine = made(0, "mine")
    record(again, mine)
    assert again.find(BUILD_ID) == mine


def test_one_party_alone_does_not_fill_all_marks(links: BuildIdLinks, made: Made) -> None:
    hostile, honest = made(HOSTILE, "hostile"), made(HONEST, "honest")
    for number in range(dispute_marks.MARKS_AT_ONCE + 100):
        links.record(f"{number:016x}", "/in/a/container", hostile.stat())
    assert len(names(links)) == dispute_marks.MARKS_AT_ONCE
    assert links.left_out == 100
    record(links, honest, "/in/a/container")
    assert ".disputed" in names(links)
