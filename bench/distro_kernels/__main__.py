# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.distro_kernels [--only NAME…]`: download, boot, judge, write results, page."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import bench.distro_kernels
from bench.distro_kernels import image, judge, machine, page
from bench.distro_kernels.debian import Suite

CACHE = image.ROOT / "build/kernels"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One column."""

    suite: str
    target: image.Target
    native: str


X86 = "src/sonde/_native.abi3.so"
ARM = "build/kernels/arm64/_native.abi3.so"
KERNELS = {
    "5.10": Kernel("bullseye", image.AMD64, X86),
    "6.1": Kernel("bookworm", image.AMD64, X86),
    "6.12": Kernel("trixie", image.AMD64, X86),
    "sid": Kernel("sid", image.AMD64, X86),
    "6.1 arm64": Kernel("bookworm", image.ARM64, ARM),
}


def main() -> int:
    """1 where anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.distro_kernels", description=bench.distro_kernels.__doc__
    )
    parser.add_argument("--only", nargs="*", choices=KERNELS, help="default: all")
    parser.add_argument("--steps", nargs="*", choices=page.FEATURES, help="again; default: all")
    parser.add_argument("--limit", type=float, default=1500, help="seconds for a boot")
    parser.add_argument("--keep", action="store_true", help="judge what was recorded before")
    args = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    results = page.load()
    for name in args.only or KERNELS:
        kernel = KERNELS[name]
        folder = CACHE / f"seen-{name.replace(' ', '-')}"
        if not (args.keep and (folder / "boot.json").exists()):
            if missing := _missing(kernel):
                print(f"bench.distro_kernels: {name} is left out: {missing}", file=sys.stderr)
                continue
            _observe(kernel, folder, args.limit, args.steps or [])
        results[name] = _judge(folder)
        page.write({it: results[it] for it in KERNELS if it in results})  # one may take an hour
        for step, cell in results[name]["cells"].items():
            print(f"{name:10} {step:13} {cell['status']:8} {cell['detail']}", flush=True)
    failed = any(
        cell["status"] == judge.FAILED for it in results.values() for cell in it["cells"].values()
    )
    return 1 if failed else 0


def _missing(kernel: Kernel) -> str:
    """What this machine lacks for it; '' for nothing."""
    prefix = kernel.target.prefix
    for program, package in (
        (kernel.target.qemu[0], f"qemu-system-{'x86' if not prefix else 'arm'}"),
        (f"{prefix}g++", f"g++-{kernel.target.triplet}" if prefix else "g++"),
        ("cpio", "cpio"),
    ):
        if shutil.which(program) is None:
            return f"apt-get install {package}"
    if not (image.ROOT / kernel.native).exists():
        return "make setup" if not prefix else "scripts/wheel_aarch64"
    return ""


def _observe(kernel: Kernel, folder: Path, limit_s: float, steps: Sequence[str]) -> None:
    """Boot and keep what was seen; of `steps` alone, beside what was seen of the others before."""
    note = folder / "boot.json"
    before = json.loads(note.read_text())["steps"] if steps and note.exists() else {}
    if not steps:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    unpacked, package = _kernel(kernel)
    initrd = image.initrd(CACHE, kernel.target, image.ROOT / kernel.native)
    words = f"ONLY={','.join(steps)}" if steps else ""
    boot = asdict(machine.boot(kernel.target, unpacked, initrd, folder, limit_s, words))
    boot_report = {**boot, "steps": before | boot["steps"], "package": package}
    note.write_text(json.dumps(boot_report, indent=1))


def _kernel(kernel: Kernel) -> tuple[Path, str]:
    """The kernel's image and its package, downloaded once."""
    root = CACHE / f"linux-{kernel.suite}-{kernel.target.arch}"
    note = root / "package"
    if not note.exists():
        suite = Suite(CACHE, kernel.suite, kernel.target.arch)
        suite.unpack(root, *suite.kernel_packages())
        note.write_text(suite.kernel())
    found = [*root.glob("boot/vmlinuz-*"), *root.glob("usr/lib/modules/*/vmlinuz")]
    return found[0], note.read_text()


def _judge(folder: Path) -> dict[str, object]:
    boot_report = json.loads((folder / "boot.json").read_text())
    steps = boot_report["steps"]
    cells = {}
    for name in page.FEATURES:
        limit = judge.limit_of(name, steps.get("doctor"))
        cells[name] = asdict(judge.judge(name, steps.get(name), folder, limit))
    return {
        "release": boot_report["release"],
        "package": boot_report["package"],
        "init_s": round(boot_report["init_s"]) if boot_report["init_s"] else None,
        "cells": cells,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"bench.distro_kernels: {error}")
