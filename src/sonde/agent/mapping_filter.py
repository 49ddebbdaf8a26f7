# SPDX-License-Identifier: Apache-2.0
"""Which process events an agent without a capture ignores: mappings of files that were looked at
and hold nothing any collector looks for. On a machine that starts programs all the time they are
most of what the kernel reports, and reading one as an object costs more than all that is done with
it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from sonde import _native
from sonde.agent.attaching import DEVICE_LIBRARY
from sonde.agent.null_process_events import NullProcessEvents
from sonde.collect.collector import Collector


def ignore_mappings(
    events: _native.ProcessEvents | NullProcessEvents, collectors: Iterable[Collector]
) -> None:
    """Have the kernel's events of such mappings dropped before they become objects."""
    collectors = tuple(collectors)
    for collector in collectors:
        for (file, path), until_s in collector.ignorable_mappings().items():
            if not _is_wanted(path, collectors):
                events.ignore_mappings(file, path, until_s - time.monotonic())


def _is_wanted(path: str, collectors: Iterable[Collector]) -> bool:
    """Whether somebody waits for a process to map a file of this path, whatever is in it."""
    return bool(DEVICE_LIBRARY.match(path.rpartition("/")[2])) or any(
        collector.wants_mapping(path) for collector in collectors
    )
