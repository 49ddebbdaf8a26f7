# SPDX-License-Identifier: Apache-2.0
"""Opens files that a user names, in directories where other users may put anything.

Reading a pipe there could block for ever, and opening a terminal or a device has side effects. So a
path is opened with O_PATH, checked, and reopened through that handle: only regular files are read.
Exceptions are pipes that this process already has open: /dev/stdin, or /dev/fd/N of a shell's <(…).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from sonde.errors import CaptureError
from sonde.procfs.files import reopen

_OWN_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]{1,9})")
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device or terminal"),
    (stat.S_ISBLK, "a disk"),
    (stat.S_ISSOCK, "a socket"),
)


def open_input(path: Path) -> BinaryIO:
    """Open a regular file, or a pipe of this process. Raises CaptureError for others, OSError."""
    own = own_descriptor(path)
    if own is not None and not stat.S_ISREG(os.fstat(own).st_mode):
        return os.fdopen(os.dup(own), "rb")
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_it, name in _KINDS if is_it(mode)), "not a regular file")
            remedy = "give a file"
            if stat.S_ISFIFO(mode):
                remedy = "give a file, /dev/stdin, or <(command)"
            raise CaptureError(f"{path} is {kind}", remedy)
        return os.fdopen(reopen(handle, os.O_RDONLY), "rb")
    finally:
        os.close(handle)


def read_checked(path: Path, most_bytes: int, check: Callable[[Path], None]) -> bytes:
    """The content of the file at `path`.

    `check` is called while the file is open, and may refuse the path by any error. Raises that,
    what `open_input` raises, and ValueError where the content is longer than `most_bytes`.
    """
    with open_input(path) as file:
        check(path)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"longer than {most_bytes:,} bytes")
    return content


def path_or_input(text: str) -> Path:
    """The path that a command line names; - is standard input."""
    return Path("/dev/stdin" if text == "-" else text)


def own_descriptor(path: Path) -> int | None:
    """The descriptor that a path such as /dev/stdin or /dev/fd/63 refers to, else None."""
    text = str(path)
    if text == "/dev/stdin":
        return 0
    found = _OWN_DESCRIPTOR.fullmatch(text)
    return int(found[1]) if found else None


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe that this process has open, which can be read only once.

    Raises OSError where there is no such descriptor.
    """
    own = own_descriptor(path)
    return own is not None and not stat.S_ISREG(os.fstat(own).st_mode)
