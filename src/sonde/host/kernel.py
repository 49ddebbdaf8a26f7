# SPDX-License-Identifier: Apache-2.0
"""Features of the running kernel that Sonde uses, and settings that restrict them.

BPF programs, uprobe_multi and perf clocks are tried by making one. BTF, lockdown and uprobes are
looked up by a file of the kernel.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from sonde.host import syscalls
from sonde.host.finding import Finding, Status

BTF = Path("/sys/kernel/btf/vmlinux")
LOCKDOWN = Path("/sys/kernel/security/lockdown")
SYSCTL = Path("/proc/sys/kernel")
UPROBE_SOURCE = Path("/sys/bus/event_source/devices/uprobe/type")

_NOT_PERMITTED = (errno.EPERM, errno.EACCES)
_NOT_PROBED = "cannot be probed: needs CAP_BPF and CAP_PERFMON, and no seccomp filter against it"


def findings() -> Iterator[Finding]:
    """The kernel's features first, then its settings."""
    yield Finding("kernel", Status.PASS, f"{os.uname().sysname} {os.uname().release}")
    yield btf()
    yield lockdown()
    yield from bpf_programs()
    yield uprobes()
    yield _feature(
        "uprobe_multi",
        syscalls.link_uprobe_multi,
        "attaching many device-call probes at once",
        "Linux 6.6 and newer have it; without it each probe is attached separately.",
        essential=False,
    )
    yield _feature(
        "perf software clock",
        lambda: syscalls.open_cpu_event(
            syscalls.PERF_TYPE_SOFTWARE, syscalls.PERF_COUNT_SW_CPU_CLOCK
        ),
        "on-CPU samples",
        "The kernel is built without CONFIG_PERF_EVENTS; boot one that has it.",
    )
    yield hardware_counters()
    yield from settings()


def bpf_programs() -> Iterator[Finding]:
    """Features that the BPF programs of the recorder require, then optional ones."""
    yield _feature(
        "BPF",
        syscalls.create_array_map,
        "everything that is observed",
        "The kernel is built without CONFIG_BPF_SYSCALL; boot one that has it.",
    )
    yield _feature(
        "BPF ring buffer",
        syscalls.create_ring_buffer,
        "waits, device calls",
        "Boot Linux 5.8 or newer.",
    )
    yield _feature(
        "BPF task storage",
        syscalls.create_task_storage,
        "waits (off-CPU time)",
        "Boot Linux 5.15 or newer: 5.11 has it, but lacks other features that waits need.",
    )
    yield _feature(
        "BPF on perf events",
        syscalls.load_perf_event_program,
        "on-CPU samples",
        "The kernel is built without CONFIG_BPF_EVENTS; boot one that has it.",
    )
    yield _feature(
        "registers of tasks in BPF",
        syscalls.load_task_reader,
        "samples, waits, stacks",
        "Boot Linux 5.15 or newer.",
    )
    yield _feature(
        "cookies of BPF probes",
        syscalls.load_cookie_reader,
        "device calls",
        "Boot Linux 5.15 or newer.",
    )
    yield _feature(
        "loops in BPF",
        syscalls.load_loop,
        "whole user stacks, Python's among them",
        "Linux 5.17 and newer have them; without them stacks are unwound by frame pointers.",
        essential=False,
    )


def btf(path: Path = BTF) -> Finding:
    """BTF type information, from which BPF programs learn the kernel's layouts."""
    if path.exists():
        size = path.stat().st_size
        return Finding("BTF", Status.PASS, f"{path} ({size / 2**20:.1f} MiB)", "everything")
    return Finding(
        "BTF",
        Status.FAIL,
        f"{path} is missing",
        "everything that is observed",
        "Boot a kernel built with CONFIG_DEBUG_INFO_BTF=y (those of all major distributions are).",
    )


