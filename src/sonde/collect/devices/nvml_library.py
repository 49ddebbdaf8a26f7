# SPDX-License-Identifier: Apache-2.0
"""NVML as the driver ships it, libnvidia-ml.so.1, through ctypes: only what Sonde uses.

Layouts are those of nvml.h; a test compares them with that header. A function that an older library
lacks counts as one that the device does not support.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    Structure,
    Union,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_longlong,
    c_uint,
    c_ulonglong,
    c_void_p,
    create_string_buffer,
    sizeof,
)
from typing import Any

from sonde import system_libraries

LIBRARY = "libnvidia-ml.so.1"

SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 0, 1, 2, 3, 4
NOT_FOUND, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED, TIMEOUT = 6, 7, 9, 10
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 12, 13
GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, NO_DATA = 15, 16, 18, 21
ARGUMENT_VERSION, DEPRECATED, UNKNOWN = 25, 26, 999

REASONS = {
    UNINITIALIZED: "the library was shut down",
    NO_PERMISSION: "permission denied",
    DRIVER_NOT_LOADED: "the driver is not loaded",
    TIMEOUT: "the driver timed out",
    LIBRARY_NOT_FOUND: f"{LIBRARY} is not installed",
    GPU_IS_LOST: "the GPU is lost: it fell off the bus",
    RESET_REQUIRED: "the GPU must be reset",
    VERSION_MISMATCH: "library and driver are of different versions",
    UNKNOWN: "the driver reports an unknown error",
}
ABSENT = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION, DEPRECATED})
"""Codes for what the device or the library does not support and never will: it is not queried
again.
"""
NOT_AVAILABLE = 2**64 - 1
"""A number that the driver does not know."""


class NvmlError(Exception):
    """A call failed; `code` is the nvmlReturn_t."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason or REASONS.get(code, f"NVML error {code}"))
        self.code = code


