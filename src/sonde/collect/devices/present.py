# SPDX-License-Identifier: Apache-2.0
"""Whether it is worth asking a vendor's library: looked at now and then, so nothing is loaded."""

from __future__ import annotations

import os
from pathlib import Path

NVIDIA_NODES = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
AMD_NODE = Path("/dev/kfd")
DRM_NODES = Path("/dev/dri")


def nvidia() -> bool:
    """A driver is loaded, or somebody put the library in the loader's way on purpose."""
    return any(node.exists() for node in NVIDIA_NODES) or _on_path("libnvidia-ml.so.1")


def amd() -> bool:
    """AMD's compute driver is loaded, or its library is in the loader's way."""
    return AMD_NODE.exists() or _on_path("libamd_smi.so")


def _on_path(library: str) -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return any(folder and (Path(folder) / library).exists() for folder in folders)
