# SPDX-License-Identifier: Apache-2.0
"""NVML's GPM (GPU Performance Monitoring): what a GPU did between two samples (Hopper and newer).

A sample is a snapshot of the chip's counters (some 0.1 ms); the library turns two of them into
shares and rates, which takes it 2 ms of CPU time, however few are requested. It disturbs no
profiler: the counters are not CUPTI's.
An answer holds for the whole time between two samples, so nothing is missed: the older sample is
kept until all metrics up to the newer one were read, and where that fails, the next answer covers
the longer time.

PCIe bytes are those on the wire, with the headers of packets: 7 to 9 % more than programs copy.
"""

from __future__ import annotations

from ctypes import byref, c_uint, c_void_p
from dataclasses import dataclass
from math import inf

from sonde.collect.devices.nvml_library import (
    ABSENT,
    GPM_METRICS_ROOM,
    NOT_SUPPORTED,
    SUCCESS,
    GpmMetric,
    GpmMetrics,
    GpmSupport,
    Nvml,
    NvmlError,
)
from sonde.collect.polling import Points
from sonde.metrics import labels_of

PERCENT, MIB = 0.01, 2.0**20
DRAM, PCIE = 10, (20, 21)
"""Numbers of metrics (`METRICS`)."""
MAX_FAILURES = 30
"""In a row, of the PCIe metrics that had answers before; then they are requested no more."""
SHORTEST_NS = 200_000_000
"""Between two samples. The library needs more than 100 ms: it reads the counters that often."""

_TENSOR = "sonde.gpu.tensor.active"
_PIPE = "sonde.gpu.pipe.active"
_PRECISION = "sonde.gpu.precision"
_DIRECTION = "network.io.direction"

METRICS: dict[int, tuple[str, dict[str, str], float]] = {
    1: ("sonde.gpu.graphics.active", {}, PERCENT),
    2: ("sonde.gpu.sm.active", {}, PERCENT),
    3: ("sonde.gpu.sm.occupancy", {}, PERCENT),
    4: (_PIPE, {_PRECISION: "integer"}, PERCENT),
    5: (_TENSOR, {_PRECISION: "any"}, PERCENT),
    6: (_TENSOR, {_PRECISION: "dfma"}, PERCENT),
    7: (_TENSOR, {_PRECISION: "hmma"}, PERCENT),
    9: (_TENSOR, {_PRECISION: "imma"}, PERCENT),
    10: ("sonde.gpu.dram.active", {}, PERCENT),
    11: (_PIPE, {_PRECISION: "fp64"}, PERCENT),
    12: (_PIPE, {_PRECISION: "fp32"}, PERCENT),
    13: (_PIPE, {_PRECISION: "fp16"}, PERCENT),
    20: ("sonde.gpu.pcie.throughput", {_DIRECTION: "transmit"}, MIB),
    21: ("sonde.gpu.pcie.throughput", {_DIRECTION: "receive"}, MIB),
    60: ("sonde.gpu.nvlink.throughput", {_DIRECTION: "receive"}, MIB),
    61: ("sonde.gpu.nvlink.throughput", {_DIRECTION: "transmit"}, MIB),
}
"""nvmlGpmMetricId_t: series, attributes, and what the library's unit is in ours."""


@dataclass(slots=True)
class _Row:
    series: str
    labels: str
    scale: float


