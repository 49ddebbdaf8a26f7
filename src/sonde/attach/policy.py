# SPDX-License-Identifier: Apache-2.0
"""Which processes' device time may be taken: by the operator's setting and the process's wish.

    device_time = "allow-list"
    device_time_allow = ["unit:train-*.service", "job:4711", "user:alice", "opted-in:bob"]

A process asks by SONDE_MAY_ATTACH=on or =off in its environment, set by a pod's spec, a unit or a
job script. off always wins. on is the process's own wish, so it counts only for the users that the
operator named for it: "opted-in:bob", or "opted-in:*" for everybody.

What a process cannot choose: its user (the real one, only while it has no other user's rights, and
not in a container without a user namespace, which may take any id), the unit that the
system's manager started it in, its job and its pod. For these its control group is read down to
where it was delegated (procfs.cgroup_paths): below that a user, a container or a service makes
groups of any name. What it can choose: the name of its program.
"exe:trainer" allows whatever anybody runs under that name.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Self

from sonde import procfs
from sonde.errors import UsageError
from sonde.procfs.cgroup_paths import place_of

KINDS: Final = ("exe", "unit", "job", "pod", "user", "opted-in")
MAY_ATTACH: Final = "SONDE_MAY_ATTACH"
"""The variable by which a program opts in (on) or out (off)."""

_MAX_ENVIRON_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What identifies a process."""

    exe: str = ""
    units: tuple[str, ...] = ()
    """systemd's, outermost first."""
    job: str = ""
    """Slurm's number of it."""
    pod: str = ""
    """Kubernetes' UID of it, with dashes."""
    user: str = ""
    opted: bool | None = None
    """What it asks for by SONDE_MAY_ATTACH; None: nothing, or that is not known."""

    @classmethod
    def of(cls, pid: int, proc: Path = Path("/proc")) -> Self:
        """Of a live process; what cannot be read stays empty."""
        folder = proc / str(pid)
        exe = user = ""
        groups: list[str] = []
        with suppress(OSError):
            link = procfs.read_link(str(folder / "exe"))
            exe = link.removesuffix(" (deleted)").rpartition("/")[2]
        with suppress(OSError):
            lines = procfs.read_lines(folder / "cgroup")
            groups = [line.split(":", 2)[2] for line in lines if line.count(":") > 1]
        with suppress(KeyError):
            user = _user(procfs.user_ids(pid), procfs.party_of(pid))
        places = [place_of(group) for group in groups]
        units = [unit for place in places for unit in place.units]
        return cls(
            exe=exe,
            units=tuple(dict.fromkeys(units)),
            job=next((place.job for place in places if place.job), ""),
            pod=next((place.pod_uid for place in places if place.pod_uid), ""),
            user=user,
            opted=_opted(folder / "environ"),
        )


def _user(uids: tuple[int, ...], party: int) -> str:
    """Its user's name; '' where its real, effective and other user ids differ, or its party is not
    that user. Raises KeyError."""
    return pwd.getpwuid(uids[0]).pw_name if {party} == {party, *uids} and uids else ""


def _opted(environ: Path) -> bool | None:
    try:
        file = procfs.HeldFile(str(environ), first=_MAX_ENVIRON_BYTES)
        try:
            raw = file.read(_MAX_ENVIRON_BYTES)
        finally:
            file.close()
    except procfs.Hung:
        return False  # it may have opted out, and makes readers wait
    except OSError:
        return None
    given = dict(entry.partition(b"=")[::2] for entry in reversed(raw.split(b"\0")))
    if given.get(b"SONDE_INJECT") == b"off":  # the library itself would obey that, too
        return False
    return {b"on": True, b"off": False}.get(given.get(MAY_ATTACH.encode(), b"").strip().lower())


class Policy:
    """Decides by the operator's mode and list."""

    def __init__(self, mode: str, allow: Iterable[str] = ()) -> None:
        """`mode`: off, allow-list or all. Raises UsageError for an entry that means nothing."""
        self.mode = mode
        self._allow = [_entry(text) for text in allow]

    def allows(self, facts: ProcessFacts) -> bool:
        """Whether the device time of this process may be taken."""
        if self.mode == "off" or facts.opted is False:
            return False
        if self.mode == "all":
            return True
        return any(_matches(kind, pattern, facts) for kind, pattern in self._allow)


def _entry(text: str) -> tuple[str, str]:
    kind, colon, pattern = text.partition(":")
    if not colon or kind not in KINDS or not pattern:
        raise UsageError(
            f"device_time_allow holds {text!r}",
            f"Write KIND:PATTERN with one of {', '.join(KINDS)}, for example unit:train.service",
        )
    return kind, pattern


def _matches(kind: str, pattern: str, facts: ProcessFacts) -> bool:
    known: dict[str, tuple[str, ...]] = {
        "exe": (facts.exe,),
        "unit": facts.units,
        "job": (facts.job,),
        "pod": (facts.pod,),
        "user": (facts.user,),
        "opted-in": (facts.user,) if facts.opted else (),
    }
    return any(value and fnmatchcase(value, pattern) for value in known[kind])
