# SPDX-License-Identifier: Apache-2.0
"""What is known of a function of Ruby or PHP, and how its name and file are shown."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Protocol

from sonde.procfs.long_texts import short_end
from sonde.unwind.process_memory import Memory
from sonde.unwind.python_code import short_path

MAX_LINE: Final = 1 << 24
FAILURES: Final = (OSError, ValueError, LookupError, ArithmeticError, struct.error)
"""What reading memory that holds anything raises: it ends early, or its numbers lead nowhere."""
MAX_LENGTH: Final = 1 << 20
"""Of a text in memory, for its length to be taken as one."""
_INSTALLED: Final = ("/gems/", "/vendor_ruby/", "/site_ruby/", "/vendor/")
"""Folders of libraries: a file is shown from there on."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of Ruby or PHP."""

    name: str
    file: str
    """Its path as the interpreter has it; '' of a C function."""
    line: int
    """The first one; 0: unknown."""
    place: int = 0
    """By which its lines are found: of Ruby the address of its body, of PHP 1; 0: it has none."""
    last_line: int = 0
    """0: unknown."""


class Names(Protocol):
    """Reads functions of one language: `RubyNames`, `PhpNames`."""

    def read(self, memory: Memory, at: int, is_native: bool, pid: int) -> Function:
        """The function at an address. Raises what FAILURES has."""

    def line_at(self, memory: Memory, function: Function, place: int) -> int:
        """The line of the instruction at the address `place`; 0 unknown. Raises what FAILURES
        has."""


def one_line(text: str) -> str:
    """A name with ? for characters that cannot be printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def skipped_bytes(length: int, limit: int) -> int:
    """How many bytes to skip so that the last `limit` of a text are read; 0 of one that is so long
    that its length is none."""
    return length - limit if limit < length <= MAX_LENGTH else 0


def shown_path(path: str, pid: int) -> str:
    """A source file as frames show it: from its library or project on, never a full path; of a long
    one its end."""
    for folder in _INSTALLED:
        if folder in path:
            return short_end(path.rpartition(folder)[2])
    return short_end(short_path(path, pid))
