# SPDX-License-Identifier: Apache-2.0
"""Which processes may have device time: what the operator allowed, and what a process says itself.

    device_time = "allow-list"
    device_time_allow = ["unit:train-*.service", "job:4711", "user:alice", "exe:trainer"]

A process opts in or out by SONDE_MAY_ATTACH=on or =off in its environment: set by a pod's spec, a
unit or a job script, it is there from the start. Opting out always wins; opting in counts under
"allow-list", and only for what the process was started with.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Self

from sonde.errors import UsageError

KINDS: Final = ("exe", "unit", "job", "pod", "user")
OPT: Final = "SONDE_MAY_ATTACH"

_UNIT: Final = re.compile(r"([^/]+\.(?:service|scope|slice))(?:/|$)")
_JOB: Final = re.compile(r"(?:^|/)job_(\d+)(?:/|$)")
_POD: Final = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_MOST_ENVIRON_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Facts:
    """What a process can be told by."""

    exe: str = ""
    units: tuple[str, ...] = ()
    """systemd's, outermost first."""
    job: str = ""
    """Slurm's number of it."""
    pod: str = ""
    """Kubernetes' UID of it, with dashes."""
    user: str = ""
    opted: bool | None = None

    @classmethod
    def of(cls, pid: int, proc: Path = Path("/proc")) -> Self:
        """Of a live process; what cannot be read stays empty."""
        folder = proc / str(pid)
        exe = cgroup = user = ""
        with suppress(OSError):
            link = os.readlink(folder / "exe")  # noqa: PTH115
            exe = link.removesuffix(" (deleted)").rpartition("/")[2]
        with suppress(OSError):
            cgroup = (folder / "cgroup").read_text(errors="replace")
        with suppress(OSError, KeyError):
            user = pwd.getpwuid(folder.stat().st_uid).pw_name
        job, pod = _JOB.search(cgroup), _POD.search(cgroup)
        return cls(
            exe=exe,
            units=tuple(dict.fromkeys(_UNIT.findall(cgroup))),
            job=job[1] if job else "",
            pod=pod[1].replace("_", "-") if pod else "",
            user=user,
            opted=_opted(folder / "environ"),
        )


def _opted(environ: Path) -> bool | None:
    try:
        with environ.open("rb") as file:
            raw = file.read(_MOST_ENVIRON_BYTES)
    except OSError:
        return None
    given = dict(entry.partition(b"=")[::2] for entry in reversed(raw.split(b"\0")))
    if given.get(b"SONDE_INJECT") == b"off":  # the library itself would obey that, too
        return False
    return {b"on": True, b"off": False}.get(given.get(OPT.encode(), b"").strip().lower())


class Policy:
    """Decides by the operator's mode and list."""

    def __init__(self, mode: str, allow: Iterable[str] = ()) -> None:
        """`mode`: off, allow-list or all. Raises UsageError for an entry that means nothing."""
        self.mode = mode
        self._allow = [_entry(text) for text in allow]

    def allows(self, facts: Facts) -> bool:
        """Whether this process may have device time."""
        if self.mode == "off" or facts.opted is False:
            return False
        if self.mode == "all" or facts.opted:
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


def _matches(kind: str, pattern: str, facts: Facts) -> bool:
    known: dict[str, tuple[str, ...]] = {
        "exe": (facts.exe,),
        "unit": facts.units,
        "job": (facts.job,),
        "pod": (facts.pod,),
        "user": (facts.user,),
    }
    return any(value and fnmatchcase(value, pattern) for value in known[kind])
