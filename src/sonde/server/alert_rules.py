# SPDX-License-Identifier: Apache-2.0
"""The file of `sonde serve --alerts`: rules, each a question and the values that are an alert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from sonde import http_client
from sonde.errors import CaptureError, UsageError
from sonde.input_files import open_input
from sonde.ownership import only_ours
from sonde.server import answers
from sonde.server.parameters import parse
from sonde.server.schemas import ANSWERS
from sonde.server.tokens import TENANT

MAX_RULES = 200
_MAX_BYTES = 1 << 20
_MAX_ENTRIES = 32
"""Of each table of a rule (`select`, `where`, `by`, `labels`, `annotations`)."""
_MAX_TEXT = 1_000
"""Characters of each of their texts."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
"""Names of rules and labels that Alertmanager accepts."""
_IN_BRACES = re.compile(r"\{(\w+)\}")
_SEE = "see docs/guide/server.md#alerts"
_OWN = frozenset({"alertname", "tenant"})
"""Labels that the server sets."""
_SHARES = frozenset({"share", "computing", "idle"})
"""Fields that are shares of 1, wherever they stand."""
_ENDS = {"_ns": "ns", "_s": "s", "_h": "h", "_bytes": "By", "_joules": "J"}
"""Units of fields by how their names end."""
_SET = frozenset({"from", "to", "before_from", "before_to", "format"})
"""Parameters of a question that a rule sets itself."""


class Reduce(StrEnum):
    """How the rows of one alert become one value."""

    MAX = "max"
    MIN = "min"
    SUM = "sum"
    MEAN = "mean"
    COUNT = "count"


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question, and the threshold beyond which a value of its answer is an alert: `above` or
    `below`, in the unit of the answer's field."""

    name: str
    question: str
    value: str = ""
    """Path of the field in a row: `mean`, `labels.hw.id`, `causes.0.share`."""
    above: float | None = None
    below: float | None = None
    tenant: str = "default"
    rows: str = ""
    """Path of the list of rows in the answer; '': the answer itself."""
    select: Mapping[str, str | int | float | list[str]] = msgspec.field(default_factory=dict)
    """Parameters of the question."""
    where: Mapping[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    """Values that a row must have to count, by path."""
    by: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Labels and the paths of their values: an alert for each combination."""
    reduce: Reduce = Reduce.MAX
    per: str = ""
    """Path of the field that a value is divided by."""
    range_s: float = 300.0
    """The question is about this long before now."""
    for_s: float = 0.0
    """How long the value must be beyond the threshold before the alert fires."""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def threshold(self) -> float:
        """That of `above` or `below`, in the unit of the answer's field."""
        return self.above if self.above is not None else self.below or 0.0

    @property
    def measured(self) -> str:
        """What its values are, for people: 'mean of hw.gpu.utilization'."""
        if self.reduce is Reduce.COUNT:
            return f"number of {self.rows or self.question}"
        text = f"{self.value} of {self.series}" if self.series else self.value
        if self.reduce is not Reduce.MAX:
            text = f"{self.reduce} of {text}"
        return f"{text} / {self.per}" if self.per else text

    @property
    def unit(self) -> str:
        """The unit of its values in UCUM notation, 1 for a share of 1; '' where it is not known, or
        that of `series`."""
        if self.per or self.reduce is Reduce.COUNT or self.series:
            return ""
        last = self.value.rpartition(".")[2]
        if last in _SHARES:
            return "1"
        return next((unit for end, unit in _ENDS.items() if f"_{last}".endswith(end)), "")

    @property
    def series(self) -> str:
        """The one series that its values are of, in its unit; '' none."""
        one = self.where.get("series") or self.select.get("series") or ""
        return one if isinstance(one, str) else ""

    def holds(self, value: float) -> bool:
        """Whether a value is beyond the threshold."""
        return value > self.above if self.above is not None else value < self.threshold


class AlertConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rules, and where alerts go."""

    rules: list[Rule]
    interval_s: float = 30.0
    webhook: str = ""
    alertmanager: str = ""
    page: str = ""
    """Address of the server's page for links in alerts."""


def load(path: Path) -> AlertConfig:
    """Read and check the file. Raises UsageError."""
    try:
        with open_input(path) as file:
            if not only_ours(path):
                raise UsageError(
                    f"other users can change {path}, which decides where data is sent",
                    "take their right to write: chmod go-w",
                )
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"longer than {_MAX_BYTES:,} bytes")
        found = msgspec.toml.decode(content, type=AlertConfig)
    except CaptureError as error:
        raise UsageError(f"alerts: {error.cause}", "name a file of rules") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"alerts: {path} cannot be used: {error}", _SEE) from error
    _check(found)
    return found


def parameters(rule: Rule) -> Iterator[tuple[str, str]]:
    """The parameters of a rule's question, without times."""
    for name, value in rule.select.items():
        for one in value if isinstance(value, list) else [value]:
            yield name, str(one)


