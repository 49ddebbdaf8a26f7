# SPDX-License-Identifier: Apache-2.0
"""What the path of a control group tells of the processes in it.

Sources: the runtimes' own naming, for both of their drivers (cgroupfs and systemd):

    docker       /docker/ID                       /system.slice/docker-ID.scope
    containerd   /k8s.io/ID, /default/ID          …/cri-containerd-ID.scope, …/cri-containerd:ID
    CRI-O        …/crio-ID                        …/crio-ID.scope
    podman       /libpod_parent/libpod-ID         …/libpod-ID.scope, with /container below it
    kubelet      /kubepods/burstable/podUID/ID    …/kubepods-burstable-podU_I_D.slice/…
    Slurm        /slurm/uid_U/job_J/step_S/task_T /system.slice/slurmstepd.scope/job_J/step_S/user/…
    systemd      /system.slice/NAME.service       /user.slice/user-U.slice/session-N.scope
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

MAX_PATH = 256
"""Of a path that is kept: what lies deeper is cut, like in the kernel's own notes."""

_ID = r"(?P<id>[0-9a-f]{64}|[0-9a-f]{32}-[0-9]{5,20})"
"""64 hex digits; AWS ECS names its containers by task and number."""
_CONTAINERS = tuple(
    (runtime, re.compile(pattern))
    for runtime, pattern in (
        ("docker", rf"^docker-{_ID}\.scope$"),
        ("containerd", rf"^(?:cri-containerd|nerdctl)-{_ID}\.scope$"),
        ("containerd", rf"^[^/]*:(?:cri-containerd|nerdctl):{_ID}$"),
        ("crio", rf"^[^/]*:crio:{_ID}$"),
        ("crio", rf"^crio-{_ID}(?:\.scope)?$"),
        ("podman", rf"^libpod-{_ID}(?:\.scope)?$"),
        ("container", rf"^[A-Za-z0-9_.]+-{_ID}\.scope$"),
        ("container", rf"^{_ID}$"),
    )
)
_CONMON = re.compile(r"^(?:libpod|crio)-conmon-[0-9a-f]{64}")
"""The runtime's own keeper beside a container is not in it."""
_PARENTS = {
    "docker": "docker",
    "buildkit": "docker",
    "k8s.io": "containerd",
    "default": "containerd",
    "libpod_parent": "podman",
}
_POD = re.compile(
    r"^(?:(?:[a-z]+-)*kubepods(?:-[a-z]+)*-)?pod(?P<uid>[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}"
    r"[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice(?::.*)?)?$"
)
_SLURM = re.compile(r"^slurm(?:_[^/]*)?$|^[^/]*slurmstepd\.scope$")
_JOB = re.compile(r"^job_(?P<job>[0-9]+)$")
_STEP = re.compile(r"^step_(?P<step>[0-9]+|batch|extern|interactive)(?:_[0-9]+)?$")
_UNIT = re.compile(r"\.(?:service|scope|socket|mount|swap)$")
_MACHINE = re.compile(r"^machine-(?P<name>.+)\.scope$")


@dataclass(frozen=True, slots=True)
class Place:
    """What one path tells."""

    path: str
    runtime: str = ""
    container: str = ""
    pod_uid: str = ""
    job: str = ""
    step: str = ""
    unit: str = ""

    @property
    def tells(self) -> int:
        """How much: a path of a container or a job tells more than that of a unit."""
        return (
            4 * bool(self.container or self.job)
            + 2 * bool(self.pod_uid)
            + bool(self.unit)
            + bool(self.path.strip("/"))
        )


@lru_cache(maxsize=4096)
def place_of(path: str) -> Place:
    """Read a path under the root of its hierarchy. Any text is a path; nothing is raised."""
    path = path[:MAX_PATH]
    runtime = container = pod_uid = job = step = unit = ""
    in_slurm = False
    parts = [part for part in path.split("/") if part]
    for number, part in enumerate(parts):
        in_slurm = in_slurm or bool(_SLURM.match(part))
        if found := _POD.match(part):
            pod_uid = _dashed(found["uid"])
        if in_slurm and (found := _JOB.match(part)):
            job = found["job"]
        if in_slurm and job and (found := _STEP.match(part)):
            step = found["step"]
        if _UNIT.search(part):
            unit = part
        # The innermost container holds: docker in docker, podman in a pod.
        if not _CONMON.match(part) and (found_container := _container(parts, number)):
            runtime, container = found_container
    return Place(path, runtime, container, pod_uid, job, step, _readable(unit))


def _container(parts: list[str], number: int) -> tuple[str, str] | None:
    part = parts[number]
    for runtime, pattern in _CONTAINERS:
        found = pattern.match(part)
        if found is None:
            continue
        if runtime != "container":
            return runtime, found["id"]
        above = parts[number - 1] if number else ""
        return _PARENTS.get(above, _by_pod(above)), found["id"]
    if part.startswith(("lxc.payload.", "lxc.payload/")):
        return "lxc", part.removeprefix("lxc.payload.")
    if number and parts[number - 1] == "lxc":
        return "lxc", part
    if found := _MACHINE.match(part):
        return "nspawn", _readable(found["name"])
    return None


def _by_pod(above: str) -> str:
    """Under a pod, a bare id is what containerd and docker alike write; say no more than that."""
    return "containerd" if _POD.match(above) else "container"


def _dashed(uid: str) -> str:
    """A pod's uid as the API has it: systemd takes no dashes, static pods have none at all."""
    return uid.replace("_", "-")


def _readable(unit: str) -> str:
    r"""systemd escapes bytes as \x2d."""
    if "\\x" not in unit:
        return unit
    return unquote(unit.replace("%", "%25").replace("\\x", "%"), errors="replace")
