# SPDX-License-Identifier: Apache-2.0
"""What a program that Sonde starts is given in its environment, so that it and its children load
the library themselves: no tracing, no privilege, timed from the first launch on.

CUDA's driver loads what CUDA_INJECTION64_PATH names at its first call; where a program uses OpenCL,
the dynamic linker brings the library by LD_PRELOAD. Loaded by both it is still one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sonde.attach.policy import OPT

CUDA: Final = "CUDA_INJECTION64_PATH"
PRELOAD: Final = "LD_PRELOAD"
BEGIN: Final = "SONDE_INJECT"
_REQUEST: Final = 1 | 2 | 8
"""INJECT_EVENTS, INJECT_OPENCL, INJECT_STACKS of abi/inject.h: begin with these."""
OPENCL_VENDORS: Final = Path("/etc/OpenCL/vendors")


def variables(
    environ: Mapping[str, str],
    library: Path,
    per_second: int = 200,
    vendors: Path = OPENCL_VENDORS,
) -> dict[str, str]:
    """What to set besides `environ`; nothing where the program opted out (SONDE_MAY_ATTACH=off).

    Another tool's claim on CUDA_INJECTION64_PATH is left as it is; then the linker brings ours.
    """
    if environ.get(OPT, "").lower() == "off" or environ.get(BEGIN) == "off":
        return {}
    given = {BEGIN: f"{_REQUEST}:{per_second}"}
    if CUDA not in environ:
        given[CUDA] = str(library)
    if CUDA in environ or any(vendors.glob("*.icd")):
        others = environ.get(PRELOAD, "")
        given[PRELOAD] = f"{library}:{others}" if others else str(library)
    return given
