# SPDX-License-Identifier: Apache-2.0
"""What a capture holds of each GPU's clocks, power and throttling, as counters of a timeline."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.timeline import Counter

SERIES = {
    "sonde.gpu.clock": "sonde.gpu.clock.domain",
    "sonde.gpu.clock.limit": "sonde.gpu.clock.domain",
    "sonde.gpu.throttled": "sonde.gpu.throttle.reason",
    "hw.power": "",
}
"""Series, and the label that tells several of a device apart."""


def device_counters(metric: pa.Table) -> list[Counter]:
    """The series of GPUs that bear on how fast they compute; devices by their index."""
    series = metric.column("series").cast(pa.string())
    rows = metric.filter(pc.is_in(series, pa.array([*SERIES, "sonde.gpu.info"])))
    names = rows.column("series").cast(pa.string()).to_pylist()
    labels = rows.column("labels").cast(pa.string()).to_pylist()
    times = rows.column("time_ns").to_numpy().astype(np.int64)
    values = rows.column("value").to_numpy()
    numbers: dict[str, int] = {}
    points: dict[tuple[str, str], list[int]] = {}
    for row, key in enumerate(zip(names, labels, strict=True)):
        points.setdefault(key, []).append(row)
    told = {text: json.loads(text or "{}") for text in set(labels)}
    for name, text in points:
        if name == "sonde.gpu.info":
            index = str(told[text].get("sonde.gpu.index", ""))
            numbers[told[text].get("hw.id", "")] = int(index) if index.isdecimal() else -1
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
