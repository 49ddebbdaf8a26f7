# SPDX-License-Identifier: Apache-2.0
"""NVIDIA devices through NVML: the source `nvml`.

GPUs and MIG instances are both devices; an instance names its GPU as `hw.parent`. What a device
or its driver does not support is queried once and left out. No query waits for the device: PCIe
bytes come from counters, not from nvmlDeviceGetPcieThroughput, which blocks for 20 ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref, c_uint, c_ulonglong, c_void_p, sizeof
from dataclasses import replace
from mmap import mmap

from sonde import _native
from sonde.collect.devices.nvml_device import TICKS_AT_REST, NvmlDevice
from sonde.collect.devices.nvml_library import (
    ABSENT,
    LIBRARY,
    TIMEOUT,
    EventData,
    Nvml,
    NvmlError,
)
from sonde.collect.devices.readings import Readings
from sonde.collect.polling import FAST_S, NORMAL_S, SLOW_S, Gaps, Points, Poll, SourceUnavailable
from sonde.metrics import labels

XID, DOUBLE_BIT_ECC = 0x8, 0x2
"""nvmlEventTypeXidCriticalError, nvmlEventTypeDoubleBitEccError"""
EVENTS_S = 0.2
"""Between two queries for errors of devices."""
NORMAL_AT_REST_S = 5.0
"""Period, for a device at rest, of the polls that run once a second otherwise."""
EVENTS_A_POLL = 64
"""Errors that are read at a time."""
XIDS_COUNTED = 64
"""Distinct (device, number) pairs that are counted; errors of others are events alone."""


class NvmlSource:
    """Every NVIDIA device of this machine."""

    name = "nvml"

    def __init__(self, library: str = LIBRARY, fast_s: float = FAST_S) -> None:
        self._path = library
        self._tick_ns = int(fast_s * 1e9)
        self._poller = _native.NativePoller(self._tick_ns)
        self._event_group = self._event_query = -1
        """Group and query for events of devices."""
        self._is_idle = self._keeps_last_only = False
        self._nvml: Nvml | None = None
        self._devices: list[NvmlDevice] = []
        self._events: c_void_p | None = None
        self._xids: dict[tuple[str, int], int] = {}
        self._gaps = Gaps()

    def open(self) -> None:
        """Find the devices. Raises SourceUnavailable without a library, driver or device."""
        try:
            self._nvml = nvml = Nvml(self._path)
            self._poller = _native.NativePoller(self._tick_ns)
            try:
                self._devices = find(nvml, self._poller)
                self._events = self._register(nvml)
            except NvmlError:
                nvml.close()
                raise
        except NvmlError as error:
            raise SourceUnavailable(str(error), whole=True) from error
        if not self._devices:
            nvml.close()
            raise SourceUnavailable("the driver has no device", whole=True)

    def polls(self) -> Sequence[Poll]:
        """Three polls of each device, by cost, and those of all devices together."""
        polls = []
        for device in self._devices:
            polls.append(self._fast(device))
            for name, period_s, rest_s, readings in (
                ("normal", NORMAL_S, NORMAL_AT_REST_S, device.normal()),
                ("slow", SLOW_S, SLOW_S, device.slow()),
            ):
                read = Readings(f"{self.name}.{device.name}", readings, self._gaps)
                polls.append(Poll(f"{device.name}.{name}", period_s, read, device.at_rest, rest_s))
        if self._events is not None:
            polls.append(self._events_poll(self._events))
        polls.append(Poll("devices", SLOW_S, self._look_for_changes))
        self._is_idle = False
        self._pace_devices()
        return polls

    def keep_last_only(self, seconds: float) -> None:
        """Of each interval of this length only the last answer counts; 0: each does."""
        self._keeps_last_only = seconds > 0
        self._pace_devices()

    def _pace_devices(self) -> None:
        for device in self._devices:
            device.keep_last_only(self._keeps_last_only)
        if self._events is not None:
            ticks = TICKS_AT_REST if self._is_idle or self._keeps_last_only else 1
            self._poller.set_interval(self._event_group, ticks, self._is_idle)

    def wait(self, fd: int, until_ns: int, page: mmap) -> bool:
        """Run the native poller's queries; see ContinuousSource."""
        return self._poller.wait(fd, until_ns, page)

    def _fast(self, device: NvmlDevice) -> Poll:
        """The poll that reads the answers of a device's fast queries."""
        readings = Readings(f"{self.name}.{device.name}", device.fast(), self._gaps)

        def read(points: Points) -> None:
            device.mark_read()
            readings(points)

        period_s = self._tick_ns / 1e9 if device.counts_at_ticks else NORMAL_S
        poll = Poll(f"{device.name}.fast", period_s, read, device.at_rest, NORMAL_AT_REST_S)
        may_wait = not device.counts_at_ticks
        return replace(poll, calls=device.calls, paced=device.pace, may_wait=may_wait)

    def _events_poll(self, events: c_void_p) -> Poll:
        """The poll for errors. The native poller queries in between, and has it read at once where
        there is one."""
        assert self._nvml is not None
        poller, name = self._poller, "events"
        self._event_group = group = poller.group(f"{self.name}.{name}")
        function = self._nvml.address("nvmlEventSetWait_v2")
        fields = [
            (getattr(EventData, field).offset, getattr(EventData, field).size)
            for field in ("device", "eventType", "eventData")
        ]
        self._event_query = poller.add_query(
            group,
            function,
            [events.value, None, 0],  # it never waits
            bytes(sizeof(EventData)),
            fields,
            ignored_code=TIMEOUT,
            every_ticks=max(1, round(EVENTS_S * 1e9 / self._tick_ns)),
        )

        def pace(is_idle: bool) -> None:
            self._is_idle = is_idle
            self._pace_devices()

        poll = Poll(name, NORMAL_S, self._read_events, self._at_rest, NORMAL_AT_REST_S)
        return replace(poll, calls=lambda: poller.is_pending(group), paced=pace)

    def _at_rest(self) -> bool:
        return all(device.at_rest() for device in self._devices)

    def close(self) -> None:
        """Shut the library down."""
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        self._poller = _native.NativePoller(self._tick_ns)  # the old one would call the library
        try:
            if self._events is not None:
                nvml.call("nvmlEventSetFree", self._events)
            for device in self._devices:
                device.close()
        except NvmlError:
            pass  # the driver may be gone already
        self._events = None
        nvml.close()

    def _register(self, nvml: Nvml) -> c_void_p | None:
        """Subscribe to errors; None where no device can."""
        events = nvml.handle("nvmlEventSetCreate")
        registered = False
        for device in self._devices:
            if device.parent:
                continue
            try:
                wanted = c_ulonglong(XID | DOUBLE_BIT_ECC)
                nvml.call("nvmlDeviceRegisterEvents", device.handle, wanted, events)
                registered = True
            except NvmlError as error:
                if error.code not in ABSENT:
                    raise
        if registered:
            return events
        nvml.call("nvmlEventSetFree", events)
        return None

    def _read_events(self, points: Points) -> None:
        poller, number = self._poller, self._event_query
        poller.mark_read(self._event_group)
        answers = poller.drain(number)
        for _ in range(EVENTS_A_POLL):
            answers.append(poller.query(number))
            if answers[-1][1]:
                break
        for _, code, (device, kind, data) in answers:
            if code == TIMEOUT:
                return
            if code:
                raise SourceUnavailable(str(NvmlError(code)))
            if kind == XID:
                self._take_xid(device, data, points)

    def _take_xid(self, device: int, number: int, points: Points) -> None:
        uuid = next((d.uuid for d in self._devices if d.handle.value == device), "unknown")
        points.note("xid", number, f"{uuid}: XID {number}")
        key = (uuid, number)
        if key not in self._xids and len(self._xids) >= XIDS_COUNTED:
            return
        self._xids[key] = self._xids.get(key, 0) + 1
        tags = labels(hw__id=uuid, sonde__gpu__xid__number=number)
        points.add("sonde.gpu.xid", self._xids[key], tags)

    def _look_for_changes(self, points: Points) -> None:
        """Have the source opened again when devices came or went; report the counts of XIDs again,
        for a recording that began after them."""
        assert self._nvml is not None
        known = {device.uuid for device in self._devices}
        try:
            if {uuid for _, _, uuid in _handles(self._nvml)} != known:
                now = find(self._nvml, _native.NativePoller(self._tick_ns))
                for device in now:
                    device.close()  # its samples
                if {device.uuid for device in now} != known:
                    raise SourceUnavailable("devices came or went", whole=True)
        except NvmlError as error:
            raise SourceUnavailable(str(error), whole=True) from error
        for (uuid, number), count in self._xids.items():
            tags = labels(hw__id=uuid, sonde__gpu__xid__number=number)
            points.add("sonde.gpu.xid", count, tags)


