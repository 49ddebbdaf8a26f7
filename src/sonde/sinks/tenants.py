# SPDX-License-Identifier: Apache-2.0
"""Tenants, between whom the room for series of a metric is divided.

An owner is as specific as possible: a container of a pod, a step of a job, a unit. One user can
make any number of these (steps, sessions, transient units). Root of a container, and a user with
subordinate ids, can take any number of user ids. So shares are given to tenants, of which nobody
can make more: pods, containers, users, units of root, and all containers of a unit that are not
known by themselves (a process there has no user of the machine).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

Attributes = tuple[tuple[str, str], ...]

# Attributes that identify a tenant of each kind.
POD: Final = ("k8s.namespace.name", "k8s.pod.name")
CONTAINER: Final = ("container.id",)
USER: Final = ("process.owner",)
UNIT: Final = ("sonde.unit",)
ROOT: Final = "root"
_NO_USER: Final = "other"
"""In place of the users of containers within a unit."""
_USERS_SLICE: Final = re.compile(r"^(?:/\.\.)*/user\.slice/(user-[0-9]+\.slice)(?:/|$)")


HolderLookup = Callable[[str], str]
"""The user who has a user's id as a subordinate one; else that user."""


def own_id(user: str) -> str:
    """The lookup where subordinate ids are not known."""
    return user


@lru_cache(maxsize=1024)
def tenant_of(owner: Attributes, holder_of: HolderLookup = own_id) -> Attributes:
    """The attributes of an owner that identify its tenant."""
    given = dict(owner)
    for names in (POD, CONTAINER):
        if found := _only(given, names):
            return found
    if is_users_slice(given.get("sonde.unit", "")):
        return _only(given, UNIT)
    if "process.owner" not in given:
        return (*_only(given, UNIT), *((name, _NO_USER) for name in USER))
    if given["process.owner"] != ROOT:
        return tuple((name, holder_of(user)) for name, user in _only(given, USER))
    return _only(given, UNIT) or _only(given, USER)


def is_users_slice(unit: str) -> bool:
    """Whether a unit is a user's slice (user-UID.slice), which has all units of that user."""
    return unit.startswith("user-") and unit.endswith(".slice")


def unit_of(cgroup: str, unit: str) -> str:
    """The unit that series have: `unit`, but the user's slice for all sessions and services of a
    logged-in user."""
    found = _USERS_SLICE.match(cgroup)
    return found[1] if found else unit


def _only(given: Mapping[str, str], names: tuple[str, ...]) -> Attributes:
    return tuple((name, given[name]) for name in names if name in given)
