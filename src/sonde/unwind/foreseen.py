# SPDX-License-Identifier: Apache-2.0
"""Which files a program will have mapped at its start, as far as is told without running it."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from typing import Final

from sonde import procfs

_EVERYBODYS: Final = re.compile(r"(ld-|libc\b|libm\b|libpthread\b|libstdc\+\+|libgcc_s|libpython)")
_MOST_SCRIPTS: Final = 4
"""Scripts that name a script as their interpreter; the kernel follows as many."""
_HEAD_BYTES: Final = 256


def files(program: str) -> list[str]:
    """The program, or what interprets it, and the libraries of everybody as this process has them:
    a program that is launched from here has most likely the same."""
    found = _interpreters(program)
    with suppress(OSError), procfs.MapsReader("self") as reader:
        for line in reader.lines():
            fields = line.split(None, 5)
            path = os.fsdecode(fields[5]) if len(fields) == 6 else ""
            if b"x" in fields[1] and _EVERYBODYS.match(path.rpartition("/")[2]):
                found.append(path)
    return list(dict.fromkeys(found))


def _interpreters(program: str) -> list[str]:
    found = []
    for _ in range(_MOST_SCRIPTS):
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
