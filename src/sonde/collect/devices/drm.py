# SPDX-License-Identifier: Apache-2.0
"""GPUs that the kernel's DRM knows, of any vendor: the source `drm`. Unverified on hardware.

What drivers report is in files: sysfs of the card (amdgpu: use and memory), hwmon beside it (power,
temperature, clock, energy, fan), and /proc/PID/fdinfo of processes that hold the card open (engine
time and memory: the kernel's Documentation/gpu/drm-usage-stats.rst). amdgpu, i915 and others write
engine time in ns (`drm-engine-*`). xe writes cycles instead (`drm-cycles-*`, of
`drm-total-cycles-*`), which are not read: its processes have memory and no engine time. Cards of
NVIDIA are left to NVML, and those of AMD to its library where that is installed.
"""

from __future__ import annotations

import os
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sonde import procfs
from sonde.collect.devices import present
from sonde.collect.devices.process_start import start_of
from sonde.collect.host.shares import share_out
from sonde.collect.polling import FAST_S, NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable
from sonde.metrics import labels_of

VENDORS = {present.AMD: "AMD", present.INTEL: "Intel"}
CLIENTS_MAX = 256
"""Clients that are read once a second, shared out between users and containers."""
DESCRIPTORS_MAX = 4_096
"""Of one process, looked through for cards."""
FIND_CPU_S = 0.5
"""CPU time of one look through all processes. The next one begins where it ended."""
DRM_MAJOR = 226
"""Of the devices in /dev/dri."""
ENGINE, MEMORY = "drm-engine-", ("drm-resident-", "drm-memory-", "drm-total-")
"""Prefixes of keys in fdinfo: engine time; bytes, the first that a driver has."""
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "": 1}
_CARD_MEMORY = ("vram", "local")
"""How drivers call the memory on the card, behind those prefixes."""
_SENSORS = {"edge": "gpu", "junction": "hotspot", "mem": "memory"}
"""Where a sensor is, by its label in hwmon."""


@dataclass(slots=True)
class _Card:
    address: str
    """On the PCI bus."""
    folder: Path
    """Its device's in sysfs."""
    hwmon: Path | None
    vendor: str
    driver: str
    index: str
    me: dict[str, str] = field(default_factory=dict)

    def tags(self, **attributes: str) -> str:
        return labels_of(self.me | {k.replace("__", "."): v for k, v in attributes.items()})


@dataclass(frozen=True, slots=True)
class _Client:
    pid: int
    fdinfo: Path


