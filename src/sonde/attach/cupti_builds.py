# SPDX-License-Identifier: Apache-2.0
"""Builds of CUPTI with which a running process may be traced: only those that were tried.

Only a copy that the process has mapped itself is used: a second copy beside it hung programs.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from sonde import _native, procfs
from sonde.attach import glibc
from sonde.attach.image import ProcessMemory
from sonde.errors import TargetRefused

_CUPTI: Final = re.compile(r"libcupti\.so(\.[0-9.]+)?$")
_DRIVER: Final = re.compile(r"libcuda\.so(\.[0-9.]+)?$")
_INSTEAD: Final = "Record it without a trace: sonde record --device-time -p PID"
_WORD_BYTES: Final = 4
DRIVER: Final = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Price:
    """What tracing costs a program that is limited by its CPU, not by the device."""

    launch_us: float
    """How much longer a launch takes."""
    replay_us: float
    """The same of a replay of a CUDA graph."""
    mixed_us: float
    """And more for each replay, in a program that replays and launches in turn."""

    def share(self, launches: float, replays: float) -> float:
        """By which share steps take longer at most, at this many launches and replays a second."""
        mixed = min(launches, replays) * self.mixed_us
        return (launches * self.launch_us + replays * self.replay_us + mixed) / 1e6


@dataclass(frozen=True, slots=True)
class Build:
    """A build that was tried: an entry of cupti_builds.toml, which has what the fields are."""

    version: str
    build_id: str
    subscriber: int
    drivers: tuple[int, ...]
    machine: str
    during: Price
    """While a trace goes on."""
    after: Price
    """From then on, until the process ends."""


def proved() -> list[Build]:
    """All builds of the table."""
    text = resources.files("sonde.attach").joinpath("cupti_builds.toml").read_text("utf-8")
    return [_build(entry) for entry in tomllib.loads(text)["build"]]


def _build(entry: dict[str, Any]) -> Build:
    prices = {name: Price(**entry["price"][name]) for name in ("during", "after")}
    return Build(
        entry["version"], entry["build_id"], entry["subscriber"], tuple(entry["drivers"]),
        entry["machine"], **prices
    )  # fmt: skip


def require(pid: int, driver: int | None = None) -> Build:
    """The build that process `pid` has mapped. `driver`: the major version, if not this machine's.

    Raises TargetRefused where it has none, several, or one that was not tried, or with a driver it
    was not tried with; OSError when the process is gone.
    """
    found = _build_ids(pid)
    if not found and not _has_driver(pid):
        raise TargetRefused(
            f"process {pid} uses no NVIDIA GPU: the driver's library (libcuda.so) is not loaded",
            f"What a program without a GPU waits for: sonde explain --pid {pid}",
        )
    if not found:
        raise TargetRefused(
            f"process {pid} has not loaded CUPTI (libcupti.so), and Sonde brings none",
            f"PyTorch loads it with its own libraries. {_INSTEAD}",
        )
    if len(found) > 1:
        raise TargetRefused(f"process {pid} has several builds of CUPTI loaded", _INSTEAD)
    build_id, path = found.popitem()
    table = {build.build_id: build for build in proved()}
    build = table.get(build_id)
    if build is None:
        tried = ", ".join(sorted(build.version for build in table.values()))
        raise TargetRefused(
            f"process {pid} has a build of CUPTI ({path}, build id {build_id or 'unknown'}) that "
            f"Sonde was not tried with; it was with {tried}",
            _INSTEAD,
        )
    major = driver_major() if driver is None else driver
    if major not in build.drivers:
        drivers = ", ".join(map(str, build.drivers))
        raise TargetRefused(
            f"CUPTI {build.version} was tried with driver {drivers}; this machine has "
            f"{major or 'an unknown one'}",
            _INSTEAD,
        )
    return build


def has_subscriber(pid: int, build: Build) -> bool:
    """Whether somebody holds the subscription of the CUPTI that process `pid` has mapped, by what
    CUPTI has noted in the process's memory. Raises OSError when the process is gone."""
    base = next(
        (m.start for m in glibc.mappings_of(pid) if not m.offset and _CUPTI.search(m.leaf)), None
    )
    if base is None:
        raise ProcessLookupError(f"process {pid} has no CUPTI any more")
    with ProcessMemory(pid) as memory:
        return any(memory.read(base + build.subscriber, _WORD_BYTES))


def driver_major() -> int:
    """Major version of NVIDIA's kernel module; 0: unknown."""
    try:
        text = DRIVER.read_text("utf-8", "replace")
    except OSError:
        return 0
    match = re.search(r"^NVRM version:.*?\s(\d{3,4})\.\d+", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _build_ids(pid: int) -> dict[str, str]:
    """File names of the copies of CUPTI that are mapped, by build id ('': it cannot be read)."""
    found = {}
    for mapped in glibc.mappings_of(pid):
        if "x" in mapped.prot and _CUPTI.search(mapped.leaf):
            found[_build_id(pid, mapped)] = mapped.leaf
    return found


def _has_driver(pid: int) -> bool:
    """Whether a process has mapped the library through which programs use NVIDIA's GPUs."""
    return any("x" in one.prot and _DRIVER.search(one.leaf) for one in glibc.mappings_of(pid))


def _build_id(pid: int, mapped: glibc.Mapped) -> str:
    """The build id of the very file that is mapped; '' where it cannot be read."""
    task = procfs.memory_task(pid)
    span = f"{mapped.start:x}-{mapped.end:x}"
    for path in (f"/proc/{task}/map_files/{span}", f"/proc/{task}/root{mapped.path}"):
        try:
            fd = procfs.open_regular(path)
        except OSError:
            continue
        if fd is None:
            continue
        try:
            if os.fstat(fd).st_ino == mapped.inode:
                return _native.build_id(f"/proc/self/fd/{fd}")
        except (OSError, ValueError):
            continue
        finally:
            os.close(fd)
    return ""
