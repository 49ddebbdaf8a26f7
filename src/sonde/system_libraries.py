# SPDX-License-Identifier: Apache-2.0
"""Libraries of drivers, found and checked before they are loaded: the only place that does.

To load a file is to run it, often as root. A library that the dynamic linker would take may still
be anybody's: a folder in /etc/ld.so.conf.d or /opt that a user owns, a group that may write there.
So a library is looked up here, in the linker's own order, and loaded only where none but trusted
users can change it or a folder above it (`ownership.only_ours`). A process of another user than
root endangers nobody else and may load any.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from sonde.ownership import only_ours, trusted_folders

CACHE: Final = Path("/etc/ld.so.cache")
_CACHE_MAGIC: Final = b"glibc-ld.so.cache1.1"
_FOLDERS: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")


class UntrustedLibraryError(OSError):
    """A library is there, but somebody else could change it. The message has which and what to
    do."""


def why_not(path: str | Path) -> str:
    """Why a library (or a folder of code) must not be loaded by this process; '' where it may."""
    if os.geteuid() != 0 or only_ours(Path(path)):
        return ""
    return (
        f"{path} is not loaded, because users other than root can change it; have root own it and "
        "every folder above it, writable by nobody else"
    )


def load(name: str) -> ctypes.CDLL:
    """Load a library by the name that programs link to, or by its path.

    Raises UntrustedLibraryError, and OSError where there is none or it cannot be loaded.
    """
    path = name if "/" in name else find(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    _check(path)
    return ctypes.CDLL(path)


def load_open(fd: int) -> ctypes.CDLL:
    """Load the library that a descriptor refers to, after a check of its path. Raises as `load`."""
    path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    _check(path)
    held = os.fstat(fd)
    found = os.stat(path)  # noqa: PTH116
    if (held.st_dev, held.st_ino) != (found.st_dev, found.st_ino):
        raise FileNotFoundError(f"{path} is another file by now")
    return ctypes.CDLL(f"/proc/self/fd/{fd}", mode=os.RTLD_NOW | os.RTLD_LOCAL)


def import_checked(name: str, library: str, folder: Path) -> ModuleType:
    """Import a vendor's Python module, also from `folder`, that loads `library` by itself.

    Raises UntrustedLibraryError, ImportError and OSError.
    """
    if name in sys.modules:
        return import_module(name)  # an entry None raises ImportError
    if folder.is_dir() and str(folder) not in sys.path:
        _check(folder)
        sys.path.append(str(folder))
    spec = importlib.util.find_spec(name)
    package = Path(spec.origin).parent if spec is not None and spec.origin else None
    if package is not None:
        for path in (*package.glob("*.py"), *package.glob("*.so")):
            _check(path)
    rocm = (os.environ.get(variable) for variable in ("ROCM_HOME", "ROCM_PATH"))
    for root in (*rocm, "/opt/rocm"):
        if root and (path := Path(root, "lib", library)).exists():
            _check(path)
    if (linked := find(library)) is not None:
        _check(linked)
    return import_module(name)


def find(name: str) -> str | None:
    """Where the dynamic linker would find a library for this architecture; None where it would not.

    For root, folders of LD_LIBRARY_PATH that others can write to are skipped, as in all
    children (`interpreter.environment`).
    """
    searched = trusted_folders(os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    cached = (path for key, path in in_cache() if key == name)
    for path in (
        *(f"{folder}/{name}" for folder in searched),
        *cached,
        *(f"{folder}/{name}" for folder in _FOLDERS),
    ):
        if _is_of_our_architecture(path):
            return path
    return None


def in_cache(cache: Path | None = None) -> Iterator[tuple[str, str]]:
    """(name, path) of each entry of the dynamic linker's cache."""
    try:
        raw = (cache or CACHE).read_bytes()
    except OSError:
        return
    # glibc, sysdeps/generic/dl-cache.h, struct cache_file_new: 48 bytes, then entries of 24 bytes
    # (flags, key, value, osversion, hwcap); offsets of the strings count from the header.
    base = raw.find(_CACHE_MAGIC)
    if base < 0 or len(raw) < base + 48:
        return
    (count,) = struct.unpack_from("<I", raw, base + len(_CACHE_MAGIC))
    for entry in range(min(count, (len(raw) - base - 48) // 24)):
        texts = [
            raw[base + at : raw.find(b"\0", base + at)].decode(errors="surrogateescape")
            for at in struct.unpack_from("<II", raw, base + 48 + 24 * entry + 4)
        ]
        yield texts[0], texts[1]


def _check(path: str | Path) -> None:
    if reason := why_not(path):
        raise UntrustedLibraryError(reason)


def _is_of_our_architecture(path: str) -> bool:
    """Whether an ELF file is for this processor, with pointers as long as ours."""
    try:
        with open("/proc/self/exe", "rb") as ours, open(path, "rb") as theirs:  # noqa: PTH123
            header = theirs.read(20)
            mine = ours.read(20)
    except OSError:
        return False
    # EI_CLASS and EI_DATA, then e_machine.
    return (header[:6], header[18:20]) == (mine[:6], mine[18:20])
