# SPDX-License-Identifier: Apache-2.0
"""Rules of alerts: what a file may hold, which value an answer gives, how states follow."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde.errors import UsageError
from sonde.server import alert_rules
from sonde.server.alert_rules import AlertConfig, Reduce, Rule, load
from sonde.server.alert_states import RESOLVED_NS, AlertState, AlertStates
from sonde.server.alert_values import LABEL, MAX_ALERTS, evaluate, field, key_of, of_rows
from sonde.server.alerts import Alerts, _bodies
from sonde.server.service import Service
from sonde.store.flush import Flusher
from stored_chunks import as_of, recorded

GOOD = 'name = "A"\nquestion = "names"\nvalue = "ns"\nabove = 1.0\n'
ROW = {"node": "n", "ns": 4.0, "n": 2, "labels": '{"hw.id":"GPU-1","n":3}', "list": [{"x": 7}]}


def written(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_rule_is_read(tmp_path: Path) -> None:
    text = (
        'interval_s = 5.0\nwebhook = "http://127.0.0.1:1/x"\n[[rules]]\n'
        + GOOD
        + (
            'for_s = 60.0\nselect = {kind = "runqueue", node = ["a", "b"], limit = 3}\n'
            'by = {cause = "name"}\nreduce = "sum"\nper = "n"\nlabels = {severity = "page"}\n'
            'annotations = {summary = "{cause} is {value}, limit {threshold}"}\n'
        )
    )
    config = load(written(tmp_path, text))

    (rule,) = config.rules
    assert [*alert_rules.parameters(rule)] == [
        ("kind", "runqueue"), ("node", "a"), ("node", "b"), ("limit", "3"),
    ]  # fmt: skip
    assert (rule.reduce, rule.threshold, rule.holds(1.0), rule.holds(1.1)) == (
        Reduce.SUM, 1.0, False, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "measured", "unit"),
    [
        (
            'question = "devices"\nwhere = {series = "hw.gpu.utilization"}\nvalue = "mean"',
            "mean of hw.gpu.utilization",
            "",
        ),
        ('question = "nodes"\nreduce = "count"', "number of nodes", ""),
        ('question = "names"\nvalue = "ns"\nreduce = "sum"', "sum of ns", "ns"),
        ('question = "names"\nvalue = "ns"\nper = "n"', "ns / n", ""),
        ('question = "owners"\nrows = "owners"\nvalue = "wasted_h"', "wasted_h", "h"),
        (
            'question = "verdict"\nselect = {node = "n"}\nrows = "verdicts"\n'
            'value = "bounds.0.share"',
            "bounds.0.share",
            "1",
        ),
    ],
)
def test_a_rule_names_what_it_measures_and_its_unit(
    tmp_path: Path, text: str, measured: str, unit: str
) -> None:
    (rule,) = load(written(tmp_path, f'[[rules]]\nname = "A"\nabove = 1.0\n{text}')).rules

    assert (rule.measured, rule.unit) == (measured, unit)


def test_the_rules_of_the_guide_are_well_formed(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "server.md").read_text()
    (text,) = [one for one in guide.split("```") if "[[rules]]" in one]
    config = load(written(tmp_path, text))

    assert [rule.name for rule in config.rules] == ["GpuIdle", "WaitsForInput"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "rules"),
        ("rules = []", "0 rules"),
        ("[[rules]]\n" + GOOD + 'colour = "red"', "colour"),
        ("[[rules]]\n" + GOOD + "for_s = -1.0", "for_s is -1"),
        ("[[rules]]\n" + GOOD + 'for_s = "long"', "for_s"),
        ("[[rules]]\n" + GOOD + "range_s = 1e9", "range_s is 1e\\+09"),
        ("[[rules]]\n" + GOOD + "below = 0.0", "either above or below"),
        ("[[rules]]\n" + GOOD.replace("1.0", "nan"), "threshold is nan"),
        ("[[rules]]\n" + GOOD.replace("names", "flames"), "no question 'flames'"),
        ("[[rules]]\n" + GOOD.replace("names", "pprof"), "no question 'pprof'"),
        ("[[rules]]\n" + GOOD.replace('"ns"', '"nanos"'), "no field 'nanos'"),
        ("[[rules]]\n" + GOOD.replace('value = "ns"', ""), "value is missing"),
        ("[[rules]]\n" + GOOD.replace('"A"', '"A B"'), "no name of an alert"),
        ("[[rules]]\n" + GOOD + 'tenant = "../x"', "no tenant"),
        ("[[rules]]\n" + GOOD + 'select = {from = "0"}', "select has from"),
        ("[[rules]]\n" + GOOD + 'select = {sql = "0"}', "no parameter is called 'sql'"),
        ("[[rules]]\n" + GOOD + 'by = {tenant = "name"}', "tenant has two values"),
        ("[[rules]]\n" + GOOD + 'by = {"a-b" = "name"}', "no name of a label"),
        ("[[rules]]\n" + GOOD + 'where = {"nom" = "x"}', "no field 'nom'"),
        ("[[rules]]\n" + GOOD + 'rows = "x"', "no fields but a list"),
        ("[[rules]]\n" + GOOD + 'annotations = {a = "{nobody}"}', "{nobody}, which is no label"),
        ("[[rules]]\n" + GOOD + f'labels = {{a = "{"x" * 2_000}"}}', "labels is too large"),
        ("[[rules]]\n" + GOOD + "[[rules]]\n" + GOOD, "two rules are called A"),
        ('webhook = "file:///etc/passwd"\n[[rules]]\n' + GOOD, "webhook is"),
        ("interval_s = 0.0\n[[rules]]\n" + GOOD, "interval_s is 0"),
        ("[[rules]]\n" + GOOD.replace("names", "verdict"), "about one node"),
        ("x = " + "[" * 50_000, "cannot be used"),
        ("[[rules]]\n" * 10_000, "name"),
        ("#" * (2 << 20), "longer than"),
        ("\0", "cannot be used"),
    ],
)
def test_a_hostile_file_is_an_error_with_its_cause(tmp_path: Path, text: str, cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as error:
        load(written(tmp_path, text))

    assert error.value.remedy and len(error.value.cause) < 500


def test_the_secret_of_a_webhook_is_in_no_message(tmp_path: Path) -> None:
    text = 'webhook = "https://hooks.example/services/s3cret/ x?key=s3cret"\n[[rules]]\n' + GOOD
    with pytest.raises(UsageError, match=r"webhook is https://hooks\.example: blanks") as error:
        load(written(tmp_path, text))
    assert "s3cret" not in str(error.value)


def test_a_file_that_others_can_change_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "[[rules]]\n" + GOOD)
    path.chmod(0o666)
    with pytest.raises(UsageError, match="other users can change"):
        load(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="a pipe"):
        load(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("path", "found"),
    [("ns", 4.0), ("labels.hw.id", "GPU-1"), ("list.0.x", 7), ("list.9.x", None),
     ("node.x", None), ("ns.x", None), ("missing", None), ("list.-1", None)],
)  # fmt: skip
def test_a_path_leads_to_a_field(path: str, found: object) -> None:
    assert field(ROW, path) == found


def rule(**given: object) -> Rule:
    return Rule("A", "names", **({"value": "ns", "above": 1.0} | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, [({}, 4.0, True)]),
        ({"per": "n"}, [({}, 2.0, True)]),
        ({"reduce": Reduce.COUNT}, [({}, 3.0, True)]),
        ({"reduce": Reduce.SUM, "by": {"gpu": "labels.hw.id"}},
         [({"gpu": "GPU-1"}, 8.0, True), ({"gpu": ""}, 0.5, False)]),
        ({"where": {"labels.hw.id": "GPU-1"}, "reduce": Reduce.MEAN}, [({}, 4.0, True)]),
        ({"reduce": Reduce.MIN, "above": None, "below": 1.0}, [({}, 0.5, True)]),
        ({"where": {"node": "x"}}, []),
        ({"where": {"node": "x"}, "reduce": Reduce.COUNT, "above": None, "below": 1.0},
         [({}, 0.0, True)]),
    ],
)  # fmt: skip
def test_rows_become_values(given: dict[str, object], found: object) -> None:
    rows = [ROW, ROW, {"ns": 0.5}, {"ns": "many"}, {"ns": None}, {"ns": float("inf")}, {"n": True}]
    if given.get("reduce") is Reduce.COUNT:
        rows = rows[:3]
    values = of_rows(rule(**given), rows)

    assert [(one.labels, one.value, one.holds) for one in values.found] == found


def test_a_number_in_labels_that_is_none_costs_its_row_alone() -> None:
    rows = [{"labels": f'{{"at": {text}}}'} for text in ("1" + 400 * "0", "1e999", "NaN", "4")]
    values = of_rows(rule(value="labels.at"), rows)
    assert [one.value for one in values.found] == [4.0]


def test_too_many_values_are_left_out() -> None:
    rows = [{"name": str(n), "ns": n} for n in range(MAX_ALERTS + 10)]
    values = of_rows(rule(by={"name": "name"}), rows)

    assert (len(values.found), values.left_out) == (MAX_ALERTS, 10)
    assert values.found[0].value == MAX_ALERTS + 9


def test_known_alerts_stay_where_there_are_too_many() -> None:
    one = rule(by={"name": "name"})
    rows = [{"name": str(n), "ns": 10 + n} for n in range(2 * MAX_ALERTS)]
    known = {key_of({"name": str(n)}) for n in range(10)} | {key_of({"name": "fine"})}
    values = of_rows(one, [*rows, {"name": "fine", "ns": 0.0}], known)

    assert (len(values.found), values.left_out) == (MAX_ALERTS, MAX_ALERTS + 1)
    assert [one.labels["name"] for one in values.found[:10]] == [str(n) for n in range(9, -1, -1)]
    assert values.found[10].labels["name"] == str(2 * MAX_ALERTS - 1)
    assert all(one.holds for one in values.found)


def test_labels_are_short_and_none_becomes_another_one() -> None:
    begin = "x" * 5_000
    values = of_rows(
        rule(by={"name": "name"}), [{"name": begin + end, "ns": 5.0} for end in "abca"]
    )
    labels = [one.labels["name"] for one in values.found]

    assert len(set(labels)) == 3 and all(len(one) == LABEL for one in labels)
    assert of_rows(rule(by={"a": "a"}), [{"a": "x" * LABEL, "ns": 5}]).found[0].labels == {
        "a": "x" * LABEL
    }


def test_labels_that_data_chooses_fill_no_store(states: AlertStates) -> None:
    one = rule(by={"name": "name"})
    quiet = rule(tenant="quiet")
    states.update(quiet, of_rows(quiet, [ROW]), 10**9)
    for turn in range(6):
        rows = [{"name": f"{turn}-{n}", "ns": 5.0} for n in range(MAX_ALERTS)]
        states.update(one, of_rows(one, rows, states.active(one)), (turn + 1) * 10**9)
        if turn == 0:
            for alert in states.listed("default"):
                states.note_sent(alert)

    listed = states.listed("default")
    resolved = [one for one in listed if one.state == AlertState.RESOLVED]
    assert (len(listed), len(resolved)) == (2 * MAX_ALERTS, MAX_ALERTS)
    assert states.resolved_dropped == 4 * MAX_ALERTS
    assert {one.resolved_ns for one in resolved} == {6 * 10**9}, "the newest are kept"
    assert states.counts("quiet")[AlertState.FIRING] == len(states.listed("quiet")) == 1
    shown = states.foremost("default", MAX_ALERTS + 1)
    assert [one.state for one in shown] == [AlertState.FIRING] * MAX_ALERTS + [AlertState.RESOLVED]


def test_alerts_are_counted_without_the_file(states: AlertStates, tmp_path: Path) -> None:
    one = rule(by={"node": "node"})
    states.update(one, of_rows(one, [{"node": str(n), "ns": 5.0} for n in range(3)]), 10**9)
    other = AlertStates(tmp_path)
    states.update(one, of_rows(one, [{"node": "0", "ns": 5.0}]), 2 * 10**9)
    expected = {AlertState.PENDING: 0, AlertState.FIRING: 1, AlertState.RESOLVED: 2}
    found: list[object] = []
    with states._db.transaction():
        counter = threading.Thread(target=lambda: found.append(states.counts()), daemon=True)
        counter.start()
        counter.join(5)

    assert found == [expected]
    assert other.counts()[AlertState.FIRING] == 3
    other.recount()
    assert other.counts() == expected
    other.close()


def test_lists_of_alerts_are_read_by_an_index(states: AlertStates) -> None:
    for wanted in ("tenant = 'a'", "tenant = 'a' AND rule = 'b'", "tenant = 'a' AND state = 'c'"):
        with states._db.held() as db:
            (plan,) = db.execute(
                f"EXPLAIN QUERY PLAN SELECT * FROM alert WHERE {wanted}"
            ).fetchall()
        assert plan[3].startswith("SEARCH"), plan


@pytest.fixture
def states(tmp_path: Path) -> Iterator[AlertStates]:
    states = AlertStates(tmp_path)
    yield states
    states.close()


def test_states_follow_the_value_and_survive(states: AlertStates, tmp_path: Path) -> None:
    lasting = rule(for_s=10.0, by={"node": "node"})
    high, low = (of_rows(lasting, [{"node": "n", "ns": ns}]) for ns in (5, 0))

    def now() -> list[tuple[str, int]]:
        return [(one.state, one.since_ns // 10**9) for one in states.listed("default")]

    states.update(lasting, high, 100 * 10**9)
    assert now() == [(AlertState.PENDING, 100)]
    states.update(lasting, low, 105 * 10**9)
    assert now() == []
    states.update(lasting, high, 110 * 10**9)
    states.close()
    states.__init__(tmp_path)  # type: ignore[misc]
    states.update(lasting, high, 121 * 10**9)
    assert now() == [(AlertState.FIRING, 110)]
    (firing,) = states.listed()
    states.note_sent(firing)
    assert states.listed()[0].notified == AlertState.FIRING
    states.update(lasting, low, 130 * 10**9)
    (resolved,) = states.listed()
    assert (resolved.state, resolved.resolved_ns) == (AlertState.RESOLVED, 130 * 10**9)
    states.note_sent(firing)
    assert states.listed()[0].notified == AlertState.FIRING
    assert states.listed("other") == []
    states.update(lasting, low, 131 * 10**9 + RESOLVED_NS)
    assert now() == []


def test_alerts_of_a_rule_that_is_gone_end(states: AlertStates) -> None:
    one = rule()
    states.update(one, of_rows(one, [ROW]), 10**9)
    states.end_others({("default", "A")}, 2 * 10**9)
    assert states.listed()[0].state == AlertState.FIRING
    states.end_others({("other", "A")}, 2 * 10**9)
    assert states.listed()[0].state == AlertState.RESOLVED


def test_bodies_are_bounded() -> None:
    bodies = list(_bodies([{"text": "x" * 1_000}] * 200))

    assert len(bodies) > 2 and all(len(body) < 64 << 10 for body, _ in bodies)
    assert all(body.count(b"text") == count for body, count in bodies)
    assert sum(count for _, count in bodies) == 200


class Busy:
    """A webhook that takes some bodies a turn."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tenants: list[str] = []

    @property
    def has_room(self) -> bool:
        return self.room > 0

    def post(self, body: bytes, _done: object = None) -> None:
        self.room -= 1
        found = json.loads(body)
        found = found if isinstance(found, list) else [found]
        self.tenants += [one["labels"]["tenant"] for one in found]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("to", ["_webhook", "_manager"])