class Gpm:
    """The samples of one device or MIG instance."""

    def __init__(
        self,
        nvml: Nvml,
        device: c_void_p,
        identity: dict[str, str],
        instance: int | None,
        dram_peak: float,
    ) -> None:
        """Raises NvmlError where the chip has no GPM. `instance`: number of a MIG instance, and
        `device` is its parent then; `dram_peak`: bytes a second that its memory can move, 0 if not
        known."""
        self._nvml = nvml
        self._device = device
        self._instance = instance
        support = GpmSupport(version=1)
        nvml.call("nvmlGpmQueryDeviceSupport", device, byref(support))
        if not support.isSupportedDevice:
            raise NvmlError(NOT_SUPPORTED)
        self._samples = [nvml.handle("nvmlGpmSampleAlloc") for _ in range(2)]
        """The last sample that was reported; memory for the next."""
        self._before_ns = 0
        """When the last sample was taken; 0 before the first."""
        self._dram_peak = dram_peak
        self._dram_tags = labels_of(identity)
        self._moved: dict[int, float] = {}
        """Bytes of PCIe so far, by metric."""
        self._known: set[int] = set()
        """Metrics that had an answer once."""
        self._failed = 0
        """Times in a row without an answer for bytes of PCIe."""
        self._rows = {
            number: _Row(series, labels_of({**identity, **attributes}), scale)
            for number, (series, attributes, scale) in METRICS.items()
        }
        self._request = GpmMetrics(version=1)
        self._set_request(list(METRICS))

    def read(self, points: Points, now_ns: int) -> None:
        """Take a sample and report what happened since the one before. Raises NvmlError; the next
        then covers this time too."""
        if self._before_ns and now_ns - self._before_ns < SHORTEST_NS:
            return
        before, scratch = self._samples
        if self._instance is None:
            self._nvml.call("nvmlGpmSampleGet", self._device, scratch)
        else:
            instance = c_uint(self._instance)
            self._nvml.call("nvmlGpmMigSampleGet", self._device, instance, scratch)
        if self._before_ns:
            self._report(points, before, scratch, now_ns)
        self._samples, self._before_ns = [scratch, before], now_ns

    def close(self) -> None:
        """Free the samples."""
        for sample in self._samples:
            self._nvml.call("nvmlGpmSampleFree", sample)

    def _report(self, points: Points, before: c_void_p, now: c_void_p, now_ns: int) -> None:
        request = self._request
        request.sample1, request.sample2 = before, now
        self._nvml.call("nvmlGpmMetricsGet", byref(request))
        found = request.metrics[: request.numMetrics]
        missing = [one for one in found if one.metricId in PCIE and self._may_return(one)]
        for metric in found:
            # The library has NaN where nothing was counted.
            is_valid = metric.nvmlReturn == SUCCESS and 0 <= metric.value < inf
            if is_valid and not (missing and metric.metricId in PCIE):
                self._add(points, metric.metricId, metric.value, now_ns)
        self._failed = self._failed + 1 if missing else 0
        if missing:
            raise NvmlError(missing[0].nvmlReturn)  # its bytes would be missing in the total
        self._known |= {one.metricId for one in found if one.nvmlReturn == SUCCESS}
        kept = [one.metricId for one in found if not one.nvmlReturn or self._may_return(one)]
        if kept and len(kept) < len(found):
            self._set_request(kept)

    def _may_return(self, metric: GpmMetric) -> bool:
        """Whether a metric that failed had an answer before, and may have one again."""
        failed = metric.nvmlReturn and metric.nvmlReturn not in ABSENT
        return bool(failed) and metric.metricId in self._known and self._failed < MAX_FAILURES

    def _add(self, points: Points, number: int, answer: float, now_ns: int) -> None:
        row = self._rows[number]
        value = answer * row.scale
        points.add(row.series, value, row.labels, now_ns)
        if number in PCIE:
            # Summed here: the chip's own counters have 32 bits, and wrap in 70 ms at full speed.
            if number not in self._moved:
                self._moved[number] = 0.0
                points.add("hw.gpu.io", 0.0, row.labels, self._before_ns)  # the counter's beginning
            self._moved[number] += value * (now_ns - self._before_ns) / 1e9
            points.add("hw.gpu.io", self._moved[number], row.labels, now_ns)
        elif number == DRAM and self._dram_peak:
            rate = value * self._dram_peak
            points.add("sonde.gpu.dram.throughput", rate, self._dram_tags, now_ns)

    def _set_request(self, numbers: list[int]) -> None:
        self._request.numMetrics = min(len(numbers), GPM_METRICS_ROOM)
        for index, number in enumerate(numbers[:GPM_METRICS_ROOM]):
            self._request.metrics[index].metricId = number
