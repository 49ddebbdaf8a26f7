# SPDX-License-Identifier: Apache-2.0
"""Figures beside their truth: asserted, and noted for `python -m bench.signals.host`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TRUTH = 0.05


def agrees(what: str, recorded: float, truth: float, slack: float = 0.0) -> None:
    """Hold a figure to its truth within 5 %, or a slack in its own unit where that is more."""
    if notes := os.environ.get("SONDE_TRUTHS"):
        with Path(notes).open("a") as file:
            file.write(json.dumps({"what": what, "recorded": recorded, "truth": truth}) + "\n")
    assert recorded == pytest.approx(truth, rel=TRUTH, abs=slack), what
