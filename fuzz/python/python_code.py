# SPDX-License-Identifier: Apache-2.0
"""What an interpreter's file publishes of its layouts, and code objects in the memory of a hostile
process: names and line tables."""

from __future__ import annotations

import os

from data import Data
from sonde import procfs
from sonde.errors import SondeError
from sonde.unwind import python_code
from sonde.unwind.cpython import FoundInterpreter, interpreter
from sonde.unwind.python_lines import line_at

_MEMORY_BYTES = 1 << 16
_VERSIONS = (0x030A0000, 0x030B0000, 0x030C0000, 0x030D0000, 0x030E0000, 0)
_fd = os.memfd_create("input", os.MFD_CLOEXEC)
_file = procfs.HeldFile(f"/proc/self/fd/{_fd}")


def one(raw: bytes) -> None:
    """Lay out an interpreter and read a code object of its process."""
    data = Data(raw)
    version, at = data.pick(_VERSIONS), data.number(16)
    published = data.part()
    if data.byte() & 1:
        published = b"xdebugpy" + published.ljust(80 * 8, b"\0")
    found = FoundInterpreter(version, 0x1000, data.number(64), (1, 2, 0, 0), published)
    memory = data.rest()
    os.ftruncate(_fd, 0)
    os.pwrite(_fd, memory[:_MEMORY_BYTES], 0)
    os.ftruncate(_fd, _MEMORY_BYTES)
    try:
        python = interpreter(found, "python3.13")
    except SondeError:
        return
    python.for_kernel(0x10000, is_musl=False)
    head = os.pread(_fd, python.code.linetable + 8, at)
    try:
        [(code, lines)] = python_code._read(_file, 1, python, [head], 0)
    except (OSError, ValueError):
        return  # as PythonCode takes it: not a code object
    assert len(code.function) <= python_code.MAX_TEXT and code.function.isprintable()
    for offset in (0, 2, 100, -1, 1 << 20):
        line_at(lines, code.first_line, offset, python.version)
