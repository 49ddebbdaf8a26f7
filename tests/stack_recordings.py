# SPDX-License-Identifier: Apache-2.0
"""Threads as they were at one moment: registers, memory and unwind tables, in a file; and the
kernel's walker built for this machine, which walks them (tests/golden/unwind/walker.c).

A recording is JSON, compressed; its parts are hexadecimal. `scripts/record_stack.py` makes one.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

WALKER = Path(__file__).parent / "golden" / "unwind"
MAX_WORDS = 2048
STOPS = 21
"""STOP_MAX"""


@dataclass(frozen=True)
class Recording:
    """One thread at one moment."""

    registers: Sequence[int]
    """In the order of the kernel's pt_regs, then the thread's base."""
    process: bytes
    """struct unwind_process"""
    memory: Sequence[tuple[int, bytes]]
    """Pieces of memory with their addresses."""
    tables: Sequence[tuple[int, bytes]]
    """Words of chunks with the reference of the first."""
    about: Mapping[str, Any]
    """What it shows, what the walk must find, and names for it."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """A file's recording."""
        raw = json.loads(zlib.decompress(path.read_bytes()))
        return cls(
            registers=raw["registers"],
            process=bytes.fromhex(raw["process"]),
            memory=[(at, bytes.fromhex(data)) for at, data in raw["memory"]],
            tables=[(at, bytes.fromhex(data)) for at, data in raw["tables"]],
            about=raw["about"],
        )

    def write(self, path: Path) -> None:
        """Leave it in a file."""
        raw = {
            "registers": list(self.registers),
            "process": self.process.hex(),
            "memory": [(at, data.hex()) for at, data in self.memory],
            "tables": [(at, data.hex()) for at, data in self.tables],
            "about": dict(self.about),
        }
        path.write_bytes(zlib.compress(json.dumps(raw).encode(), 9))


@dataclass(frozen=True)
class Walk:
    """What the walker found."""

    words: tuple[int, ...]
    stop: int
    """enum unwind_stop"""
    steps: int
    counted: tuple[int, ...]
    """How often each of enum unwind_stop was counted."""


class Walker:
    """The walker of the kernel programs as a library of this machine."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where to build it."""
        library = folder / "walker.so"
        checks = ("-fsanitize=undefined,bounds",)  # reported on stderr, which tests look at
        flags = ("-O1", "-g", "-shared", "-fPIC", "-Wno-unknown-pragmas", *checks)
        include, source = f"-I{WALKER / 'shim'}", str(WALKER / "walker.c")
        subprocess.run(["cc", *flags, include, "-o", str(library), source], check=True)
        self._library = ctypes.CDLL(str(library))

    def load(self, recording: Recording) -> None:
        """Take a recording in place of the one before."""
        library = self._library
        library.forget_all()
        registers = (ctypes.c_uint64 * len(recording.registers))(*recording.registers)
        library.set_registers(registers)
        library.set_process(recording.process, len(recording.process))
        self._kept = [data for _, data in recording.memory]  # the library only points to them
        for at, data in recording.memory:
            size = ctypes.c_uint64(len(data))
            assert not library.add_memory(ctypes.c_uint64(at), size, data)
        for at, data in recording.tables:
            assert not library.add_words(ctypes.c_uint32(at), len(data) // 4, data)

    def walk(self, recording: Recording) -> Walk:
        """The stack of a recording."""
        self.load(recording)
        return self.again()

    def again(self) -> Walk:
        """The stack of what was loaded last."""
        words = (ctypes.c_uint64 * MAX_WORDS)()
        result = (ctypes.c_uint64 * (2 + STOPS))()
        count = self._library.walk(words, MAX_WORDS, result)
        return Walk(tuple(words[: min(count, MAX_WORDS)]), result[0], result[1], tuple(result[2:]))

    @property
    def reads(self) -> int:
        """How often the last walk read memory."""
        return int(self._library.reads_of_memory())

    def walk_whole_pages(self, recording: Recording) -> Walk:
        """The stack of a recording whose pages can be read as a whole, as a kernel's can; where
        nothing was recorded they hold what leads nowhere."""
        self.load(recording)
        self._library.use_whole_pages(1)
        return self.again()

    def use_reader(self, reader: Any) -> None:
        """Ask `reader` (a ctypes callback) for memory that no piece has."""
        self._library.use_reader(reader)
