# SPDX-License-Identifier: Apache-2.0
"""Predicts which files a program will map at its start, without running it."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from typing import Final

from sonde import procfs

_COMMON_LIBRARIES: Final = re.compile(
    r"(ld-|libc\b|libm\b|libpthread\b|libstdc\+\+|libgcc_s|libpython)"
)
_MAX_SCRIPTS: Final = 4
"""Scripts whose interpreter is a script, nested as deep as the kernel allows (fs/exec.c)."""
_HEAD_BYTES: Final = 256


def startup_files(program: str) -> list[str]:
    """Paths of the program, its interpreters, and common libraries as this process maps them: a
    program launched from here most likely maps the same ones."""
    found = _interpreters(program)
    with suppress(OSError), procfs.MapsReader("self") as reader:
        for line in reader.lines():
            fields = line.split(None, 5)
            path = os.fsdecode(fields[5]) if len(fields) == 6 else ""
            if b"x" in fields[1] and _COMMON_LIBRARIES.match(path.rpartition("/")[2]):
                found.append(path)
    return list(dict.fromkeys(found))


def _interpreters(program: str) -> list[str]:
    found = []
    for _ in range(_MAX_SCRIPTS):
        found.append(program)
        fd = procfs.open_regular(program, follow=True)
        if fd is None:
            break
        try:
            head = os.pread(fd, _HEAD_BYTES, 0)
        except OSError:
            break
        finally:
            os.close(fd)
        words = head.partition(b"\n")[0][2:].split() if head.startswith(b"#!") else []
        if not words:
            break
        program = os.fsdecode(words[0])
        if program.endswith("/env") and len(words) > 1:
            program = shutil.which(os.fsdecode(words[1])) or program
    return found
