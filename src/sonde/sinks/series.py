# SPDX-License-Identifier: Apache-2.0
"""The metric registry: the last value of each series, for Prometheus and OTLP.

Its size is bounded whatever the node does. Series of single processes are summed by owner (pod,
job, unit), program name and script, so ten thousand short-lived processes are one series. A metric
has at most `MAX_OWNED` such series, of which one tenant (`sonde.sinks.tenants`: a pod, a container,
a user, a unit of root) has at most `MAX_OF_TENANT`. What does not fit is added to the series
`other` of its owner, or of its tenant where that has many owners. So a tenant with many program
names and owners does not take the room of other tenants' series. The room for series of control
groups and network namespaces is shared between parties (`sonde.sinks.plain_series`). A series
without new values is forgotten after a while.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sonde.metrics import PERIODS_S, Metric, MetricRow, catalogue
from sonde.sinks.plain_series import FORGOTTEN_AFTER_S, Last, PartyLookup, PlainSeries, no_party
from sonde.sinks.tenants import Attributes, HolderLookup, own_id, tenant_of

MAX_OWNED = 200
"""Series of processes that one metric may have."""
MAX_OF_TENANT = MAX_OWNED // 4
"""Of these, series that one tenant may have."""
MAX_COMMANDS_OF_TENANT = MAX_OF_TENANT // 2
"""Of these, series with a command; its other ones of a program are one series."""
MAX_RESTS = MAX_OWNED
"""Series `other` of one metric; what exceeds even these goes to one series for all."""
MAX_RESTS_OF_TENANT = MAX_RESTS // 16
"""Of these, series for single owners of one tenant; its other owners share one series."""
MAX_PLANS = 20_000
"""That are cached; beyond that the one that was used longest ago is made again."""
COUNTERS_FORGOTTEN_AFTER_S = 600.0
"""A counter of an owner that did not grow for so long is dropped."""
PID, START = "process.pid", "sonde.process.start"
PROGRAM = "process.executable.name"
COMMAND = "process.command"
"""What a process runs as an interpreter: its script, module or main class."""
_OF_PROGRAM = (PROGRAM, COMMAND)
OTHER = "other"
"""In place of a name, of what is summed up beyond a bound."""

OwnerLookup = Callable[[int, int], Mapping[str, str]]
"""Attributes of the owner of a process (pid, start in ns)."""


def no_owner(_pid: int, _start_ns: int) -> Mapping[str, str]:
    """The lookup where owners are not known."""
    return {}


@dataclass(slots=True)
class Series:
    """Attributes and value of one series."""

    attributes: dict[str, str]
    value: float


@dataclass(slots=True)
class _Owned:
    """A series summed over processes."""

    processes: dict[str, Last] = field(default_factory=dict)
    """By pid and start, as `_Plan.process`."""
    ended: float = 0.0
    """Of a counter: the sum of processes that have ended."""
    time_ns: int = 0
    """When it got a value last."""
    tenant: Attributes | None = None
    """The tenant whose share it counts against; None for a series `other`."""


@dataclass(slots=True)
class _Count:
    """A counter whose sum is kept in the registry."""

    value: float = 0.0
    time_ns: int = 0
    """When it grew last; 0: not about a process, never forgotten."""
    tenant: Attributes | None = None
    """As of `_Owned`."""


@dataclass(slots=True)
class _Plan:
    """How rows with one (series, labels) are recorded; cached, as these repeat at each tick."""

    metric: Metric
    process: str
    """Pid and start; '' for series that are not about a process."""
    attributes: Attributes
    """With the owner of the process in place of the process."""
    base: Attributes
    """The owner of the process, without the name of its program."""
    kept: Attributes
    """The other attributes of the row."""
    last: Last | None = None
    """Where values are stored, for series that are not about a process."""


class MetricRegistry:
    """Records rows of the table `metric` and returns the current series. Thread-safe."""

    def __init__(
        self,
        owner_of: OwnerLookup = no_owner,
        clock: Callable[[], int] = time.monotonic_ns,
        party_of_group: PartyLookup = no_party,
        holder_of: HolderLookup = own_id,
    ) -> None:
        self._owner_of = owner_of
        self._holder_of = holder_of
        self._clock = clock
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[str, str], _Plan | None] = OrderedDict()
        """By series and labels, the one that was used longest ago first."""
        self._plain = PlainSeries(party_of_group)
        self._owned: dict[str, dict[Attributes, _Owned]] = {}
        self._counts: dict[str, dict[Attributes, _Count]] = {}
        self._shares: dict[str, dict[Attributes, int]] = {}
        """By metric and tenant: number of the tenant's series."""
        self._rests: dict[str, dict[Attributes, int]] = {}
        """By metric and tenant: number of owners with a separate series `other`."""
        self._wholes: OrderedDict[Attributes, dict[tuple[str, str], Attributes]] = OrderedDict()
        """By owner, the one that was used longest ago first: attributes of its series, by the
        series' name and the value of its one further attribute; a cache of `count_owned`."""
        self.folded = 0
        """Rows and counts that were added to a series `other`, or found no room."""

        self._commands: dict[str, dict[Attributes, int]] = {}
        """By metric and tenant: number of the tenant's series with a command."""

    def __len__(self) -> int:
        with self._lock:
            owned = sum(map(len, self._owned.values()))
            return len(self._plain) + owned + sum(map(len, self._counts.values()))

    def record(self, rows: Iterable[MetricRow]) -> None:
        """Record the values of rows of the table `metric`; unknown series are ignored."""
        with self._lock:
            for time_ns, series, labels, value in rows:
                plan = self._plan(series, labels)
                if plan is None:
                    continue
                if plan.process:
                    self._record_owned(plan, time_ns, value)
                    continue
                last = plan.last
                if last is None or not last.time_ns:
                    last = plan.last = self._plain.slot((series, plan.attributes), self._clock())
                    if last is None:
                        self.folded += 1
                        continue
                last.value, last.time_ns = value, time_ns

    def count(self, series: str, attributes: Mapping[str, str], more: float) -> None:
        """Add `more`, in the series' unit, to a counter of the registry; a process is replaced by
        its owner."""
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
        """Add to counters of the registry for a process of `owner`.

        Each of `counts` is (series, at most one further attribute, amount).
        """
        with self._lock:
            base = _sorted(owner)
            wholes = self._wholes.get(base)
            if wholes is None:
                if len(self._wholes) >= MAX_OWNED:
                    self._wholes.popitem(last=False)
                wholes = self._wholes[base] = {}
            else:
                self._wholes.move_to_end(base)
            without_program = tuple(pair for pair in base if pair[0] not in _OF_PROGRAM)
            for series, kept, more in counts:
                value = next(iter(kept.values())) if kept else ""
                whole = wholes.get((series, value))
                if whole is None:
                    whole = wholes[series, value] = _sorted({**kept, **owner}) if kept else base
                self._add_owned(series, whole, without_program, _sorted(kept), more)

    def _add_owned(
        self, series: str, whole: Attributes, base: Attributes, kept: Attributes, more: float
    ) -> None:
        known = self._counts.setdefault(series, {})
        one = known.get(whole)
        if one is None:
            whole, tenant = self._assign(series, known, whole, base, kept)
            one = known.get(whole)
            if one is None:
                one = known[whole] = _Count(tenant=tenant)
        one.value += more
        one.time_ns = self._clock()

    def _assign(
        self,
        series: str,
        known: Mapping[Attributes, object],
        whole: Attributes,
        base: Attributes,
        kept: Attributes,
    ) -> tuple[Attributes, Attributes | None]:
        """(attributes to record a new series under, tenant that it counts against or None).

        The attributes are `whole` within the tenant's share; else those of the series `other` of
        its owner, of its tenant, or of all.
        """
        tenant = tenant_of(base, self._holder_of)
        has_command = any(name == COMMAND for name, _ in whole)
        commands = self._commands.setdefault(series, {})
        if has_command and commands.get(tenant, 0) >= MAX_COMMANDS_OF_TENANT:
            has_command = False
            whole = tuple(pair for pair in whole if pair[0] != COMMAND)
            if whole in known:
                return whole, None
        shares = self._shares.setdefault(series, {})
        held = sum(shares.values())
        if shares.get(tenant, 0) < MAX_OF_TENANT and held < MAX_OWNED:
            shares[tenant] = shares.get(tenant, 0) + 1
            if has_command:
                commands[tenant] = commands.get(tenant, 0) + 1
            return whole, tenant
        self.folded += 1
        rest = _rest(kept, base)
        if rest in known:
            return rest, None
        rests = self._rests.setdefault(series, {})
        others = len(known) - held
        if rests.get(tenant, 0) < MAX_RESTS_OF_TENANT and others < MAX_RESTS // 2:
            rests[tenant] = rests.get(tenant, 0) + 1
            return rest, None
        rest = _rest(kept, tenant)
        return (rest if rest in known or others < MAX_RESTS else _rest(kept, ())), None

    def families(self) -> list[tuple[Metric, list[Series]]]:
        """Every metric that has a value, with its series, in the order of the catalogue."""
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
            found["sonde.series.left_out"] = [
                Series({"sonde.party": party or "machine"}, float(count))
                for party, count in self._plain.left_out()
            ]
        return [(metric, found[name]) for name, metric in catalogue().items() if found.get(name)]

    def _plan(self, series: str, labels: str) -> _Plan | None:
        key = (series, labels)
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        if len(self._plans) >= MAX_PLANS:
            self._plans.popitem(last=False)
        plan = None
        metric = catalogue().get(series)
        if metric is not None:
            attributes = json.loads(labels) if labels else {}
            process = f"{attributes[PID]}.{attributes.get(START, '')}" if PID in attributes else ""
            plan = _Plan(metric, process, *self._folded(attributes))
        self._plans[key] = plan
        return plan

    def _folded(self, attributes: Mapping[str, str]) -> tuple[Attributes, Attributes, Attributes]:
        """(attributes with the owner in place of the process; the owner without its program name;
        the attributes without the owner)."""
        kept = {name: str(value) for name, value in attributes.items() if name not in (PID, START)}
        if PID not in attributes:
            return _sorted(kept), (), _sorted(kept)
        owner = self._owner_of(int(attributes[PID]), int(attributes.get(START) or 0))
        owner = {name: value for name, value in owner.items() if value}
        base = {name: value for name, value in owner.items() if name not in _OF_PROGRAM}
        rest = {name: value for name, value in kept.items() if name not in (*base, *_OF_PROGRAM)}
        return _sorted(kept | owner), _sorted(base), _sorted(rest)

    def _record_owned(self, plan: _Plan, time_ns: int, value: float) -> None:
        known = self._owned.setdefault(plan.metric.name, {})
        attributes = plan.attributes
        one = known.get(attributes)
        if one is None:
            name = plan.metric.name
            attributes, tenant = self._assign(name, known, attributes, plan.base, plan.kept)
            one = known.setdefault(attributes, _Owned(tenant=tenant))
        one.processes[plan.process] = Last(value, time_ns)
        one.time_ns = time_ns

    def _forget(self, now_ns: int) -> None:
        self._plain.forget(now_ns)
        for name, known in self._owned.items():
            metric = catalogue()[name]
            # A process without a new value for this long has ended.
            gone_s = FORGOTTEN_AFTER_S if metric.monotonic else 3 * PERIODS_S[metric.rate] + 2
            kept_s = COUNTERS_FORGOTTEN_AFTER_S if metric.monotonic else gone_s
            for attributes, one in list(known.items()):
                for process, last in list(one.processes.items()):
                    if now_ns - last.time_ns > gone_s * 1e9:
                        del one.processes[process]
                        one.ended += last.value if metric.monotonic else 0.0
                if not one.processes and now_ns - one.time_ns > kept_s * 1e9:
                    del known[attributes]
                    self._give_back(name, attributes, one.tenant)
        for name, counts in self._counts.items():
            for attributes, count in list(counts.items()):
                age_ns = now_ns - count.time_ns
                if count.time_ns and age_ns > COUNTERS_FORGOTTEN_AFTER_S * 1e9:
                    del counts[attributes]
                    self._give_back(name, attributes, count.tenant)

    def _give_back(self, series: str, whole: Attributes, tenant: Attributes | None) -> None:
        """Return the room of a forgotten series to its tenant's share."""
        if tenant is None:
            # Counted from 0 again: `MAX_RESTS` bounds the sum in any case (`_assign`).
            self._rests.pop(series, None)
            return
        has_command = any(name == COMMAND for name, _ in whole)
        for counts in (self._shares, self._commands)[: 1 + has_command]:
            shares = counts[series]
            shares[tenant] -= 1
            if not shares[tenant]:
                del shares[tenant]


def _rest(kept: Attributes, owner: Attributes) -> Attributes:
    """The attributes of the series `other` of an owner or tenant; () for that of all."""
    return tuple(sorted((*kept, *owner, (PROGRAM, OTHER))))


def _nameless(attributes: Attributes) -> Attributes:
    """The same attributes, all with the value `other`."""
    return tuple((name, OTHER) for name, _ in attributes)


def _sorted(attributes: Mapping[str, object]) -> Attributes:
    return tuple(sorted((name, str(value)) for name, value in attributes.items()))
