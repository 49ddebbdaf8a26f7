# SPDX-License-Identifier: Apache-2.0
"""Writes private files, also as root into directories that other users may write to.

Files of Sonde contain data on other users' processes, so each has mode 0600; under sudo it belongs
to the caller. The components of a path are opened one by one: a symbolic link that belongs to
neither root nor the caller is refused. A file is created under an unused name, and replaced by
renaming; of existing files only pipes and character devices are opened for writing. Folders are
made and filled through descriptors, so exchanging a new folder has no effect.

All output of Sonde is written here (`tests/unit/test_architecture.py` lists the exceptions).
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
_MAX_LINKS = 40
"""The kernel's limit for one path."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OWN_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Opened:
    """An open file: a new one, or an existing stream."""

    fd: int
    is_stream: bool
    """A pipe, a terminal or another character device; or an own descriptor (/dev/stdout), of any
    type."""


def caller(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(uid, gid) of the caller of sudo; None without sudo, if root called it, or if not root.

    SUDO_UID and SUDO_GID are used by root only, and only if they are plain numbers.
    """
    if os.geteuid() != 0:
        return None
    numbers = [environ.get(name, "") for name in ("SUDO_UID", "SUDO_GID")]
    if not all(re.fullmatch(r"[0-9]{1,10}", number) for number in numbers):
        return None
    uid, gid = map(int, numbers)
    return (uid, gid) if 0 < uid < (1 << 32) - 1 and gid < (1 << 32) - 1 else None


def create(path: Path, force: bool = False) -> Opened:
    """Make the file, or open the pipe or character device that is there. Raises SinkError.

    An existing file is an error, unless `force`: then a new file replaces it atomically. The old
    file, or the target of a link, is not written to.
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
    """A stream whose content replaces `path` when it is complete. Raises SinkError.

    The new file has mode 0600, whatever the old one had. `for_folders_owner`: as root, make the
    owner of its folder its owner, too, for the state of a service that runs as that user.
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
    """An open directory, in which files are made even where its path leads elsewhere by now."""

    def __init__(self, fd: int, path: Path) -> None:
        """`path`: for messages."""
        self._fd, self.path = fd, path

    @property
    def fd(self) -> int:
        """A descriptor of it, open until the context manager that gave this folder ends."""
        return self._fd

    def write(self, name: str, content: bytes) -> None:
        """Write a new file of mode 0600. Raises SinkError, also where the name exists."""
        with _reported(self.path / name):
            fd = os.open(name, _NEW, MODE, dir_fd=self._fd)
            with os.fdopen(fd, "wb") as out:
                out.write(content)

    @contextlib.contextmanager
    def make(self, name: str) -> Iterator[Folder]:
        """Make a private directory in this one. Raises SinkError, also where it exists."""
        path = self.path / name
        with _reported(path):
            made = _make_folder(self._fd, name, 0o700)
        try:
            yield Folder(made, path)
        finally:
            os.close(made)


@contextlib.contextmanager
def secret_folder(path: Path, holds: str = "keys") -> Iterator[Folder]:
    """A directory for what only its owner may read, such as keys, made if it is missing. Raises
    SinkError; UsageError where this is root and others than root and the caller of sudo could
    change or exchange the directory.

    `holds`: what is kept in it, for the message.
    """
    with _folder(path / "x", make=0o700) as (fd, _):
        if os.geteuid() == 0 and not is_ours(fd):
            raise UsageError(
                f"{path} could be changed by other users, and with it the {holds} in it",
                "choose a directory that only you can write to, in none that others own",
            )
        yield Folder(fd, path)


def make_folder(path: Path) -> None:
    """Make a directory and its parents, where they are missing. Raises SinkError."""
    with _reported(path), _folder(path / "x", make=0o777):
        pass


def is_ours(fd: int) -> bool:
    """Whether only root, this user and the caller of sudo can change an open file or directory.

    As root, also whether no other user can exchange it at its path. Another user's process
    endangers nobody else, and may share directories with its group.
    """
    called_by = caller()
    trusted = {*owners(), *([called_by[0]] if called_by else [])}
    found = os.fstat(fd)
    if os.geteuid() != 0:
        return found.st_uid in trusted and not found.st_mode & stat.S_IWOTH
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
    try:
        return only_ours(path, trusted) and os.path.samestat(path.lstat(), found)
    except OSError:
        return False


def _make_folder(within: int, name: str, mode: int) -> int:
    """Make and open a directory. Raises OSError; SinkError where it was exchanged."""
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
    """Remove `path` if it still is the file `made`; otherwise do nothing."""
    with contextlib.suppress(OSError, SinkError), _folder(path) as (folder, name):
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(there.st_mode) and os.path.samestat(there, made):
            os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turns OSError and ValueError into SinkError."""
    try:
        yield
    except OSError as error:
        raise SinkError(
            f"cannot write {path}: {error.strerror or error}",
            "choose another path with -o, or free some space",
        ) from error
    except ValueError as error:  # A NUL byte in the path.
        raise SinkError(f"{str(path)!r} is not a path: {error}", "check the path") from error


@contextlib.contextmanager
def _folder(path: Path, make: int | None = None) -> Iterator[tuple[int, str]]:
    """(descriptor of the parent directory of `path`, file name), opened component by component.

    `make`: the mode of missing directories, which are then made.
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
                    if links > _MAX_LINKS:
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


def _trust(found: os.stat_result, path: Path, what: str) -> None:
    """Raise SinkError if this is root, and what was found is neither root's nor the caller's.

    `what`: words for it.
    """
    called_by = caller()
    if os.geteuid() == 0 and found.st_uid not in (0, called_by[0] if called_by else 0):
        raise SinkError(
            f"{path} is not written: {what} on its path belongs to user {found.st_uid}",
            "choose a directory of your own with -o",
        )


def _stream(path: Path, folder: int, name: str) -> int | None:
    """A descriptor of `path` if it is a pipe, a character device or an own descriptor; None for a
    file or nothing.

    Raises SinkError for other types (a directory, a socket, a disk).
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
    _trust(at, path, "the existing file")
    _trust(to, path, "the existing file")
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=folder)
    opened = os.fstat(fd)
    if not os.path.samestat(opened, to):  # exchanged meanwhile
        os.close(fd)
        raise SinkError(f"cannot write {path}: it changed while it was opened", "try again")
    return fd


def _own_descriptor(path: Path) -> int | None:
    """The descriptor that a path such as /dev/stdout refers to; None for other paths."""
    text = str(path)
    if text in ("/dev/stdout", "/dev/stderr"):
        return 1 if text == "/dev/stdout" else 2
    match = _OWN_DESCRIPTOR.fullmatch(text)
    return int(match[1]) if match else None


def _draft(folder: int) -> tuple[int, str]:
    """Make a new file with an unpredictable name: (descriptor, name)."""
    name = f".sonde-{os.urandom(8).hex()}"
    fd = os.open(name, _NEW, MODE, dir_fd=folder)
    _give(fd, folder)
    return fd, name


def _give(fd: int, folder: int) -> None:
    """Make the caller of sudo the owner of a new file, if they may write to its directory.

    Elsewhere it stays root's: permission to record is no permission to own files in /etc.
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
