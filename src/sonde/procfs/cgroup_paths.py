# SPDX-License-Identifier: Apache-2.0
"""Whose the processes in a control group are, as far as its path shows that.

Container runtimes and others name groups like this, with their cgroup drivers cgroupfs (left) and
systemd (right):

    docker       /docker/ID                       /system.slice/docker-ID.scope
    containerd   /k8s.io/ID, /default/ID          …/cri-containerd-ID.scope, …/cri-containerd:ID
    CRI-O        …/crio-ID                        …/crio-ID.scope
    podman       /libpod_parent/libpod-ID         …/libpod-ID.scope, with /container below it
    kubelet      /kubepods/burstable/podUID/ID    …/kubepods-burstable-podU_I_D.slice/…
    Slurm        /slurm/uid_U/job_J/step_S/task_T /system.slice/slurmstepd.scope/job_J/step_S/user/…
    LXC, Incus   /lxc/NAME                        /lxc.payload.NAME
    systemd      /system.slice/NAME.service       /user.slice/user-U.slice/session-N.scope

A path is read from its top, component by component, down to the border of what root's services
named: the first service or scope, the first container, the step of a Slurm job, or the first name
that none of them gives. Below that border a user, a service or a container makes groups of any
name, so nothing there shows whose a process is. A container further down (docker in docker, kind,
rootless podman) is kept as `inner_container`, which those who run there may have made up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import unquote_to_bytes

from sonde.procfs.names import raw_name, text

MAX_PATH: Final = 256
"""Characters of a path that are kept, as many as in `struct cgroup_note` of abi/events.h."""
_MAX_READ: Final = 1024
"""Characters of a path that are read; the border is never so deep."""

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
        ("podman", rf"^libpod-(?:payload-)?{_ID}(?:\.scope)?$"),
        ("container", rf"^[A-Za-z0-9_.]+-{_ID}\.scope$"),
        ("container", rf"^{_ID}$"),
    )
)
_CONMON = re.compile(r"^(?:libpod|crio)-conmon-[0-9a-f]{64}")
"""The runtime's monitor process of a container is not in the container."""
_PARENTS = {
    "docker": ("docker", 1),
    "buildkit": ("docker", 1),
    "k8s.io": ("containerd", 1),
    "default": ("containerd", 1),
    "moby": ("container", 1),
    "libpod_parent": ("podman", 2),
    "garden": ("container", 1),
    "actions_job": ("container", 1),
    "ecs": ("container", 3),
}
"""Groups of daemons that run as root: (runtime, how many levels below its containers may be).
(garden: Cloud Foundry's runtime; actions_job: GitHub Actions' runner.)"""
_LXC_PARENTS = ("lxc", "lxc.payload")
_RUNTIME_SERVICES = re.compile(
    r"^(?:snap\.[a-z0-9-]+\.(?:daemon-)?)?"
    r"(?:containerd|crio|cri-o|docker|dockerd|k3s|k3s-agent|kubelet|rke2-agent|rke2-server)\.service$"
)
"""Services below which a runtime makes groups where its driver is cgroupfs, not systemd."""
_POD = re.compile(
    r"^(?P<above>(?:[a-z]+-)*kubepods(?:-[a-z]+)*-)?"
    r"pod(?P<uid>[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}"
    r"[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?P<slice>\.slice(?::.*)?)?$"
)
_KUBEPODS = re.compile(r"^(?:[a-z0-9]+-)*kubepods$")
_QOS = ("besteffort", "burstable", "guaranteed")
_SLURM = re.compile(r"^slurm(?:_[^/]*)?$|^(?:[^/]*_)?slurmstepd\.scope$")
_SLURM_USER = re.compile(r"^uid_(?P<uid>[0-9]{1,10})$")
_USERS_SLICE = re.compile(r"^user-(?P<uid>[0-9]{1,10})\.slice$")
_JOB = re.compile(r"^job_(?P<job>[0-9]+)$")
_STEP = re.compile(r"^step_(?P<step>[0-9]+|batch|extern|interactive)(?:_[0-9]+)?$")
_UNIT = re.compile(r"\.(?:service|scope|socket|mount|swap)$")
_MACHINE = re.compile(r"^machine-(?P<name>.+)\.scope$")


@dataclass(frozen=True, slots=True)
class Place:
    """To whom the processes of one path belong; '' for what it does not show."""

    path: str
    runtime: str = ""
    container: str = ""
    pod_uid: str = ""
    job: str = ""
    step: str = ""
    unit: str = ""
    """The first service or scope, without systemd's escapes."""
    units: tuple[str, ...] = ()
    """systemd's slices and that service or scope, outermost first, as the path has them."""
    inner_container: str = ""
    """The innermost container below the border, by a name that those who run there chose."""
    is_delegated: bool = False
    """The path goes on below the border."""
    border: str = "/"
    """The path as far as the border."""
    user: str = ""
    """Id of the user for whom root's services made it: systemd's user-N.slice, Slurm's uid_N."""

    @property
    def specificity(self) -> int:
        """How much the path shows: a container or job more than a pod, that more than a unit, and
        the root nothing. Of a process's paths (one a hierarchy) the one with the most counts."""
        return (
            4 * bool(self.container or self.job)
            + 2 * bool(self.pod_uid)
            + bool(self.unit)
            + bool(self.path.strip("/"))
        )


