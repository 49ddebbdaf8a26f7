# SPDX-License-Identifier: Apache-2.0
"""Finds the owner of a process: user, control group, container, pod, job, unit.

The source is /proc while the process lives, and notes of the kernel programs after that. A note
(`model.owner.ProcessNote`) names the control groups of a process when it executed, was moved or
ended. So a process of 50 ms has an owner, even if its container is gone as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sonde import procfs
from sonde.model.owner import OWNER_COLUMNS, GroupNote, Owner, ProcessNote, step_of
from sonde.procfs.cgroup_paths import Place, place_of
from sonde.resolve.cgroup_index import CgroupIndex
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.processes import STEP_DAEMON
from sonde.resolve.tracked_process import TrackedProcess

if TYPE_CHECKING:
    from sonde.resolve.pods import Pods

MAX_NOTES: Final = 16_384
"""Processes whose last note is kept."""
MAX_OWNERS: Final = 1_024
"""Different owners kept."""
FRESH_NS: Final = 30_000_000_000
"""How long an owner read from /proc is valid without a newer note. The time doubles with each
reading that finds the same owner."""
MAX_FRESH_NS: Final = 8 * FRESH_NS
USERS_S: Final = 10.0
"""How often /etc/passwd is checked for changes, at most."""
_MAX_ANCESTORS: Final = 32
"""A job step is looked for in the process and in ancestors up to this distance."""
_STEPD_TITLE: Final = re.compile(rb"slurmstepd: \[(\d+)\.(\w+)\]")
_MAX_ENVIRONMENT: Final = 1 << 17
"""Bytes of a process's environment that are searched for a job step."""
_PASSWD: Final = Path("/etc/passwd")

_SHARED_FIELDS: Final = attrgetter(*OWNER_COLUMNS[:-1])
"""All fields of an owner but the inner pid. Three times as fast as `dataclasses.replace`."""

Parents = Callable[[TrackedProcess], TrackedProcess | None]
"""Returns the parent of a process, None where it is unknown."""


class OwnerResolver:
    """Finds the owners of processes. Everything it keeps is bounded."""

    def __init__(self, pods: Pods | None = None) -> None:
        self._groups = CgroupIndex()
        self._notes: LruCache[tuple[int, int], ProcessNote] = LruCache(MAX_NOTES)
        self._steps: LruCache[tuple[int, int], tuple[str, str]] = LruCache(MAX_NOTES)
        """(job, step) of Slurm that notes have, by process."""
        self._users = UserNames()
        self._shared: LruCache[tuple[tuple[str, ...], str], Owner] = LruCache(MAX_OWNERS)
        """Owners by control groups and user, without an inner pid."""
        self._pods = pods

    def start(self) -> None:
        """Read the control groups that exist."""
        self._groups.scan()

    def group_path(self, hierarchy: int, number: int) -> str | None:
        """The path of a control group, None for an unknown one."""
        return self._groups.path(hierarchy, number)

    def close(self) -> None:
        """Stop the requests to the kubelet."""
        if self._pods is not None:
            self._pods.close()

    def add_notes(self, notes: Iterable[ProcessNote], groups: Iterable[GroupNote]) -> None:
        """Take in notes of the kernel programs, in order of time."""
        for group in groups:
            self._groups.add(group)
        for note in notes:
            key = note.pid, note.start_ns
            if note.step is not None:
                self._steps.put(key, note.step)
            old = self._notes.get(key)
            if old is None or old.time_ns <= note.time_ns:
                self._notes.put(key, note)
            if self._pods is not None:
                self._request_pod(note)

    @staticmethod
    def on_step_started(process: TrackedProcess, daemon: TrackedProcess) -> None:
        """Read the job step of a program that a slurmstepd has just started."""
        if not _is_slurmstepd(daemon.pid):
            return
        if daemon.slurm_step is None:
            daemon.slurm_step = _step_in_title(daemon.pid)
        process.slurm_step = daemon.slurm_step or step_of(
            procfs.read_file(f"/proc/{process.pid}/environ", _MAX_ENVIRONMENT) or b""
        )

    def of(self, process: TrackedProcess, parent_of: Parents, now_ns: int) -> Owner:
        """The owner of a process. `now_ns`: CLOCK_MONOTONIC."""
        note = self._notes.get((process.pid, process.start_ns))
        known = process.owner
        is_stale = process.owner_valid_until_ns <= now_ns and not process.dead_ns
        has_newer_note = note is not None and note.time_ns > process.owner_read_ns
        if known is None or is_stale or has_newer_note:
            found = self._read(process) if process.is_alive else None
            if found is None and note is not None:
                found = self._of_note(note)
            if found is None:
                found = known or self._inherited(process, parent_of)
            if not (found.job or found.container or found.pod_uid):
                found = self._with_job(process, found, parent_of)
            if known is not None and not has_newer_note and self._in_pod(found) == known:
                valid_ns = process.owner_valid_until_ns - process.owner_read_ns
                valid_ns = min(2 * valid_ns, MAX_FRESH_NS)
            else:
                valid_ns = FRESH_NS
            process.owner, process.owner_read_ns = found, now_ns
            process.owner_valid_until_ns = now_ns + valid_ns
        assert process.owner is not None
        if self._pods is not None:
            process.owner = self._in_pod(process.owner)
        return process.owner

    def wait_for_pods(self, timeout_s: float) -> None:
        """Wait until all requested pods are known, or for `timeout_s`."""
        if self._pods is not None:
            self._pods.wait_for_requested(timeout_s)

    def _read(self, process: TrackedProcess) -> Owner | None:
        """The owner by /proc; None where the process is gone, or its pid has a new process."""
        credentials = procfs.read_credentials(process.pid)
        raw = procfs.read_file(f"/proc/{process.pid}/cgroup")
        stat = procfs.read_stat(process.pid)
        if credentials is None or not raw or stat is None or stat.start_ns != process.start_ns:
            return None
        paths = []
        for line in raw.split(b"\n"):
            hierarchy, _, rest = line.partition(b":")
            path = rest.partition(b":")[2]
            with suppress(ValueError):
                paths.append((int(hierarchy), procfs.text(path)))
        # Version 2 first: of paths that are equally specific, the first one is shown.
        paths.sort(key=lambda item: item[0] != 0)
        uid, inner_pid = credentials.uids[0], credentials.inner_pid
        return self._owner([path for _, path in paths], uid, inner_pid)

    def _of_note(self, note: ProcessNote) -> Owner:
        paths = [path for group in note.groups if (path := self._groups.path(*group)) is not None]
        return self._owner(paths, note.uid, note.inner_pid)

    def _owner(self, paths: Iterable[str], uid: int, inner_pid: int) -> Owner:
        key = (tuple(paths), self._users.name(uid))
        known = self._shared.get(key)
        if known is None:
            known = _owner_at(*key)
            self._shared.put(key, known)
        return Owner(*(*_SHARED_FIELDS(known), inner_pid))

    def _inherited(self, process: TrackedProcess, parent_of: Parents) -> Owner:
        """The owner of the parent, without its inner pid: a child starts in the same groups. Also
        without the user where that is root, who starts processes as any user."""
        parent = parent_of(process)
        owner = parent.owner if parent is not None else None
        if owner is None:
            return Owner()
        user = "" if owner.user == self._users.name(0) else owner.user
        return replace(owner, user=user, inner_pid=0)

    def _with_job(self, process: TrackedProcess, found: Owner, parent_of: Parents) -> Owner:
        """The owner with a job of Slurm, where that uses no control groups: the job step of the
        process or an ancestor."""
        ancestor: TrackedProcess | None = process
        for _ in range(_MAX_ANCESTORS):
            if ancestor is None:
                break
            step = ancestor.slurm_step or self._steps.get(ancestor.key)
            has_name = ancestor.comm == STEP_DAEMON and ancestor.is_alive
            if step is None and has_name and _is_slurmstepd(ancestor.pid):
                step = ancestor.slurm_step = _step_in_title(ancestor.pid)
            if step is not None:
                return replace(found, job=step[0], step=step[1])
            ancestor = parent_of(ancestor)
        return found

    def _request_pod(self, note: ProcessNote) -> None:
        assert self._pods is not None
        for group in note.groups:
            path = self._groups.path(*group)
            if path is not None and (uid := place_of(path).pod_uid):
                self._pods.request(uid)

    def _in_pod(self, owner: Owner) -> Owner:
        if self._pods is None or not owner.pod_uid or owner.pod:
            return owner
        pod = self._pods.find(owner.pod_uid)
        if pod is None:
            return owner
        return replace(
            owner,
            pod=pod.name,
            namespace=pod.namespace,
            labels=pod.labels,
            container_name=pod.containers.get(owner.container, ""),
        )


