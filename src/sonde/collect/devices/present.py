# SPDX-License-Identifier: Apache-2.0
"""Whether there is a vendor's device or library to query: files are looked at, nothing is
loaded."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

NVIDIA_FILES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
AMD_NODE = Path("/dev/kfd")
ROCM = Path("/opt/rocm/share/amd_smi")
"""Where ROCm puts AMD SMI's Python module, beside the usual places."""
NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
"""PCI vendor ids."""
DRM_CARDS = Path("/sys/class/drm")


def nvidia() -> bool:
    """Whether there are signs of a driver (a device node outlives it), or LD_LIBRARY_PATH leads to
    the library."""
    return any(file.exists() for file in NVIDIA_FILES) or _on_path("libnvidia-ml.so.1")


def amd() -> bool:
    """Whether AMD's compute driver is loaded, and its library is installed."""
    return AMD_NODE.exists() and amd_library()


def drm() -> bool:
    """Whether there is a card that is not read through its vendor's library. Raises OSError where
    one vanishes meanwhile."""
    vendors = {path.read_text().strip() for path in DRM_CARDS.glob("card[0-9]*/device/vendor")}
    return bool(vendors - vendors_with_library())


def vendors_with_library() -> frozenset[str]:
    """Vendors whose cards are read through their own library, or not at all: NVIDIA's always,
    though nouveau has no such library."""
    return frozenset({NVIDIA, AMD} if amd_library() else {NVIDIA})


def amd_library() -> bool:
    """Whether AMD SMI's Python module is installed."""
    return ROCM.is_dir() or importlib.util.find_spec("amdsmi") is not None


def _on_path(library: str) -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return any(folder and (Path(folder) / library).exists() for folder in folders)
