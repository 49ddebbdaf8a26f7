# SPDX-License-Identifier: Apache-2.0
"""Where, in a live process, its C library keeps what a remote load needs."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sonde import _native, procfs
from sonde.attach.image import LoadedImage, ProcessMemory
from sonde.errors import TargetRefused

_LIBC: Final = re.compile(r"libc(-2\.\d+)?\.so(\.6)?$")
_LIBDL: Final = re.compile(r"libdl(-2\.\d+)?\.so(\.2)?$")
_LOADER: Final = re.compile(r"(ld-linux-x86-64\.so\.2|ld-2\.\d+\.so|ld\.so)$")
_MUSL: Final = re.compile(r"(ld-musl-[^/]*|libc\.musl-[^/]*)$")
_SIGRETURN: Final = bytes.fromhex("48c7c00f0000000f05")  # mov $15,%rax; syscall
_RET: Final = b"\xc3"
_MACHINE_X86_64: Final = 62
_MAX_CODE_BYTES: Final = 8 << 20
"""How much of the C library's code is searched for `_SIGRETURN` and `_RET`, by which a borrowed
thread returns."""

_FUNCTIONS: Final = ("dlopen", "_IO_list_lock", "_IO_list_unlock", "getppid")

# Remedies: the second argument of TargetRefused.
START_WITH_SONDE: Final = "Start the program with: sonde record -- CMD"
NEEDS_GLIBC: Final = "Only programs that are linked to glibc at run time can take a library in."


@dataclass(frozen=True, slots=True)
class Mapped:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    prot: str
    offset: int
    inode: int
    path: str

    @property
    def leaf(self) -> str:
        """The file's name."""
        return self.path.removesuffix(" (deleted)").rpartition("/")[2]


_LINE: Final = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ (\d+) *(.*)$", re.MULTILINE
)


def parse(maps: Iterable[bytes]) -> list[Mapped]:
    """The mappings in the text of a /proc/PID/maps, which comes in blocks of whole lines."""
    paths: dict[bytes, str] = {}
    return [
        Mapped(
            *(int(start, 16), int(end, 16), prot.decode(), int(offset, 16), int(inode)),
            paths.get(path) or paths.setdefault(path, os.fsdecode(path)),
        )
        for block in maps
        for start, end, prot, offset, inode, path in _LINE.findall(block)
    ]


def mappings_of(pid: int) -> list[Mapped]:
    """What the process has mapped now. Raises OSError when it is gone, TargetRefused where there
    are more mappings than are read: the stacks of its threads are among the last, and a load has
    to know them."""
    with procfs.MapsReader(pid) as reader:
        found = parse(reader.blocks())
        if reader.is_cut:
            raise TargetRefused(
                f"process {pid} has more mappings than are looked at", START_WITH_SONDE
            )
    return found


def has_library(mappings: list[Mapped], memfd: str) -> bool:
    """Whether code of the memfd of that name is mapped."""
    return bool(library_inodes(mappings, memfd))


def library_inodes(mappings: list[Mapped], memfd: str) -> set[int]:
    """Inodes of the memfds of that name whose code is mapped."""
    return {m.inode for m in mappings if m.path.startswith(f"/memfd:{memfd} ") and "x" in m.prot}


def _base(mappings: list[Mapped], leaf: re.Pattern[str]) -> int | None:
    return next((m.start for m in mappings if leaf.match(m.leaf) and not m.offset), None)


def _all_code(mappings: list[Mapped], leaf: re.Pattern[str]) -> list[Mapped]:
    return [m for m in mappings if leaf.match(m.leaf) and "x" in m.prot]


def _code(mappings: list[Mapped], leaf: re.Pattern[str]) -> tuple[int, int] | None:
    return next(((m.start, m.end) for m in _all_code(mappings, leaf)), None)


def landmarks(memory: ProcessMemory, mappings: list[Mapped]) -> _native.Landmarks:
    """All of them. Raises TargetRefused where one is missing, OSError when the process is gone."""
    if any(_MUSL.search(m.leaf) for m in mappings):
        raise TargetRefused("the process uses musl as its C library, not glibc", NEEDS_GLIBC)
    base, code = _base(mappings, _LIBC), _code(mappings, _LIBC)
    loader_code = _code(mappings, _LOADER)
    if base is None or code is None or loader_code is None:
        raise TargetRefused("the process has no dynamic glibc: a static program?", NEEDS_GLIBC)
    try:
        libc = LoadedImage(memory, base)
        if libc.machine != _MACHINE_X86_64:
            raise TargetRefused(
                "the process runs code of another architecture", "Attach from x86-64 to x86-64."
            )
        found = {name: libc.function(name) for name in _FUNCTIONS}
        is_old = found["dlopen"] is None  # before glibc 2.34 it is in libdl
        if is_old and (dl := _base(mappings, _LIBDL)) is not None:
            found["dlopen"] = LoadedImage(memory, dl).function("dlopen")
        offset = _errno_offset(memory, libc.function("__errno_location"))
    except ValueError as error:
        raise TargetRefused(
            f"the process's C library cannot be read: {error}", NEEDS_GLIBC
        ) from error
    if missing := [name for name, address in found.items() if address is None]:
        raise TargetRefused(f"the process's C library lacks {', '.join(missing)}", NEEDS_GLIBC)
    text = memory.read(code[0], min(code[1] - code[0], _MAX_CODE_BYTES))
    stub, ret = text.find(_SIGRETURN), text.find(_RET)
    if stub < 0 or ret < 0:
        raise TargetRefused("the process's C library has no code for rt_sigreturn", NEEDS_GLIBC)
    addresses = {name: address for name, address in found.items() if address is not None}
    for name, address in addresses.items():
        # The process may have changed its tables: at least, addresses must be code of that library.
        library = _LIBDL if is_old and name == "dlopen" else _LIBC
        if not any(m.start <= address < m.end for m in _all_code(mappings, library)):
            raise TargetRefused(
                f"the process's {name} lies outside its C library's code", NEEDS_GLIBC
            )
    return _native.Landmarks(
        dlopen=addresses["dlopen"],
        sigreturn=code[0] + stub,
        ret=code[0] + ret,
        list_lock=addresses["_IO_list_lock"],
        list_unlock=addresses["_IO_list_unlock"],
        getppid=addresses["getppid"],
        errno_offset=offset,
        loader_code=loader_code,
        loader_data=_loader_data(mappings),
        old_loader=is_old,
    )


def _loader_data(mappings: list[Mapped]) -> tuple[int, int]:
    """The writable mapping of the loader: its globals, locks among them."""
    written = [m for m in mappings if _LOADER.match(m.leaf) and m.prot.startswith("rw")]
    if not written:
        raise TargetRefused("the process's loader has no data segment", NEEDS_GLIBC)
    return written[0].start, written[-1].end


def _errno_offset(memory: ProcessMemory, function: int | None) -> int | None:
    """errno's distance from the thread pointer, out of the code of __errno_location(); None where
    that is another code than this one.

    [endbr64] mov X(%rip),%rax; add %fs:0,%rax; ret
    """
    if function is None:
        return None
    code = memory.read(function, 24)
    if code.startswith(b"\xf3\x0f\x1e\xfa"):
        code, function = code[4:], function + 4
    if code[:3] != b"\x48\x8b\x05" or code[7:12] != b"\x64\x48\x03\x04\x25":
        return None
    (distance,) = struct.unpack_from("<i", code, 3)
    (offset,) = struct.unpack("<q", memory.read(function + 7 + distance, 8))
    return int(offset)
