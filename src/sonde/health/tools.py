# SPDX-License-Identifier: Apache-2.0
"""Runs other programs that read hardware, and reads small files of the kernel: both with limits of
time and size, since what they return is trusted no more than any other input.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sonde import interpreter, system_libraries

OUTPUT_BYTES: Final = 1 << 20
"""A disk's SMART data as JSON has some 20 kB, a large chassis's sensors some 50 kB."""
FILE_BYTES: Final = 4_096
"""A file of sysfs has a page at most."""
TEXT_LENGTH: Final = 80
"""Characters of a name or a state."""


class Output(NamedTuple):
    """What a program wrote to its standard output, and its exit code."""

    code: int
    text: str


def find(name: str) -> str | None:
    """Path of a program in PATH or in the system's folders; None where it is in neither, or where
    root would run what others can change."""
    folders = f"{interpreter.environment()['PATH']}{os.pathsep}{interpreter.DEFAULT_PATH}"
    path = shutil.which(name, path=folders)
    return None if path is None or system_libraries.why_not(path) else path


def run(argv: Sequence[str], timeout_s: float) -> Output:
    """Run a program to its end, without input.

    Raises TimeoutError where it takes longer, and OSError where it cannot be started or writes more
    than `OUTPUT_BYTES`; it is killed then.
    """
    child = interpreter.start(argv, stdin=subprocess.DEVNULL)
    try:
        return _read_to_end(child, time.monotonic() + max(timeout_s, 0.0))
    finally:
        interpreter.give_up(child)


def _read_to_end(child: subprocess.Popen[bytes], deadline_s: float) -> Output:
    assert child.stdout is not None
    out = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while selector.select(max(deadline_s - time.monotonic(), 0.0)):
            more = os.read(child.stdout.fileno(), 65_536)
            if not more:
                return Output(_code(child, deadline_s), out.decode(errors="replace"))
            out += more
            if len(out) > OUTPUT_BYTES:
                raise OSError(f"it wrote more than {OUTPUT_BYTES >> 20} MiB")
    raise TimeoutError("it does not end")


def _code(child: subprocess.Popen[bytes], deadline_s: float) -> int:
    try:
        return child.wait(max(deadline_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired as error:
        raise TimeoutError("it does not end") from error


def read(path: Path) -> str:
    """Beginning of a file of the kernel, cleaned; '' where it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            return clean(file.read(FILE_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def clean(text: str) -> str:
    """A short text without control characters and white space around it."""
    text = text.strip()[: TEXT_LENGTH + 1]
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= TEXT_LENGTH else f"{text[:TEXT_LENGTH]}…"
