# SPDX-License-Identifier: Apache-2.0
"""Whose processes are: asked of /proc while they live, of the kernel's notes when they are gone.

A note says which control groups a process was in when it executed, was moved or ended; control
groups are known by number, from a look at the mounted hierarchies and from the kernel's word of
each new one. So a process of 50 ms in a container that is gone as well has its owner.
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
from sonde.resolve.hierarchies import Hierarchies
from sonde.resolve.live import LiveProcess
from sonde.resolve.processes import STEP_KEEPER
from sonde.resolve.recent import Recent

if TYPE_CHECKING:
    from sonde.resolve.pods import Pods

MAX_NOTES: Final = 16_384
MAX_ALIKE: Final = 1_024
FRESH_NS: Final = 30_000_000_000
"""How long what /proc said holds where no note says that it changed; each time that it said the
same again twice as long as before."""
FRESH_MOST_NS: Final = 8 * FRESH_NS
USERS_S: Final = 10.0
"""How long a user's name is taken for granted."""
_MAX_ANCESTORS: Final = 32
_STEPD_TITLE: Final = re.compile(rb"slurmstepd: \[(\d+)\.(\w+)\]")
_MAX_ENVIRONMENT: Final = 1 << 17
_PASSWD: Final = Path("/etc/passwd")

_OF_MANY: Final = attrgetter(*OWNER_COLUMNS[:-1])
"""All of an owner but the inner pid: `replace` costs three times as much."""

Parents = Callable[[LiveProcess], LiveProcess | None]
"""The parent of a process, where it is known."""


class Owners:
    """Says whose a process is. Everything kept is bounded."""

    def __init__(self, pods: Pods | None = None) -> None:
        self._groups = Hierarchies()
        self._notes: Recent[tuple[int, int], ProcessNote] = Recent(MAX_NOTES)
        self._steps: Recent[tuple[int, int], tuple[str, str]] = Recent(MAX_NOTES)
        self._users = Users()
        self._alike: Recent[tuple[tuple[str, ...], str], Owner] = Recent(MAX_ALIKE)
        """Owners by control groups and user, of no process in particular."""
        self._pods = pods

    def start(self) -> None:
        """Look at the control groups that there are."""
        self._groups.scan()

    def group_path(self, hierarchy: int, number: int) -> str | None:
        """The path of a control group, None where it is not known."""
        return self._groups.path(hierarchy, number)

    def close(self) -> None:
        """Ask no one any more."""
        if self._pods is not None:
            self._pods.close()

    def learn(self, notes: Iterable[ProcessNote], groups: Iterable[GroupNote]) -> None:
        """What the kernel told, in order of time."""
        for group in groups:
            self._groups.made(group)
        for note in notes:
            key = note.pid, note.start_ns
            if note.step is not None:
                self._steps.put(key, note.step)
            old = self._notes.get(key)
            if old is None or old.time_ns <= note.time_ns:
                self._notes.put(key, note)
            if self._pods is not None:
                self._want(note)

    @staticmethod
    def started(process: LiveProcess, keeper: LiveProcess) -> None:
        """A keeper of Slurm's steps started a program just now: both may be gone soon."""
        if not _is_keeper(keeper.pid):
            return
        if keeper.step is None:
            keeper.step = _step_of_keeper(keeper.pid)
        process.step = keeper.step or step_of(
            procfs.read_file(f"/proc/{process.pid}/environ", _MAX_ENVIRONMENT) or b""
        )

    def of(self, process: LiveProcess, parent_of: Parents, now_ns: int) -> Owner:
        """Whose it is. `now_ns`: CLOCK_MONOTONIC."""
        note = self._notes.get((process.pid, process.start_ns))
        known = process.who
        is_stale = process.who_until_ns <= now_ns and not process.dead_ns
        is_told = note is not None and note.time_ns > process.who_ns
        if known is None or is_stale or is_told:
            found = self._read(process) if process.is_alive else None
            if found is None and note is not None:
                found = self._of_note(note)
            if found is None:
                found = known or self._inherited(process, parent_of)
            if not (found.job or found.container or found.pod_uid):
                found = self._with_job(process, found, parent_of)
            if known is not None and not is_told and self._in_pod(found) == known:
                held_ns = min(2 * (process.who_until_ns - process.who_ns), FRESH_MOST_NS)
            else:
                held_ns = FRESH_NS
            process.who, process.who_ns, process.who_until_ns = found, now_ns, now_ns + held_ns
        assert process.who is not None
        if self._pods is not None:
            process.who = self._in_pod(process.who)
        return process.who

    def settle(self, timeout_s: float) -> None:
        """Wait for answers that are still to come."""
        if self._pods is not None:
            self._pods.settle(timeout_s)

    # Parts of the answer.

    def _read(self, process: LiveProcess) -> Owner | None:
        who = procfs.read_owner(process.pid)
        raw = procfs.read_file(f"/proc/{process.pid}/cgroup")
        still = procfs.read_stat(process.pid)
        if who is None or not raw or still is None or still.start_ns != process.start_ns:
            return None  # gone, or another one has its pid
        paths = []
        for line in raw.split(b"\n"):
            hierarchy, _, rest = line.partition(b":")
            path = rest.partition(b":")[2]
            with suppress(ValueError):
                paths.append((int(hierarchy), procfs.text(path)))
        # Version 2 first: where several tell the same, its path stands for the process.
        paths.sort(key=lambda item: item[0] != 0)
        return self._owner([path for _, path in paths], who.uids[0], who.inner_pid)

    def _of_note(self, note: ProcessNote) -> Owner:
        paths = [path for group in note.groups if (path := self._groups.path(*group)) is not None]
        return self._owner(paths, note.uid, note.inner_pid)

    def _owner(self, paths: Iterable[str], uid: int, inner_pid: int) -> Owner:
        key = (tuple(paths), self._users.name(uid))
        known = self._alike.get(key)
        if known is None:
            known = _owner_at(*key)
            self._alike.put(key, known)
        return Owner(*(*_OF_MANY(known), inner_pid))

    @staticmethod
    def _inherited(process: LiveProcess, parent_of: Parents) -> Owner:
        """Nothing is known of it but its parent: it was born into the same groups."""
        parent = parent_of(process)
        who = parent.who if parent is not None else None
        if who is None:
            return Owner()
        return replace(who, inner_pid=0)

    def _with_job(self, process: LiveProcess, found: Owner, parent_of: Parents) -> Owner:
        """Slurm without control groups: the step's keeper is an ancestor and says which it is."""
        here: LiveProcess | None = process
        for _ in range(_MAX_ANCESTORS):
            if here is None:
                break
            step = here.step or self._steps.get(here.key)
            is_named = here.comm == STEP_KEEPER and here.is_alive
            if step is None and is_named and _is_keeper(here.pid):
                step = here.step = _step_of_keeper(here.pid)
            if step is not None:
                return replace(found, job=step[0], step=step[1])
            here = parent_of(here)
        return found

    def _want(self, note: ProcessNote) -> None:
        assert self._pods is not None
        for group in note.groups:
            path = self._groups.path(*group)
            if path is not None and (uid := place_of(path).pod_uid):
                self._pods.want(uid)

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
    """Whose everything of a user is that runs in these control groups."""
    places = [place_of(path) for path in paths] or [Place("")]
    best = max(places, key=lambda place: place.tells)  # the first of equals
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


