# SPDX-License-Identifier: Apache-2.0
"""What the child (serve.py) reads of the folder of a control group, for `procfs.group_folders`.

Without its package, as serve.py. Who keeps the folder locked makes a lookup in it wait so that not
even SIGKILL ends it, but a listing so that it does: so a listing comes first, and most children
that are lost over a folder end at once.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # without typing, which the child would import for nothing
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_CLOEXEC
LINKS_OF_EMPTY = 2
"""st_nlink of a folder without folders in it: kernfs, the file system of control groups, adds one
for each."""
ONE_READ = 4096
"""Bytes that the kernel returns at once."""
GETDENTS64 = {"x86_64": 217, "aarch64": 61}.get(os.uname().machine, -1)
ENTRIES_BYTES = 64
"""Room for an entry or two."""

listed: Callable[[int], object] | None = None


def read_group(
    folder: str, names: list[str], limit: int, most_below: int, opens: bool
) -> tuple[tuple[int, int, list[tuple[str, int, int]], int, list[Any]], list[int]]:
    """((inode, owner, (name, inode, owner) of `most_below` groups below it at most, how many more
    there are, the content of these files, cut at `limit` bytes), descriptors). `opens`: the files
    are opened, not read: True in place of a content, and a descriptor. None for a file that is not
    there. Raises OSError."""
    fd = os.open(folder, FOLDER)
    opened: list[int] = []
    try:
        found = os.fstat(fd)
        below: list[tuple[str, int, int]] = []
        more = 0
        if most_below and found.st_nlink != LINKS_OF_EMPTY:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                    if len(below) < most_below:
                        uid = entry.stat(follow_symlinks=False).st_uid
                        below.append((entry.name, entry.inode(), uid))
                    else:
                        more += 1
        elif names:
            begin_listing(fd)
        contents: list[Any] = []
        for name in names:
            try:
                file = os.open(name, FILE, dir_fd=fd)
            except OSError:
                contents.append(None)
                continue
            if opens:
                opened.append(file)
                contents.append(True)
            else:
                contents.append(content_of(file, limit))
        return (found.st_ino, found.st_uid, below, more, contents), opened
    except BaseException:
        for file in opened:
            os.close(file)
        raise
    finally:
        os.close(fd)


def content_of(file: int, limit: int) -> bytes | None:
    try:
        piece = os.read(file, limit)
        if limit <= ONE_READ:
            return piece
        pieces = [piece]
        while piece and (limit := limit - len(piece)) > 0:
            piece = os.read(file, limit)
            pieces.append(piece)
        return b"".join(pieces)
    except OSError:
        return None
    finally:
        os.close(file)


def begin_listing(fd: int) -> None:
    """Wait, in a way that SIGKILL ends, until the folder is not locked."""
    global listed
    if listed is None:
        import ctypes

        call = ctypes.CDLL(None, use_errno=True).syscall
        number, size = ctypes.c_long(GETDENTS64), ctypes.c_size_t(ENTRIES_BYTES)
        buffer = ctypes.create_string_buffer(ENTRIES_BYTES)

        def begun(fd: int) -> object:
            return call(number, fd, buffer, size) if GETDENTS64 >= 0 else None

        listed = begun
    listed(fd)
