# SPDX-License-Identifier: Apache-2.0
"""Sends metrics to other systems: a page that Prometheus fetches, a push by OTLP.

Takes the same rows that go into chunks, and sums up as counters what is a row for each tick there:
device calls, device runs, usage of processes, losses.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import Any

from sonde import _native, health, procfs
from sonde.agent.owner_attributes import Holders
from sonde.agent.run_metrics import RunMetrics
from sonde.collect.collector import Batch
from sonde.config import Config
from sonde.metrics import Metric, MetricRow, labels, labels_of
from sonde.model.calls import STATUS_UNKNOWN
from sonde.model.rows import ActivityRow, DeviceRunRow, UsageTuple
from sonde.sinks import exposition
from sonde.sinks.otlp import OtlpPusher
from sonde.sinks.prometheus import NothingNewError, PrometheusServer
from sonde.sinks.series import MetricRegistry, OwnerLookup, Series

_DIRECTIONS = {"h2d": "receive", "d2h": "transmit"}
"""As seen from the device, as OpenTelemetry's conventions have it."""

HEALTH_S = 30.0
"""How often the checks of health run, at most: they read some files."""
FIRST_HEALTH_S = 5.0
"""When they run first, after the start: before that, devices may not have answered all queries."""

STUCK_S = 30.0
STUCK_INTERVALS = 3
"""The main loop is stuck after that many seconds, or intervals, without a turn: the longer one."""
LOOP_AGE = "sonde.agent.loop_age_seconds"
PAUSED = "sonde.agent.paused"

Families = list[tuple[Metric, list[Series]]]


