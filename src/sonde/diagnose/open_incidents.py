# SPDX-License-Identifier: Apache-2.0
"""Which incidents are news: one cause on a machine is one incident, however many it slows.

Where CPUs or disks are short, each process there becomes slower again and again; and a program that
waits for its own lock does so in each of its processes; a process that is slowed is looked at
again while it is, and may be explained otherwise then. The first of these slowdowns is reported,
the later ones are parts of it as long as it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from sonde.diagnose.incident import BY_KERNEL, FaultCause, Incident

SHARED: Final = frozenset((FaultCause.CPU_CONTENTION, FaultCause.DISK_CONTENTION))
"""Causes that lie in what all processes of the machine share; of others each program has its own
incident."""
QUIET_NS: Final = 120_000_000_000
"""An incident is over when nothing became slower by its cause for this long."""
AGAIN_NS: Final = 600_000_000_000
"""One that goes on is reported again after this time."""
MOST: Final = 512
"""Causes, programs and victims that are remembered, those with the latest incident."""


@dataclass(slots=True)
class _Open:
    number: int
    reported_ns: int
    latest_ns: int
    """When its latest part was explained."""


class OpenIncidents:
    """Of one node. Calls come one at a time."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, ...], _Open] = {}
        self._count = 0

    def numbered(self, incident: Incident) -> Incident:
        """The incident with its number, and `part_of` where one is open that it belongs to. Changes
        that are no fault, and stalls of jobs, belong to none."""
        self._count += 1
        verdict = incident.verdict
        incident = msgspec.structs.replace(incident, number=self._count)
        if not verdict.is_fault or verdict.ranks:
            return incident
        key: tuple[str, ...] = (str(verdict.cause),)
        if verdict.cause not in SHARED:
            key += incident.victim_name, incident.victim_owner
        victim = str(incident.victim), ""
        now_ns = incident.explained_ns
        known = self._going_on(key, now_ns)
        if known is None and verdict.cause not in BY_KERNEL:
            known = self._going_on(victim, now_ns)
        known = known or _Open(self._count, now_ns, now_ns)
        known.latest_ns = max(known.latest_ns, now_ns)
        for one in (key, victim):
            self._open.pop(one, None)
            self._open[one] = known  # the last one in order
        while len(self._open) > MOST:
            del self._open[next(iter(self._open))]
        part_of = known.number if known.number != self._count else 0
        return msgspec.structs.replace(incident, part_of=part_of)

    def _going_on(self, key: tuple[str, ...], now_ns: int) -> _Open | None:
        known = self._open.get(key)
        if known is None or now_ns - known.reported_ns > AGAIN_NS:
            return None
        return known if now_ns - known.latest_ns <= QUIET_NS else None