def test_many_alerts_of_one_tenant_hold_up_nobody_elses(tmp_path: Path, to: str) -> None:
    service = Service(tmp_path, open_tenant="lab", flushes=False)
    rules = [rule(tenant=name, by={"name": "name"}) for name in ("a", "b", "c")]
    alerts = Alerts(service, AlertConfig(rules))
    webhook = Busy(4)
    setattr(alerts, to, webhook)
    now_ns = time.time_ns()
    for one, count in zip(rules, (100, 3, 1), strict=True):
        values = of_rows(one, [{"name": str(number), "ns": 5.0} for number in range(count)])
        alerts.states.update(one, values, now_ns)

    alerts._send(now_ns)
    assert webhook.tenants[:4] == ["a", "b", "c", "a"]
    if to == "_webhook":
        for _ in range(3):
            webhook.room = 1
            alerts._send(now_ns)
        assert webhook.tenants[4:] == ["b", "a", "b"]
        webhook.room = 1_000
        alerts._send(now_ns)
    assert Counter(webhook.tenants) == {"a": 100, "b": 3, "c": 1}, "none is left out, none twice"
    webhook.room = 1_000
    alerts._send(now_ns)
    assert len(webhook.tenants) == 104
    alerts.states.close()
    service.close()


def test_a_question_is_asked_for_the_rules_tenant(tmp_path: Path) -> None:
    store = tmp_path / "store"
    service = Service(store, open_tenant="lab", flushes=False)
    caller = service.caller("")
    assert caller
    now_ns = time.time_ns()
    for future, _ in service.take(caller, "one", as_of(recorded()[0], "c", 0, now_ns)):
        future.result(10)
    service.wal.close()
    Flusher(store, service.catalog).flush()
    for tenant, count in (("lab", 1), ("default", 0)):
        counting = Rule("A", "nodes", reduce=Reduce.COUNT, above=0.0, tenant=tenant)
        values = evaluate(service, counting, now_ns / 1e9 + 1)
        assert [one.value for one in values.found] == [count]
    gone = Rule("A", "verdict", "window_ns", above=0.0, rows="verdicts", select={"node": "two"})
    assert evaluate(service, gone, now_ns / 1e9).found == []
    service.catalog.close()
