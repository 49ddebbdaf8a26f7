# SPDX-License-Identifier: Apache-2.0
"""One file with code in it, and how it is identified."""

from __future__ import annotations

import os
from itertools import count
from typing import Final, NamedTuple

from sonde import _native

FileKey = tuple[int, int, int]
"""(major, minor, inode) of the device and file, as /proc/PID/maps and mmap events show them."""

_ELF_MAGIC: Final = b"\x7fELF"
_indices = count(1)


class FileIdentity(NamedTuple):
    """One version of a file's content, where its device keeps identities (`procfs.devices`). A file
    that reuses the inode differs in `ctime_ns`."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    """Time of the last change of the content. Its owner can set it."""
    ctime_ns: int
    """Time of the last change of the inode. Only the kernel sets it."""


_NOT_READ: Final = FileIdentity(0, 0, 0, 0, 0)


class Binary:
    """One file with code in it. It has no name: each process may have it under another one."""

    __slots__ = (
        *("build_id", "fd", "identity", "index", "is_copy", "is_elf"),
        *("is_everybodys", "key", "kind", "linked"),
    )

    def __init__(self, kind: str = "user") -> None:
        self.index = next(_indices)
        """Number of the content: it changes when the file changes."""
        self.kind = kind
        """Kind of its frames: user, vdso."""
        self.build_id = ""
        """In hex; '' without one."""
        self.is_elf = False
        self.key: FileKey | None = None
        """Of the file itself; None where it is known for one mapping only."""
        self.is_everybodys = True
        """Whether all processes that map the file share it: no other file can have its identity."""
        self.is_copy = False
        """`fd` is a copy in memory: reads of the file itself could block. Its `identity` may also
        be that of another user's file, so nothing is looked up by it."""
        self.fd = -1
        """Open for reading; -1 while closed."""
        self.linked = 0
        """Index of the content for which `BuildIdLinks` was asked."""
        self.identity = _NOT_READ

    @property
    def holds_no_code(self) -> bool:
        """Whether the file was read and is no ELF file: just-in-time compilers map such files."""
        return self.identity.inode != 0 and not self.is_elf

    @property
    def distinct(self) -> int:
        """By what its content is kept, beside the identity: 0 where that is enough, else `index`,
        as a file of somebody else may have the same."""
        return 0 if self.is_everybodys and not self.is_copy else self.index

    @property
    def path(self) -> str:
        """A path to the open file."""
        return f"/proc/self/fd/{self.fd}"

    def use_descriptor(self, fd: int, original: FileIdentity | None = None) -> None:
        """Read the file through `fd` from now on, and update what is known of its content.

        `original`: identity of the file of which `fd` is a copy in memory; None for the file.
        Raises OSError where it cannot be read; the object is then unchanged.
        """
        status = os.fstat(fd)
        identity = original or FileIdentity(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )
        if identity != self.identity:
            is_elf = os.pread(fd, 4, 0) == _ELF_MAGIC
            if self.identity.inode:
                self.index = next(_indices)
            self.identity, self.is_elf = identity, is_elf
            self.build_id = _native.build_id(f"/proc/self/fd/{fd}") if is_elf else ""
        self.fd, self.is_copy = fd, original is not None
