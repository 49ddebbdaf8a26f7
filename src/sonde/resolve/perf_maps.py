# SPDX-License-Identifier: Apache-2.0
"""Names of just-in-time compiled code, from the perf maps that processes write.

The file is /tmp/perf-PID.map in the root directory of the process, with the pid of its own pid
namespace (format: jit-interface.txt of Linux perf). Any user can write to /tmp, so the file counts
only when it belongs to the user of the process.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sonde import _native, procfs
from sonde.resolve.counters import Counters
from sonde.resolve.tracked_process import PerfMapState, TrackedProcess

MAX_MAPS: Final = 16
"""Processes whose perf maps are kept."""
RECHECK_NS: Final = 1_000_000_000
"""A process's map is read again for new lines no sooner than after this."""

# An absolute path or file URL inside a name, up to its last slash.
_FOLDERS: Final = re.compile(r"(?:(?<=^)|(?<=[\s:(\[]))(?:\w+://)?/(?:[^\s/:]+/)*(?=[^\s/])")
# CPython's perf trampoline writes py::QUALIFIED_NAME:PATH (Python/perf_trampoline.c).
_PYTHON: Final = re.compile(r"py::([^:]+):(.+)")


@dataclass(frozen=True, slots=True)
class JitName:
    """The name of compiled code, with paths cut to file names."""

    kind: str
    """jit | python"""
    function: str
    file: str = ""


class PerfMaps:
    """The perf maps of the MAX_MAPS processes that were first asked about last."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._users: dict[TrackedProcess, None] = {}

    def find(self, process: TrackedProcess, address: int, now_ns: int) -> JitName | None:
        """The compiled code at an address, None where its map has no name for it."""
        known = process.perf_map
        if known is None:
            known = process.perf_map = PerfMapState()
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
        """Forget the maps of processes that have ended or run another program."""
        for process in list(self._users):
            if not process.is_alive or process.perf_map is None:
                del self._users[process]
                process.perf_map = None

    def _read_more(self, process: TrackedProcess, known: PerfMapState, now_ns: int) -> bool:
        if not process.is_alive or now_ns < known.checked_ns + RECHECK_NS:
            return False
        known.checked_ns = now_ns
        credentials = process.credentials
        if credentials is None:
            credentials = process.credentials = procfs.read_owner(process.pid)
        if credentials is None:
            return False
        path = f"/proc/{process.pid}/root/tmp/perf-{credentials.inner_pid}.map"
        fd = procfs.open_regular(path)
        if fd is None:
            return False
        status = None
        try:
            with suppress(OSError):
                status = os.fstat(fd)
            if status is None or status.st_uid not in credentials.uids:
                self._counters.perf_maps_refused += 1
                return False
            if status.st_ino != known.inode or status.st_size < known.names.offset:
                known.names, known.left_out = _native.PerfMap(), 0
                known.inode = status.st_ino
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
