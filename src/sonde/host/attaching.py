# SPDX-License-Identifier: Apache-2.0
"""Whether a library may be injected into a running process (`sonde attach`)."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sonde.attach import kill_switch
from sonde.host.capabilities import effective
from sonde.host.finding import Finding, Status

YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_NAME: Final = "attach"
_NEEDED_FOR: Final = "device time of processes that already run"
_CAP_SYS_PTRACE: Final = 19


def findings() -> Iterator[Finding]:
    """The finding on `sonde attach`."""
    yield attach_finding()


def attach_finding(
    yama: Path = YAMA,
    machine: str | None = None,
    capabilities: int | None = None,
) -> Finding:
    """Which processes this user may attach to; None of a parameter: as this machine has it."""
    machine = machine or platform.machine()
    if (path := kill_switch.found_file()) is not None:
        return _warn(f"turned off on this machine by {path}", f"rm {path}")
    if machine != "x86_64":
        return _warn(
            f"supported on x86-64 only, not on {machine}",
            "Start programs with: sonde record -- CMD",
        )
    scope = _scope(yama)
    if scope is None:
        return Finding(_NAME, Status.ABSENT, f"{yama} cannot be read", _NEEDED_FOR)
    if scope == 3:
        return _warn(
            "kernel.yama.ptrace_scope is 3: no process may be traced",
            "Boot with another setting, or start programs with: sonde record -- CMD",
        )
    mask = effective() if capabilities is None else capabilities
    if mask >> _CAP_SYS_PTRACE & 1:
        return Finding(_NAME, Status.PASS, "to processes of every user", _NEEDED_FOR)
    if scope:
        return _warn(
            f"kernel.yama.ptrace_scope is {scope}, and CAP_SYS_PTRACE is missing",
            "Run it with sudo: sudo sonde attach PID",
        )
    return Finding(_NAME, Status.PASS, "to processes of this user", _NEEDED_FOR)


def _scope(yama: Path) -> int | None:
    """Yama's ptrace_scope; 0 where the kernel has no Yama, None where it is not known."""
    try:
        return int(yama.read_text())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):
        return None


def _warn(detail: str, remedy: str) -> Finding:
    return Finding(_NAME, Status.WARN, detail, _NEEDED_FOR, remedy)
