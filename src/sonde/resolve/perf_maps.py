# SPDX-License-Identifier: Apache-2.0
"""Names of code that a just-in-time compiler made, from the perf map that the process writes.

/tmp/perf-PID.map stands in the process's own root, under its own pid there. Anybody may write to
/tmp, so it counts only when it belongs to the user whose process it is.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from sonde import _native, procfs
from sonde.resolve.counters import Counters
from sonde.resolve.live import LiveProcess

MAX_MAPS: Final = 16
"""Processes whose perf maps are kept."""
RECHECK_NS: Final = 1_000_000_000
"""How often a process's map is asked for more."""

# An absolute path or file URL inside a name, up to its last slash.
_FOLDERS: Final = re.compile(r"(?:(?<=^)|(?<=[\s:(\[]))(?:\w+://)?/(?:[^\s/:]+/)*(?=[^\s/])")
# What CPython's trampolines write: py::QUALIFIED_NAME:PATH
_PYTHON: Final = re.compile(r"py::([^:]+):(.+)")


@dataclass(frozen=True, slots=True)
class JitName:
    """What stands at an address, without folders."""

    kind: str
    """jit | python"""
    function: str
    file: str = ""


@dataclass(slots=True)
class ProcessPerfMap:
    """What is known of one process's map."""

    names: _native.PerfMap = field(default_factory=_native.PerfMap)
    inode: int = 0
    checked_ns: int = 0
    left_out: int = 0


class PerfMaps:
    """The perf maps of the processes used last."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._users: dict[LiveProcess, None] = {}

    def find(self, process: LiveProcess, address: int, now_ns: int) -> JitName | None:
        """The code at an address of a process."""
        known = process.perf_map
        if known is None:
            known = process.perf_map = ProcessPerfMap()
            self._users[process] = None
            if len(self._users) > MAX_MAPS:
                oldest = next(iter(self._users))
                del self._users[oldest]
                oldest.perf_map = None
        name = known.names.find(address)
        if name is None and self._read_more(process, known, now_ns):
            name = known.names.find(address)
        return None if name is None else parse_name(name)

    def expire(self) -> None:
        """Forget the maps of processes that are gone or run another program."""
        for process in list(self._users):
            if not process.is_alive or process.perf_map is None:
                del self._users[process]
                process.perf_map = None

    def _read_more(self, process: LiveProcess, known: ProcessPerfMap, now_ns: int) -> bool:
        if not process.is_alive or now_ns < known.checked_ns + RECHECK_NS:
            return False
        known.checked_ns = now_ns
        owner = process.owner
        if owner is None:
            owner = process.owner = procfs.read_owner(process.pid)
        if owner is None:
            return False
        path = f"/proc/{process.pid}/root/tmp/perf-{owner.inner_pid}.map"
        fd = procfs.open_regular(path)
        if fd is None:
            return False
        found = None
        try:
            with suppress(OSError):
                found = os.fstat(fd)
            if found is None or found.st_uid not in owner.uids:
                self._counters.perf_maps_refused += 1
                return False
            if found.st_ino != known.inode or found.st_size < known.names.offset:
                known.names, known.left_out = _native.PerfMap(), 0
                known.inode = found.st_ino
            with suppress(OSError):
                read = known.names.read(fd)
                self._counters.perf_map_lines_left_out += known.names.left_out - known.left_out
                known.left_out = known.names.left_out
                return read > 0
            return False
        finally:
            os.close(fd)


def parse_name(name: str) -> JitName:
    """A perf map's name as a frame shows it."""
    python = _PYTHON.fullmatch(name)
    if python:
        return JitName("python", python[1], python[2].rpartition("/")[2])
    return JitName("jit", _FOLDERS.sub("", name))
