# SPDX-License-Identifier: Apache-2.0
"""The states of alerts, kept in the store so that they survive a restart.

An alert is pending while its value is beyond the threshold, fires when that lasted as long as its
rule asks, and is resolved when it ends. Of each it is known what the webhook was last sent.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sonde.server.alert_rules import Rule
from sonde.server.alert_values import Values
from sonde.server.state_file import open_state

NAME = "alerts.sqlite"
RESOLVED_NS = 20 * 60 * 10**9
"""How long a resolved alert is kept, and repeated to Alertmanager, as Prometheus does."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS alert (
  tenant TEXT NOT NULL, rule TEXT NOT NULL, labels TEXT NOT NULL, state TEXT NOT NULL,
  since_ns INTEGER NOT NULL, fired_ns INTEGER NOT NULL, resolved_ns INTEGER NOT NULL,
  value REAL NOT NULL, notified TEXT NOT NULL,
  PRIMARY KEY (tenant, rule, labels)) WITHOUT ROWID"""
_COLUMNS = "tenant, rule, labels, state, since_ns, fired_ns, resolved_ns, value, notified"
_UPSERT = f"INSERT OR REPLACE INTO alert ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class AlertState(StrEnum):
    """Where an alert is."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert; times in ns since 1970, 0: not yet."""

    tenant: str
    rule: str
    labels: Mapping[str, str]
    """Those of the rule's `by`."""
    state: AlertState
    since_ns: int
    fired_ns: int
    resolved_ns: int
    value: float
    notified: str
    """The state that the webhook was last sent; '' none."""

    @property
    def key(self) -> str:
        """Its labels as text: with tenant and rule it is the alert's identity."""
        return json.dumps(self.labels, sort_keys=True)


class AlertStates:
    """The alerts of a store. Thread-safe; processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError where others could change states, sqlite3.Error."""
        self._mutex = threading.Lock()
        self._db = open_state(folder, NAME, _SCHEMA)

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._db.close()

    def listed(self, tenant: str = "") -> list[Alert]:
        """All alerts of a tenant; '' of all."""
        with self._mutex:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM alert WHERE ? IN ('', tenant)"
                " ORDER BY tenant, rule, labels",
                [tenant],
            ).fetchall()
        return [_alert(row) for row in rows]

    def counts(self) -> dict[AlertState, int]:
        """Alerts of all tenants by state."""
        with self._mutex:
            rows = self._db.execute("SELECT state, count(*) FROM alert GROUP BY state").fetchall()
        return dict.fromkeys(AlertState, 0) | {AlertState(state): count for state, count in rows}

    def update(self, rule: Rule, values: Values, now_ns: int) -> None:
        """What a rule gave now."""
        holding = {json.dumps(one.labels, sort_keys=True): one for one in values.found if one.holds}
        of_rule = {one.key: one for one in self.listed(rule.tenant) if one.rule == rule.name}
        changed = []
        for key, value in holding.items():
            before = of_rule.get(key)
            if before is None or before.state is AlertState.RESOLVED:
                since_ns, fired_ns, notified = now_ns, 0, ""
            else:
                since_ns, fired_ns, notified = before.since_ns, before.fired_ns, before.notified
            if not fired_ns and now_ns - since_ns >= rule.for_s * 1e9:
                fired_ns = now_ns
            state = AlertState.FIRING if fired_ns else AlertState.PENDING
            changed.append(
                (rule.tenant, rule.name, key, state, since_ns, fired_ns, 0, value.value, notified)
            )
        ended = [one for key, one in of_rule.items() if key not in holding]
        self._write(changed, ended, now_ns)

    def end_others(self, rules: set[tuple[str, str]], now_ns: int) -> None:
        """End the alerts of rules that there are no more; `rules`: (tenant, name) of the others."""
        self._write(
            [], [one for one in self.listed() if (one.tenant, one.rule) not in rules], now_ns
        )

    def note_sent(self, alert: Alert) -> None:
        """The webhook has taken the alert in its state."""
        with self._mutex:
            self._db.execute(
                "UPDATE alert SET notified = state WHERE tenant = ? AND rule = ? AND labels = ?"
                " AND state = ? AND fired_ns = ?",
                [alert.tenant, alert.rule, alert.key, alert.state, alert.fired_ns],
            )

    def _write(
        self, changed: Sequence[tuple[object, ...]], ended: list[Alert], now_ns: int
    ) -> None:
        with self._mutex:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(_UPSERT, changed)
                for one in ended:
                    self._end(one, now_ns)
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def _end(self, one: Alert, now_ns: int) -> None:
        where = "WHERE tenant = ? AND rule = ? AND labels = ?"
        key = [one.tenant, one.rule, one.key]
        if one.state is AlertState.FIRING:
            self._db.execute(
                f"UPDATE alert SET state = 'resolved', resolved_ns = ? {where}", [now_ns, *key]
            )
        elif one.state is AlertState.PENDING or now_ns - one.resolved_ns > RESOLVED_NS:
            self._db.execute(f"DELETE FROM alert {where}", key)


def _alert(row: tuple[str, str, str, str, int, int, int, float, str]) -> Alert:
    return Alert(row[0], row[1], json.loads(row[2]), AlertState(row[3]), *row[4:])
