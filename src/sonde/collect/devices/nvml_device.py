# SPDX-License-Identifier: Apache-2.0
"""One NVIDIA device: every query to it, by what the answer costs."""

from __future__ import annotations

from ctypes import byref, c_int, c_uint, c_void_p

from sonde._native import NativePoller
from sonde.collect.devices.gpm import Gpm
from sonde.collect.devices.nvml_fast import MHZ, FastQueries
from sonde.collect.devices.nvml_library import (
    ABSENT,
    NOT_AVAILABLE,
    NOT_SUPPORTED,
    SUCCESS,
    UNSIGNED_INT,
    FieldValue,
    Nvml,
    NvmlError,
    PciInfo,
)
from sonde.collect.devices.process_start import start_of
from sonde.collect.devices.readings import Reading
from sonde.collect.polling import Points
from sonde.metrics import labels_of

_CORRECTED, _UNCORRECTED = c_int(0), c_int(1)
"""nvmlMemoryErrorType_t"""
_DRAM, _SRAM = c_int(2), c_int(7)
"""nvmlMemoryLocation_t"""
_VOLATILE, _AGGREGATE = c_int(0), c_int(1)
"""nvmlEccCounterType_t: since the driver was loaded, and in the life of the device."""
_CLOCKS = {"sm": c_int(1), "memory": c_int(2), "video": c_int(3)}
"""nvmlClockType_t"""
ALL_LINKS = 2**32 - 1
"""The scopeId that sums over all NVLinks."""
ENERGY_AT_REST_NS = 25_000_000_000
"""At rest, energy is queried by every third poll of ten seconds."""

TICKS_AT_REST = 10
"""Between two fast queries to a device at rest."""

# Fields by their numbers, NVML_FI_DEV_… of nvml.h.
PCIE_FIELDS = {197: "transmit", 198: "receive"}
THROTTLE_FIELDS = {
    74: "software_power_cap",
    76: "sync_boost",
    269: "software_thermal",
    270: "hardware_thermal",
    271: "hardware_power_brake",
}
NVLINK_FIELDS = {138: "transmit", 139: "receive"}
SLOW_FIELDS: dict[int, tuple[str, dict[str, str]]] = {
    94: ("sonde.gpu.pcie.replays", {}),
    142: ("sonde.gpu.remapped_rows", {"error.type": "corrected"}),
    143: ("sonde.gpu.remapped_rows", {"error.type": "uncorrected"}),
    144: ("sonde.gpu.remap.state", {"sonde.gpu.remap": "pending"}),
    145: ("sonde.gpu.remap.state", {"sonde.gpu.remap": "failed"}),
    38: ("sonde.gpu.nvlink.errors", {"error.type": "crc_flit"}),
    45: ("sonde.gpu.nvlink.errors", {"error.type": "crc_data"}),
    52: ("sonde.gpu.nvlink.errors", {"error.type": "replay"}),
    59: ("sonde.gpu.nvlink.errors", {"error.type": "recovery"}),
}
_MEMORY_TEMPERATURE, _LINK_COUNT = 82, 91


