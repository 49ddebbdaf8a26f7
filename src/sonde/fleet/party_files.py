# SPDX-License-Identifier: Apache-2.0
"""Bounded, checked access to the files in a party's directory.

Others may be able to write to that directory. A pipe would block root, opening a device has
effects, and a file may have any size. Each file is therefore checked before it is opened
(`input_files`), and its size is bounded. Keys are read, and a state is stored, only where nobody
else could have written.
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

MAX_KEY_FILE_BYTES: Final = 64 << 10
"""Maximum size of a file of keys."""
MAX_TASK_FILE_BYTES: Final = 1 << 20
"""Maximum size of a task or a certificate."""
MAX_ROSTER_BYTES: Final = 256 << 20
"""Maximum size of a roster: about two million nodes."""
STATE_OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""With which files of a state are opened: no link, pipe or terminal in their place has an effect.
"""


def read_text(path: Path, max_bytes: int) -> str:
    """Reads a file of any owner. Raises UsageError if it is not a regular file or is too long;
    OSError, UnicodeDecodeError.
    """
    with _opened(path) as file:
        return _content(file, path, max_bytes).decode()


def read_secret(path: Path, max_bytes: int = MAX_KEY_FILE_BYTES) -> str:
    """Reads a file that others cannot have changed. Raises as `read_text` does."""
    with open_secret(path) as file:
        return _content(file, path, max_bytes).decode()


@contextmanager
def open_secret(path: Path) -> Iterator[BinaryIO]:
    """Opens a file of keys. Raises UsageError if others could have changed it; OSError."""
    with _opened(path) as file:
        if not is_ours(file.fileno()):
            raise UsageError(
                f"{path} belongs to others, or others could change it, and with it the keys in it",
                "keep it in a directory of your own, chmod go-w, or run as the user that owns it",
            )
        yield file


def open_state_directory(directory: Path) -> int:
    """Opens the directory of a party's state and returns its descriptor. Raises UsageError if
    others could change its contents; OSError.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if is_ours(descriptor):
        return descriptor
    os.close(descriptor)
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


def _content(file: BinaryIO, path: Path, max_bytes: int) -> bytes:
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UsageError(
            f"{path} is longer than {max_bytes:,} bytes", "put the file there as it was made"
        )
    return content
