# SPDX-License-Identifier: Apache-2.0
"""Whose code a file holds, by the folder that it lies in: paths themselves are not recorded.

In virtual environments, conda environments and the system, packages are installed below
`site-packages` (Debian: `dist-packages`), and the rest of `lib/python3.N` is the standard library.
Binaries in `/lib` and `/usr/lib`, and in the folders of CUDA and ROCm, are the system's. What lies
elsewhere counts as the program's: its own files, a project in editable mode, whose files stay where
they are, packages that `pip install --target` put into another folder; and libraries that somebody
installed beside the system (`/usr/local/lib`, `/nix/store`, `lib/*.so` of a conda environment).
"""

from __future__ import annotations

import re
from typing import Final

from sonde.model.code import CodeOrigin

_PACKAGES: Final = re.compile(r"(^|/)(site|dist)-packages/")
_STANDARD: Final = re.compile(r"(^|/)lib(64)?/(python|pypy)3(\.\d+t?/|\d+\.zip/)")
_SYSTEM: Final = re.compile(r"^/(usr/)?lib(32|64|x32)?/|^/usr/local/cuda[^/]*/|^/opt/rocm[^/]*/")


def origin_of_source(path: str) -> CodeOrigin:
    """The origin of a Python file, by its path as a code object has it: absolute, relative to where
    the program was started, or in angle brackets where there is no file."""
    if path.startswith("<frozen "):
        return CodeOrigin.INTERPRETER
    if not path or path.startswith("<"):
        return CodeOrigin.UNKNOWN
    return _of_python(path) or CodeOrigin.PROGRAM


def origin_of_binary(path: str) -> CodeOrigin:
    """The origin of a file with machine code, by its absolute path as its process sees it; an
    executable in `/usr/bin` is the program's."""
    if not path.startswith("/"):
        return CodeOrigin.UNKNOWN
    found = _of_python(path) or (CodeOrigin.SYSTEM if _SYSTEM.search(path) else None)
    return found or CodeOrigin.PROGRAM


def _of_python(path: str) -> CodeOrigin | None:
    if _PACKAGES.search(path):
        return CodeOrigin.PACKAGE
    return CodeOrigin.INTERPRETER if _STANDARD.search(path) else None
