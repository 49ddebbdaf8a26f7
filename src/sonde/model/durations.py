# SPDX-License-Identifier: Apache-2.0
"""Durations as texts for people."""

from __future__ import annotations


def duration(ns: float) -> str:
    """Nanoseconds with three significant digits and a suitable unit: '1.25 s', '340 µs'."""
    if ns >= 600e9:
        return f"{ns / 60e9:,.0f} min"
    for limit_ns, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        # 999.6 ms would round to 1000 ms.
        if ns >= limit_ns * 0.9995:
            return f"{three_digits(ns / limit_ns)} {unit}"
    return f"{ns:.0f} ns" if ns else "0"


def three_digits(value: float) -> str:
    """A `value` that is not less than 0.9995, with three significant digits."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
