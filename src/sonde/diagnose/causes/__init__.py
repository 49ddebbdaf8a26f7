# SPDX-License-Identifier: Apache-2.0
"""Causes, one concern a file. Each claims, from a `Case`, its part of the lost time.

Terms:
- judge: from a case to the candidate that a cause makes of it, None where it has no part
- part: what the victim's threads did in the lost time (`sonde.diagnose.thread_time.Part`)
- share: of the lost time that a cause claims; of an offender, of what all others took more
- LEAST: seconds more in each second below which a cause claims nothing
- more: beyond what it was before the change; others: processes outside of the victim's family
"""

from __future__ import annotations

from collections.abc import Callable

from sonde.diagnose.case import Case
from sonde.diagnose.causes import (
    cpu,
    device,
    disk,
    file_system,
    frozen,
    garbage,
    loader,
    locks,
    memory,
    network,
)
from sonde.diagnose.incident import Candidate

Judge = Callable[[Case], Candidate | None]

JUDGES: tuple[Judge, ...] = (
    frozen.judge,
    cpu.quota,
    cpu.pinning,
    cpu.contention,
    memory.judge,
    disk.throttle,
    disk.fsync,
    disk.contention,
    file_system.judge,
    loader.judge,
    garbage.judge,
    locks.interpreter,
    locks.own,
    network.path,
    network.dependency,
    device.memory,
    device.migration,
    device.compilation,
    device.link,
    device.contention,
    device.synchronization,
)
"""All of them; of two with the same share the one that comes first, the more specific, wins."""
