# SPDX-License-Identifier: Apache-2.0
"""Names of just-in-time compiled code, from the perf maps that processes write.

The file is /tmp/perf-PID.map in the root directory of the process, with the pid in its pid
namespace (format: jit-interface.txt of Linux perf). Any user can write to /tmp, so the file counts
only when it belongs to the user of the process.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from typing import Final

from sonde import _native, procfs
from sonde.resolve.counters import Counters
from sonde.resolve.naming_budget import NamingBudget
from sonde.resolve.tracked_process import JitName, PerfMapState, TrackedProcess

MAX_BYTES: Final = 24 << 20
"""Of all perf maps that are kept. Maps of the party that holds most are evicted first."""
RECHECK_NS: Final = 1_000_000_000
"""A process's map is read again for new lines no sooner than after this."""
EVICTED_NS: Final = 10_000_000_000
"""A map that was evicted is read again, from its beginning, no sooner than after this. Until then
its process's code has no names."""

# An absolute path or file URL inside a name, up to its last slash.
_FOLDERS: Final = re.compile(r"(?:(?<=^)|(?<=[\s:(\[]))(?:\w+://)?/(?:[^\s/:]+/)*(?=[^\s/])")
# CPython's perf trampoline writes py::QUALIFIED_NAME:PATH (Python/perf_trampoline.c).
_PYTHON: Final = re.compile(r"py::([^:]+):(.+)")


class PerfMaps:
    """The perf maps that were searched last, as many as fit."""

    def __init__(self, counters: Counters, budget: NamingBudget) -> None:
        self._counters = counters
        self._budget = budget
        self._users: dict[TrackedProcess, None] = {}
        """Processes whose maps were searched, the latest at the end."""
        self._bytes = 0

    def find(self, process: TrackedProcess, address: int, now_ns: int) -> JitName | None:
        """The compiled code at an address, None where its map has no name for it."""
        known = process.perf_map
        if known is None:
            known = process.perf_map = PerfMapState()
        self._users.pop(process, None)
        self._users[process] = None
        name = known.names.find(address)
        if name is None and self._may_read(process, known, now_ns):
            with self._budget.charged(process.party):
                has_more = self._read_more(process, known, now_ns)
            self._count(known)
            if has_more:
                name = known.names.find(address)
                self._make_room(now_ns)
        return None if name is None else parse_name(name)

    def _may_read(self, process: TrackedProcess, known: PerfMapState, now_ns: int) -> bool:
        """Whether the map is to be read now. Where its party's time for names is used up, that is
        counted and put off by `RECHECK_NS`."""
        if not process.is_alive or now_ns < known.checked_ns + RECHECK_NS:
            return False
        if self._budget.is_over(process.party):
            known.checked_ns = now_ns
            self._budget.left_out[process.party] += 1
            self._counters.names_put_off += 1
            return False
        return True

    def _count(self, known: PerfMapState) -> None:
        self._bytes -= known.counted_bytes
        known.counted_bytes = known.names.bytes
        self._bytes += known.counted_bytes

    def _make_room(self, now_ns: int) -> None:
        """Evict maps until the others fit: each time, of the party that holds most, the one
        searched least recently."""
        while self._bytes > MAX_BYTES:
            self._bytes = 0  # counted again: an exec drops its process's map, too
            held: Counter[int] = Counter()
            oldest: dict[int, PerfMapState] = {}
            for process in self._users:
                known = process.perf_map
                if known is not None and known.counted_bytes:
                    self._bytes += known.counted_bytes
                    held[process.party] += known.counted_bytes
                    oldest.setdefault(process.party, known)
            if self._bytes <= MAX_BYTES:
                return
            [(most, _)] = held.most_common(1)
            known = oldest[most]
            known.names, known.inode = _native.PerfMap(), 0
            known.checked_ns = now_ns + EVICTED_NS - RECHECK_NS  # due after EVICTED_NS
            self._count(known)
            self._counters.perf_maps_evicted += 1

    def expire(self) -> None:
        """Forget the maps of processes that have ended or run another program."""
        for process in list(self._users):
            if process.perf_map is None or not process.is_alive:
                del self._users[process]
                process.perf_map = None
        self._bytes = sum(it.perf_map.counted_bytes for it in self._users if it.perf_map)

    def _read_more(self, process: TrackedProcess, known: PerfMapState, now_ns: int) -> bool:
        """Read the lines that were added to a map. Returns whether there were any."""
        known.checked_ns = now_ns
        credentials = process.credentials
        if credentials is None:
            credentials = process.credentials = procfs.read_credentials(process.pid)
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
