# SPDX-License-Identifier: Apache-2.0
"""Building the library under trial and the CUDA programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def sources(program: str) -> list[str]:
    """The C files of a program of several."""
    return [str(p) for p in sorted((HERE / program).glob("*.c"))]


def includes(cupti: Path) -> list[str]:
    found = [str(cupti / "include")]
    for place in ("/usr/local/cuda/include", "/usr/local/cuda/extras/CUPTI/include"):
        if Path(place).is_dir():
            found.append(place)
    nvcc = shutil.which("nvcc")
    if nvcc:
        found.append(str(Path(nvcc).resolve().parent.parent / "include"))
    return [f"-I{p}" for p in found if Path(p).is_dir()]


def build(to: Path, cupti: Path) -> list[str]:
    errors = []
    commands = [
        [
            "gcc",
            "-O2",
            "-shared",
            "-fPIC",
            "-Wl,-z,nodelete",
            *includes(cupti),
            "-o",
            f"{to}/windows.so",
            *sources("windows"),
            "-ldl",
            "-lpthread",
        ],
    ]
    nvcc = shutil.which("nvcc") or (
        "/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else ""
    )
    if nvcc:
        commands.append(
            [
                nvcc,
                "-O2",
                "-arch=sm_90",
                "-cudart",
                "shared",
                "-o",
                f"{to}/launch",
                f"{HERE}/launch.cu",
                "-ldl",
            ]
        )
        commands.append(
            [
                nvcc,
                "-O2",
                "-std=c++17",
                "-arch=sm_90",
                "-cudart",
                "shared",
                "-o",
                f"{to}/stages",
                f"{HERE}/stages.cu",
                "-ldl",
            ]
        )
        commands.append(
            [nvcc, "-O2", "-arch=sm_90", "-o", f"{to}/launch_static", f"{HERE}/launch.cu", "-ldl"]
        )
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    for c, p in zip(commands, running, strict=True):
        text, _ = p.communicate(timeout=120)
        if p.returncode:
            errors.append(f"{c[0]} {c[c.index('-o') + 1]}: {text[-800:]}")
    return errors


def library_path() -> dict[str, str]:
    """For the dynamic CUDA runtime: the toolkit's folder, then the one that torch came with."""
    nvcc = shutil.which("nvcc")
    places = (
        [str(Path(nvcc).resolve().parent.parent / "lib64")] if nvcc else ["/usr/local/cuda/lib64"]
    )
    for entry in sys.path:
        places += [str(p) for p in Path(entry or ".").glob("nvidia/cu13/lib") if p.is_dir()]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([*places, os.environ.get("LD_LIBRARY_PATH", "")]),
    }
