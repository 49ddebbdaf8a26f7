# SPDX-License-Identifier: Apache-2.0
"""Which process events an agent for metrics alone ignores, as it names no code (`EventLoop`):
mappings of files that were examined and have nothing that a collector needs. On a machine that
starts programs all the time they are most of the events, and making a Python object of one costs
more than handling it."""

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
    """Have events of such mappings dropped in native code, before they become objects."""
    collectors = tuple(collectors)
    for collector in collectors:
        for (file, path), until_s in collector.ignorable_mappings().items():
            if not _is_needed(path, collectors):
                events.ignore_mappings(file, path, until_s - time.monotonic())


def _is_needed(path: str, collectors: Iterable[Collector]) -> bool:
    """Whether mappings of a file of this path are needed, whatever the file contains."""
    return bool(DEVICE_LIBRARY.match(path.rpartition("/")[2])) or any(
        collector.wants_mapping(path) for collector in collectors
    )
