# SPDX-License-Identifier: Apache-2.0
"""Releases of the fleet protocol that `sonde fleet collect` wrote as JSON, for the page. Read-only.

A release is made for publication: what it reveals about one GPU or tenant is bounded by its
epsilon. So every token for `read` may read all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from sonde.errors import CaptureError
from sonde.export.strict_json import dumps
from sonde.input_files import open_input

SUFFIX = ".json"
MAX_FILES = 60
"""The newest ones; the answer has how many more there are."""
MAX_BYTES = 16 << 20
"""Of one."""
MAX_CLASSES = 200
"""Of one list of a release; the answer has how many more there are."""
_MAX_CHARS = 200
"""Names are cut to this length."""
_95_PERCENT = 1.96
"""Times the standard deviation: half the width of a 95 % confidence interval."""


class _Row(msgspec.Struct):
    """A bucket of the release: a noised count of samples."""

    application: str
    kernel: str
    count: int
    activity: str = ""


class _Cost(msgspec.Struct):
    """Epsilon for one privacy unit; None: no bound is known."""

    one_release: float | None
    worst_year: float | None
    full_year: float | None


class _Ledger(msgspec.Struct):
    """What all releases together have cost."""

    releases: int
    yearly: int
    units: dict[str, _Cost]


class _Release(msgspec.Struct):
    """A file: sonde.fleet.result.Result, its guarantee as text, and the ledger of all releases."""

    task: str
    start_s: int
    duration_s: int
    unit: str
    epsilon: dict[str, float | None]
    delta: float
    budget: float
    deviation: float
    rows: list[_Row]
    privacy: str
    ledger: _Ledger | None = None


def listed(folder: Path | None) -> bytes:
    """JSON: `shown` (whether there is a folder), `releases` (the newest first), `older` and
    `unreadable` (numbers of files)."""
    files: list[tuple[int, str, Path]] = []
    try:
        for path in folder.iterdir() if folder else ():
            if path.name.endswith(SUFFIX):
                files.append((path.lstat().st_mtime_ns, path.name, path))
    except OSError:
        folder = None
    files.sort(reverse=True)
    found: list[dict[str, Any]] = []
    unreadable = 0
    for _, name, path in files[:MAX_FILES]:
        one = _read(path)
        if one is None:
            unreadable += 1
        else:
            found.append(_document(one, name.removesuffix(SUFFIX)))
    found.sort(key=lambda one: (-one["start_s"], one["task"], one["id"]))
    return dumps(
        {
            "shown": folder is not None,
            "releases": found,
            "older": max(0, len(files) - MAX_FILES),
            "unreadable": unreadable,
        }
    ).encode()


def _read(path: Path) -> _Release | None:
    try:
        with open_input(path) as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            return None
        one = msgspec.json.decode(raw, type=_Release)
    except (OSError, ValueError, CaptureError):
        return None
    numbers = (one.delta, one.budget, one.deviation)
    return one if all(math.isfinite(number) and number >= 0 for number in numbers) else None


def _document(one: _Release, name: str) -> dict[str, Any]:
    ledger = one.ledger
    return {
        "id": name,
        "task": one.task[:_MAX_CHARS],
        "start_s": one.start_s,
        "duration_s": one.duration_s,
        "unit": one.unit[:_MAX_CHARS],
        "privacy": one.privacy[:_MAX_CHARS],
        "delta": one.delta,
        "budget": one.budget,
        "samples": sum(row.count for row in one.rows),
        "buckets": len(one.rows),
        "spent": [
            {
                "unit": unit[:_MAX_CHARS],
                "one_release": epsilon,
                "worst_year": cost.worst_year if cost else None,
                "full_year": cost.full_year if cost else None,
            }
            for unit, epsilon, cost in (
                (unit, epsilon, ledger.units.get(unit) if ledger else None)
                for unit, epsilon in list(one.epsilon.items())[:4]
            )
        ],
        "collected": ledger.releases if ledger else 0,
        "applications": _classes(one, "application"),
        "kernels": _classes(one, "kernel"),
    }


def _classes(one: _Release, column: str) -> dict[str, Any]:
    """Totals of a column's classes that are larger than their noise. Variances of the buckets'
    noise add up. The intervals of shares ignore the noise of the total, which is small beside
    it."""
    counts: dict[str, int] = defaultdict(int)
    buckets: dict[str, int] = defaultdict(int)
    for row in one.rows:
        name: str = getattr(row, column)
        counts[name] += row.count
        buckets[name] += 1
    total = max(1, sum(counts.values()))
    errors = {name: _95_PERCENT * one.deviation * math.sqrt(buckets[name]) for name in counts}
    clear = sorted(
        (name for name in counts if counts[name] > errors[name]),
        key=lambda name: (-counts[name], name),
    )
    return {
        "rows": [
            {
                "name": name[:_MAX_CHARS],
                "count": counts[name],
                "error": errors[name],
                "share": counts[name] / total,
                "share_error": errors[name] / total,
            }
            for name in clear[:MAX_CLASSES]
        ],
        "in_noise": len(counts) - len(clear),
        "left_out": max(0, len(clear) - MAX_CLASSES),
    }
