# SPDX-License-Identifier: Apache-2.0
"""What a device is asked ten times a second.

Waking up with cold caches is most of what that costs, and Python around a call of a microsecond the
rest. So all that can be made once is: functions are looked up, buffers made and labels written
before the first question, and an answer is one row appended.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref, c_uint, c_ulonglong, c_void_p

from sonde.collect.devices.nvml_library import (
    ABSENT,
    MEMORY_VERSION,
    Memory,
    Nvml,
    NvmlError,
    Utilization,
)
from sonde.collect.devices.readings import Reading
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
THROTTLE_TOLD_NS = 5_000_000_000
"""Throttle reasons are rows when they change, and after this long."""

Out = Structure | c_uint | c_ulonglong
Ask = Callable[[Points, int], None]


class Cheap:
    """The questions of microseconds to one device, and what the others want to know of them."""

    def __init__(self, nvml: Nvml, handle: c_void_p, tags: Callable[..., str]) -> None:
        """`tags` makes labels of this device."""
        self._nvml = nvml
        self._handle = handle
        self._tags = tags
        self.busy = True
        """Whether it worked when it was asked last."""
        self.moved = True
        """Whether memory was taken or given back between the two times that it was asked last."""
        self.memory_bytes = 0
        """How much memory it has, once told."""

    def readings(self) -> list[Reading]:
        """Each with a gap of its own."""
        return [
            Reading("utilization", self._utilization()),
            Reading("memory", self._memory()),
            Reading("power", self._power()),
            Reading("clock", self._clock()),
            Reading("throttle", self._throttle()),
        ]

    def _question(self, name: str, out: Out, *arguments: object) -> Callable[[], None]:
        """Asks, and leaves the answer in `out`. Raises NvmlError."""
        handle, into = self._handle, byref(out)
        try:
            function = self._nvml.function(name)
        except NvmlError as error:
            code = error.code  # a question that this library does not know

            def unknown() -> None:
                raise NvmlError(code)

            return unknown

        def ask() -> None:
            code = function(handle, *arguments, into)
            if code:
                raise NvmlError(code)

        return ask

    def _utilization(self) -> Ask:
        out = Utilization()
        ask = self._question("nvmlDeviceGetUtilizationRates", out)
        general, plain = self._tags(hw__gpu__task="general"), self._tags()

        def read(points: Points, now_ns: int) -> None:
            ask()
            share = out.gpu
            self.busy = bool(share)
            points.metrics.append((now_ns, "hw.gpu.utilization", general, share / 100))
            points.metrics.append((now_ns, "sonde.gpu.memory.busy", plain, out.memory / 100))

        return read

    def _memory(self) -> Ask:
        out = Memory(version=MEMORY_VERSION)
        ask = self._question("nvmlDeviceGetMemoryInfo_v2", out)
        plain, last = self._tags(), -1

        def read(points: Points, now_ns: int) -> None:
            nonlocal last
            ask()
            self.memory_bytes = out.total
            self.moved = out.used != last
            last = out.used
            points.metrics.append((now_ns, "hw.gpu.memory.usage", plain, float(out.used)))

        return read

    def _power(self) -> Ask:
        out = c_uint()
        ask = self._question("nvmlDeviceGetPowerUsage", out)
        tags = self._tags(hw__type="gpu")

        def read(points: Points, now_ns: int) -> None:
            ask()
            points.metrics.append((now_ns, "hw.power", tags, out.value / 1000))

        return read

    def _clock(self) -> Ask:
        out = c_uint()
        ask = self._question("nvmlDeviceGetClockInfo", out, SM_CLOCK)
        tags = self._tags(sonde__gpu__clock__domain="sm")

        def read(points: Points, now_ns: int) -> None:
            ask()
            points.metrics.append((now_ns, "sonde.gpu.clock", tags, out.value * MHZ))

        return read

    def _throttle(self) -> Ask:
        out = c_ulonglong()
        ask = self._question("nvmlDeviceGetCurrentClocksEventReasons", out)
        before = self._question("nvmlDeviceGetCurrentClocksThrottleReasons", out)
        reasons = [
            (bit, self._tags(sonde__gpu__throttle__reason=name))
            for bit, name in THROTTLE_REASONS.items()
        ]
        told_bits, told_ns = -1, 0

        def read(points: Points, now_ns: int) -> None:
            nonlocal ask, told_bits, told_ns
            try:
                ask()
            except NvmlError as error:
                if error.code not in ABSENT or ask is before:
                    raise
                before()
                ask = before  # as older drivers call it
            bits = out.value
            if bits == told_bits and now_ns - told_ns < THROTTLE_TOLD_NS:
                return
            told_bits, told_ns = bits, now_ns
            for bit, tags in reasons:
                row = (now_ns, "sonde.gpu.throttled", tags, float(bool(bits & bit)))
                points.metrics.append(row)

        return read
