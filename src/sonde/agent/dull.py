# SPDX-License-Identifier: Apache-2.0
"""Mappings that an agent without a capture need not hear of: of files that were looked at and hold
nothing it looks for. On a machine that starts programs all the time they are most of what the
kernel tells, and reading one as an object costs more than all that is done with it."""

from __future__ import annotations

import time

from sonde import _native
from sonde.agent.attaching import DEVICE_LIBRARY
from sonde.agent.quiet import NoEvents
from sonde.collect.device_calls import DeviceCalls
from sonde.collect.inject_memory import LIBRARY
from sonde.collect.metrics import DRIVER_LIBRARY


def pass_over(events: _native.ProcessEvents | NoEvents, calls: DeviceCalls) -> None:
    """Have the kernel's events of such mappings dropped before they become objects."""
    for (file, path), until_s in calls.dull().items():
        if not _is_watched(path):
            events.pass_over(file, path, until_s - time.monotonic())


def _is_watched(path: str) -> bool:
    """Whether somebody waits for a process to map it, whatever is in it."""
    return bool(
        DEVICE_LIBRARY.match(path.rpartition("/")[2])
        or DRIVER_LIBRARY.search(path)
        or LIBRARY.search(path)
    )
