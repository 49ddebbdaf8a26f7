# SPDX-License-Identifier: Apache-2.0
"""Whose a process is that may be a rank, by what neither it nor another tenant chooses.

Ranks of one job may connect by TCP, which every process in their network namespace can do, also a
stranger with the same user id and program. So who connects must be of one owner: one pod, or all
pods of its namespace where the kubelet has described it; one container; one user; one service's
containers, where nothing shows which is which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sonde import procfs
from sonde.procfs.cgroup_paths import Place, place_of

_ROOT: Final = 0
"""The party of the machine's root."""
STRANGER: Final = "?"
"""Of a process whose owner is not known: it is nobody's companion."""


NamespaceLookup = Callable[[int, str], str]
"""The namespace of a process's pod (pid, uid of the pod), as the kubelet has it; '': not yet."""


def no_namespace(_pid: int, _pod_uid: str) -> str:
    """The lookup where no kubelet is asked."""
    return ""


def owner_of_rank(pid: int, party: int, namespace_of: NamespaceLookup = no_namespace) -> str:
    """The owner of a process of `party` (`procfs.party_of`). Raises nothing."""
    place = _place_of(pid)
    if place.pod_uid:
        namespace = namespace_of(pid, place.pod_uid)
        return f"namespace {namespace}" if namespace else f"pod {place.pod_uid}"
    if place.container:
        return f"{place.runtime} {place.container}"
    if party in (procfs.NOBODY, procfs.UNKNOWN_PARTY):
        return STRANGER
    if (place.is_delegated or party == _ROOT) and not (place.user or place.job):
        return f"{party} {place.border}"  # a container there may have the machine's pids
    return str(party)


def _place_of(pid: int) -> Place:
    """What the control group shows that shows most, of all hierarchies."""
    raw = procfs.read_file(f"/proc/{pid}/cgroup") or b""
    paths = [line.split(b":", 2)[2] for line in raw.split(b"\n") if line.count(b":") >= 2]
    places = [place_of(procfs.text(path)) for path in paths]
    return max(places, key=lambda place: place.specificity, default=Place(""))
