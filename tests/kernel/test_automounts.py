# SPDX-License-Identifier: Apache-2.0
"""An automounter of the machine's, in whose folder a process chose the path of its program."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sonde import procfs
from sonde.procfs import opening
from sonde.resolve.build_id_links import BuildIdLinks

LIMIT_S = 60
FAIL = 0x9361
"""AUTOFS_IOC_FAIL."""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts")


class Automounter:
    """Mounts nothing, and notes what it is asked for. It works for other process groups than this
    one, such as that of the broker's child."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._asks, asking = os.pipe()
        how = f"fd={asking},pgrp={os.getpgrp()},minproto=5,maxproto=5,indirect"
        done = libc.mount(b"autofs", bytes(folder), b"autofs", 0, how.encode())
        os.close(asking)
        if done:
            os.close(self._asks)
            pytest.skip(f"no autofs: {os.strerror(ctypes.get_errno())}")
        self._root = os.open(folder, os.O_RDONLY)
        self._folder = folder
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while packet := os.read(self._asks, 400):
                (token,) = struct.unpack_from("=I", packet, 8)
                self.asked.append(packet[44:].partition(b"\0")[0].decode())
                fcntl.ioctl(self._root, FAIL, token)

    def close(self) -> None:
        os.close(self._root)
        subprocess.run(["umount", "-R", "-l", self._folder], check=True)
        self._thread.join(LIMIT_S)
        os.close(self._asks)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Automounter]:
    folder = tmp_path / "net"
    folder.mkdir()
    made = Automounter(folder)
    yield made
    procfs.BROKER.close()
    made.close()


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process with other mounts than the machine's."""
    command = ["unshare", "--mount", "sh", "-c", "echo; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def _looked_up(path: str, who: int | None, links: BuildIdLinks) -> None:
    """As a program's file is, once it has frames and when it is gone."""
    assert procfs.open_stable(path, who=who) is None
    assert procfs.open_stable(path, who=who, follow=True) is None
    with suppress(OSError):
        procfs.identity_of(path, who)
    links.record("ab" * 20, path, Path("/bin/true").stat(), who)


def test_no_path_of_a_process_has_the_automounter_mount_anything(
    net: Automounter, stranger: int, tmp_path: Path
) -> None:
    """Neither of a container's, nor of one that sees our files, nor by a link, nor below a root."""
    links = BuildIdLinks(tmp_path / "links")
    (tmp_path / "link").symlink_to(tmp_path / "net" / "by-link.example.com")
    for who in (stranger, os.getpid(), None):
        _looked_up(f"{tmp_path}/net/evil.example.com/exp/prog", who, links)
        _looked_up(f"{tmp_path}/link/exp/prog", who, links)
    for pid in (stranger, os.getpid()):
        _looked_up(f"/proc/{pid}/root{tmp_path}/net/root.example.com/exp/prog", None, links)
    assert net.asked == []


@pytest.mark.usefixtures("net")
def test_programs_on_what_is_mounted_there_are_found(stranger: int, tmp_path: Path) -> None:
    place = tmp_path / "net" / "home"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    program = place / "a" / "program"
    program.parent.mkdir()
    program.write_bytes(Path("/bin/true").read_bytes())
    (tmp_path / "link").symlink_to("net/home/a")
    for path in (program, tmp_path / "link" / "program"):
        for who in (os.getpid(), stranger, None):
            fd = procfs.open_regular(str(path), follow=True, who=who)
            assert fd is not None
            assert os.fstat(fd).st_ino == program.stat().st_ino
            os.close(fd)


@pytest.mark.parametrize("openat2", [opening.OPENAT2, 9999])
def test_a_walk_in_steps_mounts_nothing_either(
    net: Automounter, tmp_path: Path, openat2: int
) -> None:
    """As where a folder on the way is not in memory; also without openat2()."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(opening.__file__).parent)!r})
import opening
opening.OPENAT2 = {openat2}
root = os.open("/", os.O_PATH)
flags = os.O_PATH | os.O_CLOEXEC
os.close(opening.walk_below(root, {str(tmp_path / "net")!r}, flags))
try:
    opening.walk_below(root, {str(tmp_path / "net/evil.example.com/prog")!r}, flags)
except FileNotFoundError as error:
    print(error.strerror)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.stdout, net.asked) == ("not mounted\n", []), done.stderr


def test_who_may_see_other_files_has_no_disk_asked_here(
    stranger: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what it runs is found, as of a service with a private /tmp: it is in memory."""
    for who in (stranger, os.getpid()):
        assert procfs.identity_of("/bin/sleep", who)[1] == Path("/bin/sleep").stat().st_ino
        assert opening.status_of("/bin/sleep", who)[0].st_ino == Path("/bin/sleep").stat().st_ino
    open_below = opening.open_below

    def nothing_in_memory(root: int, path: str, flags: int, resolve: int) -> int:
        if resolve & opening.RESOLVE_CACHED:
            raise BlockingIOError(errno.EAGAIN, "")
        return open_below(root, path, flags, resolve)

    monkeypatch.setattr(opening, "open_below", nothing_in_memory)
    neighbour = subprocess.Popen(["sleep", "60"])
    jail = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: os.chroot("/usr"))
    try:
        assert opening.status_of("/bin/sleep", neighbour.pid)[0].st_ino
        for who in (stranger, jail.pid, 500_000_001):
            with pytest.raises(BlockingIOError):
                opening.status_of("/bin/sleep", who)
    finally:
        for process in (neighbour, jail):
            process.kill()
            process.wait()
