# SPDX-License-Identifier: Apache-2.0
"""What a capture holds of each GPU's clocks, power and throttling, as counters of a timeline, and
which GPUs its processes use."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.timeline import Counter
from sonde.query.labels import attributes_of, index_of

SERIES = {
    "sonde.gpu.clock": "sonde.gpu.clock.domain",
    "sonde.gpu.clock.limit": "sonde.gpu.clock.domain",
    "sonde.gpu.throttled": "sonde.gpu.throttle.reason",
    "hw.power": "",
    "sonde.gpu.dram.active": "",
    "sonde.gpu.tensor.active": "sonde.gpu.precision",
}
"""Series, and the label that tells several of a device apart."""
_INFO, _HELD = "sonde.gpu.info", "sonde.process.gpu.memory"


def device_counters(metric: pa.Table) -> list[Counter]:
    """The series of GPUs that bear on how fast they compute; devices by their index."""
    rows = _rows_of(metric, [*SERIES, _INFO])
    names = rows.column("series").cast(pa.string()).to_pylist()
    labels = rows.column("labels").cast(pa.string()).to_pylist()
    times = rows.column("time_ns").to_numpy().astype(np.int64)
    values = rows.column("value").to_numpy()
    points: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(zip(names, labels, strict=True)):
        points.setdefault(key, []).append(row)
    told = {text: attributes_of(text) for text in set(labels)}
    numbers = _numbers(told[text] for name, text in points if name == _INFO)
    found = []
    for (name, text), chosen in sorted(points.items()):
        label = SERIES.get(name)
        device = numbers.get(told[text].get("hw.id", ""), -1)
        if label is None or device < 0:
            continue
        which = told[text].get(label, "") if label else ""
        order = np.array(chosen)[np.argsort(times[chosen], kind="stable")]
        found.append(Counter(name, times[order], values[order], device, which))
    return found


def gpus_of_processes(metric: pa.Table) -> dict[int, list[int]]:
    """Indices of the GPUs that hold memory of a process, by its pid, ascending."""
    rows = _rows_of(metric, [_HELD, _INFO])
    pairs = {
        (name, text)
        for name, text in zip(
            rows.column("series").cast(pa.string()).to_pylist(),
            rows.column("labels").cast(pa.string()).to_pylist(),
            strict=True,
        )
    }
    told = [(name, attributes_of(text)) for name, text in pairs]
    numbers = _numbers(labels for name, labels in told if name == _INFO)
    found: dict[int, set[int]] = {}
    for name, labels in told:
        number, pid = numbers.get(labels.get("hw.id", ""), -1), labels.get("process.pid", "")
        if name == _HELD and number >= 0 and pid.isdecimal() and len(pid) < 11:
            found.setdefault(int(pid), set()).add(number)
    return {pid: sorted(gpus) for pid, gpus in found.items()}


def device_ids(metric: pa.Table) -> dict[int, tuple[str, ...]]:
    """By index: what a GPU is called everywhere, its own id and its PCI address."""
    rows = _rows_of(metric, [_INFO])
    found: dict[int, set[str]] = {}
    for text in set(rows.column("labels").cast(pa.string()).to_pylist()):
        told = attributes_of(text)
        index = index_of(told.get("sonde.gpu.index", ""))
        if index >= 0:
            ids = (told.get("hw.id", ""), told.get("sonde.gpu.pci.address", ""))
            found.setdefault(index, set()).update(str(one) for one in ids if one)
    return {index: tuple(sorted(ids)) for index, ids in found.items()}


def _rows_of(metric: pa.Table, series: list[str]) -> pa.Table:
    return metric.filter(pc.is_in(metric.column("series").cast(pa.string()), pa.array(series)))


def _numbers(infos: Iterable[dict[str, str]]) -> dict[str, int]:
    """Index of each device by its id; -1 for what has none of its own, as a part of a GPU."""
    return {told.get("hw.id", ""): index_of(told.get("sonde.gpu.index", "")) for told in infos}