def _check(config: AlertConfig) -> None:
    if not 1 <= config.interval_s <= 3_600:
        raise UsageError(
            f"alerts: interval_s is {config.interval_s:g}", "choose a value from 1 to 3600"
        )
    for name in ("webhook", "alertmanager", "page"):
        url = getattr(config, name)
        if url:
            _check_url(name, url)
    if not 0 < len(config.rules) <= MAX_RULES:
        raise UsageError(
            f"alerts: {len(config.rules)} rules", f"write 1 to {MAX_RULES} tables [[rules]]"
        )
    seen = set()
    for number, rule in enumerate(config.rules, 1):
        try:
            _check_rule(rule)
        except UsageError as error:
            raise UsageError(
                f"alerts: rule {number} ({rule.name[:60]!r}): {error.cause}", error.remedy or _SEE
            ) from error
        key = rule.tenant, rule.name
        if key in seen:
            raise UsageError(f"alerts: two rules are called {rule.name}", "rename one")
        seen.add(key)


def _check_url(name: str, url: str) -> None:
    try:
        http_client.split_url(url)
    except ValueError as error:
        raise UsageError(
            f"alerts: {name} is {http_client.origin(url)}: {error}", "write https://HOST/PATH"
        ) from error


def _check_rule(rule: Rule) -> None:
    if not _NAME.fullmatch(rule.name):
        raise UsageError("no name of an alert", "use letters, digits and _, at most 128")
    if not TENANT.fullmatch(rule.tenant):
        raise UsageError(f"no tenant can be called {rule.tenant[:60]!r}", "see `sonde token list`")
    question = answers.QUESTIONS.get(rule.question)
    if question is None or question.media_type != "application/json":
        names = (name for name, one in answers.QUESTIONS.items() if "json" in one.media_type)
        raise UsageError(f"there is no question {rule.question[:60]!r}", f"use {', '.join(names)}")
    if (rule.above is None) == (rule.below is None):
        raise UsageError("it needs either above or below", "give one of them")
    if not abs(rule.threshold) < 1e300:
        raise UsageError(f"the threshold is {rule.threshold:g}", "give a number")
    if not rule.value and rule.reduce is not Reduce.COUNT:
        raise UsageError("value is missing", 'name a field, or write reduce = "count"')
    if not 1 <= rule.range_s <= 7 * 86_400:
        raise UsageError(f"range_s is {rule.range_s:g}", "choose a value from 1 to 604800")
    if not 0 <= rule.for_s <= 7 * 86_400:
        raise UsageError(f"for_s is {rule.for_s:g}", "choose a value from 0 to 604800")
    for name in ("select", "where", "by", "labels", "annotations"):
        table = getattr(rule, name)
        if len(table) > _MAX_ENTRIES or any(
            len(str(text)) > _MAX_TEXT for entry in table.items() for text in entry
        ):
            raise UsageError(
                f"{name} is too large",
                f"at most {_MAX_ENTRIES} entries with texts of {_MAX_TEXT} characters",
            )
    _check_parameters(rule)
    _check_labels(rule)
    _check_fields(rule)


def _check_parameters(rule: Rule) -> None:
    given = list(parameters(rule))
    if wrong := sorted({name for name, _ in given} & _SET):
        raise UsageError(f"select has {wrong[0]}", "leave it out: range_s sets the time")
    parse(given)
    if rule.question in ("verdict", "timeline") and "node" not in rule.select:
        raise UsageError(f"{rule.question} is about one node", 'write select = {node = "NAME"}')


def _check_labels(rule: Rule) -> None:
    for name in (*rule.by, *rule.labels, *rule.annotations):
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name[:60]!r} is no name of a label", "use letters, digits and _")
    twice = (set(rule.by) & set(rule.labels)) | ((set(rule.by) | set(rule.labels)) & _OWN)
    if twice:
        raise UsageError(f"the label {min(twice)} has two values", "rename one")
    known = {"value", "threshold", *rule.by, *rule.labels, *_OWN}
    for text in rule.annotations.values():
        if unknown := sorted(set(_IN_BRACES.findall(text)) - known):
            raise UsageError(
                f"an annotation has {{{unknown[0]}}}, which is no label",
                f"use {', '.join(sorted(known))}",
            )


def filled(text: str, values: Mapping[str, str]) -> str:
    """An annotation with the values of the names in braces; unknown names stay."""
    return _IN_BRACES.sub(lambda it: values.get(it[1], it[0]), text)


def _check_fields(rule: Rule) -> None:
    """Check `rows`, and the first name of each other path, against the answer's schema, if it has
    one."""
    schema = ANSWERS.get(rule.question)
    if schema is None:
        return
    for step in rule.rows.split(".") if rule.rows else ():
        inner = schema.get("properties", {}).get(step)
        if inner is None:
            known = ", ".join(sorted(schema.get("properties", {}))) or "no fields but a list"
            raise UsageError(f"rows is {rule.rows[:60]!r}", f"its answer has {known}")
        schema = inner
    row = schema.get("items", schema).get("properties")
    paths = {"value": rule.value, "per": rule.per}
    paths |= {f"by.{name}": path for name, path in rule.by.items()}
    paths |= {f"where {path}": path for path in rule.where}
    for name, path in paths.items():
        first = path.partition(".")[0]
        if row and path and first not in row:
            raise UsageError(
                f"{name}: {rule.question} has no field {first[:60]!r}",
                f"use one of {', '.join(sorted(row))}",
            )