class Exporters:
    """Everything that exports metrics of this process."""

    def __init__(
        self,
        config: Config,
        owner_of: OwnerLookup,
        refresh: Callable[[], None] = lambda: None,
        loop_age_s: Callable[[], float] = lambda: 0.0,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`refresh` has new rows taken, and returns when they were, or after a short deadline;
        `loop_age_s`: how long ago the last turn of the agent's main loop began; `is_paused`:
        whether the agent is paused. All three are called from threads of exporters. Raises
        UsageError for a bad address, SinkError where it cannot be listened on."""
        self.registry = MetricRegistry(
            owner_of, party_of_group=procfs.GroupParties().of, holder_of=Holders().of
        )
        self._runs = RunMetrics(self.registry)
        self._refresh = refresh
        self._loop_age_s = loop_age_s
        self._is_paused = is_paused
        self._stuck_s = max(STUCK_S, STUCK_INTERVALS * max(config.tick_s, config.rest_s))
        """A main loop without a turn for this long is stuck."""
        self._owner_of = owner_of
        self._dcgm_names = config.dcgm_names
        self._host = procfs.printable(platform.node())
        self._health_checked_s = time.monotonic() + FIRST_HEALTH_S - HEALTH_S
        self.resource = {
            "service.name": "sonde",
            "service.version": _native.VERSION,
            "host.name": self._host,
            "host.arch": platform.machine(),
            "os.type": "linux",
        }
        """Attributes of the agent itself, by OpenTelemetry's names."""
        self.server = (
            PrometheusServer(config.prometheus, self.page, self.take_loss, self.failure)
            if config.prometheus
            else None
        )
        self._started_ns = time.time_ns()
        self.pusher = self._make_pusher(config)

    def reconfigure(self, config: Config) -> None:
        """Apply settings that may change while it runs. Raises UsageError for a bad URL, changing
        nothing."""
        if (config.otlp, config.otlp_period_s) != self._pushes_to:
            former, self.pusher = self.pusher, self._make_pusher(config)
            if self.pusher is not None:
                self.pusher.start()
            if former is not None:
                former.end()
        self._dcgm_names = config.dcgm_names

    def _make_pusher(self, config: Config) -> OtlpPusher | None:
        pusher = None
        if config.otlp:
            pusher = OtlpPusher(
                config.otlp, config.otlp_period_s, self.families, self.resource, self._started_ns
            )
        self._pushes_to = config.otlp, config.otlp_period_s
        return pusher

    def start(self) -> None:
        """Start the exporters."""
        for exporter in (self.server, self.pusher):
            if exporter is not None:
                exporter.start()

    def close(self) -> None:
        """Stop the exporters; OTLP pushes what there is first."""
        for exporter in (self.server, self.pusher):
            if exporter is not None:
                exporter.close()

    def take(self, batch: Batch) -> None:
        """Take in what a collector gave."""
        self.take_metrics(batch.metrics)
        for row in batch.records(ActivityRow):
            if row.kind == "device":
                self._take_calls(row)
        for run in batch.records(DeviceRunRow):
            self._runs.take(run)
        self._take_usage(batch.rows.get("usage", ()))

    def take_metrics(self, rows: Iterable[MetricRow]) -> None:
        """Take in rows of the table metric."""
        self.registry.record(rows)

    def take_loss(self, name: str, count: float) -> None:
        """Count `count` more losses of this name."""
        self.registry.count("sonde.agent.lost", {"sonde.loss": name}, count)

    def families(self) -> Families:
        """All series by metric, as they are now. Where the main loop is stuck or paused, only
        whether it is paused, and its age: the rest is old. Called from threads of exporters."""
        if self._is_stuck() or self._is_paused():
            return [
                (metric, series)
                for metric, series in self._families_with_age()
                if metric.name in (LOOP_AGE, PAUSED)
            ]
        self._refresh()
        pusher = self.pusher  # `reconfigure` may replace it meanwhile
        if pusher is not None:
            now_ns = time.monotonic_ns()
            done, failed = float(pusher.pushed), float(pusher.failed)
            self.registry.record(
                (now_ns, "sonde.otlp.pushes", labels(sonde__outcome=outcome), count)
                for outcome, count in (("done", done), ("failed", failed))
            )
        found = self._families_with_age()
        if time.monotonic() - self._health_checked_s > HEALTH_S:
            self._health_checked_s = time.monotonic()
            self.registry.record(_health(found))
            found = self.registry.families()
        return found

    def failure(self) -> str:
        """Why the agent does not work, on one line; '' where it does."""
        if not self._is_stuck():
            return ""
        return (
            f"the agent has observed nothing for {self._loop_age_s():.0f} s: its main loop is stuck"
        )

    def page(self) -> str:
        """The page for Prometheus. Raises NothingNewError where the loop is stuck."""
        if failure := self.failure():
            raise NothingNewError(failure)
        families = self.families()
        text = exposition.render(families, self.resource)
        return text + exposition.render_dcgm(families, self._host) if self._dcgm_names else text

    def _is_stuck(self) -> bool:
        return self._loop_age_s() > self._stuck_s

    def _families_with_age(self) -> Families:
        now_ns = time.monotonic_ns()
        self.registry.record(
            [
                (now_ns, LOOP_AGE, "", self._loop_age_s()),
                (now_ns, PAUSED, "", float(self._is_paused())),
            ]
        )
        return self.registry.families()

    def _take_calls(self, row: ActivityRow) -> None:
        """Count device calls."""
        direction = {}
        if row.direction:
            direction = {"network.io.direction": _DIRECTIONS.get(row.direction, row.direction)}
        call: Mapping[str, str] = {"sonde.api": row.api, "sonde.op": row.op}
        failed = {"error.type": str(row.status)} if row.status not in (0, STATUS_UNKNOWN) else {}
        count_of = self.registry.count
        count_of("sonde.device.calls", {**call, **direction, **failed}, float(row.count))
        count_of("sonde.device.call.time", call, row.ns / 1e9)
        if row.bytes:
            count_of("sonde.device.call.io", {**call, **direction}, float(row.bytes))

    def _take_usage(self, rows: Sequence[UsageTuple]) -> None:
        """Count what processes used, summed up by owner first: many processes have few owners."""
        sums: dict[int, tuple[Mapping[str, str], Iterable[Any]]] = {}
        for _, pid, start_ns, *counts in rows:
            owner = self._owner_of(pid, start_ns)
            known = sums.get(id(owner))  # `sums` holds it: no other object has this id
            sums[id(owner)] = (owner, tuple(map(add, known[1], counts)) if known else counts)
        for owner, total in sums.values():
            self.registry.count_owned(
                owner,
                [
                    (series, attributes, count / unit)
                    for (series, attributes, unit), count in zip(USAGE, total, strict=True)
                    if count and series
                ],
            )


USAGE: Sequence[tuple[str, Mapping[str, str], float]] = (
    ("process.cpu.time", {}, 1e9),
    ("sonde.process.runqueue.time", {}, 1e9),
    ("", {}, 1.0),  # runs on a CPU: as many as context switches, so no series
    ("process.context_switches", {"process.context_switch.type": "voluntary"}, 1.0),
    ("process.context_switches", {"process.context_switch.type": "involuntary"}, 1.0),
    ("sonde.process.migrations", {}, 1.0),
    ("process.paging.faults", {"system.paging.fault.type": "minor"}, 1.0),
    ("process.paging.faults", {"system.paging.fault.type": "major"}, 1.0),
    ("process.disk.io", {"disk.io.direction": "read"}, 1.0),
    ("process.disk.io", {"disk.io.direction": "write"}, 1.0),
    ("sonde.process.reclaims", {}, 1.0),
    ("sonde.process.reclaim.time", {}, 1e9),
    ("sonde.process.reclaimed_pages", {}, 1.0),
)
"""What becomes of the counters of the table usage, in the order of `UsageTuple`: series ('' for
none), attributes, and how many of the counter's unit make one of the series' (1e9 ns: 1 s)."""


def _health(families: Families) -> list[MetricRow]:
    """Rows of `metric` with the results of `sonde health`'s checks of the last metrics of
    devices."""
    rows = [
        (0, metric.name, labels_of(one.attributes), one.value)
        for metric, series in families
        if metric.group == "device"
        for one in series
    ]
    down = [
        f"{one.attributes['sonde.source']}: does not answer"
        for metric, series in families
        if metric.name == "sonde.source.up"
        for one in series
        if not one.value and one.attributes["sonde.source"].partition(".")[0] == "nvml"
    ]
    now_ns = time.monotonic_ns()
    return [
        (
            now_ns,
            "sonde.health.status",
            labels(sonde__health__check=result.check, hw__id=result.uuid),
            HEALTH_VALUES[result.status],
        )
        for result in health.examine(health.with_files(rows, down))
    ]


HEALTH_VALUES = {health.Status.PASS: 0.0, health.Status.WARN: 1.0, health.Status.FAIL: 2.0}
