# SPDX-License-Identifier: Apache-2.0
"""AMD devices through AMD SMI's own Python module: the source `amdsmi`. Unverified on hardware.

The module comes with ROCm and knows the layouts of its library, which change between releases. It
lives in the process of this source alone (`sonde.collect.subprocess_runner`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sonde import system_libraries
from sonde.collect.devices.present import ROCM
from sonde.collect.devices.process_start import start_of
from sonde.collect.polling import FAST_S, NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable
from sonde.metrics import labels_of

MIB, MHZ = 2**20, 1e6
Answer = dict[str, Any]


class AmdSmiSource:
    """Every AMD GPU of this machine."""

    name = "amdsmi"

    def __init__(self) -> None:
        self._smi: Any = None
        self._devices: list[tuple[Any, dict[str, str]]] = []

    def open(self) -> None:
        """Find the devices. Raises SourceUnavailable without a library, driver or device."""
        try:
            self._smi = system_libraries.import_checked("amdsmi", "libamd_smi.so", ROCM)
        except (ImportError, OSError) as error:
            raise SourceUnavailable(f"amdsmi cannot be loaded: {error}", whole=True) from error
        try:
            self._smi.amdsmi_init()
            self._devices = [
                (handle, {"hw.id": self._smi.amdsmi_get_gpu_device_uuid(handle)})
                for handle in self._smi.amdsmi_get_processor_handles()
            ]
        except self._smi.AmdSmiException as error:
            raise SourceUnavailable(str(error), whole=True) from error
        if not self._devices:
            raise SourceUnavailable("the driver has no device", whole=True)

    def polls(self) -> Sequence[Poll]:
        """By rate; what a device does not support, or fails at, is left out."""
        return (
            Poll("fast", FAST_S, self._each(self._activity, self._memory, self._power)),
            Poll("normal", NORMAL_S, self._each(self._clocks, self._heat, self._processes)),
            Poll("slow", SLOW_S, self._each(self._about, self._energy, self._ecc)),
        )

    def close(self) -> None:
        """Shut the library down."""
        try:
            self._smi.amdsmi_shut_down()
        except self._smi.AmdSmiException:
            return

    def _each(
        self, *queries: Callable[[Points, Any, dict[str, str]], None]
    ) -> Callable[[Points], None]:
        """A poll's `read`: every query to every device; a gap only where none was answered."""

        def read(points: Points) -> None:
            failed = ""
            answered = False
            for handle, me in self._devices:
                for query in queries:
                    try:
                        query(points, handle, me)
                        answered = True
                    except self._smi.AmdSmiException as error:
                        failed = str(error)
            if failed and not answered:
                raise SourceUnavailable(failed, whole=True)

        return read

    def _activity(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        answer = self._smi.amdsmi_get_gpu_activity(handle)
        tags = labels_of(me | {"hw.gpu.task": "general"})
        _put(points, "hw.gpu.utilization", answer.get("gfx_activity"), tags, 0.01)
        _put(points, "sonde.gpu.memory.busy", answer.get("umc_activity"), labels_of(me), 0.01)

    def _memory(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        answer = self._smi.amdsmi_get_gpu_vram_usage(handle)
        _put(points, "hw.gpu.memory.usage", answer.get("vram_used"), labels_of(me), MIB)
        _put(points, "hw.gpu.memory.limit", answer.get("vram_total"), labels_of(me), MIB)

    def _power(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        answer = self._smi.amdsmi_get_power_info(handle)
        watts = next(
            (
                answer[name]
                for name in ("current_socket_power", "socket_power", "average_socket_power")
                if isinstance(answer.get(name), int | float)
            ),
            None,
        )
        _put(points, "hw.power", watts, labels_of(me | {"hw.type": "gpu"}), 1)
        _put(points, "sonde.gpu.power.limit", answer.get("power_limit"), labels_of(me), 1)

    def _clocks(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        kinds = self._smi.AmdSmiClkType
        for domain, kind in (("sm", kinds.GFX), ("memory", kinds.MEM)):
            answer = self._smi.amdsmi_get_clock_info(handle, kind)
            tags = labels_of(me | {"sonde.gpu.clock.domain": domain})
            _put(points, "sonde.gpu.clock", answer.get("clk", answer.get("cur_clk")), tags, MHZ)
            _put(points, "sonde.gpu.clock.limit", answer.get("max_clk"), tags, MHZ)

    def _heat(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        kinds, now = self._smi.AmdSmiTemperatureType, self._smi.AmdSmiTemperatureMetric.CURRENT
        for where, kind in (("gpu", kinds.HOTSPOT), ("memory", kinds.VRAM)):
            degrees = self._smi.amdsmi_get_temp_metric(handle, kind, now)
            tags = labels_of(me | {"hw.type": "gpu", "hw.sensor_location": where})
            _put(points, "hw.temperature", degrees, tags, 1)

    def _processes(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        for answer in self._smi.amdsmi_get_gpu_process_list(handle):
            pid = int(answer["pid"])
            who = {"process.pid": str(pid), "sonde.process.start": start_of(pid)}
            held = answer.get("memory_usage", {}).get("vram_mem", answer.get("mem"))
            _put(points, "sonde.process.gpu.memory", held, labels_of(me | who), 1)

    def _about(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        answer = self._smi.amdsmi_get_gpu_asic_info(handle)
        about = {
            "hw.name": str(answer.get("market_name", "AMD GPU")),
            "hw.model": str(answer.get("market_name", "AMD GPU")),
            "hw.vendor": "AMD",
            "sonde.gpu.index": str([known for known, _ in self._devices].index(handle)),
            "sonde.gpu.pci.address": str(self._smi.amdsmi_get_gpu_device_bdf(handle)),
        }
        points.add("sonde.gpu.info", 1, labels_of(me | about))

    def _energy(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        answer = self._smi.amdsmi_get_energy_count(handle)
        count = answer.get("energy_accumulator", answer.get("power"))
        microjoules = answer.get("counter_resolution", 15.3)
        _put(points, "hw.energy", count, labels_of(me | {"hw.type": "gpu"}), microjoules / 1e6)

    def _ecc(self, points: Points, handle: Any, me: dict[str, str]) -> None:
        answer = self._smi.amdsmi_get_gpu_total_ecc_count(handle)
        for kind, name in (("corrected", "correctable"), ("uncorrected", "uncorrectable")):
            tags = labels_of(me | {"hw.type": "gpu", "error.type": kind})
            _put(points, "hw.errors", answer.get(f"{name}_count"), tags, 1)


def _put(points: Points, series: str, answer: object, tags: str, scale: float) -> None:
    """Add a value, unless it is the module's 'N/A'; `scale`: the module's unit in ours."""
    if isinstance(answer, int | float):
        points.add(series, answer * scale, tags)
