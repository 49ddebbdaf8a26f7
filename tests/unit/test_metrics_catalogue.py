# SPDX-License-Identifier: Apache-2.0
"""The catalogue of metrics keeps its own rules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from sonde.metrics import KINDS, PERIODS_S, catalogue, labels, labels_of
from sonde.resolve import Counters

ROOT = Path(__file__).parents[2]
OURS = re.compile(r"(hw|system|process|k8s|container|sonde)(\.[a-z][a-z0-9_]*)+")
UNITS = re.compile(r"1|s|W|J|Hz|Cel|By|By/s|%|\{[a-z_]+\}")


def test_it_is_the_one_in_the_repository():
    contract = json.loads((ROOT / "abi/metrics.json").read_text())
    names = [line["name"] for lines in contract["groups"].values() for line in lines]
    assert sorted(names) == sorted(catalogue())  # so no name twice either


@pytest.mark.parametrize("metric", catalogue().values(), ids=lambda metric: metric.name)
def test_a_metric_is_spelt_by_the_rules(metric):
    assert OURS.fullmatch(metric.name)
    assert UNITS.fullmatch(metric.unit)
    assert metric.kind in KINDS
    assert metric.rate in PERIODS_S
    assert all(OURS.fullmatch(name) or name in ("error.type",) or "." in name
               for name in metric.attributes)  # fmt: skip
    assert metric.source
    assert not metric.brief.endswith(".")
    assert metric.brief[0].isupper() or metric.brief[0].isdigit()


def test_everything_the_resolver_counts_is_in_it():
    assert {f"sonde.resolve.{field.name}" for field in fields(Counters)} <= catalogue().keys()


def test_one_set_of_attributes_has_one_spelling():
    assert labels(hw__id="GPU-1", error__type="") == '{"hw.id":"GPU-1"}'
    assert labels_of({"b": 1, "a": "x"}) == labels_of({"a": "x", "b": 1}) == '{"a":"x","b":1}'
    assert labels() == ""


def test_the_documentation_is_made_from_it():
    script = ROOT / "scripts" / "metrics_docs.py"
    done = subprocess.run([sys.executable, str(script), "--check"])
    assert done.returncode == 0, "run scripts/metrics_docs.py"
