# SPDX-License-Identifier: Apache-2.0
"""Files in a party's directory, which may be in a place where others put things.

A pipe there would hang root, a device does something when it is opened, and a file may have any
size: so each is held and looked at before it is opened (`input_files`), and has a bound. Keys are
read only where nobody else could have put them there; a state is kept only in such a directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from sonde.errors import CaptureError, UsageError
from sonde.input_files import open_input
from sonde.private_files import is_ours

KEY_BYTES: Final = 64 << 10
"""Of a file of keys, at most."""
AGREED_BYTES: Final = 1 << 20
"""Of a task or a certificate, at most."""
ROSTER_BYTES: Final = 256 << 20
"""Some two million nodes."""
STATE_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def read_text(path: Path, most_bytes: int) -> str:
    """A file that may be anybody's. Raises UsageError for what is no file or is too long; OSError,
    UnicodeDecodeError.
    """
    with _opened(path) as file:
        return _content(file, path, most_bytes).decode()


def read_secret(path: Path, most_bytes: int = KEY_BYTES) -> str:
    """The same of a file that others cannot have changed."""
    with hold_secret(path) as file:
        return _content(file, path, most_bytes).decode()


@contextmanager
def hold_secret(path: Path) -> Iterator[BinaryIO]:
    """A file of keys, open. Raises UsageError where others could have changed it; OSError."""
    with _opened(path) as file:
        if not is_ours(file.fileno()):
            raise UsageError(
                f"{path} belongs to others, or others could change it, and with it the keys in it",
                "keep it in a directory of your own, chmod go-w, or run as the user that owns it",
            )
        yield file


def hold_state(directory: Path) -> int:
    """A directory that a party keeps its state in, as a descriptor. Raises UsageError where others
    could change what is in it; OSError.
    """
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if is_ours(held):
        return held
    os.close(held)
    raise UsageError(
        f"the state in {directory} belongs to others, or others could change it",
        "give its directory to the user that runs this, chmod go-w, or run as its owner",
    )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = open_input(path)
    except CaptureError as error:
        raise UsageError(error.cause, "put the file there as it was made") from error
    with file:
        yield file


def _content(file: BinaryIO, path: Path, most_bytes: int) -> bytes:
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UsageError(
            f"{path} is longer than {most_bytes:,} bytes", "put the file there as it was made"
        )
    return content
