# SPDX-License-Identifier: Apache-2.0
"""The last value of each series, for those who ask now and then: Prometheus, OTLP.

Bounded whatever the node does. What is told of single processes is summed up by whose they are
(pod, job, unit) and by the name of their program, so ten thousand processes that come and go are
one series; a metric has at most `MAX_OWNED` of these, and what finds no room is added to one more
series, `other`. A series of which nothing was heard for a while is forgotten.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sonde.metrics import COSTS, Metric, MetricRow, catalogue

MAX_SERIES = 10_000
MAX_OWNED = 200
"""Series of one metric that speak of processes."""
PLANS_KEPT = 20_000
FORGOTTEN_AFTER_S = 60.0
"""Longer than the rarest reading."""
COUNTERS_FORGOTTEN_AFTER_S = 600.0
PID, START = "process.pid", "sonde.process.start"
PROGRAM = "process.executable.name"
OTHER = "other"

Attributes = tuple[tuple[str, str], ...]
Whose = Callable[[int, int], Mapping[str, str]]
"""Attributes that tell whose a process (pid, start) is."""


def nobody(_pid: int, _start_ns: int) -> Mapping[str, str]:
    """For those who do not know whose processes are."""
    return {}


@dataclass(slots=True)
class Series:
    """Attributes and value."""

    attributes: dict[str, str]
    value: float


@dataclass(slots=True)
class _Last:
    value: float
    time_ns: int
    """0: forgotten."""


@dataclass(slots=True)
class _Owned:
    """A series summed over processes."""

    processes: dict[str, _Last] = field(default_factory=dict)
    ended: float = 0.0
    """Of a counter: what processes had counted that are gone."""
    time_ns: int = 0


@dataclass(slots=True)
class _Plan:
    """How the rows of one (series, labels) are taken."""

    metric: Metric
    process: str
    """'' where it speaks of none."""
    attributes: Attributes
    """With whose the process is, instead of the process."""
    without_room: Attributes
    """The same for what finds no room."""
    last: _Last | None = None
    """Where the value goes, of what speaks of no process."""


class Board:
    """Takes rows, gives series."""

    def __init__(self, whose: Whose = nobody, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._whose = whose
        self._clock = clock
        self._lock = threading.Lock()
        self._plans: dict[tuple[str, str], _Plan | None] = {}
        self._plain: dict[tuple[str, Attributes], _Last] = {}
        self._owned: dict[str, dict[Attributes, _Owned]] = {}
        self._counts: dict[str, dict[Attributes, float]] = {}
        self._wholes: dict[Attributes, dict[tuple[str, str], Attributes]] = {}
        """Of an owner: attributes of its series by name and the value of their one more, or ""."""
        self.folded = 0
        """Rows and counts that found no series of their own."""

    def __len__(self) -> int:
        with self._lock:
            owned = sum(map(len, self._owned.values()))
            return len(self._plain) + owned + sum(map(len, self._counts.values()))

    def take(self, rows: Iterable[MetricRow]) -> None:
        """Note the values of rows of the table metric; series unknown to the catalogue pass."""
        with self._lock:
            for time_ns, series, labels, value in rows:
                plan = self._plan(series, labels)
                if plan is None:
                    continue
                if plan.process:
                    self._take_owned(plan, time_ns, value)
                    continue
                last = plan.last
                if last is None or not last.time_ns:
                    last = plan.last = self._place((series, plan.attributes))
                    if last is None:
                        self.folded += 1
                        continue
                last.value, last.time_ns = value, time_ns

    def _place(self, key: tuple[str, Attributes]) -> _Last | None:
        """Where the value of a series goes; None where there is no room."""
        known = self._plain.get(key)
        if known is None and len(self._plain) < MAX_SERIES:
            known = self._plain[key] = _Last(0.0, 0)
        return known

    def count(self, series: str, attributes: Mapping[str, str], more: float) -> None:
        """Add to a counter that is kept here; a process among the attributes is folded."""
        with self._lock:
            whole, without_room = self._folded(attributes)
            known = self._counts.setdefault(series, {})
            if whole not in known and len(known) >= MAX_OWNED:
                self.folded += 1
                whole = without_room if without_room != whole else _nameless(whole)
            known[whole] = known.get(whole, 0.0) + more

    def count_owned(
        self, owner: Mapping[str, str], counts: Iterable[tuple[str, Mapping[str, str], float]]
    ) -> None:
        """Add to counters that are kept here what one process did; `owner` tells whose it is. Each
        is (series, its one attribute more or none, how much)."""
        with self._lock:
            base = _sorted(owner)
            wholes = self._wholes.get(base)
            if wholes is None:
                if len(self._wholes) >= MAX_OWNED:
                    self._wholes.clear()
                wholes = self._wholes[base] = {}
            for series, kept, more in counts:
                known = self._counts.setdefault(series, {})
                value = next(iter(kept.values())) if kept else ""
                whole = wholes.get((series, value))
                if whole is None:
                    whole = wholes[series, value] = _sorted({**kept, **owner}) if kept else base
                if whole not in known and len(known) >= MAX_OWNED:
                    self.folded += 1
                    whole = _sorted({**kept, PROGRAM: OTHER})
                known[whole] = known.get(whole, 0.0) + more

    def families(self) -> list[tuple[Metric, list[Series]]]:
        """Every metric that has a value now, with its series, in the order of the catalogue."""
        with self._lock:
            self._forget(self._clock())
            found: dict[str, list[Series]] = {}
            for (name, attributes), last in self._plain.items():
                found.setdefault(name, []).append(Series(dict(attributes), last.value))
            for name, owned in self._owned.items():
                for attributes, one in owned.items():
                    value = one.ended + sum(last.value for last in one.processes.values())
                    found.setdefault(name, []).append(Series(dict(attributes), value))
            for name, counts in self._counts.items():
                for attributes, value in counts.items():
                    found.setdefault(name, []).append(Series(dict(attributes), value))
            found["sonde.series.folded"] = [Series({}, float(self.folded))]
        return [(metric, found[name]) for name, metric in catalogue().items() if name in found]

    def _plan(self, series: str, labels: str) -> _Plan | None:
        key = (series, labels)
        if key in self._plans:
            return self._plans[key]
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        plan = None
        metric = catalogue().get(series)
        if metric is not None:
            attributes = json.loads(labels) if labels else {}
            process = f"{attributes[PID]}.{attributes.get(START, '')}" if PID in attributes else ""
            plan = _Plan(metric, process, *self._folded(attributes))
        self._plans[key] = plan
        return plan

    def _folded(self, attributes: Mapping[str, str]) -> tuple[Attributes, Attributes]:
        """Without the process, but with whose it is; and what to use where there is no room."""
        kept = {name: str(value) for name, value in attributes.items() if name not in (PID, START)}
        if PID not in attributes:
            return _sorted(kept), _sorted(kept)
        owner = self._whose(int(attributes[PID]), int(attributes.get(START) or 0))
        whole = kept | {name: value for name, value in owner.items() if value}
        return _sorted(whole), _sorted(kept | {PROGRAM: OTHER})

    def _take_owned(self, plan: _Plan, time_ns: int, value: float) -> None:
        known = self._owned.setdefault(plan.metric.name, {})
        attributes = plan.attributes
        if attributes not in known and len(known) >= MAX_OWNED:
            self.folded += 1
            attributes = plan.without_room
        one = known.setdefault(attributes, _Owned())
        one.processes[plan.process] = _Last(value, time_ns)
        one.time_ns = time_ns

    def _forget(self, now_ns: int) -> None:
        for key, last in list(self._plain.items()):
            if now_ns - last.time_ns > FORGOTTEN_AFTER_S * 1e9:
                last.time_ns = 0
                del self._plain[key]
        for name, known in self._owned.items():
            metric = catalogue()[name]
            gone_s = FORGOTTEN_AFTER_S if metric.monotonic else 3 * COSTS[metric.cost] + 2
            kept_s = COUNTERS_FORGOTTEN_AFTER_S if metric.monotonic else gone_s
            for attributes, one in list(known.items()):
                for process, last in list(one.processes.items()):
                    if now_ns - last.time_ns > gone_s * 1e9:
                        del one.processes[process]
                        one.ended += last.value if metric.monotonic else 0.0
                if not one.processes and now_ns - one.time_ns > kept_s * 1e9:
                    del known[attributes]


def _nameless(attributes: Attributes) -> Attributes:
    return tuple((name, OTHER) for name, _ in attributes)


def _sorted(attributes: Mapping[str, object]) -> Attributes:
    return tuple(sorted((name, str(value)) for name, value in attributes.items()))
