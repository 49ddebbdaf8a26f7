# SPDX-License-Identifier: Apache-2.0
"""Files as `sonde fleet collect -o NAME.json` writes them, of a release that is made up."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from sonde.fleet.result import Result, Row

HOSTILE = '"><img src=x onerror=document.title=1>'
ROWS = [
    Row(0, "training", "gemm", "", 6_000, 40.0, 0.6),
    Row(1, "training", "attention", "", 2_000, 40.0, 0.2),
    Row(2, HOSTILE, "gemm", "", 1_990, 40.0, 0.2),
    Row(3, "inference", "gemm", "", 10, 40.0, 0.0),
]
RELEASE = Result(
    "gpus", 1_800_000_000, 86_400, "gpu", {"gpu": 0.4, "tenant": None}, 1e-6, 8.0, 20.0, ROWS
)


def content(release: Result = RELEASE, **more: Any) -> str:
    """The file."""
    units = {"gpu": {"one_release": 0.4, "worst_year": 1.5, "full_year": 7.9}}
    ledger = {"unit": "gpu", "delta": 1e-6, "budget": 8.0, "releases": 3, "yearly": 365}
    given = {**asdict(release), "privacy": release.privacy_guarantee()}
    return json.dumps({**given, "ledger": {**ledger, "units": units}, **more})