def lockdown(path: Path = LOCKDOWN) -> Finding:
    """Kernel lockdown: 'confidentiality' forbids BPF to read kernel memory, 'integrity' does not.

    The file shows every mode and brackets the one in force: `none [integrity] confidentiality`.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Finding("lockdown", Status.PASS, "none", "reading kernel memory from BPF")
    except OSError as error:
        return Finding("lockdown", Status.ABSENT, f"{path}: {error.strerror}")
    bracketed = re.search(r"\[(\w+)]", text)
    mode = bracketed.group(1) if bracketed else "none"
    if mode == "confidentiality":
        return Finding(
            "lockdown",
            Status.FAIL,
            "confidentiality mode: BPF may not read kernel memory",
            "everything that is observed",
            "Boot with lockdown=integrity (or without lockdown=confidentiality).",
        )
    return Finding("lockdown", Status.PASS, mode, "reading kernel memory from BPF")


def _feature(
    name: str,
    probe: Callable[[], int],
    needed_for: str,
    remedy: str,
    *,
    essential: bool = True,
) -> Finding:
    """A finding from a probe that returns 0 or an errno."""
    error = probe()
    if error == 0:
        return Finding(name, Status.PASS, "works", needed_for)
    if error in _NOT_PERMITTED:
        # The capability has a separate finding; this feature is unknown, not broken.
        return Finding(name, Status.ABSENT, _NOT_PROBED, needed_for)
    detail = f"refused: {os.strerror(error)}"
    return Finding(name, Status.FAIL if essential else Status.WARN, detail, needed_for, remedy)


def uprobes(path: Path = UPROBE_SOURCE) -> Finding:
    """Probes on functions of user programs."""
    if path.exists():
        return Finding("uprobes", Status.PASS, "works", "device calls")
    return Finding(
        "uprobes",
        Status.WARN,
        f"{path} is missing",
        "device calls",
        "Boot a kernel built with CONFIG_UPROBE_EVENTS=y; without it record leaves them out.",
    )


def hardware_counters() -> Finding:
    """Cycle counters: not needed, and most virtual machines have none."""
    error = syscalls.open_cpu_event(syscalls.PERF_TYPE_HARDWARE, syscalls.PERF_COUNT_HW_CPU_CYCLES)
    if error == 0:
        return Finding("hardware counters", Status.PASS, "cycles can be counted")
    if error in _NOT_PERMITTED:
        return Finding("hardware counters", Status.ABSENT, _NOT_PROBED)
    return Finding(
        "hardware counters", Status.ABSENT, "none (usual in a virtual machine); not needed"
    )


def _sysctl(name: str) -> int | None:
    try:
        return int((SYSCTL / name).read_text())
    except (OSError, ValueError):
        return None


def settings() -> Iterator[Finding]:
    """Settings for processes without privileges."""
    unprivileged = _sysctl("unprivileged_bpf_disabled")
    yield Finding(
        "unprivileged BPF",
        Status.PASS,
        {None: "not limited", 0: "allowed (0)"}.get(
            unprivileged, f"disabled ({unprivileged}): CAP_BPF is needed"
        ),
    )
    paranoid = _sysctl("perf_event_paranoid")
    yield Finding(
        "perf_event_paranoid",
        Status.PASS,
        "unknown" if paranoid is None else f"{paranoid}: CAP_PERFMON overrides it",
    )
    yield kernel_addresses()


def kernel_addresses(path: Path = Path("/proc/kallsyms")) -> Finding:
    """Whether /proc/kallsyms shows addresses to this process (kptr_restrict, CAP_SYSLOG)."""
    restrict = _sysctl("kptr_restrict")
    try:
        with path.open() as symbols:
            visible = any(int(line.split()[0], 16) for line in itertools.islice(symbols, 50))
    except OSError as error:
        return Finding(
            "kernel symbols",
            Status.WARN,
            f"{path}: {error.strerror}",
            "names of kernel frames",
            "Boot a kernel built with CONFIG_KALLSYMS=y.",
        )
    if visible:
        return Finding(
            "kernel symbols",
            Status.PASS,
            f"addresses visible (kptr_restrict {restrict})",
            "names of kernel frames",
        )
    return Finding(
        "kernel symbols",
        Status.WARN,
        f"addresses hidden (kptr_restrict {restrict})",
        "names of kernel frames",
        "Allow them with: sudo sysctl kernel.kptr_restrict=0"
        if restrict == 2
        else "Run with CAP_SYSLOG.",
    )