class DrmSource:
    """Every card but those that are read through a vendor's library."""

    name = "drm"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._left_to_libraries = present.vendors_with_library()
        self._cards: dict[str, _Card] = {}
        self._clients: list[_Client] = []
        self._left_out = 0
        """Clients that are not read, and processes that were not looked through to their end; a
        look that took too long counts as one."""
        self._looked_at = 0
        """The process that was looked through last."""

    def open(self) -> None:
        """Find the cards. Raises SourceUnavailable where there is none."""
        self._cards = {card.address: card for card in self._find()}
        if not self._cards:
            raise SourceUnavailable("no card that DRM knows", whole=True)
        self._clients = []

    def polls(self) -> Sequence[Poll]:
        """Files of cards, and of processes that hold them."""
        return (
            Poll("fast", FAST_S, self._read_fast),
            Poll("normal", NORMAL_S, self._read_normal),
            Poll("processes", NORMAL_S, self._read_processes),
            Poll("slow", SLOW_S, self._read_slow),
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _find(self) -> Iterator[_Card]:
        for folder in sorted((self._root / "sys/class/drm").glob("card[0-9]*")):
            if not folder.name[4:].isdigit():
                continue  # a connector: card0-HDMI-A-1
            vendor = _text(folder / "device/vendor")
            uevent = dict(line.split("=", 1) for line in _lines(folder / "device/uevent") if line)
            address = uevent.get("PCI_SLOT_NAME", "")
            if not address or vendor in self._left_to_libraries:
                continue
            hwmon = next(iter(sorted((folder / "device/hwmon").glob("hwmon*"))), None)
            card = _Card(
                address=address,
                folder=folder / "device",
                hwmon=hwmon,
                vendor=VENDORS.get(vendor, vendor),
                driver=uevent.get("DRIVER", ""),
                index=folder.name[4:],
            )
            card.me = {"hw.id": address}
            yield card

    # ---- cards ----

    def _read_fast(self, points: Points) -> None:
        for card in self._cards.values():
            busy = _number(card.folder / "gpu_busy_percent")
            if busy is not None:
                tags = card.tags(hw__gpu__task="general")
                points.add("hw.gpu.utilization", busy / 100, tags)
            used = _number(card.folder / "mem_info_vram_used")
            if used is not None:
                points.add("hw.gpu.memory.usage", used, card.tags())
            if card.hwmon is None:
                continue
            watts = _first(card.hwmon / "power1_input", card.hwmon / "power1_average")
            if watts is not None:
                points.add("hw.power", watts / 1e6, card.tags(hw__type="gpu"))
            clock = _number(card.hwmon / "freq1_input")
            if clock is not None:
                points.add("sonde.gpu.clock", clock, card.tags(sonde__gpu__clock__domain="sm"))

    def _read_normal(self, points: Points) -> None:
        for card in self._cards.values():
            total = _number(card.folder / "mem_info_vram_total")
            if total is not None:
                points.add("hw.gpu.memory.limit", total, card.tags())
            if card.hwmon is None:
                continue
            cap = _number(card.hwmon / "power1_cap")
            if cap is not None:
                points.add("sonde.gpu.power.limit", cap / 1e6, card.tags())
            for file in sorted(card.hwmon.glob("temp[0-9]_input")):
                label = _text(card.hwmon / file.name.replace("_input", "_label"))
                degrees = _number(file)
                if degrees is not None:
                    where = _SENSORS.get(label, "gpu")
                    tags = card.tags(hw__type="gpu", hw__sensor_location=where)
                    points.add("hw.temperature", degrees / 1000, tags)

    def _read_slow(self, points: Points) -> None:
        self._find_clients()
        points.add("sonde.gpu.clients_left_out", self._left_out)
        for card in self._cards.values():
            about = {
                "hw.name": f"{card.vendor} {card.driver}",
                "hw.vendor": card.vendor,
                "sonde.gpu.index": card.index,
                "sonde.gpu.pci.address": card.address,
            }
            points.add("sonde.gpu.info", 1, labels_of(card.me | about))
            for which in ("current", "max"):
                tags = card.tags(sonde__gpu__pcie__link=which)
                width = _number(card.folder / f"{which}_link_width")
                if width is not None:
                    points.add("sonde.gpu.pcie.link.width", width, tags)
            if card.hwmon is not None:
                energy = _number(card.hwmon / "energy1_input")
                if energy is not None:
                    points.add("hw.energy", energy / 1e6, card.tags(hw__type="gpu"))
                speed, most = (_number(card.hwmon / name) for name in ("pwm1", "pwm1_max"))
                if speed is not None:
                    share = speed / (most or 255)
                    points.add("hw.fan.speed_ratio", share, card.tags(hw__type="fan"))

    # ---- processes ----

    def _find_clients(self) -> None:
        """Find the processes that hold a card open: by a look at every open file, so it is rare."""
        found: list[tuple[int, _Client]] = []
        self._left_out = 0
        until_s = time.thread_time() + FIND_CPU_S
        pids = sorted(int(it.name) for it in (self._root / "proc").iterdir() if it.name.isdigit())
        at = bisect(pids, self._looked_at)
        for pid in pids[at:] + pids[:at]:
            if time.thread_time() >= until_s:
                self._left_out += 1  # how many more there are is not known
                break
            self._looked_at = pid
            clients = list(self._clients_of(self._root / f"proc/{pid}", pid))
            if clients:
                party = procfs.party_of(pid)
                found += [(party, client) for client in clients]
        known = set(self._clients)
        self._clients = share_out(found, CLIENTS_MAX, known.__contains__)
        self._left_out += len(found) - len(self._clients)

    def _clients_of(self, process: Path, pid: int) -> Iterator[_Client]:
        try:
            with os.scandir(process / "fd") as entries:
                for entry in islice(entries, DESCRIPTORS_MAX):
                    path = f"{process}/fd/{entry.name}"
                    if os.readlink(path).startswith("/dev/dri/") and _is_card(path):  # noqa: PTH115
                        yield _Client(pid, process / "fdinfo" / entry.name)
                self._left_out += next(entries, None) is not None
        except OSError:
            return  # gone, or not ours to look at

    def _read_processes(self, points: Points) -> None:
        seen: set[tuple[str, str]] = set()
        for client in self._clients:
            answer = _pairs(client.fdinfo)
            card = self._cards.get(answer.get("drm-pdev", ""))
            key = (answer.get("drm-pdev", ""), answer.get("drm-client-id", ""))
            if card is None or key in seen:
                continue  # another descriptor of the same client has the same values
            seen.add(key)
            who = {"process.pid": str(client.pid), "sonde.process.start": start_of(client.pid)}
            for name, text in answer.items():
                if name.startswith(ENGINE) and text.endswith(" ns"):
                    engine = {"sonde.gpu.engine": name.removeprefix(ENGINE)}
                    tags = labels_of(card.me | who | engine)
                    points.add("sonde.process.gpu.engine.time", int(text.split()[0]) / 1e9, tags)
            held = _held(answer)
            if held is not None:
                points.add("sonde.process.gpu.memory", held, labels_of(card.me | who))


def _is_card(path: str) -> bool:
    """Whether a descriptor is a card: the path that it shows depends on its process's mounts."""
    try:
        return os.major(procfs.character_device(path)) == DRM_MAJOR
    except OSError:
        return False


def _held(answer: dict[str, str]) -> int | None:
    """Bytes of the card's memory, by the first of the prefixes that the driver writes."""
    for prefix in MEMORY:
        sizes = [
            int(text.split()[0]) * _UNITS[text.partition(" ")[2]]
            for name, text in answer.items()
            if name.startswith(prefix) and name.removeprefix(prefix).startswith(_CARD_MEMORY)
        ]
        if sizes:
            return sum(sizes)
    return None


def _pairs(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _lines(path))
    return {name: value.strip() for name, colon, value in lines if colon}


def _lines(path: Path) -> list[str]:
    try:
        return procfs.read_lines(path)
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text.lstrip("-").isdigit() else None


def _first(*paths: Path) -> float | None:
    found = (_number(path) for path in paths)
    return next((value for value in found if value is not None), None)
