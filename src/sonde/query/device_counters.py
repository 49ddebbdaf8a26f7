# SPDX-License-Identifier: Apache-2.0
"""Series of metrics about GPUs (clocks, power, throttling, activity) as counters of a timeline;
which GPUs processes use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.timeline import Counter, DeviceUse
from sonde.query.labels import attributes_of, index_of

SERIES = {
    "sonde.gpu.clock": "sonde.gpu.clock.domain",
    "sonde.gpu.clock.limit": "sonde.gpu.clock.domain",
    "sonde.gpu.throttled": "sonde.gpu.throttle.reason",
    "hw.power": "",
    "sonde.gpu.dram.active": "",
    "sonde.gpu.tensor.active": "sonde.gpu.precision",
}
"""Series to the label that distinguishes several series of one device, '' for none."""
_PROCESS_USE, _COMPUTE = "sonde.process.gpu.utilization", "sm"
"""A series, and the value of its label `sonde.gpu.engine` for the multiprocessors."""
_PROCESS_MEMORY = "sonde.process.gpu.memory"
_INFO = "sonde.gpu.info"
"""Its labels identify a GPU: its id (`hw.id`), its index, its PCI address."""
_PID_DIGITS = 10
"""Of a 32-bit number; a label of a hostile capture may have more."""


def device_counters(metric: pa.Table) -> list[Counter]:
    """A counter for each series of `SERIES`, sorted by name and labels. Left out are those of
    devices without an index, such as MIG instances."""
    rows = _rows_of(metric, [*SERIES, _INFO])
    names = rows.column("series").cast(pa.string()).to_pylist()
    labels = rows.column("labels").cast(pa.string()).to_pylist()
    times = rows.column("time_ns").to_numpy().astype(np.int64)
    values = rows.column("value").to_numpy()
    points: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(zip(names, labels, strict=True)):
        points.setdefault(key, []).append(row)
    attributes = {text: attributes_of(text) for text in set(labels)}
    numbers = _numbers(attributes[text] for name, text in points if name == _INFO)
    found = []
    for (name, text), at in sorted(points.items()):
        label = SERIES.get(name)
        device = numbers.get(attributes[text].get("hw.id", ""), -1)
        if label is None or device < 0:
            continue
        which = attributes[text].get(label, "") if label else ""
        order = np.array(at)[np.argsort(times[at], kind="stable")]
        found.append(Counter(name, times[order], values[order], device, which))
    return found


def gpus_of_processes(metric: pa.Table) -> dict[int, list[int]]:
    """Ascending indices of the GPUs on which a process has memory, by pid."""
    rows = _rows_of(metric, [_PROCESS_MEMORY, _INFO])
    pairs = {
        (name, text)
        for name, text in zip(
            rows.column("series").cast(pa.string()).to_pylist(),
            rows.column("labels").cast(pa.string()).to_pylist(),
            strict=True,
        )
    }
    series = [(name, attributes_of(text)) for name, text in pairs]
    numbers = _numbers(labels for name, labels in series if name == _INFO)
    found: dict[int, set[int]] = {}
    for name, labels in series:
        number, pid = numbers.get(labels.get("hw.id", ""), -1), labels.get("process.pid", "")
        if name == _PROCESS_MEMORY and number >= 0 and _is_pid(pid):
            found.setdefault(int(pid), set()).add(number)
    return {pid: sorted(gpus) for pid, gpus in found.items()}


def uses_of_processes(metric: pa.Table) -> list[DeviceUse]:
    """How much each process used each GPU's multiprocessors, as the driver reports it."""
    rows = _rows_of(metric, [_PROCESS_USE, _INFO])
    names = rows.column("series").cast(pa.string()).to_pylist()
    labels = rows.column("labels").cast(pa.string()).to_pylist()
    attributes = {text: attributes_of(text) for text in set(labels)}
    numbers = _numbers(
        attributes[text] for name, text in zip(names, labels, strict=True) if name == _INFO
    )
    points: dict[tuple[int, int], list[int]] = {}
    for row, (name, text) in enumerate(zip(names, labels, strict=True)):
        own = attributes[text]
        pid, number = own.get("process.pid", ""), numbers.get(own.get("hw.id", ""), -1)
        is_compute = name == _PROCESS_USE and own.get("sonde.gpu.engine") == _COMPUTE
        if is_compute and number >= 0 and _is_pid(pid):
            points.setdefault((int(pid), number), []).append(row)
    times = rows.column("time_ns").to_numpy().astype(np.int64)
    values = rows.column("value").to_numpy()
    found = []
    for (process, number), at in sorted(points.items()):
        order = np.array(at)[np.argsort(times[at], kind="stable")]
        found.append(DeviceUse(process, number, times[order], values[order]))
    return found


def sharing(uses: Iterable[DeviceUse], gpus: Mapping[int, Sequence[int]]) -> set[int]:
    """Processes with memory on a GPU whose multiprocessors another process used. `gpus`: those on
    which each process has memory, by pid."""
    busy = [(use.pid, use.device) for use in uses if (use.share > 0).any()]
    return {
        pid
        for pid, mine in gpus.items()
        if any(other != pid and device in mine for other, device in busy)
    }


def device_ids(metric: pa.Table) -> dict[int, tuple[str, ...]]:
    """UUID and PCI address of each GPU, by index."""
    rows = _rows_of(metric, [_INFO])
    found: dict[int, set[str]] = {}
    for text in set(rows.column("labels").cast(pa.string()).to_pylist()):
        attributes = attributes_of(text)
        index = index_of(attributes.get("sonde.gpu.index", ""))
        if index >= 0:
            ids = (attributes.get("hw.id", ""), attributes.get("sonde.gpu.pci.address", ""))
            found.setdefault(index, set()).update(str(one) for one in ids if one)
    return {index: tuple(sorted(ids)) for index, ids in found.items()}


def _is_pid(text: str) -> bool:
    return text.isdecimal() and len(text) <= _PID_DIGITS


def _rows_of(metric: pa.Table, series: list[str]) -> pa.Table:
    return metric.filter(pc.is_in(metric.column("series").cast(pa.string()), pa.array(series)))


def _numbers(infos: Iterable[dict[str, str]]) -> dict[str, int]:
    """Index of each device by its id; -1 for one without an index, such as a MIG instance."""
    return {info.get("hw.id", ""): index_of(info.get("sonde.gpu.index", "")) for info in infos}
