# SPDX-License-Identifier: Apache-2.0
"""The owner of a process as attributes of metrics: few, and equal for processes of one owner and
program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from sonde import procfs
from sonde.model.owner import Owner
from sonde.resolve.owners import UserNames
from sonde.sinks.series import COMMAND, PROGRAM
from sonde.sinks.tenants import ROOT, is_users_slice, unit_of

MAX_CACHED = 1_024
"""Combinations of program and owner."""
_RANK = re.compile(r" rank \d{1,7}$")


def attributes(program: str, owner: Owner, pid: int = 0, command: str = "") -> Mapping[str, str]:
    """The program's name, what it runs if it is an interpreter (`command`, `Process.command`; ranks
    of a job are one), and its owner; no pid, which would make a series of every process. The same
    object for equal arguments, as long as it is cached.

    `pid`: of the process. One that has another pid in its own namespace is in a container. In one
    within a unit, which its control group does not name for sure, any user id can be taken: a
    process there has no user, unless it is root of the unit.
    """
    job = owner.job, owner.step
    pod = owner.pod_uid, owner.namespace, owner.pod, owner.container_name
    unit = unit_of(owner.cgroup, owner.unit)
    is_named = bool(owner.job or owner.container or owner.pod_uid or is_users_slice(unit))
    is_inner = bool(owner.inner_container) or (pid and owner.inner_pid not in (0, pid))
    has_user = is_named or not is_inner or bool(unit and owner.user == ROOT)
    user = owner.user if has_user else ""
    script = _RANK.sub("", command)
    return _attributes(program, script, user, job, pod, owner.container, unit)


@lru_cache(maxsize=MAX_CACHED)
def _attributes(
    program: str,
    command: str,
    user: str,
    job: tuple[str, str],
    pod: tuple[str, str, str, str],
    container: str,
    unit: str,
) -> Mapping[str, str]:
    found = {PROGRAM: program or "unknown", "process.owner": user}
    if command:
        found[COMMAND] = command
    if job[0]:
        found |= {"sonde.slurm.job": job[0], "sonde.slurm.step": job[1]}
    uid, namespace, name, container_name = pod
    if uid:
        found |= {
            "k8s.namespace.name": namespace,
            "k8s.pod.name": name or uid,
            "k8s.container.name": container_name,
        }
    elif container:
        found["container.id"] = container
    if unit and not (job[0] or container):
        found["sonde.unit"] = unit
    return {name: value for name, value in found.items() if value}


class Holders:
    """Looks up which user has a user id as a subordinate one (/etc/subuid)."""

    def __init__(self) -> None:
        self._names = UserNames()

    def of(self, user: str) -> str:
        """The user who has `user` (a name, or a number without a name) as a subordinate id: a name,
        or a number; `user` itself where nobody has."""
        if not user.isdecimal():
            return user
        holder = procfs.party_of_user(int(user))
        return user if holder == int(user) else self._names.name(holder)
