# SPDX-License-Identifier: Apache-2.0
"""The machine itself: processors, memory, disk, control groups, interpreter."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sonde.host.finding import Finding, Status

_LOW_DISK_BYTES = 200 * 2**20
"""Below this a long recording may not find room for its capture."""


def findings() -> Iterator[Finding]:
    """Findings on the machine itself."""
    yield architecture()
    yield memory()
    yield disk(Path.cwd())
    yield control_groups()
    yield native_module()


def architecture(machine: str | None = None) -> Finding:
    """x86-64 is fully supported, aarch64 without complete stacks, no other architecture."""
    machine = machine or platform.machine()
    detail = f"{os.cpu_count()} CPUs, {machine}"
    if machine == "x86_64":
        return Finding("processors", Status.PASS, detail)
    if machine == "aarch64":
        return Finding(
            "processors",
            Status.WARN,
            f"{detail}: user stacks by frame pointers alone, no Python frames, no device time",
            "whole stacks, Python's frames, sonde attach, dump, --memory, device time",
            "Use an x86-64 machine for these; the rest works here.",
        )
    return Finding(
        "processors",
        Status.FAIL,
        f"{machine} is not supported",
        "everything",
        "Use an x86-64 machine.",
    )


def memory(path: Path = Path("/proc/meminfo")) -> Finding:
    """Total and available memory."""
    try:
        sizes = {
            key: int(value.split()[0]) * 1024
            for key, _, value in (
                line.partition(":")
                for line in path.read_bytes().decode("utf-8", "replace").split("\n")
            )
            if value
        }
        detail = (
            f"{sizes['MemTotal'] / 2**30:.1f} GiB, {sizes['MemAvailable'] / 2**30:.1f} available"
        )
    except (OSError, KeyError, ValueError, IndexError) as error:
        return Finding("memory", Status.ABSENT, f"{path}: {error}")
    return Finding("memory", Status.PASS, detail)


def disk(folder: Path) -> Finding:
    """Free disk space for captures in their default folder, the working directory."""
    try:
        free = os.statvfs(folder)
    except OSError as error:
        return Finding("disk", Status.ABSENT, f"{folder}: {error.strerror}")
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < _LOW_DISK_BYTES:
        return Finding(
            "disk",
            Status.WARN,
            f"{free_bytes / 2**20:.0f} MiB free in {folder}",
            "captures",
            f"Write captures elsewhere: sonde record -o {tempfile.gettempdir()}/FILE.sonde",
        )
    return Finding("disk", Status.PASS, f"{free_bytes / 2**30:.1f} GiB free in {folder}")


def control_groups(root: Path = Path("/sys/fs/cgroup")) -> Finding:
    """cgroup version 2 (one tree), version 1 (one tree for each controller), or both at once."""
    if (root / "cgroup.controllers").exists():
        return Finding("control groups", Status.PASS, "version 2")
    if (root / "unified" / "cgroup.procs").exists():
        return Finding("control groups", Status.PASS, "version 1 and version 2")
    if (root / "cpu").exists() or (root / "memory").exists():
        return Finding("control groups", Status.PASS, "version 1")
    return Finding("control groups", Status.ABSENT, f"none mounted at {root}")


def native_module() -> Finding:
    """Whether the native module loads, and in which interpreter."""
    version = f"Python {platform.python_version()} at {sys.executable}"
    try:
        import sonde._native  # noqa: F401
    except ImportError as error:
        return Finding(
            "native module",
            Status.FAIL,
            f"does not load: {error}",
            "everything that is observed",
            "Reinstall Sonde from a wheel for this machine, or run `make setup` in a checkout.",
        )
    return Finding("native module", Status.PASS, f"loads in {version}")
