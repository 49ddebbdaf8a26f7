# SPDX-License-Identifier: Apache-2.0
"""Whether the identity of a file (device, inode, size, times) is that of its content.

It is where root alone chooses what is on the device: the kernel sets ctime then. Not on images and
removable media: users have them mounted (udisks, Apptainer), with any inode and times, one after
another under the same device number. So of two files with one identity there, one may be somebody
else's, made so that it passes for the other.

Users can wait until nothing holds the first file open. So what is kept of a file on such a device
is kept for one party (a user or a container), and for one disk (`disk_number`): a party can mislead
nobody but itself. A digest of the content would cost as much as what is kept, and to hold files
open would keep users from unmounting their media.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Final

_BY_USERS: Final = frozenset((0, 7, 11, 43))
"""Major numbers: none, loop, sr, nbd (Documentation/admin-guide/devices.txt)."""
_IMAGES: Final = re.compile(r"loop|sr\d|nbd|ublk")
_PLUGGED: Final = re.compile(r"/usb\d")
"""Of disks that anybody may plug in, removable or not."""
_DEVICES: Final = "/sys/dev/block"
_BY_NAME: Final = "/sys/class/block"
_MAX_LEVELS: Final = 8
"""Devices that are mapped to one another and looked at."""


def keeps_identity(device: int) -> bool:
    """Whether root alone chooses what is on a device (st_dev), and has no other in its place.

    Not without a major number: FUSE can report anything, and such numbers are used again. Not on
    images and removable media, parts of them, and what is mapped to them.
    """
    if os.major(device) in _BY_USERS:
        return False
    return _is_fixed(f"{_DEVICES}/{os.major(device)}:{os.minor(device)}", _MAX_LEVELS)


def disk_number(device: int) -> int:
    """Number that the kernel has for what is in a device (st_dev) now, and gives to nothing else
    until the next boot; 0: none (before Linux 5.15, or without a major number)."""
    if os.major(device):
        with suppress(OSError, ValueError):
            return int(_read(f"{_disk_at(_path_of(device))}/diskseq"))
    return 0


def _path_of(device: int) -> str:
    return f"{_DEVICES}/{os.major(device)}:{os.minor(device)}"


def _is_fixed(path: str, levels: int) -> bool:
    """The same of a device by its path below /sys; `levels`: of what it is mapped to."""
    if levels == 0:
        return False
    try:
        disk = _disk_at(path)
        is_image = _IMAGES.match(disk.rpartition("/")[2])
        if is_image or _PLUGGED.search(disk) or _read(f"{disk}/removable") != b"0\n":
            return False
        below = os.listdir(f"{disk}/slaves")  # noqa: PTH208
    except OSError:
        return False  # not a disk, or /sys does not show it
    return all(_is_fixed(f"{_BY_NAME}/{name}", levels - 1) for name in below)


def _disk_at(path: str) -> str:
    """The folder of a disk, or of the disk that a part is of, by a link to it. Raises OSError."""
    # Not by realpath(), which looks at every folder on the way: this is asked for each file.
    folder, target = path.rpartition("/")[0], os.readlink(path)  # noqa: PTH115
    where = os.path.normpath(os.path.join(folder, target))  # noqa: PTH118
    is_part = os.access(f"{where}/partition", os.F_OK)
    return where.rpartition("/")[0] if is_part else where


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 64)
    finally:
        os.close(fd)
