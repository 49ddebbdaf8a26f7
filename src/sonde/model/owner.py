# SPDX-License-Identifier: Apache-2.0
"""Whose a process is: user, container, pod, job, unit."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a process is, as far as is known; a field that is '' is not known or does not apply."""

    user: str = ""
    """Name of the user, or its number where this machine has no name for it."""
    cgroup: str = ""
    """Path of its control group under the root of its hierarchy: version 2, or that of version 1 in
    which the path is the longest."""
    runtime: str = ""
    """What made the container: docker | containerd | crio | podman | lxc | nspawn | container."""
    container: str = ""
    """Id of the container, 64 hex digits for most runtimes; a machine's name for lxc, nspawn."""
    inner_container: str = ""
    """Id of a container within that one, or of one that a user runs without root. Those who run it
    chose the path it is read from, so it proves nothing."""
    container_name: str = ""
    """Its name in the pod."""
    pod_uid: str = ""
    pod: str = ""
    namespace: str = ""
    labels: str = ""
    """Of the pod: a JSON object."""
    job: str = ""
    """Slurm's number of the job."""
    step: str = ""
    """Of the job: a number, batch (its script), extern (logins by ssh), interactive."""
    unit: str = ""
    """systemd's unit: the first service or scope in the path of the control group."""
    inner_pid: int = 0
    """The pid that it has in its own pid namespace; 0: not known."""

    @property
    def label(self) -> str:
        """The owner that people know the work by, in a few words, as a table prints it: the job,
        else the pod, container, unit or user."""
        if self.job:
            return f"job {self.job}.{self.step}" if self.step else f"job {self.job}"
        if self.pod:
            return f"{self.namespace}/{self.pod}" if self.namespace else self.pod
        if self.pod_uid:
            return f"pod {self.pod_uid[:13]}"
        if self.container:
            return f"{self.runtime} {self.container[:12]}"
        return self.unit or self.user


OWNER_COLUMNS = tuple(field.name for field in fields(Owner))
"""Columns of the table `process` that name its owner; `inner_pid` is the last."""

UNKNOWN = Owner()


@dataclass(frozen=True, slots=True)
class ProcessNote:
    """The kernel's record of whose a process is, made while it lived."""

    time_ns: int
    pid: int
    start_ns: int
    ppid: int
    uid: int
    inner_pid: int
    groups: tuple[tuple[int, int], ...]
    """(hierarchy, id) of its control groups."""
    kind: str
    """exec | moved (to another control group) | exit"""
    step: tuple[str, str] | None = None
    """(job, step) of Slurm, where slurmstepd started it."""


@dataclass(frozen=True, slots=True)
class GroupNote:
    """The kernel's record of a control group that was made."""

    hierarchy: int
    """0: version 2."""
    id: int
    path: str


_VARIABLES = {b"SLURM_JOB_ID": "job", b"SLURM_STEP_ID": "step", b"SLURM_STEPID": "step"}
_NAMED_STEPS = {"4294967292": "extern", "4294967291": "batch", "4294967290": "interactive"}
"""SLURM_EXTERN_CONT, SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP of slurm.h: steps by name."""


def step_of(environment: bytes) -> tuple[str, str] | None:
    """(job, step) from the environment of a step's program; nothing else of it is kept."""
    found = {"job": "", "step": "batch"}  # the batch script itself has no step
    for variable in environment.split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name in _VARIABLES and value.isdigit():
            found[_VARIABLES[name]] = value.decode()
    step = _NAMED_STEPS.get(found["step"], found["step"])
    return (found["job"], step) if found["job"] else None
