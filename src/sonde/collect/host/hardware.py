# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of CPUs, where there are any: cycles, instructions, cache and branch misses.

Counting only, by perf_event_open(2): no interrupts, no samples. Unverified on hardware.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from contextlib import suppress

from sonde.collect.host.files import labels
from sonde.collect.polling import NORMAL_S, Points, Poll, SourceUnavailable

_SYSCALL = {"x86_64": 298, "aarch64": 241}
"""Number of perf_event_open."""
_PERF_TYPE_HARDWARE = 0
EVENTS = {"cycles": 0, "instructions": 1, "cache_references": 2, "cache_misses": 3,
          "branches": 4, "branch_misses": 5}  # fmt: skip
"""enum perf_hw_id"""
_READ_TIMES = 1 | 2
"""PERF_FORMAT_TOTAL_TIME_ENABLED | _RUNNING, to scale counts: where there are more events than
counters, they take turns."""
_CLOEXEC = 8
"""PERF_FLAG_FD_CLOEXEC"""
_ATTR_SIZE = 112
"""PERF_ATTR_SIZE_VER5, of struct perf_event_attr."""


class Hardware:
    """Sums over all CPUs, scaled where counters were shared."""

    name = "hardware"

    def __init__(self) -> None:
        self._fds: dict[str, list[int]] = {}

    def open(self) -> None:
        """Start the counters. Raises SourceUnavailable where the CPUs have none."""
        refused: list[int] = []
        for name, number in EVENTS.items():
            # Of the machine, not only those that this process may run on; offline ones refuse.
            opened = [_open(number, cpu) for cpu in range(os.sysconf("SC_NPROCESSORS_CONF"))]
            fds = [fd for fd in opened if fd >= 0]
            refused += [-fd for fd in opened if fd < 0]
            if fds:
                self._fds[name] = fds
        if not self._fds:
            code = errno.errorcode[refused[0]]  # of the first CPU: later ones may be offline
            raise SourceUnavailable(f"these CPUs offer no counters ({code})", whole=True)

    def polls(self) -> Sequence[Poll]:
        """One poll."""
        return [Poll("counters", NORMAL_S, self._read)]

    def close(self) -> None:
        """Stop the counters."""
        for fds in self._fds.values():
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)
        self._fds = {}

    def _read(self, points: Points) -> None:
        for name, fds in self._fds.items():
            total = 0.0
            for fd in fds:
                count, enabled, running = struct.unpack("=QQQ", os.read(fd, 24))
                total += count * enabled / running if running else 0.0
            points.add("sonde.host.hardware", total, labels(sonde__hardware__event=name))


def _open(number: int, cpu: int) -> int:
    """A counter of everything that a CPU runs; where there is none, why, as a negative errno."""
    call = _SYSCALL.get(os.uname().machine)
    if call is None:
        return -errno.ENOSYS
    attr = struct.pack("=IIQQQQ", _PERF_TYPE_HARDWARE, _ATTR_SIZE, number, 0, 0, _READ_TIMES)
    raw = ctypes.create_string_buffer(attr, _ATTR_SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(call, raw, -1, cpu, -1, _CLOEXEC)
    return fd if fd >= 0 else -ctypes.get_errno()
