# SPDX-License-Identifier: Apache-2.0
"""Who shares the series of a metric: whom the attributes of an owner lead back to.

An owner is as fine as possible: a pod's container, a step of a job, a unit. One user has as many of
these as they like (steps, sessions, transient units), and root of a container as many users. So
what is shared out is shared between parties that nobody makes more of: pods, containers, users,
and the units of root.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

Attributes = tuple[tuple[str, str], ...]

POD: Final = ("k8s.namespace.name", "k8s.pod.name")
CONTAINER: Final = ("container.id",)
USER: Final = ("process.owner",)
UNIT: Final = ("sonde.unit",)
_ROOT: Final = "root"
_USERS_SLICE: Final = re.compile(r"^(?:/\.\.)*/user\.slice/(user-[0-9]+\.slice)(?:/|$)")


@lru_cache(maxsize=1024)
def tenant_of(owner: Attributes) -> Attributes:
    """Of an owner's attributes those that say whose share it takes."""
    given = dict(owner)
    for names in (POD, CONTAINER):
        if found := _only(given, names):
            return found
    if is_users_slice(given.get("sonde.unit", "")):
        return _only(given, UNIT)
    if given.get("process.owner", _ROOT) != _ROOT:
        return _only(given, USER)
    return _only(given, UNIT) or _only(given, USER)


def is_users_slice(unit: str) -> bool:
    """Whether it stands for all units of one user."""
    return unit.startswith("user-") and unit.endswith(".slice")


def unit_of(cgroup: str, unit: str) -> str:
    """The unit of a series: one for all sessions and services of a user who logs in."""
    found = _USERS_SLICE.match(cgroup)
    return found[1] if found else unit


def _only(given: Mapping[str, str], names: tuple[str, ...]) -> Attributes:
    return tuple((name, given[name]) for name in names if name in given)
