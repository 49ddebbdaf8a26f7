# SPDX-License-Identifier: Apache-2.0
"""Which Linux capabilities this process has, which it needs, and how to grant them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import PermissionDenied
from sonde.host import namespaces
from sonde.host.finding import Finding, Status


@dataclass(frozen=True, slots=True)
class Capability:
    """A capability, by its number in include/uapi/linux/capability.h."""

    name: str
    bit: int
    needed_for: str
    required: bool  # record cannot start without it
    substitute: int | None = None  # this one is sufficient, too


SYS_ADMIN = 21

NEEDED = (
    Capability("CAP_BPF", 39, "loading BPF programs", True, SYS_ADMIN),
    Capability("CAP_PERFMON", 38, "sampling CPUs, probing functions", True, SYS_ADMIN),
    Capability("CAP_SYS_PTRACE", 19, "symbols and device calls of other users' processes", False),
    Capability(
        "CAP_CHECKPOINT_RESTORE", 40, "symbols of deleted and replaced files", False, SYS_ADMIN
    ),
    Capability("CAP_DAC_READ_SEARCH", 2, "reading binaries that only their owner may", False),
    Capability("CAP_SYSLOG", 34, "kernel symbols", False, SYS_ADMIN),
)


def effective(status: str | None = None) -> int:
    """The effective set as a bit mask, from /proc/self/status (or `status`, its text)."""
    if status is None:
        status = Path("/proc/self/status").read_text()
    for line in status.split("\n"):
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def held(mask: int, capability: Capability) -> bool:
    """Whether `mask` has the capability or its substitute."""
    bits = [capability.bit]
    if capability.substitute is not None:
        bits.append(capability.substitute)
    return any(mask >> bit & 1 for bit in bits)


def missing(mask: int | None = None, *, required_only: bool = False) -> list[Capability]:
    """The needed capabilities that this process (or `mask`) lacks."""
    if mask is None:
        mask = effective()
    return [
        capability
        for capability in NEEDED
        if not held(mask, capability) and (capability.required or not required_only)
    ]


def in_container() -> str | None:
    """'docker', 'podman', 'kubernetes' or 'a container' when this is one; None on a bare host.

    A marker file alone does not count: a machine booted from a container image has it as well.
    """
    if namespaces.all_initial():
        return None
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    # systemd-nspawn, LXC and others name themselves to their first process.
    return "a container" if "container" in os.environ else None


def how_to_grant() -> str:
    """One sentence: how to grant what is missing, on a host or in this kind of container."""
    names = [capability.name for capability in NEEDED]
    match in_container():
        case "kubernetes":
            short = ", ".join(name.removeprefix("CAP_") for name in names)
            return (
                "Set hostPID: true on the pod and "
                f"securityContext.capabilities.add: [{short}] on the container."
            )
        case "docker" | "podman" as engine:
            flags = " ".join(f"--cap-add {name.removeprefix('CAP_')}" for name in names)
            return f"Start the container with: {engine} run --pid=host {flags} …"
        case str():
            return f"Give the container {', '.join(names)} and the host's PID namespace."
        case None:
            return f"Run it with sudo: sudo {_command()}"


def without_root() -> str:
    """The command that runs Sonde as this user with just the needed capabilities."""
    caps = ",".join("+" + cap.name.removeprefix("CAP_").lower() for cap in NEEDED)
    return (
        f"sudo setpriv --reuid={os.getuid()} --regid={os.getgid()} --init-groups "
        f"--inh-caps={caps} --ambient-caps={caps} {_command()}"
    )


_NEED_THEM = frozenset(("record", "explain", "up", "agent", "diagnose", "trace"))
"""Commands that need what `NEEDED` has."""


def _command() -> str:
    """The command to repeat with privileges; for those that need none, `sonde record`."""
    # sudo uses another PATH, so the script is named by its full path.
    program = "sonde"
    if Path(sys.argv[0]).name == program:
        program = shutil.which(sys.argv[0]) or program
    arguments = sys.argv[1:] if _NEED_THEM.intersection(sys.argv[1:2]) else ["record"]
    return shlex.join([program, *arguments])


def require() -> None:
    """Raise `PermissionDenied` when record cannot start because a capability is missing."""
    lacking = missing(required_only=True)
    if lacking:
        names = " and ".join(capability.name for capability in lacking)
        plural = "capabilities" if len(lacking) > 1 else "capability"
        raise PermissionDenied(f"recording needs the {plural} {names}", how_to_grant())


def findings() -> Iterator[Finding]:
    """One finding per capability."""
    mask = effective()
    for capability in NEEDED:
        if held(mask, capability):
            yield Finding(capability.name, Status.PASS, "held", capability.needed_for)
        else:
            yield Finding(
                capability.name,
                Status.FAIL if capability.required else Status.WARN,
                "missing in this process",
                capability.needed_for,
                how_to_grant(),
            )