def _owner_at(paths: Iterable[str], user: str) -> Owner:
    """The owner of all processes of a user in these control groups."""
    places = [place_of(path) for path in paths] or [Place("")]
    best = max(places, key=lambda place: place.specificity)  # the first of equals
    return Owner(
        user=user,
        cgroup=best.path,
        runtime=best.runtime,
        container=best.container,
        inner_container=best.inner_container,
        pod_uid=best.pod_uid,
        job=best.job,
        step=best.step,
        unit=best.unit or next((place.unit for place in places if place.unit), ""),
    )


def _is_slurmstepd(pid: int) -> bool:
    """Whether a process is a slurmstepd of the host: any user can forge the name and the title.

    Its real user is root, even while it acts as the job's user. Its executable has the right name,
    which a set-user-id program started through a link lacks. It is in the host's pid namespace: a
    container's root starts no job steps of the machine.
    """
    credentials = procfs.read_credentials(pid)
    is_root = credentials is not None and credentials.uids[0] == 0 and credentials.levels == 1
    return is_root and procfs.read_exe(pid) == STEP_DAEMON


def _step_in_title(pid: int) -> tuple[str, str] | None:
    """(job, step) in the command line of a slurmstepd, None without them."""
    match = _STEPD_TITLE.search(procfs.read_file(f"/proc/{pid}/cmdline", 4096) or b"")
    return (match[1].decode(), match[2].decode()) if match else None


class UserNames:
    """User names by uid, from /etc/passwd alone: a directory service (NSS) may block for long."""

    def __init__(self, path: Path = _PASSWD) -> None:
        self._path = path
        self._names: dict[int, str] = {}
        self._mtime_ns = 0
        self._checked_s = float("-inf")

    def name(self, uid: int) -> str:
        """The user's name, else the number."""
        known = self._names.get(uid)
        now_s = time.monotonic()
        if known is None or now_s - self._checked_s > USERS_S:
            self._checked_s = now_s
            self._reload()
            known = self._names.get(uid)
        return known if known is not None else str(uid)

    def _reload(self) -> None:
        with suppress(OSError):
            mtime_ns = self._path.stat().st_mtime_ns
            if mtime_ns != self._mtime_ns:
                self._mtime_ns = mtime_ns
                self._names = dict(self._entries())

    def _entries(self) -> Iterable[tuple[int, str]]:
        raw = procfs.read_file(str(self._path), 1 << 22) or b""
        for line in reversed(raw.split(b"\n")):  # the first name of a uid wins
            parts = line.split(b":")
            with suppress(ValueError, IndexError):
                yield int(parts[2]), procfs.text(parts[0])
