# SPDX-License-Identifier: Apache-2.0
"""The states of alerts, kept in the store so that they survive a restart.

An alert is pending while its value is beyond the threshold, fires when that has lasted for `for_s`
of its rule, and is resolved when it ends. The state that the webhook was last sent is kept, too.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sonde.server.alert_rules import Rule
from sonde.server.alert_values import MAX_ALERTS, Values, key_of
from sonde.store.database import Database

NAME = "alerts.sqlite"
RESOLVED_NS = 20 * 60 * 10**9
"""How long a resolved alert is kept and sent to Alertmanager, as Prometheus does (15 minutes). Of a
rule the newest `MAX_ALERTS` are kept, because the data decides how many labels there are."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS alert (
  tenant TEXT NOT NULL, rule TEXT NOT NULL, labels TEXT NOT NULL, state TEXT NOT NULL,
  since_ns INTEGER NOT NULL, fired_ns INTEGER NOT NULL, resolved_ns INTEGER NOT NULL,
  value REAL NOT NULL, notified TEXT NOT NULL,
  PRIMARY KEY (tenant, rule, labels)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS alert_by_state ON alert (tenant, state, since_ns);
"""
_COLUMNS = "tenant, rule, labels, state, since_ns, fired_ns, resolved_ns, value, notified"
_UPSERT = f"INSERT OR REPLACE INTO alert ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class AlertState(StrEnum):
    """States of an alert; one that ends while pending is forgotten."""

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
        return key_of(self.labels)


class AlertStates:
    """The alerts of a store. Any thread may call it, but one thread of one process alone `update`
    and `end_others`, which keep counts without a lock."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError where others could change states, sqlite3.Error, OSError."""
        self._db = Database(folder, NAME, _SCHEMA)
        self._by_rule: dict[tuple[str, str], dict[AlertState, int]] = {}
        """How many alerts each rule has, as of the last change here or `recount`."""
        self.resolved_dropped = 0
        """Resolved alerts that were dropped before `RESOLVED_NS`, because a rule had too many."""
        self.recount()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def listed(self, tenant: str = "") -> list[Alert]:
        """All alerts of a tenant, '' of all, by tenant, rule and labels."""
        return self._of("tenant = ?" if tenant else "TRUE", [tenant] if tenant else [])

    def foremost(self, tenant: str, most: int) -> list[Alert]:
        """At most `most` alerts of a tenant: those that fire first, then pending ones, then
        resolved ones, the newest of each first."""
        found: list[Alert] = []
        for state in (AlertState.FIRING, AlertState.PENDING, AlertState.RESOLVED):
            found += self._of(
                "tenant = ? AND state = ?", [tenant, state],
                order="since_ns DESC, rule, labels", most=most - len(found),
            )  # fmt: skip
        return found

    def active(self, rule: Rule) -> set[str]:
        """Keys of a rule's alerts that are pending or fire."""
        return {
            one.key
            for one in self._of("tenant = ? AND rule = ?", [rule.tenant, rule.name])
            if one.state is not AlertState.RESOLVED
        }

    def counts(self, tenant: str = "") -> dict[AlertState, int]:
        """Alerts of a tenant, '' of all, by state. From memory: the database is not read."""
        found = dict.fromkeys(AlertState, 0)
        for (of_tenant, _), counts in list(self._by_rule.items()):
            if tenant in ("", of_tenant):
                for state, count in counts.items():
                    found[state] += count
        return found

    def recount(self) -> None:
        """Count again, since other processes may have changed alerts. Raises sqlite3.Error."""
        found: dict[tuple[str, str], dict[AlertState, int]] = {}
        with self._db.held() as db:
            rows = db.execute(
                "SELECT tenant, rule, state, count(*) FROM alert GROUP BY tenant, rule, state"
            )
            for tenant, rule, state, count in rows:
                found.setdefault((tenant, rule), {})[AlertState(state)] = count
        self._by_rule = found

    def update(self, rule: Rule, values: Values, now_ns: int) -> None:
        """Change a rule's alerts by the values that it has now. Those whose values are not among
        them end, too: `alert_values` leaves out new ones first."""
        holding = {key_of(one.labels): one for one in values.found if one.holds}
        of_rule = {
            one.key: one for one in self._of("tenant = ? AND rule = ?", [rule.tenant, rule.name])
        }
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
        others = [one for key, one in of_rule.items() if key not in holding]
        self._write((rule.tenant, rule.name), changed, others, now_ns)

    def end_others(self, rules: set[tuple[str, str]], now_ns: int) -> None:
        """End the alerts of rules that no longer exist; `rules`: (tenant, name) of those that
        do."""
        for key in [one for one in self._by_rule if one not in rules]:
            self._write(key, [], self._of("tenant = ? AND rule = ?", list(key)), now_ns)

    def note_sent(self, alert: Alert) -> None:
        """Note that the webhook needs not be sent the alert in its state (again)."""
        with self._db.held() as db:
            db.execute(
                "UPDATE alert SET notified = state WHERE tenant = ? AND rule = ? AND labels = ?"
                " AND state = ? AND fired_ns = ?",
                [alert.tenant, alert.rule, alert.key, alert.state, alert.fired_ns],
            )

    def _of(
        self, where: str, given: list[str], order: str = "tenant, rule, labels", most: int = -1
    ) -> list[Alert]:
        """Alerts that fulfil a condition with the parameters `given`; `most` -1: all."""
        with self._db.held() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM alert WHERE {where} ORDER BY {order} LIMIT ?",
                [*given, most],
            ).fetchall()
        return [_alert(row) for row in rows]

    def _write(
        self,
        rule: tuple[str, str],
        changed: Sequence[tuple[object, ...]],
        others: list[Alert],
        now_ns: int,
    ) -> None:
        """Write rows of `_COLUMNS` of one rule; its `others` end, or are deleted if that was long
        ago."""
        if not changed and not others:
            return
        with self._db.transaction() as db:
            db.executemany(_UPSERT, changed)
            for one in others:
                _end(db, one, now_ns)
            # Those whose end the webhook was not sent yet are dropped last.
            dropped = db.execute(
                "DELETE FROM alert WHERE tenant = ?1 AND rule = ?2 AND labels IN (SELECT labels"
                " FROM alert WHERE tenant = ?1 AND rule = ?2 AND state = 'resolved'"
                " ORDER BY notified = state, resolved_ns DESC LIMIT -1 OFFSET ?3)",
                [*rule, MAX_ALERTS],
            ).rowcount
            rows = db.execute(
                "SELECT state, count(*) FROM alert WHERE tenant = ? AND rule = ? GROUP BY state",
                rule,
            ).fetchall()
        self.resolved_dropped += dropped
        counts = {AlertState(state): count for state, count in rows}
        if counts:
            self._by_rule[rule] = counts
        else:
            self._by_rule.pop(rule, None)


def _end(db: sqlite3.Connection, one: Alert, now_ns: int) -> None:
    """One that fires is resolved; one that is pending, or was resolved long ago, is deleted."""
    where = "WHERE tenant = ? AND rule = ? AND labels = ?"
    key = [one.tenant, one.rule, one.key]
    if one.state is AlertState.FIRING:
        db.execute(f"UPDATE alert SET state = 'resolved', resolved_ns = ? {where}", [now_ns, *key])
    elif one.state is AlertState.PENDING or now_ns - one.resolved_ns > RESOLVED_NS:
        db.execute(f"DELETE FROM alert {where}", key)


def _alert(row: tuple[str, str, str, str, int, int, int, float, str]) -> Alert:
    return Alert(row[0], row[1], json.loads(row[2]), AlertState(row[3]), *row[4:])
