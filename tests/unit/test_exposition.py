# SPDX-License-Identifier: Apache-2.0
"""The page for Prometheus under the names of dcgm-exporter."""

from __future__ import annotations

from typing import Any

import pytest

from sonde.metrics import catalogue
from sonde.sinks import exposition
from sonde.sinks.exposition import DcgmField
from sonde.sinks.series import Series

INFO, LIMIT, USAGE = "sonde.gpu.info", "hw.gpu.memory.limit", "hw.gpu.memory.usage"


def family(name: str, *values: tuple[dict[str, str], float]) -> tuple[Any, list[Series]]:
    series = [Series({"hw.id": "GPU-1", **more}, value) for more, value in values]
    return catalogue()[name], series


def test_only_what_has_the_same_attributes_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"kind": "frame buffer"}
    field = DcgmField("DCGM_FI_DEV_FB_FREE", "gauge", LIMIT, 1.0, where, USAGE)
    monkeypatch.setattr(exposition, "dcgm_fields", lambda: (field,))
    families = [
        family(INFO, ({}, 1.0)),
        family(LIMIT, (where, 80.0), ({"kind": "bar1"}, 7.0)),
        family(USAGE, (where, 10.0), (where, 20.0), ({"kind": "bar1"}, 5.0)),
    ]

    page = exposition.render_dcgm(families, "host")

    assert page.splitlines()[-1].endswith("} 50.0")
