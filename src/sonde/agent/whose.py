# SPDX-License-Identifier: Apache-2.0
"""Whose a process is, as attributes of series: few, and the same for all that belong together."""

from __future__ import annotations

from collections.abc import Mapping

from sonde.model.process import Process
from sonde.sinks.series import PROGRAM


def attributes(process: Process) -> Mapping[str, str]:
    """The program's name and its owner; a pid would make a series of every process."""
    owner = process.owner
    found = {PROGRAM: process.exe or process.comm or "unknown", "process.owner": owner.user}
    if owner.job:
        found |= {"sonde.slurm.job": owner.job, "sonde.slurm.step": owner.step}
    if owner.pod_uid:
        found |= {
            "k8s.namespace.name": owner.namespace,
            "k8s.pod.name": owner.pod or owner.pod_uid,
            "k8s.container.name": owner.container_name,
        }
    elif owner.container:
        found["container.id"] = owner.container
    if owner.unit and not (owner.job or owner.container):
        found["sonde.unit"] = owner.unit
    return {name: value for name, value in found.items() if value}
