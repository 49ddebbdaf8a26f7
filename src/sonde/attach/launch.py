# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a program that Sonde starts, by which it and its children load the
library themselves: without ptrace or privileges, and timed from the first launch on.

CUDA's driver loads what CUDA_INJECTION64_PATH names at its first call, the OpenCL loader (Khronos'
and ocl-icd, since 2020) what OPENCL_LAYERS names. So only programs that use a device get it: the
library has a thread, and a process with a second one may not enter another user namespace
(unshare(2), setns(2)), as the commands that start containers do. LD_PRELOAD would bring it to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sonde.attach.policy import MAY_ATTACH

# Names of variables.
CUDA: Final = "CUDA_INJECTION64_PATH"
OPENCL: Final = "OPENCL_LAYERS"
BEGIN: Final = "SONDE_INJECT"
_REQUEST: Final = 1 | 2 | 8
"""INJECT_EVENTS, INJECT_OPENCL, INJECT_STACKS of abi/inject.h: what the library begins with."""


def variables(environ: Mapping[str, str], library: Path, per_second: int = 200) -> dict[str, str]:
    """What to set besides `environ`; nothing where that opts out (SONDE_MAY_ATTACH=off).

    `per_second`: how many launches the library aims to time in each process.

    A CUDA_INJECTION64_PATH of another tool is left as it is, as two would time each other: then
    CUDA is not timed. The other variables are set all the same, for OpenCL.
    """
    if environ.get(MAY_ATTACH, "").lower() == "off" or environ.get(BEGIN) == "off":
        return {}
    others = environ.get(OPENCL, "")
    given = {
        BEGIN: f"{_REQUEST}:{per_second}",
        # The library is a layer: inject/opencl_layer.c. A loader that knows no layers ignores this.
        OPENCL: f"{library}:{others}" if others else str(library),
    }
    if CUDA not in environ:
        given[CUDA] = str(library)
    return given
