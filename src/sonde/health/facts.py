# SPDX-License-Identifier: Apache-2.0
"""The input of checks: the last values of a node's metrics, and the content of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sonde.health.hardware_facts import Hardware
from sonde.metrics import PERIODS_S, MetricRow


@dataclass(slots=True)
class Device:
    """The metrics of one device."""

    uuid: str
    about: dict[str, str]
    """Attributes of sonde.gpu.info; a MIG instance has a hw.parent."""
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    """Last values by (metric, attributes without hw.id)."""

    @property
    def label(self) -> str:
        """Its index, as nvidia-smi shows it, else its id."""
        index = self.about.get("sonde.gpu.index")
        return f"gpu {index}" if index else self.uuid

    def get(self, series: str, **attributes: str) -> float | None:
        """The value of a metric with at least these attributes (__ for dots), the first one found;
        None if there is none."""
        wanted = {(name.replace("__", "."), value) for name, value in attributes.items()}
        for (name, tags), value in self.values.items():
            if name == series and wanted <= tags:
                return value
        return None

    def all(self, series: str, attribute: str) -> dict[str, float]:
        """Values of a metric by one of its attributes."""
        return {
            dict(tags)[attribute]: value
            for (name, tags), value in self.values.items()
            if name == series and attribute in dict(tags)
        }


@dataclass(frozen=True, slots=True)
class Gap:
    """A metric source that failed, by its name: nvml, nvml.events, nvml.0.fast, nvml.0.power."""

    name: str
    text: str
    """`name: reason`."""

    @property
    def of_all(self) -> bool:
        """Whether the whole source failed."""
        return "." not in self.name

    @property
    def index(self) -> str:
        """Index of the device that it belongs to; '' for none."""
        part = self.name.partition(".")[2].partition(".")[0]
        return part if part.isdigit() else ""

    @property
    def of_device(self) -> bool:
        """Whether it is a whole poll of a device (fast, normal, slow), not a single reading: then
        the device does not answer."""
        return bool(self.index) and self.name.rpartition(".")[2] in PERIODS_S


@dataclass(slots=True)
class Facts:
    """Facts about one node."""

    devices: list[Device]
    trouble: list[str]
    """Metric sources that failed: `name: reason`."""
    on_the_bus: int = 0
    """Number of NVIDIA GPUs on the PCI bus."""
    module_version: str = ""
    """Version of the kernel driver; '' without one."""
    installed: frozenset[str] = frozenset()
    """Versions of NVML on disk; empty where it is in none of the usual folders."""
    xids: list[tuple[str, int]] = field(default_factory=list)
    """(PCI address, number) of the errors in the kernel's log."""
    log_lost: int = 0
    """Records of the kernel's log that were overwritten before they were read."""
    memory_corrected: int | None = None
    memory_uncorrected: int | None = None
    """Memory errors of the host, from EDAC; None where they are not counted."""
    ports: dict[str, str] = field(default_factory=dict)
    """InfiniBand and RoCE ports: name to state."""
    bandwidth: dict[str, float] = field(default_factory=dict)
    """uuid to bytes per second from the host, where it was measured."""
    hardware: Hardware = field(default_factory=Hardware)
    """Disks, fans, power supplies and sensors; `gather` alone collects them."""

    @property
    def gaps(self) -> list[Gap]:
        """`trouble`, parsed."""
        return [Gap(text.partition(": ")[0], text) for text in self.trouble]


def devices_of(rows: Iterable[MetricRow]) -> list[Device]:
    """The devices in rows of the table `metric`, sorted by index."""
    found: dict[str, Device] = {}
    for _, series, labels, value in rows:
        tags = json.loads(labels) if labels else {}
        uuid = tags.pop("hw.id", "")
        if not uuid or "process.pid" in tags:
            continue
        device = found.setdefault(uuid, Device(uuid, {}))
        if series == "sonde.gpu.info":
            device.about = {name: str(value) for name, value in tags.items()}
        plain = frozenset((name, str(value)) for name, value in tags.items())
        device.values[series, plain] = value
    return sorted(found.values(), key=lambda device: _sort_key(device.about))


def _sort_key(about: Mapping[str, str]) -> list[int]:
    """Sort key of a device: 2 before 10, and a GPU before its MIG instances."""
    return [int(digits) for digits in re.findall(r"\d+", about.get("sonde.gpu.index", ""))]


def is_part(about: Mapping[str, str]) -> bool:
    """Whether a device is a MIG instance."""
    return bool(about.get("hw.parent"))