def find(nvml: Nvml, poller: _native.NativePoller) -> list[NvmlDevice]:
    """GPUs, each followed by its MIG instances; `poller` runs fast queries. Raises NvmlError."""
    found = []
    gpus: dict[str, NvmlDevice] = {}
    driver = nvml.text("nvmlSystemGetDriverVersion")
    for handle, name, _ in _handles(nvml):
        index, _, instance = name.partition(".")
        if instance and index not in gpus:
            continue
        try:
            parent = gpus[index] if instance else None
            device = NvmlDevice(nvml, handle, name, driver, poller, parent)
        except NvmlError:
            continue  # lost just now: `sonde health` counts devices
        if not instance:
            gpus[index] = device
        found.append(device)
    return found


def _handles(nvml: Nvml) -> Iterator[tuple[c_void_p, str, str]]:
    """Handle, name (0, or 0.1 for an instance) and UUID of each GPU that answers, followed by its
    MIG instances. Raises NvmlError."""
    for index in range(nvml.number("nvmlDeviceGetCount_v2")):
        try:
            handle = nvml.handle("nvmlDeviceGetHandleByIndex_v2", c_uint(index))
            yield handle, str(index), nvml.text("nvmlDeviceGetUUID", handle)
        except NvmlError:
            continue  # lost
        for number in range(_max_instances(nvml, handle)):
            try:
                part = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, c_uint(number))
                yield part, f"{index}.{number}", nvml.text("nvmlDeviceGetUUID", part)
            except NvmlError:
                continue  # there is no instance of this number


def _max_instances(nvml: Nvml, gpu: c_void_p) -> int:
    """How many MIG instances a GPU may have; 0 where MIG is off."""
    mode, pending = c_uint(), c_uint()
    try:
        nvml.call("nvmlDeviceGetMigMode", gpu, byref(mode), byref(pending))
        return nvml.number("nvmlDeviceGetMaxMigDeviceCount", gpu) if mode.value else 0
    except NvmlError as error:
        if error.code in ABSENT:
            return 0
        raise
