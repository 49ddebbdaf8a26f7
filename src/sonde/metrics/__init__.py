# SPDX-License-Identifier: Apache-2.0
"""The catalogue of metrics: name, unit, kind, attributes and rate of every possible series.

It is abi/metrics.json; `metrics.json` here is a link to it, for installed packages. A new metric is
a new line there; docs/reference/metrics.md is generated from it.

Terms:
- series: the values of one metric with one set of labels; where a name stands for it, of the metric
- group: the metrics of one subject
- attribute, label: the same, in the words of OpenTelemetry and of Prometheus
- rate: how often a metric is read: fast, normal, slow, or at an event
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

MetricRow = tuple[int, str, str, float]
"""A row of the table `metric`: (time_ns, series, labels, value), labels in the form of `labels`."""

KINDS = ("gauge", "counter", "updowncounter")
PERIODS_S = {"fast": 0.1, "normal": 1.0, "slow": 10.0, "event": 0.0}
"""Seconds between two readings of a metric, by its rate; 0 for events."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the catalogue."""

    group: str
    name: str
    unit: str
    """In UCUM notation: By, s, W, Cel, 1 for a ratio, {thing} for a count of things."""
    kind: str
    attributes: tuple[str, ...]
    rate: str
    """How often it is read: fast, normal, slow or event (`PERIODS_S`)."""
    source: str
    """What values are read from, as text for the documentation."""
    brief: str
    """What it measures, in one sentence."""

    @property
    def monotonic(self) -> bool:
        """Whether it is a counter: it only grows, until its source starts again."""
        return self.kind == "counter"


@cache
def catalogue() -> Mapping[str, Metric]:
    """Every metric by its name."""
    contract = json.loads(files("sonde.metrics").joinpath("metrics.json").read_bytes())
    found = {
        line["name"]: Metric(group=group, **{**line, "attributes": tuple(line["attributes"])})
        for group, lines in contract["groups"].items()
        for line in lines
    }
    return MappingProxyType(found)


def labels(**attributes: object) -> str:
    """Attributes in the form of the column `labels`; keywords have __ in place of dots.

    One spelling for one set: keys sorted, no spaces. '' for none.
    """
    return labels_of({name.replace("__", "."): value for name, value in attributes.items()})


def labels_of(attributes: Mapping[str, object]) -> str:
    """As `labels`, from a mapping. Empty values are left out."""
    kept = {name: value for name, value in attributes.items() if value not in ("", None)}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")) if kept else ""