class NvmlDevice:
    """A GPU, or a MIG instance of one."""

    def __init__(
        self,
        nvml: Nvml,
        handle: c_void_p,
        name: str,
        driver: str,
        poller: NativePoller,
        parent: NvmlDevice | None = None,
    ) -> None:
        """`poller` runs the fast queries. Raises NvmlError where it has no UUID."""
        self.handle = handle
        self.name = name
        self.driver = driver
        self.uuid = nvml.text("nvmlDeviceGetUUID", handle)
        self.parent = parent.uuid if parent else ""
        self._parent = parent
        self._nvml = nvml
        self._me = {"hw.id": self.uuid}
        self._tags = labels_of(self._me)
        self._known_tags: dict[tuple[tuple[str, str], ...], str] = {}
        self._process_since_us = 0
        """The driver's time of the last sample of processes' use that was read."""
        self._in_use = True
        """Whether a process held it when it was queried last."""
        self._is_idle = self._keeps_last_only = False
        self._energy_again_ns = 0
        self._highest: dict[str, int] = {}
        """Highest clocks in MHz, once known."""
        self._wraps: dict[int, tuple[float, float]] = {}
        """(last value, sum so far) of counters that wrap, by field."""
        self._poller = poller
        self._group = poller.group(f"nvml.{name}.fast")
        self._fast = FastQueries(nvml, handle, self.tags, poller, self._group)
        self._gpm = self._find_gpm()
        self._pcie = [] if self._gpm else [Reading("pcie counters", self._pcie_counters)]

    def at_rest(self) -> bool:
        """Whether no process holds it and it did nothing when it was queried last. One with
        counters that wrap (`counts_at_ticks`) never is: they have to be read on."""
        return not (self._fast.busy or self._fast.moved or self._in_use or self._pcie)

    def calls(self) -> bool:
        """Whether an answer to a fast query is to be read at once."""
        return self._poller.is_pending(self._group)

    def mark_read(self) -> None:
        """Answers of fast queries are read now."""
        self._poller.mark_read(self._group)

    def pace(self, is_idle: bool) -> None:
        """Run fast queries seldom, or at every tick."""
        self._is_idle = is_idle
        self._pace()

    def keep_last_only(self, last_only: bool) -> None:
        """Only the last answer of an interval is kept: query seldom, though the device works."""
        self._keeps_last_only = last_only
        self._pace()

    def _pace(self) -> None:
        ticks = TICKS_AT_REST if self._is_idle or self._keeps_last_only else 1
        self._poller.set_interval(self._group, ticks, self._is_idle)

    @property
    def counts_at_ticks(self) -> bool:
        """Whether it has counters that wrap within a second."""
        return bool(self._pcie)

    def fast(self) -> list[Reading]:
        """Queries that take microseconds, or whose values change within a second."""
        return [*self._fast.readings(), *self._pcie]

    def normal(self) -> list[Reading]:
        """Queries that take some tenths of a millisecond, or are of interest once a second."""
        return [
            Reading("memory limit", self._memory_limit),
            Reading("temperature", self._temperature),
            Reading("clocks", self._clocks),
            Reading("power limit", self._power_limit),
            Reading("engines", self._engines),
            Reading("gpm", self._activity),
            Reading("nvlink", self._nvlink),
            Reading("memory temperature", self._memory_temperature),
            Reading("process memory", self._process_memory),
            Reading("process use", self._process_use),
        ]

    def slow(self) -> list[Reading]:
        """Queries that take milliseconds, or whose values hardly change."""
        return [
            Reading("identity", self._identity),
            Reading("energy", self._energy),
            Reading("throttle time", self._throttle_time),
            Reading("links", self._links),
            Reading("nvlinks", self._nvlink_states),
            Reading("ecc", self._ecc),
            Reading("errors", self._errors),
            Reading("fan", self._fan),
            Reading("highest clocks", self._highest_clocks),
        ]

    def _find_gpm(self) -> Gpm | None:
        whole, instance = self, None
        try:
            if self._parent is not None:
                whole = self._parent
                instance = self._nvml.number("nvmlDeviceGetGpuInstanceId", self.handle)
            return Gpm(self._nvml, whole.handle, self._me, instance, self._dram_peak())
        except NvmlError as error:
            if error.code in ABSENT:
                return None
            raise

    def _dram_peak(self) -> float:
        """Bytes a second that the memory can move: both edges of its clock, over its whole bus.
        0 where that is not known, as for a part of a GPU."""
        if self._parent is not None:
            return 0.0
        try:
            bits = self._nvml.number("nvmlDeviceGetMemoryBusWidth", self.handle)
            mhz = self._nvml.number("nvmlDeviceGetMaxClockInfo", self.handle, _CLOCKS["memory"])
        except NvmlError as error:
            if error.code in ABSENT:
                return 0.0
            raise
        return 2 * mhz * MHZ * bits / 8

    def close(self) -> None:
        """Free what the library holds for it."""
        if self._gpm is not None:
            self._gpm.close()

    def tags(self, **attributes: str) -> str:
        """Labels of this device and more; __ stands for a dot."""
        key = tuple(attributes.items())
        if key not in self._known_tags:
            more = {name.replace("__", "."): value for name, value in key}
            self._known_tags[key] = labels_of(self._me | more)
        return self._known_tags[key]

    # ---- fast ----

    def _temperature(self, points: Points, now_ns: int) -> None:
        degrees = self._nvml.number("nvmlDeviceGetTemperature", self.handle, c_int(0))
        tags = self.tags(hw__type="gpu", hw__sensor_location="gpu")
        points.add("hw.temperature", degrees, tags, now_ns)

    def _clocks(self, points: Points, now_ns: int) -> None:
        for domain in ("memory", "video"):
            self._clock(domain, points, now_ns)

    def _clock(self, domain: str, points: Points, now_ns: int) -> None:
        mhz = self._nvml.number("nvmlDeviceGetClockInfo", self.handle, _CLOCKS[domain])
        tags = self.tags(sonde__gpu__clock__domain=domain)
        points.add("sonde.gpu.clock", mhz * MHZ, tags, now_ns)

    def _pcie_counters(self, points: Points, now_ns: int) -> None:
        """The chip's own counters, where it has no GPM. They have 32 bits and are read at every
        tick, so that they cannot wrap unseen below 40 GB/s."""
        fields = self._fields([*PCIE_FIELDS])
        self._require(bool(fields))
        for field in fields:
            tags = self.tags(network__io__direction=PCIE_FIELDS[field.fieldId])
            points.add("hw.gpu.io", self._unwrapped(field), tags, now_ns)

    # ---- normal ----

    def _memory_limit(self, points: Points, now_ns: int) -> None:
        if self._fast.memory_bytes:  # known from the usage
            points.add("hw.gpu.memory.limit", self._fast.memory_bytes, self._tags, now_ns)

    def _power_limit(self, points: Points, now_ns: int) -> None:
        milliwatts = self._nvml.number("nvmlDeviceGetEnforcedPowerLimit", self.handle)
        points.add("sonde.gpu.power.limit", milliwatts / 1000, self._tags, now_ns)

    def _engines(self, points: Points, now_ns: int) -> None:
        for task, name in (("encoder", "Encoder"), ("decoder", "Decoder")):
            share, period_us = c_uint(), c_uint()
            call = f"nvmlDeviceGet{name}Utilization"
            self._nvml.call(call, self.handle, byref(share), byref(period_us))
            tags = self.tags(hw__gpu__task=task)
            points.add("hw.gpu.utilization", share.value / 100, tags, now_ns)

    def _nvlink(self, points: Points, now_ns: int) -> None:
        known = False
        for field in self._fields([*NVLINK_FIELDS], scope=ALL_LINKS):
            known = True
            tags = self.tags(network__io__direction=NVLINK_FIELDS[field.fieldId])
            points.add("sonde.gpu.nvlink.io", field.number() * 1024, tags, now_ns)
        self._require(known)

    def _memory_temperature(self, points: Points, now_ns: int) -> None:
        fields = self._fields([_MEMORY_TEMPERATURE])
        self._require(bool(fields))
        tags = self.tags(hw__type="gpu", hw__sensor_location="memory")
        points.add("hw.temperature", fields[0].number(), tags, now_ns)

    def _process_use(self, points: Points, now_ns: int) -> None:
        if not self._in_use:
            return  # the query takes milliseconds, and longest where no process runs
        samples = self._nvml.process_samples(self.handle, self._process_since_us)
        shares: dict[int, list[tuple[int, int, int, int]]] = {}
        for one in samples:
            if one.timeStamp <= self._process_since_us:
                continue
            parts = (one.smUtil, one.memUtil, one.encUtil, one.decUtil)
            if max(parts) <= 100:  # without a sample the driver leaves its buffer uninitialised
                shares.setdefault(one.pid, []).append(parts)
        self._process_since_us = max(
            [one.timeStamp for one in samples], default=self._process_since_us
        )
        for pid, rows in shares.items():
            who = {"process.pid": str(pid), "sonde.process.start": start_of(pid)}
            for engine, column in zip(
                ("sm", "memory", "encoder", "decoder"), zip(*rows, strict=True), strict=True
            ):
                tags = labels_of(self._me | who | {"sonde.gpu.engine": engine})
                share = sum(column) / len(column) / 100
                points.add("sonde.process.gpu.utilization", share, tags, now_ns)

    def _process_memory(self, points: Points, now_ns: int) -> None:
        held: dict[int, int] = {}
        for name in ("Compute", "Graphics"):
            call = f"nvmlDeviceGet{name}RunningProcesses_v3"
            for one in self._nvml.processes(call, self.handle):
                used = one.usedGpuMemory if one.usedGpuMemory != NOT_AVAILABLE else 0
                held[one.pid] = max(held.get(one.pid, 0), used)
        self._in_use = bool(held)
        for pid, used in held.items():
            who = {"process.pid": str(pid), "sonde.process.start": start_of(pid)}
            points.add("sonde.process.gpu.memory", used, labels_of(self._me | who), now_ns)

    def _activity(self, points: Points, now_ns: int) -> None:
        if self._gpm is None:
            raise NvmlError(NOT_SUPPORTED)
        self._gpm.read(points, now_ns)

    # ---- slow ----

    def _throttle_time(self, points: Points, now_ns: int) -> None:
        fields = self._fields([*THROTTLE_FIELDS])
        self._require(bool(fields))
        for field in fields:
            tags = self.tags(sonde__gpu__throttle__reason=THROTTLE_FIELDS[field.fieldId])
            points.add("sonde.gpu.throttle.time", field.number() / 1e9, tags, now_ns)

    def _identity(self, points: Points, now_ns: int) -> None:
        nvml = self._nvml
        pci = PciInfo()
        whole = self._parent or self
        nvml.call("nvmlDeviceGetPciInfo_v3", whole.handle, byref(pci))
        about = {
            "hw.name": nvml.text("nvmlDeviceGetName", self.handle),
            "hw.model": nvml.text("nvmlDeviceGetName", whole.handle),
            "hw.vendor": "NVIDIA",
            "hw.parent": self.parent,
            "hw.driver_version": self.driver,
            "sonde.gpu.index": self.name,
            "sonde.gpu.pci.address": pci.busId.decode().lower(),
        }
        points.add("sonde.gpu.info", 1, labels_of(self._me | about), now_ns)

    def _energy(self, points: Points, now_ns: int) -> None:
        """Energy so far. The query takes milliseconds, so it is rarer while the device is at
        rest."""
        if not (self._fast.busy or self._in_use) and now_ns < self._energy_again_ns:
            return
        self._energy_again_ns = now_ns + ENERGY_AT_REST_NS
        millijoules = self._nvml.large("nvmlDeviceGetTotalEnergyConsumption", self.handle)
        points.add("hw.energy", millijoules / 1000, self.tags(hw__type="gpu"), now_ns)

    def _links(self, points: Points, now_ns: int) -> None:
        for which, name in (("current", "Curr"), ("max", "Max")):
            tags = self.tags(sonde__gpu__pcie__link=which)
            for series, what in (("generation", "Generation"), ("width", "Width")):
                value = self._nvml.number(f"nvmlDeviceGet{name}PcieLink{what}", self.handle)
                points.add(f"sonde.gpu.pcie.link.{series}", value, tags, now_ns)

    def _nvlink_states(self, points: Points, now_ns: int) -> None:
        fields = self._fields([_LINK_COUNT])
        self._require(bool(fields) and fields[0].number() > 0)
        up = 0
        links = int(fields[0].number())
        for link in range(links):
            up += self._nvml.number("nvmlDeviceGetNvLinkState", self.handle, c_uint(link))
        for state, count in (("up", up), ("down", links - up)):
            tags = self.tags(sonde__gpu__nvlink__state=state)
            points.add("sonde.gpu.nvlink.links", count, tags, now_ns)

    def _ecc(self, points: Points, now_ns: int) -> None:
        for kind, number in (("corrected", _CORRECTED), ("uncorrected", _UNCORRECTED)):
            count = self._nvml.large("nvmlDeviceGetTotalEccErrors", self.handle, number, _VOLATILE)
            points.add("sonde.gpu.ecc.volatile", count, self.tags(error__type=kind), now_ns)
            for where, total in self._ecc_by_memory(number).items():
                tags = self.tags(hw__type="gpu", error__type=kind, sonde__gpu__memory__kind=where)
                points.add("hw.errors", total, tags, now_ns)

    def _ecc_by_memory(self, kind: c_int) -> dict[str, int]:
        """Errors in the life of the GPU, of dram and sram; of '' (all) where it does not separate
        them."""
        nvml = self._nvml
        call = "nvmlDeviceGetMemoryErrorCounter"
        try:
            return {
                where: nvml.large(call, self.handle, kind, _AGGREGATE, number)
                for where, number in (("dram", _DRAM), ("sram", _SRAM))
            }
        except NvmlError as error:
            if error.code not in ABSENT:
                raise
            return {"": nvml.large("nvmlDeviceGetTotalEccErrors", self.handle, kind, _AGGREGATE)}

    def _errors(self, points: Points, now_ns: int) -> None:
        known = False
        for field in self._fields([*SLOW_FIELDS]):
            known = True
            series, attributes = SLOW_FIELDS[field.fieldId]
            points.add(series, field.number(), labels_of(self._me | attributes), now_ns)
        self._require(known)

    def _fan(self, points: Points, now_ns: int) -> None:
        share = self._nvml.number("nvmlDeviceGetFanSpeed", self.handle)
        points.add("hw.fan.speed_ratio", share / 100, self.tags(hw__type="fan"), now_ns)

    def _highest_clocks(self, points: Points, now_ns: int) -> None:
        for domain, number in _CLOCKS.items():
            if domain not in self._highest:  # never changes, and takes milliseconds to read
                mhz = self._nvml.number("nvmlDeviceGetMaxClockInfo", self.handle, number)
                self._highest[domain] = mhz
            tags = self.tags(sonde__gpu__clock__domain=domain)
            points.add("sonde.gpu.clock.limit", self._highest[domain] * MHZ, tags, now_ns)

    # ---- fields ----

    def _fields(self, numbers: list[int], scope: int = 0) -> list[FieldValue]:
        """The values of fields, without those that the device does not support."""
        values = (FieldValue * len(numbers))()
        for index, number in enumerate(numbers):
            values[index].fieldId = number
            values[index].scopeId = scope
        self._nvml.fields(self.handle, values)
        return [value for value in values if value.nvmlReturn == SUCCESS]

    def _unwrapped(self, field: FieldValue) -> float:
        """The value; of a counter of 32 bits, its sum over all wraps since it was read first."""
        value = field.number()
        if field.valueType != UNSIGNED_INT:
            return value
        before, total = self._wraps.get(field.fieldId, (value, 0.0))
        total += (value - before) % 2**32
        self._wraps[field.fieldId] = (value, total)
        return total

    @staticmethod
    def _require(known: bool) -> None:
        """Raise NvmlError (not supported) where nothing is known."""
        if not known:
            raise NvmlError(NOT_SUPPORTED)
