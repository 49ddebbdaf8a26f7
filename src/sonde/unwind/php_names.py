# SPDX-License-Identifier: Apache-2.0
"""Names, files and lines of PHP's functions, read from the memory of a running PHP.

It is memory of the profiled process, and changes while it is read: a pointer may lead anywhere, and
every length has a limit.
"""

from __future__ import annotations

import struct
from typing import Final

from sonde.procfs.long_texts import short_name
from sonde.unwind import php_layout as of
from sonde.unwind.function_names import FAILURES, MAX_LINE, Function, one_line, skipped_bytes
from sonde.unwind.php_layout import PhpLayout
from sonde.unwind.process_memory import Memory, read_exactly, read_word

MAX_NAME: Final = 256
"""Bytes of a name."""
MAX_PATH: Final = 4096
"""Bytes of a path; of a longer one the last ones."""
_HEAD_BYTES: Final = 24
MAIN: Final = "{main}"
"""What PHP's own traces call the code of a file."""
_EVAL: Final = "eval()'d code"
_UNNAMED: Final = "(unnamed)"


class PhpNames:
    """Reads the functions of one PHP."""

    def __init__(self, layout: PhpLayout) -> None:
        self._layout = layout

    def read(self, memory: Memory, at: int, is_native: bool, pid: int) -> Function:
        """The function at an address (zend_function). Raises OSError, ValueError, struct.error."""
        head = read_exactly(memory, _HEAD_BYTES, at)
        kind = head[of.TYPE]
        name, scope = struct.unpack_from("<QQ", head, of.NAME)
        text = one_line(_text(memory, name, MAX_NAME)) if name else ""
        if scope and text:
            try:
                owner = _text(memory, read_word(memory, scope + of.CLASS_NAME), MAX_NAME)
                text = f"{one_line(owner)}::{text}"
            except FAILURES:
                pass  # the class cannot be read: the function's name alone
        if kind == of.INTERNAL_FUNCTION:
            return Function(short_name(text) or _UNNAMED, "", 0)
        if kind not in (of.USER_FUNCTION, of.EVAL_CODE):
            raise ValueError("no function")
        file = read_word(memory, at + self._layout.filename)
        path = one_line(_text(memory, file, MAX_PATH, from_end=True))
        lines = read_exactly(memory, 8, at + self._layout.first_line)
        first, last = struct.unpack("<II", lines)
        if not text:
            text = _EVAL if kind == of.EVAL_CODE else MAIN
        first = first if first < MAX_LINE else 0
        return Function(short_name(text), path, first, place=1, last_line=last)

    def line_at(self, memory: Memory, function: Function, place: int) -> int:
        """The line of the instruction (zend_op) at `place`; the function's first line where that is
        none of the function's lines. Raises as `read`."""
        if not function.place:
            return 0
        (line,) = struct.unpack("<I", read_exactly(memory, 4, place + of.OP_LINE))
        return line if function.line <= line <= function.last_line else function.line


def _text(memory: Memory, pointer: int, limit: int, from_end: bool = False) -> str:
    """The text of a zend_string, of which at most `limit` bytes are read, the first or the last
    ones. Raises OSError, ValueError."""
    if not pointer or pointer & 7:
        raise ValueError("no pointer to a string")
    length = read_word(memory, pointer + of.STRING_LENGTH)
    if not length:
        return ""
    skipped = skipped_bytes(length, limit) if from_end else 0
    at = pointer + of.STRING_TEXT + skipped
    return memory.read_at(min(length, limit), at).decode("utf-8", "replace")
