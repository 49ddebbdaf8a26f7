# SPDX-License-Identifier: Apache-2.0
"""Queries to a device that run ten times a second.

Most of their cost is to wake up with cold caches, and the rest is Python around calls of a
microsecond. So native code runs them (`sonde._native.NativePoller`), and once a second the answers
are read, each with its time. Functions are looked up and labels written before the first query, so
that an answer is only one row to append.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, c_uint, c_ulonglong, c_void_p, sizeof

from sonde import _native
from sonde.collect.devices.nvml_library import (
    ABSENT,
    MEMORY_VERSION,
    Memory,
    Nvml,
    NvmlError,
    Utilization,
)
from sonde.collect.devices.readings import DEVICE, WHOLE, Reading
from sonde.collect.polling import Points

MHZ = 1e6
SM_CLOCK = 1
THROTTLE_REASONS = {
    0x004: "software_power_cap",
    0x008: "hardware_slowdown",
    0x010: "sync_boost",
    0x020: "software_thermal",
    0x040: "hardware_thermal",
    0x080: "hardware_power_brake",
    0x100: "display_clock",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of nvmlClocksEventReasons*; idle (1) and clocks set by a user (2) are no throttling."""
THROTTLE_REPORTED_AGAIN_NS = 5_000_000_000
"""Throttle reasons are rows when they change, and after this long."""

Read = Callable[[Points, int], None]
"""See Reading.ask."""
Answers = Callable[[], list[tuple[int, int, list[int]]]]
"""Returns the answers since the last call, at least one: when (ns), code, numbers. Raises
NvmlError."""


class FastQueries:
    """The queries to one device that take microseconds, and what they show of its activity."""

    def __init__(
        self,
        nvml: Nvml,
        handle: c_void_p,
        tags: Callable[..., str],
        poller: _native.NativePoller,
        group: int,
    ) -> None:
        """`tags` makes labels of this device, `group` is that of its queries in `poller`."""
        self._nvml = nvml
        self._poller = poller
        self._group = group
        self._handle = handle
        self._tags = tags
        self.busy = True
        """Whether it worked when it was queried last."""
        self.moved = True
        """Whether the memory in use changed with the answers that were read last."""
        self.memory_bytes = 0
        """How much memory it has, once known."""

    def readings(self) -> list[Reading]:
        """The readings of these queries, each with a separate gap."""
        return [
            Reading("utilization", self._utilization()),
            Reading("memory", self._memory()),
            Reading("power", self._power()),
            Reading("clock", self._clock()),
            Reading("throttle", self._throttle()),
        ]

    def _query(
        self,
        name: str,
        out: Structure | c_uint | c_ulonglong,
        fields: Sequence[tuple[int, int]],
        *arguments: int,
        activity_field: int | None = None,
    ) -> Answers:
        """Add a query of the function `name` to the poller; arguments as of
        NativePoller.add_query."""
        poller, group = self._poller, self._group
        try:
            function = self._nvml.address(name)
        except NvmlError as error:
            code = error.code  # this version of the library has no such function

            def unknown() -> list[_native.Answer]:
                raise NvmlError(code)

            return unknown
        given = [self._handle.value, *arguments, None]
        number = poller.add_query(
            group, function, given, bytes(out), fields, activity_field=activity_field
        )

        def answers() -> list[_native.Answer]:
            found = poller.drain(number) or [poller.query(number)]
            good = [answer for answer in found if not answer[1]]
            if good:  # an error after them is reported by the next call
                return good
            code = found[-1][1]
            if code:
                if code in DEVICE | WHOLE:
                    poller.suspend(group)
                raise NvmlError(code)
            return found

        return answers

    def _utilization(self) -> Read:
        fields = [_field(Utilization, "gpu"), _field(Utilization, "memory")]
        answers = self._query(
            "nvmlDeviceGetUtilizationRates", Utilization(), fields, activity_field=0
        )
        general, plain = self._tags(hw__gpu__task="general"), self._tags()

        def read(points: Points, now_ns: int) -> None:
            add = points.metrics.append
            for time_ns, _, (share, memory) in answers():
                self.busy = bool(share)
                add((time_ns, "hw.gpu.utilization", general, share / 100))
                add((time_ns, "sonde.gpu.memory.busy", plain, memory / 100))

        return read

    def _memory(self) -> Read:
        fields = [_field(Memory, "used"), _field(Memory, "total")]
        out = Memory(version=MEMORY_VERSION)
        answers = self._query("nvmlDeviceGetMemoryInfo_v2", out, fields, activity_field=0)
        plain, last = self._tags(), -1

        def read(points: Points, now_ns: int) -> None:
            nonlocal last
            moved = False
            for time_ns, _, (used, total) in answers():
                self.memory_bytes = total
                moved |= used != last
                last = used
                points.metrics.append((time_ns, "hw.gpu.memory.usage", plain, float(used)))
            self.moved = moved

        return read

    def _power(self) -> Read:
        answers = self._query("nvmlDeviceGetPowerUsage", c_uint(), _WHOLE_UINT)
        tags = self._tags(hw__type="gpu")

        def read(points: Points, now_ns: int) -> None:
            for time_ns, _, (milliwatts,) in answers():
                points.metrics.append((time_ns, "hw.power", tags, milliwatts / 1000))

        return read

    def _clock(self) -> Read:
        answers = self._query("nvmlDeviceGetClockInfo", c_uint(), _WHOLE_UINT, SM_CLOCK)
        tags = self._tags(sonde__gpu__clock__domain="sm")

        def read(points: Points, now_ns: int) -> None:
            for time_ns, _, (mhz,) in answers():
                points.metrics.append((time_ns, "sonde.gpu.clock", tags, mhz * MHZ))

        return read

    def _throttle(self) -> Read:
        whole = [(0, sizeof(c_ulonglong))]
        answers = self._query("nvmlDeviceGetCurrentClocksEventReasons", c_ulonglong(), whole)
        old_name = "nvmlDeviceGetCurrentClocksThrottleReasons"  # of older drivers
        old_answers = self._query(old_name, c_ulonglong(), whole)
        reasons = [
            (bit, self._tags(sonde__gpu__throttle__reason=name))
            for bit, name in THROTTLE_REASONS.items()
        ]
        reported_bits, reported_ns = -1, 0

        def read(points: Points, now_ns: int) -> None:
            nonlocal answers, reported_bits, reported_ns
            try:
                found = answers()
            except NvmlError as error:
                if error.code not in ABSENT or answers is old_answers:
                    raise
                found = old_answers()
                answers = old_answers
            for time_ns, _, (bits,) in found:
                if bits == reported_bits and time_ns - reported_ns < THROTTLE_REPORTED_AGAIN_NS:
                    continue
                reported_bits, reported_ns = bits, time_ns
                for bit, tags in reasons:
                    row = (time_ns, "sonde.gpu.throttled", tags, float(bool(bits & bit)))
                    points.metrics.append(row)

        return read


_WHOLE_UINT = [(0, sizeof(c_uint))]


def _field(layout: type[Structure], name: str) -> tuple[int, int]:
    """Offset and size of a field."""
    field = getattr(layout, name)
    return field.offset, field.size
