# SPDX-License-Identifier: Apache-2.0
"""Rules of a tenant that take long do not hold up those of others."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from sonde.server import alerts as alerts_module
from sonde.server.alert_rules import AlertConfig, Reduce, Rule
from sonde.server.alert_turns import RuleTurns
from sonde.server.alert_values import Values
from sonde.server.alerts import Alerts
from sonde.server.service import Service

INTERVAL_S = 30.0


def evaluated(costs: dict[str, tuple[int, float]], rounds: int) -> tuple[Counter[str], float, int]:
    """(evaluations by tenant, mean time of a round in s, rules put off); `costs`: number of rules
    and seconds of each, by tenant."""
    now_s, took_s = 0.0, 0.0
    rules = [(tenant, f"r{at}") for tenant, (count, _) in costs.items() for at in range(count)]
    turns = RuleTurns(rules, INTERVAL_S, lambda: now_s)
    counted: Counter[str] = Counter()
    for _ in range(rounds):
        begun_s = now_s
        seen = []
        for key in turns.round():
            seen.append(key)
            counted[key[0]] += 1
            now_s += costs[key[0]][1]
        assert len(set(seen)) == len(seen)
        took_s += now_s - begun_s
        now_s = max(now_s, begun_s + INTERVAL_S)
    return counted, took_s / rounds, turns.put_off


def test_slow_rules_take_their_tenants_part_of_the_time() -> None:
    counted, mean_s, put_off = evaluated({"slow": (20, 15.0), "quick": (3, 0.1)}, 40)
    assert counted["quick"] == 3 * 40
    assert 20 <= counted["slow"] < 80
    assert mean_s < 1.5 * INTERVAL_S
    assert put_off > 0


def test_every_rule_has_its_turn() -> None:
    seen: Counter[tuple[str, str]] = Counter()
    now_s = 0.0
    rules = [("slow", f"r{at}") for at in range(7)] + [("quick", "r")]
    turns = RuleTurns(rules, INTERVAL_S, lambda: now_s)
    for _ in range(28):
        for key in turns.round():
            seen[key] += 1
            now_s += 15.0 if key[0] == "slow" else 0.1
        now_s += 10
    assert min(seen.values()) > 0
    slow = [count for key, count in seen.items() if key[0] == "slow"]
    assert max(slow) - min(slow) <= 1


def test_a_tenant_alone_has_all_of_the_time() -> None:
    counted, _, put_off = evaluated({"one": (9, 15.0)}, 5)
    assert counted["one"] == 45
    assert not put_off


def test_quick_rules_are_evaluated_each_round() -> None:
    counted, _, put_off = evaluated({f"t{at}": (20, 0.05) for at in range(10)}, 10)
    assert set(counted.values()) == {200}
    assert not put_off


def test_alerts_of_others_come_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def evaluate(_service: Service, rule: Rule, *_: object) -> Values:
        order.append(rule.tenant)
        time.sleep(0.05 if rule.tenant == "slow" else 0)
        return Values([], 0, 0)

    monkeypatch.setattr(alerts_module, "evaluate", evaluate)
    service = Service(tmp_path, open_tenant="lab", flushes=False)
    rules = [
        Rule(f"R{at}", "nodes", reduce=Reduce.COUNT, above=0.0, tenant=tenant)
        for tenant in ("slow", "quick")
        for at in range(4)
    ]
    alerts = Alerts(service, AlertConfig(rules))
    alerts.evaluate_all(time.time_ns())
    assert order[:4].count("quick") >= 2, "in turn"
    assert Counter(order) == {"slow": 4, "quick": 4}
    alerts.states.close()
    service.close()
