# SPDX-License-Identifier: Apache-2.0
"""Files that one user puts where those of others are looked for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sonde import _native, procfs
from sonde.procfs import opening
from sonde.resolve.binaries import Binaries
from sonde.resolve.counters import Counters
from sonde.resolve.mappings import Mapping
from sonde.resolve.naming_budget import NamingBudget
from sonde.resolve.perf_maps import PerfMaps
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.tracked_process import TrackedProcess
from symbol_programs import build, plugin

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts and acts as another user"),
]

ATTACKER, GONE = 12_345, (1 << 22) + 1
"""A user; a pid that no process has."""
CODE = 0x7F00_0000_0000

OVERLAY = """
set -e
mount -t tmpfs none "$1"
mkdir -p "$1/low$(dirname "$2")" "$1/empty" "$1/ov"
n=0
until [ "$(stat -c %i "$1/low$2" 2>/dev/null)" = "$3" ]; do
  n=$((n + 1)); [ $n -lt 300 ]
  : > "$1/f$n"
  [ "$(stat -c %i "$1/f$n")" != "$3" ] || { cat "$4" > "$1/f$n"; mv "$1/f$n" "$1/low$2"; }
done
cp "$5" "$1/low/waits"
mount -t overlay -o "lowerdir=$1/low:$1/empty" none "$1/ov"
[ "$(stat -c %i "$1/ov$2")" = "$3" ]
exec chroot "$1/ov" /waits
"""
WAITS = '#include <unistd.h>\nint main(void) { char c; write(1, "ready\\n", 6); read(0, &c, 1); }\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that everybody can reach."""
    for part in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        part.chmod(0o755)
    return tmp_path


@pytest.fixture
def library(folder: Path) -> Iterator[Path]:
    """Root's, on a tmpfs: its inode has a small number, so that another user soon has the same."""
    theirs = folder / "theirs"
    theirs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", theirs], check=True)
    for number in range(100):
        (theirs / f"{number}").touch()
    yield plugin(theirs / "libwork.so")
    subprocess.run(["umount", theirs], check=True)


@pytest.fixture
def forged(folder: Path) -> Path:
    return build("named.c", folder / "forged")


@pytest.fixture
def waits(folder: Path) -> Path:
    """A program that prints that it is ready, and needs no library."""
    command = ["gcc", "-static", "-w", "-x", "c", "-", "-o", folder / "waits"]
    subprocess.run(command, input=WAITS, text=True, check=True)
    return folder / "waits"


@pytest.fixture
def binaries(library: Path) -> Iterator[Binaries]:
    """Which hold the library open: closed before it is unmounted."""
    assert library
    binaries = Binaries(Counters())
    yield binaries
    binaries.close()


@contextmanager
def _ready(command: list[Any], **more: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _mapping(file: Path, start: int = CODE) -> Mapping:
    found = file.stat()
    key = os.major(found.st_dev), os.minor(found.st_dev), found.st_ino
    return Mapping(start, start + 4096, 0, key, str(file))


def _process(pid: int, ppid: int = 0, dead_ns: int = 1) -> TrackedProcess:
    process = TrackedProcess(pid, 1, ppid, "x", ProcessImage(pid, "exec"))
    process.dead_ns = dead_ns
    return process


def _id_of_others(binaries: Binaries, file: Path) -> str:
    """What another process that maps the file is shown."""
    binary = binaries.of(_process(GONE + 1), _mapping(file))
    return binary.build_id if binary else ""


@pytest.mark.parametrize("was_known", [False, True])
def test_a_file_on_a_users_overlay_never_stands_for_the_one_that_others_run(
    binaries: Binaries, library: Path, forged: Path, waits: Path, folder: Path, was_known: bool
) -> None:
    """Path and inode number are as wanted; the parent of a dead process leads there."""
    own = folder / "own"
    own.mkdir()
    os.chown(own, ATTACKER, ATTACKER)
    inode = library.stat().st_ino
    if was_known:  # and its file no longer held open
        assert _id_of_others(binaries, library)
        binaries.close()
    script = ["unshare", "-Urm", "sh", "-c", OVERLAY, "sh", own, library, inode, forged, waits]
    who = {"user": ATTACKER, "group": ATTACKER, "extra_groups": []}
    with _ready(script, **who) as parent:
        there = os.stat(f"/proc/{parent.pid}/root{library}")  # noqa: PTH116
        assert (there.st_ino, there.st_size) == (inode, forged.stat().st_size)
        mine = binaries.of(_process(GONE, parent.pid), _mapping(library))
        assert mine is not None
        assert mine.build_id in ("", _native.build_id(str(library)))
        assert _id_of_others(binaries, library) == _native.build_id(str(library))


def test_what_a_process_maps_in_the_place_of_a_library_does_not_stand_for_it(
    binaries: Binaries, library: Path, forged: Path
) -> None:
    with forged.open("rb") as file:
        view = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE)
    start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(view))
    mine = binaries.of(_process(os.getpid(), dead_ns=0), _mapping(library, start))
    del anchor
    view.close()
    assert mine is not None
    assert mine.build_id == _native.build_id(str(library))  # by its path
    assert _id_of_others(binaries, library) == _native.build_id(str(library))


