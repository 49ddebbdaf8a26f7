# SPDX-License-Identifier: Apache-2.0
"""Whether this process sees the host as it is, or from inside namespaces.

The kernel gives its first namespaces fixed inode numbers (include/linux/proc_ns.h).

BPF programs see processes by their numbers in the first pid namespace, system calls by those in the
caller's, and /proc shows those of the namespace that mounted it. Where they differ, one number
means different processes, so nothing that combines two of them starts before all are the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from sonde.errors import HostError
from sonde.host.finding import Finding, Status

INITIAL = {
    "ipc": 0xEFFFFFFF,
    "uts": 0xEFFFFFFE,
    "user": 0xEFFFFFFD,
    "pid": 0xEFFFFFFC,
    "cgroup": 0xEFFFFFFB,
}

FOLDER = Path("/proc/self/ns")
SELF_STATUS = Path("/proc/self/status")

REMEDY = (
    "Run it on the host, or share the host's process ids (docker, podman: --pid=host; pods: "
    "hostPID: true)."
)


def is_initial(kind: str, folder: Path = FOLDER) -> bool | None:
    """Whether this process lives in the first namespace of `kind`; None where it is not known."""
    try:
        return int(re.sub(r"\D", "", str((folder / kind).readlink()))) == INITIAL[kind]
    except (OSError, ValueError):
        return None


def all_initial(folder: Path = FOLDER) -> bool:
    """Every namespace of this process is known to be the first of its kind."""
    return all(is_initial(kind, folder) for kind in INITIAL)


def proc_is_ours(status: Path = SELF_STATUS) -> bool | None:
    """Whether /proc shows the process ids of our pid namespace; None where it is not known.

    NSpid lists a process's numbers from the namespace of that /proc inwards: one number in our own
    /proc. A /proc of a namespace above ours, as in a container that mounts the host's, has one more
    for each level between; in one beside or below ours this process is not there.
    """
    try:
        text = status.read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    numbers = re.search(r"^NSpid:(.*)$", text, re.MULTILINE)
    return None if numbers is None else numbers[1].split() == [str(os.getpid())]


def require_matching_proc(status: Path = SELF_STATUS) -> None:
    """Raise HostError where a number of /proc may be another process's for a system call."""
    is_ours = proc_is_ours(status)
    if is_ours is None:
        raise HostError(
            f"{status} does not show which pid namespace /proc shows",
            "Mount a whole /proc, of Linux 4.1 or newer with pid namespaces.",
        )
    if not is_ours:
        raise HostError(
            "/proc shows the process ids of another pid namespace: its numbers are other "
            "processes here",
            "Share the host's process ids besides its /proc (docker, podman: --pid=host; pods: "
            "hostPID: true), or run it on the host.",
        )


def require_host_pids(folder: Path = FOLDER, status: Path = SELF_STATUS) -> None:
    """Raise HostError where a process id that the kernel reports may be another process's here."""
    is_host = is_initial("pid", folder)
    if is_host is None:
        raise HostError(
            f"{folder}/pid cannot be read, which shows whether this is a separate pid namespace",
            f"Mount a whole /proc. {REMEDY}",
        )
    if not is_host:
        raise HostError(
            "this is a separate pid namespace: the kernel reports the host's process ids, which "
            "are other processes here",
            REMEDY,
        )
    require_matching_proc(status)


def findings() -> Iterator[Finding]:
    """Whether this process and its /proc use the host's process ids, which BPF programs report."""
    name, needed_for = "PID namespace", "recording, dump and agent: the process of a sample"
    try:
        require_host_pids()
    except HostError as error:
        yield Finding(name, Status.FAIL, error.cause, needed_for, error.remedy)
    else:
        yield Finding(name, Status.PASS, "the host's", needed_for)