def place_of(path: str) -> Place:
    """Read a path under the root of its hierarchy. Any text is a path; nothing is raised."""
    return _place_of(path[:_MAX_READ])


@lru_cache(maxsize=4096)
def _place_of(path: str) -> Place:
    return _PathReader([part for part in path.split("/") if part]).place(path[:MAX_PATH])


class _PathReader:
    """Reads a path from its top; `_at` is the first component that is not read yet."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts
        self._at = 0
        self._units: list[str] = []
        self._unit = self._pod = self._job = self._step = self._user = ""
        self._container = ("", "")

    def place(self, path: str) -> Place:
        self._to_the_border()
        return Place(
            path,
            *self._container,
            self._pod,
            self._job,
            self._step,
            _readable(self._unit),
            tuple(self._units),
            self._inner_container(),
            self._at < len(self._parts),
            "/" + "/".join(self._parts[: self._at]),
            self._user,
        )

    def _next(self) -> str:
        return self._parts[self._at] if self._at < len(self._parts) else ""

    def _to_the_border(self) -> None:
        while self._next() == "..":  # seen from within a control group namespace
            self._at += 1
        is_beside = self._at > 0  # outside our group: the path may begin within a pod's
        self._slices()
        part = self._next()
        if self._pod:
            self._border()
        elif _SLURM.match(part):
            self._slurm()
        elif part in _PARENTS:
            self._in_parent(*_PARENTS[part])
        elif part in _LXC_PARENTS:
            self._at += 1
            if name := self._next():
                self._container = "lxc", name
                self._at += 1
        elif not self._kubepods(is_beside):
            self._border()

    def _slices(self) -> None:
        """Read systemd's slices, those of a pod among them, and the services of runtimes."""
        while part := self._next():
            is_runtime = not self._unit and _RUNTIME_SERVICES.match(part)
            if not (part.endswith(".slice") or is_runtime):
                return
            if self._units == ["user.slice"] and (found := _USERS_SLICE.match(part)):
                self._user = found["uid"]
            self._note_unit(part)
            self._at += 1
            if (found := _POD.match(part)) and found["above"]:
                self._pod = _dashed(found["uid"])
                return

    def _kubepods(self, is_beside: bool) -> bool:
        """Read the groups of a kubelet with the driver cgroupfs; whether they were there."""
        parts, at = self._parts, self._at
        if self._next() == "kubelet":  # its own --cgroup-root
            at += 1
        if at < len(parts) and _KUBEPODS.match(parts[at]):
            at += 1
        elif not is_beside or at > self._at:
            return False
        if at < len(parts) and parts[at] in _QOS:
            at += 1
        found = _POD.match(parts[at]) if at < len(parts) else None
        if found is None or found["slice"]:
            return False
        self._pod = _dashed(found["uid"])
        self._at = at + 1
        self._border()
        return True

    def _slurm(self) -> None:
        if _UNIT.search(self._next()):
            self._note_unit(self._next())
        self._at += 1
        if found := _SLURM_USER.match(self._next()):
            self._user = found["uid"]
            self._at += 1
        if found := _JOB.match(self._next()):
            self._job = found["job"]
            self._at += 1
            if found := _STEP.match(self._next()):
                self._step = found["step"]
                self._at += 1

    def _in_parent(self, runtime: str, depth: int) -> None:
        self._at += 1
        for number in range(self._at, min(self._at + depth, len(self._parts))):
            if found := self._container_at(number):
                self._container = (found[0] if found[0] != "container" else runtime), found[1]
                self._at = number + 1
                return

    def _border(self) -> None:
        """Read one component more: the service, scope or container that all below belongs to."""
        part = self._next()
        if not part:
            return
        if _UNIT.search(part):
            self._note_unit(part)
        if not self._pod and (found := _POD.match(part)) and found["slice"] and found["above"]:
            self._pod = _dashed(found["uid"])  # SLICE:RUNTIME:ID
        self._container = self._container_at(self._at) or ("", "")
        if self._container[0] == "container" and self._pod:
            # Under a pod containerd and docker write a bare id alike: taken for containerd's.
            self._container = "containerd", self._container[1]
        self._at += 1

    def _note_unit(self, part: str) -> None:
        if self._unit:
            return  # a runtime's service: what it makes below is a container's
        self._units.append(part)
        if not part.endswith(".slice"):
            self._unit = part

    def _container_at(self, number: int) -> tuple[str, str] | None:
        part = self._parts[number]
        if _CONMON.match(part):
            return None
        for runtime, pattern in _CONTAINERS:
            if found := pattern.match(part):
                return runtime, found["id"]
        if part.startswith("lxc.payload."):
            return "lxc", part.removeprefix("lxc.payload.")
        if found := _MACHINE.match(part):
            return "nspawn", _readable(found["name"])
        return None

    def _inner_container(self) -> str:
        for number in range(len(self._parts) - 1, self._at - 1, -1):
            if found := self._container_at(number):
                return found[1]
        return ""


def _dashed(uid: str) -> str:
    """A pod's uid as the API has it: systemd takes no dashes, static pods have none at all."""
    return uid.replace("_", "-")


def _readable(unit: str) -> str:
    r"""systemd escapes bytes as \x2d."""
    if "\\x" not in unit:
        return unit
    raw = raw_name(unit).replace(b"%", b"%25").replace(b"\\x", b"%")
    return text(unquote_to_bytes(raw))
