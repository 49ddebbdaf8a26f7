# SPDX-License-Identifier: Apache-2.0
"""Who learns from the links by build id who ran what: nobody else, of a file that is not public."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sonde import procfs
from sonde.procfs import opening
from sonde.resolve import build_id_links
from sonde.resolve.build_id_links import BuildIdLinks

BUILD_ID, OTHER_ID = "ab" * 20, "cd" * 20
ALICE, BOB, STRANGER = 61_001, 61_002, 61_003
NAMES = tuple(BUILD_ID + it for it in ("", ".second", ".disputed"))
FOLDERS = (".", "public", "private", *(f"users/{it}" for it in (ALICE, BOB, STRANGER)))
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody can reach."""
    folder = Path(tempfile.mkdtemp(prefix="sonde-links-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def links(place: Path) -> BuildIdLinks:
    return BuildIdLinks(place / "links")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("program")
    folder.joinpath("one.c").write_text("int one;\n")
    flags = ["-shared", f"-Wl,--build-id=0x{BUILD_ID}"]
    subprocess.run([compiler, *flags, "-o", "one", "one.c"], cwd=folder, check=True)
    return folder / "one"


Ran = Callable[..., Path]


@pytest.fixture
def ran(place: Path, program: Path) -> Ran:
    """A user's copy of the program, at home."""

    def make(owner: int, home: int = 0o755, file: int = 0o755) -> Path:
        folder = place / str(owner)
        folder.mkdir()
        path = folder / "secret"
        shutil.copy(program, path)
        for it, mode in ((path, file), (folder, home)):
            os.chown(it, owner, owner)
            it.chmod(mode)
        return path

    return make


def record(links: BuildIdLinks, path: Path) -> None:
    links.record(BUILD_ID, str(path), path.stat())


class Opened(NamedTuple):
    fd: int


class OfThisProcess:
    """Looks up what the child of the broker would, which could be root's here."""

    def ask_of_file(self, who: int | None, request: tuple[Any, ...]) -> Any:
        found, is_for_all = opening.status_of(*request[1:])
        return found.st_dev, found.st_ino, found.st_uid, is_for_all

    def open_stable(self, path: str, *, follow: bool = False) -> Opened | None:
        with suppress(OSError):
            return Opened(os.open(path, os.O_RDONLY))
        return None


def as_user(user: int, act: Callable[[], object]) -> Any:
    """What it returns, done as a user of no rights, in a child. (A program may be out of their
    reach, as this installation may be.)"""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            procfs.BROKER = of_this = OfThisProcess()  # type: ignore[assignment]
            procfs.open_stable = of_this.open_stable  # type: ignore[assignment]
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.write(writing, json.dumps(act()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        found = file.read()
    os.waitpid(pid, 0)
    return json.loads(found)


def found_by(user: int, links: BuildIdLinks) -> Path | None:
    """What a report of a user finds."""
    found = as_user(user, lambda: str(BuildIdLinks(links._folder).find(BUILD_ID) or ""))
    return Path(found) if found else None


def learned_by(user: int, links: BuildIdLinks) -> list[str]:
    """All that a user who knows the build id and how links are kept reads of them."""
    asks = (os.lstat, os.readlink, os.listxattr, lambda it: Path(it).read_bytes())

    def look() -> list[str]:
        found = []
        for folder in FOLDERS:
            for name in NAMES:
                path = f"{links._folder}/{folder}/{name}"
                for ask in asks:
                    with suppress(OSError):
                        found.append(f"{path}: {ask(path)}")
            with suppress(OSError):
                found += map(str, (links._folder / folder).iterdir())
        return found

    return list(as_user(user, look))


def is_public(links: BuildIdLinks) -> bool:
    return bool(learned_by(STRANGER, links))


@pytest.mark.parametrize(
    ("home", "file"),
    [
        (0o700, 0o755),
        (0o711, 0o755),
        (0o750, 0o755),
        (0o705, 0o755),
        (0o755, 0o700),
        (0o755, 0o711),
    ],
    ids=["home", "a home to pass", "for a group", "not for a group", "file", "to run alone"],
)
def test_nobody_else_learns_who_ran_a_file_that_not_everybody_can_read(
    links: BuildIdLinks, ran: Ran, home: int, file: int
) -> None:
    path = ran(ALICE, home, file)
    record(links, path)
    assert learned_by(STRANGER, links) == []
    assert links.find(BUILD_ID) == path


def test_its_owner_has_source_lines_of_it(links: BuildIdLinks, ran: Ran) -> None:
    path = ran(ALICE, 0o700)
    record(links, path)
    assert found_by(ALICE, links) == path
    assert found_by(STRANGER, links) is None


@pytest.mark.parametrize("owner", [0, ALICE])
def test_everybody_has_those_of_a_file_that_everybody_can_read(
    links: BuildIdLinks, ran: Ran, owner: int
) -> None:
    path = ran(owner)
    record(links, path)
    for user in (ALICE, STRANGER):
        assert found_by(user, links) == path
    assert links.find(BUILD_ID) == path


def test_what_root_runs_from_its_own_folder_only_root_learns(links: BuildIdLinks, ran: Ran) -> None:
    path = ran(0, 0o700)
    record(links, path)
    assert learned_by(STRANGER, links) == []
    assert links.find(BUILD_ID) == path


def test_a_users_report_reads_what_root_recorded(
    links: BuildIdLinks, ran: Ran, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    """Where a recorder of theirs would keep its links there are none."""
    monkeypatch.setattr(build_id_links, "SHARED", links._folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "none"))
    path = ran(ALICE, 0o700)
    record(links, path)
    expected = {ALICE: str(path), STRANGER: "None"}
    for user, found in expected.items():
        assert as_user(user, lambda: str(BuildIdLinks().find(BUILD_ID))) == found


def test_a_user_can_change_nothing_that_root_reads(links: BuildIdLinks, ran: Ran) -> None:
    path = ran(ALICE, 0o700)
    record(links, path)
    mine = links._folder / "users" / str(ALICE)
    acl = os.getxattr(mine, "system.posix_acl_access")

    def change() -> list[str]:
        assert str((mine / BUILD_ID).readlink()).endswith(str(path))
        done = []
        for folder in (links._folder, *(links._folder / it for it in FOLDERS)):
            name, new = f"{folder}/{BUILD_ID}", f"{folder}/{OTHER_ID}"
            for act, *how in (
                (os.symlink, "/etc/shadow", new),
                (os.mkdir, new),
                (os.open, new, os.O_CREAT | os.O_WRONLY),
                (os.unlink, name),
                (os.rename, name, new),
                (os.link, path, new),
                (os.chmod, folder, 0o777),
                (os.setxattr, folder, "system.posix_acl_access", acl),
                (os.rename, folder, f"/var/tmp/{OTHER_ID}"),
                (os.listdir, folder),
            ):
                with suppress(OSError):
                    act(*how)
                    done.append(f"{act.__name__} {how}")
        return done

    assert as_user(ALICE, change) == []
    assert links.find(BUILD_ID) == path


def test_root_reads_no_copy_of_a_user(links: BuildIdLinks, ran: Ran) -> None:
    record(links, ran(ALICE, 0o700))
    theirs = links._folder / "users" / str(ALICE)
    (theirs / BUILD_ID).rename(theirs / OTHER_ID)
    assert links.find(OTHER_ID) is None


def test_without_acls_root_alone_learns_of_it(
    links: BuildIdLinks, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no ACLs")

    monkeypatch.setattr(os, "setxattr", refused)
    path = ran(ALICE, 0o700)
    record(links, path)
    for user in (ALICE, STRANGER):
        assert learned_by(user, links) == []
    assert links.find(BUILD_ID) == path


def test_a_link_of_an_earlier_version_is_roots_alone(links: BuildIdLinks, ran: Ran) -> None:
    path = ran(ALICE, 0o700)
    record(links, path)
    target = (links._folder / "private" / BUILD_ID).readlink()
    shutil.rmtree(links._folder)
    links._folder.mkdir(mode=0o711)
    (links._folder / BUILD_ID).symlink_to(target)
    (links._folder / OTHER_ID).symlink_to("/usr/bin/true")
    (links._folder / f"{OTHER_ID}.disputed").symlink_to("/dev/null")
    assert is_public(links)
    again = BuildIdLinks(links._folder)
    assert again.find(BUILD_ID) == path
    assert learned_by(STRANGER, links) == []
    assert {it.name for it in links._folder.iterdir()} == {"public", "private", "users"}
    assert again._marks.of(OTHER_ID) == "/dev/null"
    record(again, path)
    assert found_by(ALICE, links) == path
    assert learned_by(STRANGER, links) == []


@pytest.mark.parametrize("left", [0, 10])
def test_a_link_to_a_file_that_is_public_no_more_is_hidden(
    links: BuildIdLinks, ran: Ran, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Once it is recorded again; also where its user may have no new links, or it has changed."""
    monkeypatch.setattr(build_id_links, "LINKS_AT_ONCE", 1 + left)
    monkeypatch.setattr(build_id_links, "LINKS_A_SECOND", 0)
    links = BuildIdLinks(links._folder)
    path = ran(ALICE)
    record(links, path)
    assert is_public(links)
    path.parent.chmod(0o700)
    record(links, path)
    assert learned_by(STRANGER, links) == []
    path.parent.chmod(0o755)
    record(links, path)
    assert found_by(STRANGER, links) == path
    assert not list((links._folder / "users" / str(ALICE)).iterdir())
    path.parent.chmod(0o700)
    path.touch()
    record(links, path)
    assert learned_by(STRANGER, links) == []


def test_links_to_disputed_files_are_their_owners(links: BuildIdLinks, ran: Ran) -> None:
    of = {ALICE: ran(ALICE), BOB: ran(BOB)}
    for path in of.values():
        record(links, path)
    assert links.find(BUILD_ID) is None
    assert learned_by(STRANGER, links) == []
    for user, path in of.items():
        assert found_by(user, links) == path
    of[ALICE].unlink()
    record(links, of[BOB])
    assert links.find(BUILD_ID) == of[BOB]
    assert found_by(STRANGER, links) == of[BOB]


@pytest.mark.parametrize("party", [None, -4_711])
def test_nobody_learns_of_a_file_that_ran_elsewhere(
    links: BuildIdLinks, ran: Ran, party: int | None
) -> None:
    """As in a container, or from a folder that the recorder cannot see. But where another user's
    file is linked, it is not believed any more."""
    elsewhere, path = ran(ALICE), ran(BOB)
    record(links, path)
    assert found_by(STRANGER, links) == path
    links.record(BUILD_ID, "/in/a/container", elsewhere.stat(), party=party)
    assert learned_by(STRANGER, links) == []
    assert links.find(BUILD_ID) is None
    assert found_by(BOB, links) == path


def test_roots_file_is_for_everybody_beside_a_dispute(links: BuildIdLinks, ran: Ran) -> None:
    for user in (ALICE, BOB):
        record(links, ran(user))
    mine = ran(0)
    record(links, mine)
    record(links, mine)
    for user in (ALICE, STRANGER):
        assert found_by(user, links) == mine
    links.record(BUILD_ID, "/in/a/container", mine.stat(), party=-4_711)
    assert found_by(STRANGER, links) == mine


def test_copies_are_as_many_as_links(
    links: BuildIdLinks, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_id_links, "MAX_FILES", 20)
    monkeypatch.setattr(build_id_links, "SHRINK_EVERY", 5)
    home = place / "home"
    home.mkdir(mode=0o700)
    for owner, count in ((ALICE, 4), (BOB, 60)):
        for number in range(count):
            path = home / f"{owner}-{number}"
            path.touch()
            os.chown(path, owner, owner)
            links.record(f"{owner:08x}{number:08x}", str(path), path.stat())
    names = {it.name for it in (links._folder / "private").iterdir()}
    assert len(names) < 20 + 5
    users = links._folder / "users"
    assert {it.name for it in users.glob("*/*")} == names
    for name in names:
        links._links.drop(name)
    (users / str(ALICE) / "left over").symlink_to("/")
    links._shrink()
    assert list(users.iterdir()) == []


def test_an_unprivileged_recorder_keeps_its_links_to_itself(place: Path, ran: Ran) -> None:
    mine, roots = ran(ALICE), ran(0)

    def recorded() -> list[str]:
        links = BuildIdLinks(mine.parent / "links")
        found = []
        for path in (mine, mine, roots, roots):
            record(links, path)
            found.append(str(links.find(BUILD_ID)))
        return found

    assert as_user(ALICE, recorded) == [*[str(mine)] * 2, *[str(roots)] * 2]
    assert learned_by(STRANGER, BuildIdLinks(mine.parent / "links")) == []


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """A process with other mounts than the machine's."""
    command = ["unshare", "--mount", "sh", "-c", "echo; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip("mounts nothing")
        yield process.pid
        process.kill()


def test_which_files_everybody_can_reach(place: Path, elsewhere: int) -> None:
    shown, closed = place / "shown" / "deep" / "file", place / "closed" / "deep" / "file"
    for path in (shown, closed):
        path.parent.mkdir(parents=True)
        path.touch(0o644)
    closed.parent.parent.chmod(0o701)
    (place / "link").symlink_to("shown")
    (place / "closed" / "deep" / "link").symlink_to(shown)
    secret = shown.with_name("secret")
    secret.touch(0o604)
    expected = {
        str(shown): True,
        str(closed): False,
        str(secret): False,
        f"{place}/link/deep/file": False,
        f"{place}/closed/deep/link": False,
        f"{place}/shown/../shown/deep/file": False,
        f"{place}/shown//deep/file": False,
        f"/proc/self/root{shown}": False,
        f"/proc/{os.getpid()}/root{shown}": False,
        str(shown.parent): False,
    }
    for who in (0, os.getpid(), elsewhere):
        assert {path: opening.status_of(path, who)[1] for path in expected} == expected
    place.chmod(0o700)
    assert not opening.status_of(str(shown), elsewhere)[1]
    assert procfs.identity_of(str(shown), None)[1] == shown.stat().st_ino


def test_a_file_that_cannot_be_looked_up_in_time_makes_no_dispute(
    links: BuildIdLinks, ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a user who has another one's look-ups hang would have their links hidden for ever."""

    def hang(*_: object) -> None:
        raise procfs.Hung("1")

    path = ran(ALICE)
    record(links, path)
    with monkeypatch.context() as patch:
        patch.setattr(procfs.BROKER, "ask_of_file", hang)
        links.record(BUILD_ID, str(path), path.stat(), 1, BOB)
    assert found_by(BOB, links) == path
