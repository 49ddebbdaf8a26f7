# SPDX-License-Identifier: Apache-2.0
"""Functions of the CUDA driver that no symbol names.

`cuGetProcAddress` may hand out addresses other than the exported ones, and most programs get the
driver's functions through it: the runtime does, and so everything that has the runtime linked in
and its symbols stripped. Where the functions lie in the file is learned by asking the library, in a
separate process: it is loaded there, not initialised, and asked for each function's address.

Only for libraries that the system's own dynamic linker would take, and that nobody else can change
(`system_libraries`): to load a file is to run it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

from sonde import interpreter, procfs, system_libraries

PATIENCE_S = 20.0
"""For the separate process, to load the library and answer."""

VERSIONS = (3020, 4000, 5050, 6050, 7000, 8000, 9000, 10000, 11000, 11020, 12000, 12080, 13000)
"""Of CUDA, as cuGetProcAddress takes them (12080: 12.8): each may get another version of a
function. Before 3.2 sizes had 32 bits: those are not asked for."""

_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2
"""CU_GET_PROC_ADDRESS_*: functions for the two kinds of default stream."""


def entry_points(fd: int, functions: Iterable[str]) -> list[tuple[str, int]]:
    """(function, offset in the file) of what an open CUDA driver library hands out.

    Empty where it cannot be loaded, has no cuGetProcAddress_v2, or does not answer in time: then
    only functions with symbols are found.
    """
    command = interpreter.command(__name__, str(fd))
    try:
        done = interpreter.run(command, PATIENCE_S, stdin="\n".join(functions), pass_fds=[fd])
        done.check_returncode()
        return [(str(name), int(offset)) for name, offset in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return []


def _offset_of(address: int, inode: int) -> int | None:
    """Offset in the file of an address in its mappings."""
    with procfs.MapsReader("self") as reader:
        for line in reader.lines():
            span, _, offset, _, number, *_ = line.split(maxsplit=5)
            start, _, end = span.partition(b"-")
            if int(number) == inode and int(start, 16) <= address < int(end, 16):
                return address - int(start, 16) + int(offset, 16)
    return None


def _ask(library: ctypes.CDLL, functions: Sequence[str], inode: int) -> list[tuple[str, int]]:
    ask = library.cuGetProcAddress_v2
    ask.restype = ctypes.c_int
    ask.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_int),
    ]
    found: dict[tuple[str, int], None] = {}
    for function in functions:
        addresses = set()
        for version in VERSIONS:
            for flags in (_LEGACY_STREAM, _PER_THREAD_STREAM):
                address, status = ctypes.c_void_p(), ctypes.c_int()
                refused = ask(
                    function.encode(),
                    ctypes.byref(address),
                    version,
                    flags,
                    ctypes.byref(status),
                )
                if not refused and address.value:
                    addresses.add(address.value)
        for one in addresses:
            offset = _offset_of(one, inode)
            if offset is not None:
                found[function, offset] = None
    return list(found)


def _main() -> None:
    fd = int(sys.argv[1])
    library = system_libraries.load_open(fd)
    functions = sys.stdin.read().split()
    with os.fdopen(1, "w") as answer:
        json.dump(_ask(library, functions, os.fstat(fd).st_ino), answer)


if __name__ == "__main__":
    _main()