def _is_keeper(pid: int) -> bool:
    """Whether it is Slurm's own: any user may give a process that name and that title.

    The real user is root's even while it acts as the job's user. A set-user-id program that becomes
    root, started through a link of that name, has another executable. In a pid namespace of its own
    root is a container's, which speaks for no job of the machine.
    """
    who = procfs.read_owner(pid)
    is_roots = who is not None and who.uids[0] == 0 and who.levels == 1
    return is_roots and procfs.read_exe(pid) == STEP_KEEPER


def _step_of_keeper(pid: int) -> tuple[str, str] | None:
    """(job, step) as the title of slurmstepd says."""
    match = _STEPD_TITLE.search(procfs.read_file(f"/proc/{pid}/cmdline", 4096) or b"")
    return (match[1].decode(), match[2].decode()) if match else None


class Users:
    """Names of users by number, from /etc/passwd alone: a directory service may take for ever."""

    def __init__(self, path: Path = _PASSWD) -> None:
        self._path = path
        self._names: dict[int, str] = {}
        self._read_at = 0
        self._looked_s = float("-inf")

    def name(self, uid: int) -> str:
        """The user's name, else the number."""
        known = self._names.get(uid)
        now_s = time.monotonic()
        if known is None or now_s - self._looked_s > USERS_S:
            self._looked_s = now_s
            self._look()
            known = self._names.get(uid)
        return known if known is not None else str(uid)

    def _look(self) -> None:
        with suppress(OSError):
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns != self._read_at:
                self._read_at = changed_ns
                self._names = dict(self._entries())

    def _entries(self) -> Iterable[tuple[int, str]]:
        raw = procfs.read_file(str(self._path), 1 << 22) or b""
        for line in reversed(raw.split(b"\n")):  # of two names for a number the first one holds
            parts = line.split(b":")
            with suppress(ValueError, IndexError):
                yield int(parts[2]), procfs.text(parts[0])
