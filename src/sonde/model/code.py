# SPDX-License-Identifier: Apache-2.0
"""Where code is: frames, and the stacks made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class CodeOrigin(StrEnum):
    """Whose code a file holds, by the folder that it lies in."""

    UNKNOWN = ""
    """Recorded before this was known, or without a file."""
    PROGRAM = "program"
    """The program's: it lies in none of the folders below. So does a project that is installed in
    editable mode."""
    PACKAGE = "package"
    """Installed for an interpreter: below `site-packages` or `dist-packages`. So is a project that
    is installed as a copy, not in editable mode."""
    INTERPRETER = "interpreter"
    """The interpreter's standard library."""
    SYSTEM = "system"
    """A library of the system, or of a device's toolkit."""


class Hide(StrEnum):
    """Which frames a report leaves out: as the page does (`Hide` of web/src/flame.ts)."""

    KERNEL = "kernel"
    RUNTIME = "runtime"
    """The kernel's, and those of C's, C++'s and Python's runtime libraries."""
    NATIVE = "native"
    """All but Python's."""

    @property
    def label(self) -> str:
        """What is left, in the words of the page."""
        return _LABELS[self]


_LABELS = {
    Hide.KERNEL: "without the kernel",
    Hide.RUNTIME: "without kernel and runtime",
    Hide.NATIVE: "Python only",
}


class Frame(NamedTuple):
    """One code location: a row of the table `frame` after its id. Made by the thousand, and a tuple
    is made several times as fast as a dataclass."""

    kind: str
    """user | inlined | kernel | vdso | jit | python | unknown"""
    function: str
    """Demangled name; '' where no symbol covers the address."""
    binary: str
    """File name of the mapping, [kernel], [module], [vdso], [jit] or [anon]."""
    build_id: str = ""
    offset: int = 0
    """Offset in the file (user), address less its base (kernel)."""
    file: str = ""
    line: int = 0
    origin: str = ""
    """A value of `CodeOrigin`."""

    @property
    def name(self) -> str:
        """What a picture writes on the frame.

        All addresses of a binary without a symbol share one name: its numbers would mean nothing
        to people.
        """
        if self.function:
            return self.function
        return self.binary if self.binary.startswith("[") else f"[{self.binary or 'unknown'}]"

    @property
    def location(self) -> str:
        """Where it is in source code: 'step train.py:12'; the name alone where no file is known."""
        if not self.file:
            return self.name
        folder, _, file = self.file.rpartition("/")
        if file == "__init__.py" and folder:
            file = f"{folder.rpartition('/')[2]}/{file}"
        return f"{self.name} {file}:{self.line}" if self.line else f"{self.name} {file}"


class KnownFrame(NamedTuple):
    """A frame and its id, which is the same wherever the same code location is seen."""

    id: int
    frame: Frame


NO_STACK = Frame(kind="unknown", function="", binary="[no stack]")
"""Stands in for a stack that was not taken."""
HIDDEN = Frame(kind="unknown", function="", binary="[hidden]")
"""Stands in for all frames of a stack, where a report leaves out each of them (`Hide`)."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Stacks without their weights, packed so that 200,000 of them cost little memory.

    Stack `i` is `frame_indices[offsets[i]:offsets[i + 1]]`, leaf first, kernel frames before user
    frames. Stack 0 is empty: none was taken.
    """

    frames: Sequence[Frame]
    offsets: Sequence[int]
    frame_indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def indices(self, stack: int) -> Sequence[int]:
        """Indices into `frames`, leaf first."""
        return self.frame_indices[self.offsets[stack] : self.offsets[stack + 1]]

    def __getitem__(self, stack: int) -> tuple[Frame, ...]:
        """The frames of a stack, leaf first; `NO_STACK` alone where none was taken."""
        return tuple(self.frames[i] for i in self.indices(stack)) or (NO_STACK,)
