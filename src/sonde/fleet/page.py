# SPDX-License-Identifier: Apache-2.0
"""The fleet view: one release as a self-contained HTML page, with error bars and the privacy
ledger.

No script, no network: a content security policy allows only the one style sheet in the page. The
charts are SVG made of numbers; every name is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections import defaultdict
from datetime import UTC, datetime
from importlib.resources import files

from sonde.fleet.budget import Ledger
from sonde.fleet.noise import format_rounded_up
from sonde.fleet.result import CONFIDENCE, Result, Row

TOP_ROWS = 50
_BAR_WIDTH = 240
"""Of a bar, in CSS pixels."""


def render(result: Result, ledger: Ledger, count: int = TOP_ROWS) -> str:
    """The page: the release, its privacy cost, the largest buckets, and totals by class."""
    style = files("sonde.fleet").joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    begin = datetime.fromtimestamp(result.start_s, UTC)
    end = datetime.fromtimestamp(result.start_s + result.duration_s, UTC)
    title = f"{result.task}: fleet totals"
    body = [
        f"<h1>{_text(title)}</h1>",
        f"<p class=when><time>{begin:%Y-%m-%d %H:%M}</time> to "
        f"<time>{end:%Y-%m-%d %H:%M}</time> UTC</p>",
        f"<p id=guarantee><strong>{_text(result.privacy_guarantee())}</strong></p>",
        "<p class=note>Each count is an estimate with added noise. The whisker is the "
        f"{CONFIDENCE:.0%} interval of that noise; sampling adds a relative error of about "
        "1/√count. Negative counts are noise around zero.</p>",
        _ledger(ledger),
        _largest(result.top(count), len(result.rows)),
    ]
    for heading, key in (("Applications", "application"), ("Kernels", "kernel")):
        names = [str(getattr(row, key)) for row in result.rows]
        if len(set(names)) > 1:
            body.append(_totals(heading, names, result))
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        "<meta name=viewport content='width=device-width'>"
        f"<title>{_text(title)}</title><style>{style}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _ledger(ledger: Ledger) -> str:
    rows = []
    for unit, cost in ledger.units.items():
        figures = (cost.one_release, cost.worst_year, cost.full_year)
        mark = " (the unit of this task)" if unit == ledger.unit else ""
        cells = "".join(f"<td class=number>{_epsilon(value)}</td>" for value in figures)
        rows.append(f"<tr><th scope=row>per {_text(unit)}{mark}</th>{cells}</tr>")
    return (
        "<h2>Privacy cost</h2><table id=ledger><thead><tr><th>ε at δ = "
        f"{format_rounded_up(ledger.delta)}</th><th class=number>this release</th>"
        f"<th class=number>the costliest year of the {ledger.releases} collected here</th>"
        f"<th class=number>a full year of {ledger.yearly:,} releases</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
        f"<p class=note>The budget is ε = {format_rounded_up(ledger.budget)} a year per "
        f"{_text(ledger.unit)}; the aggregators refuse a release beyond it.</p>"
    )


def _largest(rows: list[Row], bucket_count: int) -> str:
    has_activity = any(row.activity for row in rows)
    widest = max((row.count + row.error for row in rows), default=1.0)
    lines = []
    for row in rows:
        activity = f"<td>{_text(row.activity)}</td>" if has_activity else ""
        lines.append(
            f"<tr{_noise_class(row.count, row.error)}><td>{_text(row.application)}</td>"
            f"<td>{_text(row.kernel)}</td>{activity}"
            + _numbers(row.count, row.error, row.share, widest)
        )
    head = "<th>application</th><th>kernel</th>" + ("<th>activity</th>" if has_activity else "")
    return (
        f"<h2>The {len(rows)} largest of {bucket_count:,} buckets</h2>"
        f"<table id=largest><thead><tr>{head}{_HEAD}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _totals(heading: str, names: list[str], result: Result) -> str:
    """Totals per class, of the applications or of the kernels; `names`: the class of each row.

    The variances of the buckets' noise add up; a sum of many is taken as normal (1.96: 95 %).
    """
    counts: dict[str, int] = defaultdict(int)
    buckets: dict[str, int] = defaultdict(int)
    for name, row in zip(names, result.rows, strict=True):
        counts[name] += row.count
        buckets[name] += 1
    deviation = result.deviation
    total = max(1, sum(counts.values()))
    ordered = sorted(counts, key=lambda name: -counts[name])
    errors = {name: 1.96 * deviation * buckets[name] ** 0.5 for name in ordered}
    shown = [name for name in ordered if counts[name] > errors[name]]
    widest = max((counts[name] + errors[name] for name in shown), default=1.0)
    lines = [
        f"<tr><td>{_text(name)}</td>"
        + _numbers(counts[name], errors[name], counts[name] / total, widest)
        for name in shown
    ]
    not_shown = len(ordered) - len(shown)
    note = f"<p class=note>{not_shown} more are within the noise.</p>" if not_shown else ""
    return (
        f"<h2>{heading}</h2><table id={heading.lower()}><thead><tr><th>class</th>{_HEAD}</tr>"
        f"</thead><tbody>{''.join(lines)}</tbody></table>{note}"
    )


_HEAD = (
    "<th class=number>samples</th><th class=number>± 95 %</th><th class=number>share</th><th></th>"
)


def _numbers(count: float, error: float, share: float, widest: float) -> str:
    return (
        f"<td class=number>{count:,.0f}</td><td class=number>{error:,.0f}</td>"
        f"<td class=number>{share:.2%}</td><td>{_bar(count, error, widest)}</td></tr>"
    )


def _bar(count: float, error: float, widest: float) -> str:
    """A bar up to the count, with a whisker over its interval."""

    def x(value: float) -> float:
        return round(min(1.0, max(0.0, value / max(1.0, widest))) * _BAR_WIDTH, 1)

    low, middle, high = x(count - error), x(count), x(count + error)
    return (
        f'<svg width="{_BAR_WIDTH + 2}" height="14" role="img" '
        f'aria-label="{count:,.0f} plus or minus {error:,.0f}">'
        f'<rect class="bar" x="0" y="2" width="{middle}" height="10"/>'
        f'<path class="whisker" d="M{low} 7H{high}M{low} 4V10M{high} 4V10"/></svg>'
    )


def _noise_class(count: float, error: float) -> str:
    """Class and title of a row whose count is within the noise; else ""."""
    return "" if count > error else ' class="noise" title="within the noise"'


def _epsilon(value: float | None) -> str:
    return "not bounded" if value is None else format_rounded_up(value)


def _text(value: object) -> str:
    return html.escape(str(value))
