# SPDX-License-Identifier: Apache-2.0
"""Files for one user's eyes, written by root into directories that others may write, too.

What Sonde writes holds what other users' processes did, so each file has mode 0600; under sudo it
belongs to the caller. The steps of a path are opened one by one: a symbolic link that belongs to
neither root nor the caller is refused. A file is created under a name that was free, and replaced
by renaming; nothing that exists is opened for writing but pipes and character devices. Folders
are made and filled through descriptors: who exchanges one that was just made changes nothing.

Whatever Sonde writes goes through here (`tests/unit/test_architecture.py` lists the exceptions).
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sonde.errors import SinkError, UsageError
from sonde.ownership import only_ours, owners

MODE = 0o600
_MOST_LINKS = 40
"""As many as the kernel follows in one path."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OWN_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Opened:
    """An open file: one of our own making, or a stream."""

    fd: int
    is_stream: bool
    """A pipe, a terminal or another character device; or standard output, whatever it is."""


def caller(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(uid, gid) of who called sudo; None when nobody did, root did, or this is not root.

    The variables count for root alone, and only where they are plain numbers.
    """
    if os.geteuid() != 0:
        return None
    numbers = [environ.get(name, "") for name in ("SUDO_UID", "SUDO_GID")]
    if not all(re.fullmatch(r"[0-9]{1,10}", number) for number in numbers):
        return None
    uid, gid = map(int, numbers)
    return (uid, gid) if 0 < uid < (1 << 32) - 1 and gid < (1 << 32) - 1 else None


def create(path: Path, force: bool = False) -> Opened:
    """Make the file, or open the stream that is there. Raises SinkError.

    A file that exists is an error, unless `force`: then a new one takes its name at once. What the
    name stood for, a link included, is not written to.
    """
    with _reported(path), _folder(path) as (folder, name):
        found = _stream(path, folder, name)
        if found is not None:
            return Opened(found, is_stream=True)
        if not force:
            try:
                fd = os.open(name, _NEW, MODE, dir_fd=folder)
            except FileExistsError as error:
                raise SinkError(
                    f"{path} exists", "choose another name with -o, or --force"
                ) from error
            _give(fd, folder)
            return Opened(fd, is_stream=False)
        fd, draft = _draft(folder)
        try:
            os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.close(fd)
            os.unlink(draft, dir_fd=folder)
            raise
        return Opened(fd, is_stream=False)


@contextlib.contextmanager
def replacing(path: Path, *, for_folders_owner: bool = False) -> Iterator[BinaryIO]:
    """A stream whose content takes the place of `path` once it is whole. Raises SinkError.

    The new file has mode 0600, whatever the old one had. `for_folders_owner`: root gives it to the
    owner of its folder, for the state of a service that runs as that user.
    """
    with _reported(path), _folder(path) as (folder, name):
        found = _stream(path, folder, name)
        if found is not None:
            with os.fdopen(found, "wb") as out:
                yield out
            return
        fd, draft = _draft(folder)
        try:
            with os.fdopen(fd, "wb") as out:
                if for_folders_owner and os.geteuid() == 0:
                    owner = os.fstat(folder)
                    os.fchown(fd, owner.st_uid, owner.st_gid)
                yield out
            os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(draft, dir_fd=folder)
            raise


class Folder:
    """A directory held open; what is made in it lands there, whatever its name leads to by now."""

    def __init__(self, fd: int, path: Path) -> None:
        """`path`: for messages."""
        self._fd, self.path = fd, path

    def write(self, name: str, content: bytes) -> None:
        """A new file of mode 0600. Raises SinkError, also where the name is taken."""
        with _reported(self.path / name):
            fd = os.open(name, _NEW, MODE, dir_fd=self._fd)
            with os.fdopen(fd, "wb") as out:
                out.write(content)

    @contextlib.contextmanager
    def make(self, name: str) -> Iterator[Folder]:
        """A new directory in this one, ours alone. Raises SinkError, also where it exists."""
        path = self.path / name
        with _reported(path):
            made = _make_folder(self._fd, name, 0o700)
        try:
            yield Folder(made, path)
        finally:
            os.close(made)


@contextlib.contextmanager
def secret_folder(path: Path) -> Iterator[Folder]:
    """A directory, made where it is missing, for keys: as root, one that nobody but root and the
    caller of sudo can change or exchange. Raises SinkError, UsageError.
    """
    with _folder(path / "x", make=0o700) as (fd, _):
        if os.geteuid() == 0 and not is_ours(fd):
            raise UsageError(
                f"{path} could be changed by other users, and with it the keys in it",
                "name a directory that only you can write, in none that others own",
            )
        yield Folder(fd, path)


def make_folder(path: Path) -> None:
    """Make a directory and those above it, unless they are there. Raises SinkError."""
    with _reported(path), _folder(path / "x", make=0o777):
        pass


def is_ours(held: int) -> bool:
    """Whether nobody but root, this user and the caller of sudo can change the file or directory
    that a descriptor holds. As root, also whether it is at its path for good, as far as others go;
    another user endangers nobody else, and may share directories with its group.
    """
    called_by = caller()
    trusted = {*owners(), *([called_by[0]] if called_by else [])}
    found = os.fstat(held)
    if os.geteuid() != 0:
        return found.st_uid in trusted and not found.st_mode & stat.S_IWOTH
    path = Path(os.readlink(f"/proc/self/fd/{held}"))  # noqa: PTH115
    try:
        return only_ours(path, trusted) and os.path.samestat(path.lstat(), found)
    except OSError:
        return False


def _make_folder(within: int, name: str, mode: int) -> int:
    """A new directory, held. Raises OSError, SinkError where another one has taken its name."""
    os.mkdir(name, mode, dir_fd=within)
    made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    if os.fstat(made).st_uid != os.geteuid():
        os.close(made)
        raise SinkError(
            f"the directory {name} was exchanged by another user while it was made",
            "choose a directory of your own",
        )
    return made


def remove(path: Path, made: os.stat_result) -> None:
    """Remove `path` if it still is the file that we made; leave anything else alone."""
    with contextlib.suppress(OSError, SinkError), _folder(path) as (folder, name):
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(there.st_mode) and os.path.samestat(there, made):
            os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"cannot write {path}: {error.strerror or error}",
            "choose another place with -o, or free some space",
        ) from error
    except ValueError as error:  # A NUL byte in the path.
        raise SinkError(f"{str(path)!r} is no path: {error}", "check the path") from error


@contextlib.contextmanager
def _folder(path: Path, make: int | None = None) -> Iterator[tuple[int, str]]:
    """The directory that `path` lies in, and its name there; each step opened by itself.

    `make`: the mode of directories to make where they are missing.
    """
    if path.name in ("", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        steps = list(reversed(path.parent.parts))
        links = 0
        while steps:
            step = steps.pop()
            try:
                found = os.open(step, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            except FileNotFoundError:
                if make is None:
                    raise
                found = _make_folder(here, step, make)
                _give(found, here)
            at = os.fstat(found)
            if stat.S_ISLNK(at.st_mode):
                try:
                    _trust(at, path, f"the link {step}")
                    links += 1
                    if links > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    steps.extend(reversed(Path(os.readlink("", dir_fd=found)).parts))
                finally:
                    os.close(found)
                continue
            os.close(here)
            here = found
        yield here, path.name
    finally:
        os.close(here)


def _trust(at: os.stat_result, path: Path, what: str) -> None:
    """Root follows and opens only what is root's own or the caller's."""
    called_by = caller()
    if os.geteuid() == 0 and at.st_uid not in (0, called_by[0] if called_by else 0):
        raise SinkError(
            f"{path} is not written: {what} on its way belongs to user {at.st_uid}",
            "choose a directory of your own with -o",
        )


def _stream(path: Path, folder: int, name: str) -> int | None:
    """A descriptor of the pipe or device that `path` is; None for a file, or nothing.

    Raises SinkError for what is neither (a directory, a socket, a disk).
    """
    number = _own_descriptor(path)
    if number is not None:
        return os.dup(number)
    try:
        at = os.stat(name, dir_fd=folder, follow_symlinks=False)
        to = os.stat(name, dir_fd=folder)
    except FileNotFoundError:  # nothing, or a link to nothing
        return None
    if stat.S_ISREG(to.st_mode):
        return None
    if not (stat.S_ISFIFO(to.st_mode) or stat.S_ISCHR(to.st_mode)):
        kind = "a directory" if stat.S_ISDIR(to.st_mode) else "neither a file nor a pipe"
        raise SinkError(f"cannot write {path}: it is {kind}", "choose another name with -o")
    _trust(at, path, "what lies there")
    _trust(to, path, "what lies there")
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=folder)
    opened = os.fstat(fd)
    if not os.path.samestat(opened, to):  # exchanged meanwhile
        os.close(fd)
        raise SinkError(f"cannot write {path}: it changed while it was opened", "try again")
    return fd


def _own_descriptor(path: Path) -> int | None:
    """The descriptor that a path such as /dev/stdout stands for."""
    text = str(path)
    if text in ("/dev/stdout", "/dev/stderr"):
        return 1 if text == "/dev/stdout" else 2
    told = _OWN_DESCRIPTOR.fullmatch(text)
    return int(told[1]) if told else None


def _draft(folder: int) -> tuple[int, str]:
    """A new file under a name that nobody foresees."""
    name = f".sonde-{os.urandom(8).hex()}"
    fd = os.open(name, _NEW, MODE, dir_fd=folder)
    _give(fd, folder)
    return fd, name


def _give(fd: int, folder: int) -> None:
    """Give our new file to the caller of sudo, if the directory is one that they may write.

    Elsewhere it stays root's: that somebody may record is no leave to own files in /etc.
    """
    to = caller()
    if to is None or not _may_write(os.fstat(folder), *to):
        return
    with contextlib.suppress(OSError):  # a file system without owners
        os.fchown(fd, *to)


def _may_write(folder: os.stat_result, uid: int, gid: int) -> bool:
    if folder.st_uid == uid:
        return bool(folder.st_mode & stat.S_IWUSR)
    try:
        groups = os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        groups = [gid]
    if folder.st_gid in groups:
        return bool(folder.st_mode & stat.S_IWGRP)
    return bool(folder.st_mode & stat.S_IWOTH)
