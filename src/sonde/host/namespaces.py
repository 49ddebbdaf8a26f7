# SPDX-License-Identifier: Apache-2.0
"""Whether this process sees the host as it is, or from inside namespaces.

The kernel gives its first namespaces fixed inode numbers (include/linux/proc_ns.h).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sonde.host.finding import Finding, Status

INITIAL = {
    "ipc": 0xEFFFFFFF,
    "uts": 0xEFFFFFFE,
    "user": 0xEFFFFFFD,
    "pid": 0xEFFFFFFC,
    "cgroup": 0xEFFFFFFB,
}

FOLDER = Path("/proc/self/ns")


def is_initial(kind: str, folder: Path = FOLDER) -> bool | None:
    """Whether this process lives in the first namespace of `kind`; None when it cannot be told."""
    try:
        return int(re.sub(r"\D", "", str((folder / kind).readlink()))) == INITIAL[kind]
    except (OSError, ValueError):
        return None


def all_initial(folder: Path = FOLDER) -> bool:
    """No namespace of this process is known to be other than the first of its kind."""
    return all(is_initial(kind, folder) is not False for kind in INITIAL)


def findings() -> Iterator[Finding]:
    """Process ids that the kernel reports are the host's; /proc must show the same ones."""
    name, needed_for = "PID namespace", "matching samples to processes"
    match is_initial("pid"):
        case True:
            yield Finding(name, Status.PASS, "the host's", needed_for)
        case False:
            yield Finding(
                name,
                Status.WARN,
                "a container's: processes outside it stay without names",
                needed_for,
                "Start the container with the host's PIDs (docker: --pid=host, pods: hostPID: "
                "true).",
            )
        case None:
            yield Finding(name, Status.ABSENT, f"{FOLDER}/pid cannot be read")
