# SPDX-License-Identifier: Apache-2.0
"""What checks judge: the last values of a node's metrics, and what its files say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sonde.metrics import COSTS, MetricRow


@dataclass(slots=True)
class Device:
    """What a device said of itself."""

    uuid: str
    about: dict[str, str]
    """Attributes of sonde.gpu.info; a MIG instance has a hw.parent."""
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its index, as nvidia-smi has it, else its id."""
        index = self.about.get("sonde.gpu.index")
        return f"gpu {index}" if index else self.uuid

    def get(self, series: str, **attributes: str) -> float | None:
        """The value of a series that has these attributes (__ stands for a dot); None: not told."""
        wanted = {(name.replace("__", "."), value) for name, value in attributes.items()}
        for (name, tags), value in self.values.items():
            if name == series and wanted <= tags:
                return value
        return None

    def all(self, series: str, attribute: str) -> dict[str, float]:
        """Values of a series by one of its attributes."""
        return {
            dict(tags)[attribute]: value
            for (name, tags), value in self.values.items()
            if name == series and attribute in dict(tags)
        }


@dataclass(frozen=True, slots=True)
class Gap:
    """A signal that was lost, by its name: nvml, nvml.events, nvml.0.cheap, nvml.0.power."""

    name: str
    text: str
    """With the reason."""

    @property
    def of_all(self) -> bool:
        """Whether the whole source does not answer."""
        return "." not in self.name

    @property
    def index(self) -> str:
        """Of the device whose it is; '' for none."""
        place = self.name.partition(".")[2].partition(".")[0]
        return place if place.isdigit() else ""

    @property
    def of_device(self) -> bool:
        """Whether it is all that a device tells at one pace, so that the device is gone."""
        return bool(self.index) and self.name.rpartition(".")[2] in COSTS


@dataclass(slots=True)
class Facts:
    """Of one node."""

    devices: list[Device]
    trouble: list[str]
    """Signals that were lost while asking: `name: reason`."""
    on_the_bus: int = 0
    """NVIDIA devices that PCI knows."""
    module_version: str = ""
    """Of the driver in the kernel; '' without one."""
    installed: frozenset[str] = frozenset()
    """Versions of NVML that lie on disk; empty where they are in no usual place."""
    xids: list[tuple[str, int]] = field(default_factory=list)
    """(PCI address, number) of the errors in the kernel's log."""
    memory_corrected: int | None = None
    memory_uncorrected: int | None = None
    """Of the host, by EDAC; None where nothing counts them."""
    ports: dict[str, str] = field(default_factory=dict)
    """InfiniBand and RoCE ports: name to state."""
    bandwidth: dict[str, float] = field(default_factory=dict)
    """uuid to bytes a second from the host, where it was measured."""

    @property
    def gaps(self) -> list[Gap]:
        """The troubles, taken apart."""
        return [Gap(text.partition(": ")[0], text) for text in self.trouble]


def devices_of(rows: Iterable[MetricRow]) -> list[Device]:
    """Devices that rows speak of, in the order of their indices."""
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
    return sorted(found.values(), key=lambda device: _place(device.about))


def _place(about: Mapping[str, str]) -> list[int]:
    """What to sort devices by: 2 comes before 10, and a GPU before its parts."""
    return [int(digits) for digits in re.findall(r"\d+", about.get("sonde.gpu.index", ""))]


def is_part(about: Mapping[str, str]) -> bool:
    """Whether it is a MIG instance."""
    return bool(about.get("hw.parent"))
