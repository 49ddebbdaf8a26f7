# SPDX-License-Identifier: Apache-2.0
"""Small programs in several languages that print where their functions are."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parent / "programs" / "symbols"
COMPILERS = {".c": "gcc", ".cpp": "g++", ".S": "gcc", ".rs": "rustc"}


def build(source: str, target: Path, *flags: str) -> Path:
    """Compile tests/programs/symbols/SOURCE to `target`."""
    path = SOURCES / source
    compiler = shutil.which(
        COMPILERS[path.suffix], path=f"{os.environ['PATH']}:{Path.home()}/.cargo/bin"
    )
    if compiler is None:
        pytest.skip(f"needs {COMPILERS[path.suffix]}")
    command: Sequence[str] = [compiler, str(path), "-o", str(target), "-O1"]
    if path.suffix == ".rs":
        command = [compiler, str(path), "-o", str(target), "-Copt-level=1", "--edition=2021"]
    subprocess.run([*command, *flags], check=True)
    return target


def library(source: str, target: Path, *flags: str) -> Path:
    """The same as a shared library."""
    return build(source, target, "-shared", "-fPIC", *flags)


def plugin(target: Path) -> Path:
    """A library whose functions have versions."""
    return library("plugin.c", target, f"-Wl,--version-script={SOURCES / 'plugin.ver'}")


def write_library(path: Path, names: Sequence[str], total_bytes: int = 0) -> None:
    """An ELF file of functions of 16 bytes, one after the other from offset 4096, and little else.

    Written here because linking 400,000 functions takes half a minute.
    """
    code = 4096
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    starts, at = [], 1
    for name in names:
        starts.append(at)
        at += len(name.encode()) + 1
    symbols = bytes(24) + b"".join(
        # st_name, st_info (GLOBAL FUNC), st_other, st_shndx, st_value, st_size (gabi, Symbol Table)
        struct.pack("<IBBHQQ", start, 0x12, 0, 1, code + 16 * n, 16)
        for n, start in enumerate(starts)
    )
    code_end = max(code + 16 * len(names), total_bytes - len(symbols) - len(strings) - 4096)
    symbols_at, strings_at = code_end, code_end + len(symbols)
    sections_at = strings_at + len(strings)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, sections_at, 0, 64, 56, 1, 64, 4, 0
    )  # DYN, x86-64
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, code_end, code_end, 4096)  # LOAD, r-x
    sections = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (0, 1, 6, code, code, code_end - code, 0, 0, 16, 0),  # PROGBITS, AX
        (0, 2, 0, 0, symbols_at, len(symbols), 3, 1, 8, 24),  # SYMTAB
        (0, 3, 0, 0, strings_at, len(strings), 0, 0, 1, 0),  # STRTAB
    ]
    with path.open("wb") as out:
        out.write(ident + header + segment)
        out.seek(symbols_at)
        out.write(symbols + strings)
        out.write(b"".join(struct.pack("<IIQQQQIIQQ", *section) for section in sections))


class Talking:
    """A running program that prints `NAME ADDRESS` lines up to `ready 0`, then waits for a byte."""

    def __init__(self, *command: str | Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **options,
        )
        self.pid: int = self.process.pid
        self.addresses: dict[str, int] = {}
        self.listen()

    def listen(self) -> None:
        """Read what it prints until it is ready."""
        assert self.process.stdout
        for line in self.process.stdout:
            name, address = line.decode().split()
            if name == "ready":
                return
            self.addresses[name] = int(address, 16)
        pytest.fail(f"{self.process.args!r} ended before it was ready")

    def go_on(self) -> None:
        assert self.process.stdin
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Talking:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
