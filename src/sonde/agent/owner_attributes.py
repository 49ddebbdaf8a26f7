# SPDX-License-Identifier: Apache-2.0
"""Whose a process is, as attributes of series: few, and the same for all that belong together."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from sonde import procfs
from sonde.model.owner import Owner
from sonde.resolve.owners import UserNames
from sonde.sinks.series import PROGRAM
from sonde.sinks.tenants import unit_of

OWNERS_KEPT = 1_024


def attributes(program: str, owner: Owner) -> Mapping[str, str]:
    """The program's name and its owner; a pid would make a series of every process. The same
    object for all that are alike."""
    job = owner.job, owner.step
    pod = owner.pod_uid, owner.namespace, owner.pod, owner.container_name
    unit = unit_of(owner.cgroup, owner.unit)
    return _attributes(program, owner.user, job, pod, owner.container, unit)


@lru_cache(maxsize=OWNERS_KEPT)
def _attributes(
    program: str,
    user: str,
    job: tuple[str, str],
    pod: tuple[str, str, str, str],
    container: str,
    unit: str,
) -> Mapping[str, str]:
    found = {PROGRAM: program or "unknown", "process.owner": user}
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
    """Who has user ids as subordinate ones (/etc/subuid), by name."""

    def __init__(self) -> None:
        self._names = UserNames()

    def of(self, user: str) -> str:
        """The user whose id this is: a name, or the number of one without a name."""
        if not user.isdecimal():
            return user
        holder = procfs.party_of_user(int(user))
        return user if holder == int(user) else self._names.name(holder)
