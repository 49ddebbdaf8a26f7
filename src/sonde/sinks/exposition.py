# SPDX-License-Identifier: Apache-2.0
"""Renders series in Prometheus's text format, with names by OpenTelemetry's rules.

hw.gpu.memory.usage in the unit By becomes hw_gpu_memory_usage_bytes; a counter ends in _total, a
share (unit 1) in _ratio. On request the page also has the values under the names of NVIDIA's
dcgm-exporter (dcgm.toml), for dashboards that were made for it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

from sonde.metrics import Metric, catalogue
from sonde.sinks.series import Series

MAX_CACHED = 4_096
"""Label texts, of about 200 bytes each."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_UNITS = {
    "By": "bytes",
    "By/s": "bytes_per_second",
    "s": "seconds",
    "W": "watts",
    "J": "joules",
    "Cel": "celsius",
    "Hz": "hertz",
    "1": "ratio",
}
"""Units (UCUM) as parts of names."""
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Families = Sequence[tuple[Metric, list[Series]]]


@cache
def name_of(metric: Metric) -> str:
    """The name of a metric in Prometheus."""
    name = _NOT_IN_NAMES.sub("_", metric.name)
    unit = _UNITS.get(metric.unit, "")
    if metric.unit == "1" and metric.monotonic:
        unit = ""
    if unit and not name.endswith(f"_{unit}"):
        name += f"_{unit}"
    return f"{name}_total" if metric.monotonic else name


def render(families: Families, target: Mapping[str, str]) -> str:
    """The whole page; `target`: the attributes of the agent, which become the labels of the series
    target_info, as OpenTelemetry has it."""
    lines = [
        "# HELP target_info Attributes of the observed host and of the agent",
        "# TYPE target_info gauge",
        f"target_info{_labels(target)} 1",
    ]
    for metric, series in families:
        name = name_of(metric)
        lines.append(f"# HELP {name} {metric.brief}")
        lines.append(f"# TYPE {name} {'counter' if metric.monotonic else 'gauge'}")
        lines += [f"{name}{_labels(one.attributes)} {one.value!r}" for one in series]
    return "\n".join([*lines, ""])


def _labels(attributes: Mapping[str, str]) -> str:
    return _labels_of(tuple(attributes.items())) if attributes else ""


@lru_cache(maxsize=MAX_CACHED)
def _labels_of(attributes: tuple[tuple[str, str], ...]) -> str:
    """Label text; cached, because pages repeat the same series."""
    pairs = (
        f'{_NOT_IN_NAMES.sub("_", name)}="{value.translate(_ESCAPES)}"'
        for name, value in sorted(attributes)
    )
    return "{" + ",".join(pairs) + "}"


# ---- the names of dcgm-exporter ----


@dataclass(frozen=True, slots=True)
class DcgmField:
    """One entry of dcgm.toml."""

    name: str
    type: str
    series: str
    scale: float
    """Factor from the series' unit to the field's."""
    where: Mapping[str, str]
    """Attributes that a series must have, also one to subtract."""
    less: str
    """A series to subtract, '' for none: free memory is total less used memory."""


@cache
def dcgm_fields() -> tuple[DcgmField, ...]:
    """The fields of dcgm-exporter that Sonde has values for."""
    text = files("sonde.sinks").joinpath("dcgm.toml").read_text(encoding="utf-8")
    return tuple(
        DcgmField(
            name=entry["name"],
            type=entry.get("type", "gauge"),
            series=entry["series"],
            scale=entry.get("scale", 1),
            where=entry.get("where", {}),
            less=entry.get("less", ""),
        )
        for entry in tomllib.loads(text)["field"]
    )


def render_dcgm(families: Families, host: str) -> str:
    """The same values under DCGM_FI_* names, with the labels of dcgm-exporter."""
    by_name = {metric.name: series for metric, series in families}
    devices = {
        one.attributes["hw.id"]: {
            "gpu": one.attributes.get("sonde.gpu.index", ""),
            "UUID": one.attributes["hw.id"],
            "pci_bus_id": one.attributes.get("sonde.gpu.pci.address", "").upper(),
            "device": f"nvidia{one.attributes.get('sonde.gpu.index', '')}",
            "modelName": one.attributes.get("hw.model", ""),
            "Hostname": host,
            "DCGM_FI_DRIVER_VERSION": one.attributes.get("hw.driver_version", ""),
        }
        for one in by_name.get("sonde.gpu.info", [])
    }
    lines = []
    for field in dcgm_fields():
        totals = _by_device(by_name.get(field.series, []), field.where)
        less = _by_device(by_name.get(field.less, []), field.where)
        totals = {device: total for device, total in totals.items() if device in devices}
        if totals:
            brief = catalogue()[field.series].brief
            lines += [f"# HELP {field.name} {brief}", f"# TYPE {field.name} {field.type}"]
            lines += [
                f"{field.name}{_labels(devices[device])} "
                f"{(total - less.get(device, 0.0)) * field.scale!r}"
                for device, total in totals.items()
            ]
    return "\n".join([*lines, ""])


def _by_device(series: Iterable[Series], where: Mapping[str, str]) -> dict[str, float]:
    """The sums of the series with these attributes, by device."""
    totals: dict[str, float] = {}
    for one in series:
        if _has(one, where):
            device = one.attributes.get("hw.id", "")
            totals[device] = totals.get(device, 0.0) + one.value
    return totals


def _has(one: Series, where: Mapping[str, str]) -> bool:
    """Whether a series has these attributes."""
    return all(one.attributes.get(name, "") == value for name, value in where.items())
