# SPDX-License-Identifier: Apache-2.0
"""Two images, one after the other on one loop device: a file of the first one has the device,
inode, size and times of another file in the second."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sonde import procfs
from sonde.resolve import Resolver
from sonde.resolve.binary import FileIdentity
from sonde.resolve.build_id_links import BuildIdLinks
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind.code_files import key_of_file
from symbol_programs import Talking, build

TOOLS = ("losetup", "mkfs.ext4", "mount")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts images as root"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' '.join(MISSING)}"),
    pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="needs loop devices"),
]

ONE, OTHER = 12_345, 12_346
"""Two users."""
BUILD_ID = "ab" * 20
NAMES = (b"hidden_work", b"forged_work")


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Loop:
    """A loop device, whose image is changed."""

    def __init__(self, image: Path, place: Path) -> None:
        self._place = place
        try:
            self.device = _output("losetup", "--find", "--show", image)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no loop device: {error.stderr}")
        self._image = image

    def attach(self, image: Path) -> None:
        """Another image on the same device."""
        self._detach()
        _output("losetup", self.device, image)
        self._image = image

    def rewrite(self, image: Path) -> None:
        """Another content of the image that is on the device, which stays there."""
        self._image.write_bytes(image.read_bytes())
        _output("blockdev", "--flushbufs", self.device)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """The image's program."""
        _output("mount", "-t", "ext4", "-o", "ro,noload", self.device, self._place)
        try:
            yield self._place / "program"
        finally:
            self._unmount()

    def _unmount(self) -> None:
        until_s = time.monotonic() + 10  # the kernel needs a moment after the program's end
        while subprocess.run(["umount", self._place], check=False, capture_output=True).returncode:
            assert time.monotonic() < until_s
            time.sleep(0.05)

    def _detach(self) -> None:
        _output("losetup", "--detach", self.device)
        until_s = time.monotonic() + 10
        while Path(f"/sys/block/{Path(self.device).name}/loop/backing_file").exists():
            assert time.monotonic() < until_s
            time.sleep(0.05)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self._place], check=False, capture_output=True)
        subprocess.run(["losetup", "--detach", self.device], check=False, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that everybody can reach."""
    for part in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        part.chmod(0o755)
    return tmp_path


@pytest.fixture
def images(folder: Path) -> tuple[Path, Path]:
    """They differ in a name within the program alone, which no time shows."""
    content = folder / "content"
    content.mkdir(mode=0o755)
    build("named.c", content / "program", "-static", f"-Wl,--build-id=0x{BUILD_ID}")
    first, second = folder / "first.img", folder / "second.img"
    with first.open("wb") as file:
        file.truncate(8 << 20)
    _output("mkfs.ext4", "-q", "-d", content, first)
    second.write_bytes(first.read_bytes().replace(*NAMES))
    return first, second


@pytest.fixture
def loop(images: tuple[Path, Path], folder: Path) -> Iterator[Loop]:
    place = folder / "mounted"
    place.mkdir()
    loop = Loop(images[0], place)
    yield loop
    loop.close()


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    resolver = Resolver()
    yield resolver
    resolver.close()


def _process(resolver: Resolver, pid: int) -> TrackedProcess:
    found = procfs.read_stat(pid)
    assert found
    return resolver.processes.find(pid, found.start_ns)


def _looked_at(resolver: Resolver, program: Path, user: int) -> tuple[str, FileIdentity, str]:
    """(function, identity of the file, key of its unwind table) of what a user runs."""
    with Talking(program, user=user, group=user, cwd="/") as talking:
        process = _process(resolver, talking.pid)
        address = next(iter(talking.addresses.values())) + 1
        (known,) = resolver.resolve(process, [], [address])
        mapping = process.space().find(address)
        assert mapping is not None
        binary = resolver.file_of(process, mapping)
        assert binary is not None
        found = known.frame.function, binary.identity, key_of_file(binary)
    later_ns = time.monotonic_ns() + 60 * 10**9
    for _ in range(2):
        resolver.tick(later_ns)
    return found


@pytest.mark.parametrize(
    ("users", "swap"),
    [((ONE, OTHER), "attach"), ((ONE, OTHER), "rewrite"), ((ONE, ONE), "attach")],
    ids=["two users", "two users on one attached image", "one user"],
)
def test_a_program_has_the_names_and_tables_of_its_own_image(
    resolver: Resolver,
    images: tuple[Path, Path],
    loop: Loop,
    users: tuple[int, int],
    swap: str,
) -> None:
    with loop.mounted() as program:
        if users[0] == users[1] and not procfs.disk_number(program.stat().st_dev):
            pytest.skip("this kernel does not number disks")
        first = _looked_at(resolver, program, users[0])
    getattr(loop, swap)(images[1])
    with loop.mounted() as program:
        second = _looked_at(resolver, program, users[1])
    assert first[1] == second[1], "the images differ by more than was meant"
    assert (first[0], second[0]) == tuple(name.decode() for name in NAMES)
    assert first[2] != second[2]


def test_a_program_of_the_same_image_is_known_again(resolver: Resolver, loop: Loop) -> None:
    with loop.mounted() as program:
        first, second = (_looked_at(resolver, program, ONE) for _ in range(2))
    assert first == second


def test_a_medium_can_be_unmounted_soon_after_its_programs_have_ended(
    resolver: Resolver, loop: Loop
) -> None:
    with loop.mounted() as program:
        with Talking(program, user=ONE, group=ONE, cwd="/") as talking:
            process = _process(resolver, talking.pid)
            assert resolver.resolve(process, [], [talking.addresses["main"] + 1])
            resolver.tick(time.monotonic_ns())
            assert resolver.usage()["files_open"] == 1
        process.dead_ns = time.monotonic_ns()
        resolver.tick(process.dead_ns + 10**9)
        assert resolver.usage()["files_open"] == 1  # its last samples are to come
        resolver.tick(process.dead_ns + 4 * 10**9)
        assert resolver.usage()["files_open"] == 0


def test_who_owns_a_file_of_an_image_is_for_its_maker_to_choose(folder: Path, loop: Loop) -> None:
    """Root does, by the image: it takes no other file's place, where source lines are read from."""
    honest = build("named.c", folder / "honest", "-O2", f"-Wl,--build-id=0x{BUILD_ID}")
    os.chown(honest, ONE, ONE)
    links = BuildIdLinks(folder / "links")
    with loop.mounted() as program:
        assert program.stat().st_uid == 0
        links.record(BUILD_ID, str(honest), honest.stat())
        assert links.find(BUILD_ID) == honest
        links.record(BUILD_ID, str(program), program.stat())
        assert links.find(BUILD_ID) is None
        os.chown(honest, 0, 0)
        for path in (honest, program):
            links.record(BUILD_ID, str(path), path.stat())
            assert links.find(BUILD_ID) == honest