def test_a_file_on_an_overlay_of_the_machines_own_is_found_and_shared(
    binaries: Binaries, folder: Path, library: Path
) -> None:
    """As container runtimes mount them, also when its process is gone."""
    top, empty = folder / "top", folder / "empty"
    top.mkdir()
    empty.mkdir()
    layers = f"lowerdir={library.parent}:{empty}"
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "none", top], check=True)
    try:
        inside = top / library.name
        fd = os.open(inside, os.O_RDONLY)
        view = mmap.mmap(fd, 4096, mmap.MAP_PRIVATE)
        os.close(fd)
        start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(view))
        lines = (procfs.read_maps(os.getpid()) or b"").decode().split("\n")
        fields = next(line.split() for line in lines if line.startswith(f"{start:x}-"))
        major, _, minor = fields[3].partition(":")
        key = int(major, 16), int(minor, 16), int(fields[4])
        found = []
        for dead_ns in (0, 1):
            mapping = Mapping(start, start + 4096, 0, key, str(inside))
            process = _process(os.getpid(), dead_ns=dead_ns)
            process.party_of_parent = procfs.party_of(os.getpid())
            found.append(binaries.of(process, mapping))
        del anchor
        view.close()
        assert found[0] is found[1] is not None
        assert found[0].build_id == _native.build_id(str(library))
    finally:
        binaries.close()
        procfs.BROKER.close()
        subprocess.run(["umount", top], check=True)


def _perf_map_name(folder: Path, waits: Path, links_to: str) -> str:
    """The name of code, by the map of a process in a root whose /tmp is a link."""
    root = folder / "root"
    (root / "maps").mkdir(parents=True)
    (root / "tmp").symlink_to(links_to)
    (root / "waits").write_bytes(waits.read_bytes())
    (root / "waits").chmod(0o755)
    with _ready(["chroot", root, "/waits"]) as process:
        for where, name in ((folder / "host", "host_secret"), (root / "maps", "own_code")):
            where.mkdir(mode=0o700, exist_ok=True)
            (where / f"perf-{process.pid}.map").write_text(f"{CODE:x} 1000 {name}\n")
        maps = PerfMaps(Counters(), NamingBudget())
        found = maps.find(_process(process.pid, dead_ns=0), CODE, 1 << 60)
    return found.function if found else ""


def test_a_perf_map_is_read_where_its_process_has_it_and_never_on_the_host(
    folder: Path, waits: Path
) -> None:
    assert _perf_map_name(folder, waits, str(folder / "host")) == ""


@pytest.mark.parametrize("links_to", ["/maps", "../../../maps"])
def test_links_below_a_processs_root_lead_to_where_they_lead_the_process(
    folder: Path, waits: Path, links_to: str
) -> None:
    assert _perf_map_name(folder, waits, links_to) == "own_code"


@pytest.mark.parametrize("openat2", [opening.OPENAT2, 9999])
def test_without_openat2_links_lead_below_a_root_and_magic_ones_nowhere_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openat2: int
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "up").symlink_to("../../../../a/b")
    (tmp_path / "top").symlink_to("/a")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "host").symlink_to("/etc/passwd")
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(opening, "OPENAT2", openat2)  # 9999 is no system call
    flags = os.O_PATH | os.O_CLOEXEC
    root = os.open(tmp_path, os.O_PATH)
    subprocess.run(["mount", "-t", "proc", "proc", tmp_path / "proc"], check=True)
    try:
        expected = (tmp_path / "a/b/file").stat().st_ino
        for path in ("a/b/file", "link/b/file", "../a/b/file", "up/file", "top/b/../b//file"):
            fd = opening.hold_below(root, path, flags)
            assert os.fstat(fd).st_ino == expected
            os.close(fd)
        fd = opening.hold_below(root, "host", flags | os.O_NOFOLLOW)
        assert Path(f"/proc/self/fd/{fd}").readlink().name == "host"
        os.close(fd)
        for path, number in (
            ("host", errno.ENOENT),
            ("loop", errno.ELOOP),
            ("a/b/file/x", errno.ENOTDIR),
            (f"proc/{os.getpid()}/root/etc", errno.ELOOP),
        ):
            with pytest.raises(OSError, match=os.strerror(number)):
                opening.hold_below(root, path, flags)
    finally:
        subprocess.run(["umount", tmp_path / "proc"], check=True)
        os.close(root)
