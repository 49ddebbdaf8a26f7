# SPDX-License-Identifier: Apache-2.0
"""The last value of each series, for those who ask now and then: Prometheus, OTLP.

Bounded whatever the node does. What is told of single processes is summed up by whose they are
(pod, job, unit) and by the name of their program, so ten thousand processes that come and go are
one series; a metric has at most `MAX_OWNED` of these, and of one party `MAX_OF_ONE` (sinks.tenants:
a pod, a container, a user, a unit of root's). What finds no room is added to the series `other` of
its owner, or of the party where that has many owners, so that the many names and owners of one
party cost nobody else's totals. A series of which nothing was heard for a while is forgotten.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sonde.metrics import COSTS, Metric, MetricRow, catalogue
from sonde.sinks.tenants import Attributes, tenant_of

MAX_SERIES = 10_000
MAX_OWNED = 200
"""Series of one metric that speak of processes."""
MAX_OF_ONE = MAX_OWNED // 4
"""Of these, those of one party."""
MAX_RESTS = MAX_OWNED
"""Series `other` of one metric; what finds no room even there goes to one for all."""
MAX_RESTS_OF_ONE = MAX_RESTS // 16
"""Of these, those of single owners of one party; its other owners then share one."""
PLANS_KEPT = 20_000
FORGOTTEN_AFTER_S = 60.0
"""Longer than the rarest reading."""
COUNTERS_FORGOTTEN_AFTER_S = 600.0
PID, START = "process.pid", "sonde.process.start"
PROGRAM = "process.executable.name"
OTHER = "other"

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
    base: Attributes | None = None
    """The party whose share it is part of."""


@dataclass(slots=True)
class _Count:
    """A counter that is kept here."""

    value: float = 0.0
    time_ns: int = 0
    """0: it speaks of no process, and is kept."""
    base: Attributes | None = None


@dataclass(slots=True)
class _Plan:
    """How the rows of one (series, labels) are taken."""

    metric: Metric
    process: str
    """'' where it speaks of none."""
    attributes: Attributes
    """With whose the process is, instead of the process."""
    base: Attributes
    """Whose the process is, without the name of its program."""
    kept: Attributes
    """What the row says besides the process."""
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
        self._counts: dict[str, dict[Attributes, _Count]] = {}
        self._shares: dict[str, dict[Attributes, int]] = {}
        """Of a metric: how many series a party has."""
        self._rests: dict[str, dict[Attributes, int]] = {}
        """Of a metric: how many of its owners have a series `other` of their own."""
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
            whole, base, kept = self._folded(attributes)
            known = self._counts.setdefault(series, {})
            if PID in attributes:
                self._add_owned(series, whole, base, kept, more)
                return
            if whole not in known and len(known) >= MAX_OWNED:
                self.folded += 1
                whole = _nameless(whole)
            known.setdefault(whole, _Count()).value += more

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
            owned_by = tuple(pair for pair in base if pair[0] != PROGRAM)
            for series, kept, more in counts:
                value = next(iter(kept.values())) if kept else ""
                whole = wholes.get((series, value))
                if whole is None:
                    whole = wholes[series, value] = _sorted({**kept, **owner}) if kept else base
                self._add_owned(series, whole, owned_by, _sorted(kept), more)

    def _add_owned(
        self, series: str, whole: Attributes, base: Attributes, kept: Attributes, more: float
    ) -> None:
        known = self._counts.setdefault(series, {})
        one = known.get(whole)
        if one is None:
            whole, share = self._room(series, known, whole, base, kept)
            one = known.get(whole)
            if one is None:
                one = known[whole] = _Count(base=share)
        one.value += more
        one.time_ns = self._clock()

    def _room(
        self,
        series: str,
        known: Mapping[Attributes, object],
        whole: Attributes,
        base: Attributes,
        kept: Attributes,
    ) -> tuple[Attributes, Attributes | None]:
        """Where the first of a series goes that speaks of processes: to itself, as part of its
        party's share; to `other` of its owner; of its party; to `other` of all."""
        party = tenant_of(base)
        shares = self._shares.setdefault(series, {})
        held = sum(shares.values())
        if shares.get(party, 0) < MAX_OF_ONE and held < MAX_OWNED:
            shares[party] = shares.get(party, 0) + 1
            return whole, party
        self.folded += 1
        rest = _rest(kept, base)
        if rest in known:
            return rest, None
        rests = self._rests.setdefault(series, {})
        others = len(known) - held
        if rests.get(party, 0) < MAX_RESTS_OF_ONE and others < MAX_RESTS // 2:
            rests[party] = rests.get(party, 0) + 1
            return rest, None
        rest = _rest(kept, party)
        return (rest if rest in known or others < MAX_RESTS else _rest(kept, ())), None

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
                for attributes, count in counts.items():
                    found.setdefault(name, []).append(Series(dict(attributes), count.value))
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

    def _folded(self, attributes: Mapping[str, str]) -> tuple[Attributes, Attributes, Attributes]:
        """Without the process, but with whose it is; that owner without the name of its program;
        and what remains without the owner."""
        kept = {name: str(value) for name, value in attributes.items() if name not in (PID, START)}
        if PID not in attributes:
            return _sorted(kept), (), _sorted(kept)
        owner = self._whose(int(attributes[PID]), int(attributes.get(START) or 0))
        owner = {name: value for name, value in owner.items() if value}
        base = {name: value for name, value in owner.items() if name != PROGRAM}
        rest = {name: value for name, value in kept.items() if name not in base | {PROGRAM: ""}}
        return _sorted(kept | owner), _sorted(base), _sorted(rest)

    def _take_owned(self, plan: _Plan, time_ns: int, value: float) -> None:
        known = self._owned.setdefault(plan.metric.name, {})
        attributes = plan.attributes
        one = known.get(attributes)
        if one is None:
            name = plan.metric.name
            attributes, share = self._room(name, known, attributes, plan.base, plan.kept)
            one = known.setdefault(attributes, _Owned(base=share))
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
                    self._give_back(name, one.base)
        for name, counts in self._counts.items():
            for attributes, count in list(counts.items()):
                age_ns = now_ns - count.time_ns
                if count.time_ns and age_ns > COUNTERS_FORGOTTEN_AFTER_S * 1e9:
                    del counts[attributes]
                    self._give_back(name, count.base)

    def _give_back(self, series: str, base: Attributes | None) -> None:
        """A series of a party's share is forgotten."""
        if base is None:
            self._rests.pop(series, None)  # counted again from here on; all are bounded by `known`
            return
        shares = self._shares[series]
        shares[base] -= 1
        if not shares[base]:
            del shares[base]


def _rest(kept: Attributes, owner: Attributes) -> Attributes:
    return tuple(sorted((*kept, *owner, (PROGRAM, OTHER))))


def _nameless(attributes: Attributes) -> Attributes:
    return tuple((name, OTHER) for name, _ in attributes)


def _sorted(attributes: Mapping[str, object]) -> Attributes:
    return tuple(sorted((name, str(value)) for name, value in attributes.items()))
