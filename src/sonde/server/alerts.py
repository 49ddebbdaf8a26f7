# SPDX-License-Identifier: Apache-2.0
"""Evaluates the rules of alerts in a thread, and sends what fires and what is resolved."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any
from urllib.parse import urlencode

from sonde.errors import SondeError
from sonde.notify import alertmanager, texts
from sonde.notify.poster import MAX_BYTES, Poster
from sonde.server.alert_rules import AlertConfig, filled
from sonde.server.alert_states import Alert, AlertStates
from sonde.server.alert_turns import RuleTurns
from sonde.server.alert_values import evaluate
from sonde.server.service import Service

LOG = logging.getLogger("sonde.alerts")
RESEND_S = 60.0
"""How often alerts are sent again: to Alertmanager all, to the webhook those it did not accept."""
GIVE_UP_NS = 15 * 60 * 10**9
"""How long after a change of state it is tried to send that to the webhook."""
MAX_LISTED = 1_000
"""Alerts of a tenant in /v1/alerts."""
_CLOSE_S = 20.0
"""How long an evaluation may go on at the end."""
_BODY_BYTES = MAX_BYTES - 1_024
"""Of one request to Alertmanager."""


class Alerts:
    """The rules of a server. Of several servers of one directory, one evaluates (`alerts.lock`)."""

    def __init__(self, service: Service, config: AlertConfig) -> None:
        """Raises UsageError where states cannot be kept."""
        self._service, self._config = service, config
        self._rules = {(rule.tenant, rule.name): rule for rule in config.rules}
        self._turns = RuleTurns(self._rules, config.interval_s)
        self.states = AlertStates(service.folder)
        self.errors: dict[tuple[str, str], str] = {}
        """Why the last evaluation failed, by (tenant, name) of the rule."""
        self.left_out: Counter[tuple[str, str]] = Counter()
        """Values of rules beyond `MAX_ALERTS`, at the last evaluation."""
        self.counters: Counter[str] = Counter()
        self._posted: dict[tuple[str, str, str, str], float] = {}
        """When an alert was last handed to a poster, by `_identity` (monotonic)."""
        self._served: dict[tuple[str, str], int] = {}
        """By (destination, tenant): `_posts` when an alert of the tenant was last handed over."""
        self._posts = 0
        """How many alerts were handed to posters."""
        self._webhook = Poster(config.webhook, log=LOG.warning) if config.webhook else None
        self._manager = (
            Poster(config.alertmanager, alertmanager.PATH, LOG.warning)
            if config.alertmanager
            else None
        )
        self._lock: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sonde-alerts", daemon=True)

    def start(self) -> None:
        """Start the thread that evaluates."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; posters deliver for some more seconds what they have."""
        self._ended.set()
        self._thread.join(_CLOSE_S)
        for poster in (self._webhook, self._manager):
            if poster is not None:
                poster.close()
        if not self._thread.is_alive():
            self.states.close()
        if self._lock is not None:
            os.close(self._lock)

    def listed(self, tenant: str) -> dict[str, Any]:
        """A tenant's rules and alerts, as /v1/alerts returns them: firing ones first."""
        alerts = self.states.foremost(tenant, MAX_LISTED)
        return {
            "rules": [
                {
                    "name": rule.name,
                    "question": rule.question,
                    "measured": rule.measured,
                    "comparison": "above" if rule.above is not None else "below",
                    "threshold": rule.threshold,
                    "unit": rule.unit,
                    "series": rule.series,
                    "for_s": rule.for_s,
                    "error": self.errors.get(key, ""),
                    "left_out": self.left_out[key],
                }
                for key, rule in self._rules.items()
                if rule.tenant == tenant
            ],
            "alerts": [self._document(one) for one in alerts],
            "not_shown": max(0, sum(self.states.counts(tenant).values()) - len(alerts)),
        }

    def figures(self) -> Iterator[tuple[str, str, str, float]]:
        """(name, kind, labels, value) for /metrics."""
        for state, count in self.states.counts().items():
            yield "sonde_server_alerts", "gauge", f'{{state="{state}"}}', count
        for name in ("evaluations", "failures", "late_rounds", "given_up"):
            yield f"sonde_server_alert_{name}_total", "counter", "", self.counters[name]
        yield "sonde_server_alert_put_off_total", "counter", "", self._turns.put_off
        dropped = self.states.resolved_dropped
        yield "sonde_server_alert_resolved_dropped_total", "counter", "", dropped
        for name, poster in (("webhook", self._webhook), ("alertmanager", self._manager)):
            if poster is not None:
                labels = f'{{to="{name}"}}'
                yield "sonde_server_alert_posts_total", "counter", labels, poster.posted
                yield "sonde_server_alert_posts_lost_total", "counter", labels, poster.left_out

    def _run(self) -> None:
        while not self._ended.is_set():
            started = time.monotonic()
            try:
                held = self._lock is not None
                evaluates = self._holds_lock()
                if not (held and evaluates):  # another server may have changed alerts
                    self.states.recount()
                if evaluates:
                    self.evaluate_all(time.time_ns())
            except (OSError, sqlite3.Error) as error:
                self.counters["failures"] += 1
                LOG.error("alerts cannot be kept: %s", error)
            took_s = time.monotonic() - started
            self.counters["late_rounds"] += took_s > self._config.interval_s
            self._ended.wait(max(0.1, self._config.interval_s - took_s))

    def _holds_lock(self) -> bool:
        """Whether this server is the one that evaluates; tries to become it."""
        if self._lock is None:
            path = self._service.folder / "alerts.lock"
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                lock = os.open(path, flags, 0o600)
            except OSError as error:
                LOG.error("no lock of alerts: %s", error)
                return False
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def evaluate_all(self, now_ns: int) -> None:
        """Evaluate the rules of the tenants in turn, each once unless its tenant has used up its
        time (alert_turns.py), and send what changed. Raises sqlite3.Error."""
        self.states.end_others(set(self._rules), now_ns)
        for key in self._turns.round():
            if self._ended.is_set():
                return
            rule = self._rules[key]
            self.counters["evaluations"] += 1
            try:
                known = self.states.active(rule)
                values = evaluate(self._service, rule, now_ns / 1e9, known)
            except SondeError as error:
                self.counters["failures"] += 1
                if key not in self.errors:
                    LOG.warning("rule %s of %s: %s", rule.name, rule.tenant, error)
                self.errors[key] = texts.plain(str(error))
                continue
            except Exception:
                self.counters["failures"] += 1
                if key not in self.errors:
                    LOG.exception("rule %s of %s", rule.name, rule.tenant)
                self.errors[key] = "the server has a defect: see its log"
                continue
            self.errors.pop(key, None)
            self.left_out[key] = values.left_out
            self.states.update(rule, values, now_ns)
        self._send(now_ns)

    def _send(self, now_ns: int) -> None:
        alerts = [one for one in self.states.listed() if one.fired_ns]
        known = {self._identity(to, one) for to in ("webhook", "alertmanager") for one in alerts}
        tenants = {one.tenant for one in alerts}
        self._posted = {key: at for key, at in self._posted.items() if key in known}
        self._served = {key: at for key, at in self._served.items() if key[1] in tenants}
        if self._webhook is not None:
            self._to_webhook(self._webhook, alerts, now_ns)
        if self._manager is not None:
            due = self._in_turn("alertmanager", alerts)
            for body, count in _bodies([self._postable(one, now_ns) for one in due]):
                if not self._manager.has_room:
                    break
                self._manager.post(body)
                for one in due[:count]:
                    self._note_posted("alertmanager", one)
                del due[:count]

    @staticmethod
    def _identity(to: str, one: Alert) -> tuple[str, str, str, str]:
        """A destination and an alert in its state."""
        return to, f"{one.tenant} {one.rule}", one.key, one.state

    def _in_turn(self, to: str, alerts: Iterable[Alert]) -> list[Alert]:
        """Alerts that were not posted in their state for `RESEND_S`: one of each tenant, then a
        second one of each, …, so that many of one tenant do not displace another's. The tenant that
        was served least recently is first.
        """
        now = time.monotonic()
        by_tenant: dict[str, list[Alert]] = defaultdict(list)
        for one in alerts:
            if now - self._posted.get(self._identity(to, one), -math.inf) >= RESEND_S:
                by_tenant[one.tenant].append(one)
        tenants = sorted(by_tenant, key=lambda tenant: self._served.get((to, tenant), 0))
        rounds = zip_longest(*(by_tenant[tenant] for tenant in tenants))
        return [one for some in rounds for one in some if one is not None]

    def _note_posted(self, to: str, one: Alert) -> None:
        self._posted[self._identity(to, one)] = time.monotonic()
        self._posts += 1
        self._served[to, one.tenant] = self._posts

    def _to_webhook(self, webhook: Poster, alerts: list[Alert], now_ns: int) -> None:
        waiting = []
        for one in alerts:
            if one.notified == one.state:
                continue
            if now_ns - max(one.fired_ns, one.resolved_ns) > GIVE_UP_NS:
                self.counters["given_up"] += 1
                self.states.note_sent(one)
            else:
                waiting.append(one)
        for one in self._in_turn("webhook", waiting):
            if not webhook.has_room:
                break  # the others are posted after the next evaluation
            body = {"version": 1, "kind": "alert", **self._document(one)}
            webhook.post(texts.encoded(body), partial(self._webhook_done, one))
            self._note_posted("webhook", one)

    def _webhook_done(self, one: Alert, accepted: bool) -> None:
        if accepted:
            with contextlib.suppress(sqlite3.Error):  # closed: it is sent again after a restart
                self.states.note_sent(one)

    def _document(self, one: Alert) -> dict[str, Any]:
        """An alert as the webhook and /v1/alerts have it."""
        labels, annotations = self._texts(one)
        return {
            "status": str(one.state),
            "labels": labels,
            "annotations": annotations,
            "value": float(f"{one.value:.9g}"),
            "since": texts.iso(one.since_ns),
            "fired": texts.iso(one.fired_ns) if one.fired_ns else None,
            "resolved": texts.iso(one.resolved_ns) if one.resolved_ns else None,
            "page": self._page(one),
        }

    def _postable(self, one: Alert, now_ns: int) -> dict[str, Any]:
        """An alert as Alertmanager takes it. One that fires ends by itself where four times in
        sequence it is not sent again."""
        labels, annotations = self._texts(one)
        ends_ns = one.resolved_ns or now_ns + round(4e9 * max(RESEND_S, self._config.interval_s))
        return alertmanager.postable(labels, annotations, one.fired_ns, ends_ns, self._page(one))

    def _texts(self, one: Alert) -> tuple[dict[str, str], dict[str, str]]:
        """(labels, annotations) of an alert and its rule together."""
        rule = self._rules.get((one.tenant, one.rule))
        labels = {"alertname": one.rule, "tenant": one.tenant, **(rule.labels if rule else {})}
        labels |= one.labels
        if rule is None:
            return labels, {"summary": "the rule is not in the file any more"}
        values = labels | {"value": f"{one.value:.6g}", "threshold": f"{rule.threshold:g}"}
        annotations = {
            name: texts.plain(filled(text, values)) for name, text in rule.annotations.items()
        }
        return labels, annotations

    def _page(self, one: Alert) -> str:
        """The address of the web page with the time before the alert fired."""
        if not self._config.page:
            return ""
        rule = self._rules.get((one.tenant, one.rule))
        end_s = (one.fired_ns or one.since_ns) / 1e9
        start_s = end_s - (rule.range_s if rule else 300)
        parameters = {"from": f"{start_s:.0f}", "to": f"{end_s:.0f}"}
        if node := one.labels.get("node", ""):
            parameters = {"view": "range", "node": node} | parameters
        return f"{self._config.page.rstrip('/')}/?{urlencode(parameters)}"


def _bodies(postable: list[dict[str, Any]]) -> Iterator[tuple[bytes, int]]:
    """(JSON list of alerts of at most `_BODY_BYTES`, how many are in it), in order."""
    parts: list[bytes] = []
    size = 2
    for one in postable:
        part = texts.encoded(one)
        if parts and size + len(part) + 1 > _BODY_BYTES:
            yield b"[" + b",".join(parts) + b"]", len(parts)
            parts, size = [], 2
        parts.append(part)
        size += len(part) + 1
    if parts:
        yield b"[" + b",".join(parts) + b"]", len(parts)
