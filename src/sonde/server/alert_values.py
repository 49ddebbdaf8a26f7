# SPDX-License-Identifier: Apache-2.0
"""The values that a rule of alerts has now: one for each combination of its labels."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from sonde.errors import CaptureTooLarge
from sonde.notify import texts
from sonde.query.stored_capture import NothingStoredError
from sonde.server import answers
from sonde.server.alert_rules import Reduce, Rule, parameters
from sonde.server.parameters import parse
from sonde.server.service import Service
from sonde.server.tokens import Caller, Scope

MAX_ALERTS = 500
"""Values of one rule that are kept. Of more, first those of known alerts that still hold, then
those farthest beyond the threshold."""
LABEL = 128
"""Characters of a label. A longer one is cut and ends with a digest, so that it stays distinct."""
ANSWER_BYTES = 32 << 20
"""Of an answer that a rule reads; it bounds the reading, the answer itself was made before."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value of one alert."""

    labels: Mapping[str, str]
    """Those of `by`."""
    value: float
    holds: bool
    """Whether it is beyond the threshold."""


@dataclass(frozen=True, slots=True)
class Values:
    """All values of a rule."""

    found: Sequence[Value]
    rows: int
    """Rows of the answer that match `where` and have a value."""
    left_out: int
    """Values beyond `MAX_ALERTS`."""


def key_of(labels: Mapping[str, str]) -> str:
    """Labels as text: with tenant and rule it is an alert's identity."""
    return json.dumps(labels, sort_keys=True)


def evaluate(
    service: Service, rule: Rule, now_s: float, known: Collection[str] = frozenset()
) -> Values:
    """Ask the question for the rule's tenant, within the limits of every question.

    `known`: keys of the rule's known alerts, which it had when it was evaluated last. Raises
    SondeError where it cannot be answered.
    """
    times = [("from", repr(now_s - rule.range_s)), ("to", repr(now_s))]
    options = parse([*parameters(rule), *times])
    caller = Caller(f"alert:{rule.name}", rule.tenant, frozenset({Scope.READ}))
    try:
        answer = answers.ask(service, caller, answers.QUESTIONS[rule.question], options)
    except NothingStoredError:
        return of_rows(rule, [], known)
    if len(answer.content) > ANSWER_BYTES:
        raise CaptureTooLarge(
            f"the answer has more than {ANSWER_BYTES >> 20} MiB", "select fewer nodes, or a limit"
        )
    found = json.loads(answer.content)
    values = of_rows(rule, field(found, rule.rows) if rule.rows else found, known)
    return replace(values, left_out=values.left_out + answer.rows_left_out)


def of_rows(rule: Rule, rows: Any, known: Collection[str] = frozenset()) -> Values:
    """The values of an answer. Of more than `MAX_ALERTS`, those whose keys are `known` and that
    still hold are kept first: otherwise new ones would displace them, and end their alerts."""
    groups: dict[tuple[str, ...], list[float]] = {}
    if rule.reduce is Reduce.COUNT and not rule.by:
        groups[()] = []  # so that an answer without rows has the count 0
    counted = 0
    for row in rows if isinstance(rows, list) else [rows]:
        if any(field(row, path) != expected for path, expected in rule.where.items()):
            continue
        value = _value(rule, row)
        if value is None:
            continue
        counted += 1
        groups.setdefault(tuple(_label(field(row, path)) for path in rule.by.values()), []).append(
            value
        )
    found = [
        Value(dict(zip(rule.by, key, strict=True)), value, rule.holds(value))
        for key, value in ((key, _reduced(rule.reduce, values)) for key, values in groups.items())
    ]
    found.sort(key=lambda one: -one.value if rule.above is not None else one.value)
    if len(found) > MAX_ALERTS and known:
        found.sort(key=lambda one: not (one.holds and key_of(one.labels) in known))
    return Values(found[:MAX_ALERTS], counted, max(0, len(found) - MAX_ALERTS))


def field(row: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none. Of a text that is a JSON object (the
    labels of a metric) the rest of the path is one key."""
    at = row
    steps = path.split(".")
    for number, step in enumerate(steps):
        if isinstance(at, str):
            at = _parsed(at)
            return at.get(".".join(steps[number:]))
        if isinstance(at, dict):
            at = at.get(step)
        elif isinstance(at, list) and step.isdigit() and len(step) < 6 and int(step) < len(at):
            at = at[int(step)]
        else:
            return None
    return at


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.startswith("{") else {}
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer in labels, which the data decides
        return None
    return number if math.isfinite(number) else None


def _value(rule: Rule, row: Any) -> float | None:
    """The value of a row; None where it has none."""
    if not rule.value:
        return 1.0
    value = _number(field(row, rule.value))
    if value is None or not rule.per:
        return value
    divisor = _number(field(row, rule.per))
    return value / divisor if divisor else None


def _label(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= LABEL:
        return texts.plain(text)
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{texts.plain(text[: LABEL - len(digest) - 1])}…{digest}"


def _reduced(how: Reduce, values: Sequence[float]) -> float:
    if how is Reduce.COUNT:
        return float(len(values))
    if how is Reduce.SUM:
        return math.fsum(values)
    if how is Reduce.MEAN:
        return math.fsum(values) / len(values)
    return max(values) if how is Reduce.MAX else min(values)
