# SPDX-License-Identifier: Apache-2.0
"""Whether it is worth asking a vendor's library: looked at now and then, so nothing is loaded."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

NVIDIA_NODES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
AMD_NODE = Path("/dev/kfd")
ROCM = Path("/opt/rocm/share/amd_smi")
"""Where ROCm puts AMD SMI's Python module, beside the usual places."""
NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
"""Vendors, as PCI knows them."""
DRM_CARDS = Path("/sys/class/drm")


def nvidia() -> bool:
    """A driver is loaded, or somebody put the library in the loader's way on purpose."""
    return any(node.exists() for node in NVIDIA_NODES) or _on_path("libnvidia-ml.so.1")


def amd() -> bool:
    """AMD's compute driver is loaded, and its library is installed."""
    return AMD_NODE.exists() and amd_library()


def drm() -> bool:
    """A card that no vendor's library speaks for."""
    vendors = {path.read_text().strip() for path in DRM_CARDS.glob("card[0-9]*/device/vendor")}
    return bool(vendors - spoken_for())


def spoken_for() -> frozenset[str]:
    """Vendors whose cards are left to their own library."""
    return frozenset({NVIDIA, AMD} if amd_library() else {NVIDIA})


def amd_library() -> bool:
    """AMD SMI's Python module is installed."""
    return ROCM.is_dir() or importlib.util.find_spec("amdsmi") is not None


def _on_path(library: str) -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return any(folder and (Path(folder) / library).exists() for folder in folders)
