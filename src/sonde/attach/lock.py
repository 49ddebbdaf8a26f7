# SPDX-License-Identifier: Apache-2.0
"""One attach to a process at a time: the agent and a command may try at the same moment.

The lock is a file in a folder that only this user can write to. What everybody may open (/proc/PID,
for example) everybody may lock, and so prevent all attaches to that process.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sonde.attach import library, process
from sonde.errors import SinkError, TargetRefused

_RETRY_S = 0.02
"""Between two tries for the lock."""


@contextmanager
def alone(pid: int, patience_s: float) -> Iterator[None]:
    """Wait until no other attach of this user to the process goes on, and keep others waiting. The
    kernel drops the lock when this process dies.

    Raises ProcessGone, SinkError where no folder can hold the lock, TargetRefused when the other
    one takes longer than `patience_s`.
    """
    path = _folder() / f"attach-{pid}-{process.start_time(pid)}.lock"
    deadline = time.monotonic() + patience_s
    while (fd := _locked(path)) is None:
        if time.monotonic() > deadline:
            raise TargetRefused(
                f"somebody else is attaching to process {pid}", "Wait until that is done."
            )
        time.sleep(_RETRY_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is unlocked: a waiter then sees another inode
        os.close(fd)


def _locked(path: Path) -> int | None:
    """The locked file, or None where another has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.lstat().st_ino:
            return fd
    os.close(fd)
    return None


def _folder() -> Path:
    problems = []
    for folder in library.runtime_folders():
        try:
            library.require_own(folder)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
        else:
            if os.access(folder, os.W_OK):
                return folder
            problems.append(f"{folder}: read-only")
    raise SinkError(
        f"no folder can keep attaches apart ({'; '.join(problems)})", "Make one of them writable."
    )