class Utilization(Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class Memory(Structure):
    """nvmlMemory_v2_t, in bytes."""

    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


class PciInfo(Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("busIdLegacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", c_char * 32),
    )


class ProcessInfo(Structure):
    """nvmlProcessInfo_t, as the _v3 calls fill it."""

    _fields_ = (
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


class ProcessSample(Structure):
    """nvmlProcessUtilizationSample_t: percent; timeStamp in µs."""

    _fields_ = (
        ("pid", c_uint),
        ("timeStamp", c_ulonglong),
        ("smUtil", c_uint),
        ("memUtil", c_uint),
        ("encUtil", c_uint),
        ("decUtil", c_uint),
    )


class Value(Union):
    """nvmlValue_t."""

    _fields_ = (
        ("dVal", c_double),
        ("uiVal", c_uint),
        ("ullVal", c_ulonglong),
        ("sllVal", c_longlong),
        ("siVal", c_int),
    )


class FieldValue(Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("fieldId", c_uint),
        ("scopeId", c_uint),
        ("timestamp", c_longlong),
        ("latencyUsec", c_longlong),
        ("valueType", c_int),
        ("nvmlReturn", c_int),
        ("value", Value),
    )

    def number(self) -> float:
        """The value, by its type."""
        member = _MEMBERS.get(self.valueType, "ullVal")
        return float(getattr(self.value, member))


_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ullVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
UNSIGNED_INT = 1
"""valueType of a counter of 32 bits, which wraps."""


class EventData(Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", c_void_p),
        ("eventType", c_ulonglong),
        ("eventData", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


class _MetricInfo(Structure):
    _fields_ = (("shortName", c_char_p), ("longName", c_char_p), ("unit", c_char_p))


class GpmMetric(Structure):
    """nvmlGpmMetric_t."""

    _fields_ = (
        ("metricId", c_uint),
        ("nvmlReturn", c_int),
        ("value", c_double),
        ("metricInfo", _MetricInfo),
    )


GPM_METRICS_ROOM = 64
"""Room for the metrics that Sonde requests; the library reads numMetrics of them. NVML's own,
NVML_GPM_METRIC_MAX, is larger."""


class GpmMetrics(Structure):
    """nvmlGpmMetricsGet_t, with less room at its end."""

    _fields_ = (
        ("version", c_uint),
        ("numMetrics", c_uint),
        ("sample1", c_void_p),
        ("sample2", c_void_p),
        ("metrics", GpmMetric * GPM_METRICS_ROOM),
    )


class GpmSupport(Structure):
    """nvmlGpmSupport_t."""

    _fields_ = (("version", c_uint), ("isSupportedDevice", c_uint))


LAYOUTS: dict[str, type[Structure | Union]] = {
    "nvmlUtilization_t": Utilization,
    "nvmlMemory_v2_t": Memory,
    "nvmlPciInfo_t": PciInfo,
    "nvmlProcessInfo_t": ProcessInfo,
    "nvmlProcessUtilizationSample_t": ProcessSample,
    "nvmlValue_t": Value,
    "nvmlFieldValue_t": FieldValue,
    "nvmlEventData_t": EventData,
    "nvmlGpmMetric_t": GpmMetric,
    "nvmlGpmSupport_t": GpmSupport,
}
MEMORY_VERSION = sizeof(Memory) | 2 << 24
"""NVML_STRUCT_VERSION(Memory, 2) of nvml.h."""


class Nvml:
    """The library, opened and initialised."""

    def __init__(self, path: str = LIBRARY) -> None:
        """`path`: or the name that the dynamic linker finds it by. Raises NvmlError where there is
        no library or no driver."""
        try:
            self._library = system_libraries.load(path)
        except system_libraries.UntrustedLibraryError as error:
            raise NvmlError(NO_PERMISSION, str(error)) from error
        except OSError as error:
            raise NvmlError(LIBRARY_NOT_FOUND) from error
        self._functions: dict[str, Callable[..., int]] = {}
        self.call("nvmlInit_v2")

    def close(self) -> None:
        """Shut the library down; errors do not matter any more."""
        try:
            self.call("nvmlShutdown")
        except NvmlError:
            return

    def function(self, name: str) -> Callable[..., int]:
        """A function, which returns a code. Raises NvmlError where the library has none."""
        function = self._functions.get(name)
        if function is None:
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise NvmlError(FUNCTION_NOT_FOUND) from error
            self._functions[name] = function
        return function

    def address(self, name: str) -> int:
        """Where a function is. Raises NvmlError where the library has none."""
        function: Any = self.function(name)  # of ctypes, which has no public name for its type
        return ctypes.cast(function, c_void_p).value or 0

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by name. Raises NvmlError unless it succeeds."""
        code = self.function(name)(*arguments)
        if code != SUCCESS:
            raise NvmlError(code)

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function whose last argument takes an unsigned int."""
        out = c_uint()
        self.call(name, *arguments, byref(out))
        return out.value

    def large(self, name: str, *arguments: Any) -> int:
        """Call a function whose last argument takes an unsigned long long."""
        out = c_ulonglong()
        self.call(name, *arguments, byref(out))
        return out.value

    def text(self, name: str, *arguments: Any) -> str:
        """Call a function whose last arguments are a buffer for a text, and its size."""
        out = create_string_buffer(96)
        self.call(name, *arguments, out, c_uint(len(out)))
        return out.value.decode(errors="replace")

    def handle(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function whose last argument takes a handle."""
        out = c_void_p()
        self.call(name, *arguments, byref(out))
        return out

    def fields(self, device: c_void_p, values: ctypes.Array[FieldValue]) -> None:
        """Query field values; each has in nvmlReturn whether it is valid."""
        self.call("nvmlDeviceGetFieldValues", device, c_int(len(values)), values)

    def processes(self, name: str, device: c_void_p) -> list[ProcessInfo]:
        """Processes that use a device, by one of the …RunningProcesses_v3 calls."""
        count = c_uint(64)
        while True:
            room = (ProcessInfo * count.value)()
            try:
                self.call(name, device, byref(count), room)
            except NvmlError as error:
                if error.code == INSUFFICIENT_SIZE and count.value < 65_536:
                    count = c_uint(2 * max(count.value, len(room)))
                    continue
                raise
            return list(room[: count.value])

    def process_samples(self, device: c_void_p, since_us: int) -> list[ProcessSample]:
        """What processes used of a device after `since_us`, by the driver's clock. Raises
        NvmlError, with INSUFFICIENT_SIZE where processes have come since their number was asked
        for: the next poll asks again."""
        count = c_uint(0)
        name = "nvmlDeviceGetProcessUtilization"
        since = c_ulonglong(since_us)
        try:
            self.call(name, device, None, byref(count), since)
        except NvmlError as error:
            if error.code in (NOT_FOUND, NO_DATA):
                return []  # nothing ran lately
            if error.code != INSUFFICIENT_SIZE:
                raise
        if not count.value:
            return []
        room = (ProcessSample * count.value)()
        try:
            self.call(name, device, room, byref(count), since)
        except NvmlError as error:
            if error.code in (NOT_FOUND, NO_DATA):
                return []
            raise
        return list(room[: count.value])
