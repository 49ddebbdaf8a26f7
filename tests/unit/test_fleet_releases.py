# SPDX-License-Identifier: Apache-2.0
"""Releases of the fleet protocol for the page, over files as `sonde fleet collect` writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_server_answers import check

from fleet_release import HOSTILE, RELEASE, content
from sonde.fleet.result import Row
from sonde.server import fleet_releases
from sonde.server.schemas import FLEET


def test_a_release_is_shown_with_intervals_and_what_it_cost(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(content())
    found = json.loads(fleet_releases.listed(tmp_path))
    check(found, FLEET, "fleet")
    (one,) = found["releases"]
    rows = one["applications"]["rows"]
    assert [row["name"] for row in rows] == ["training", HOSTILE]
    assert rows[0]["count"] == 8_000
    # Two buckets of a deviation of 20 each.
    assert rows[0]["error"] == pytest.approx(1.96 * 20 * 2**0.5)
    assert rows[0]["share_error"] == pytest.approx(rows[0]["error"] / 10_000)
    assert one["applications"]["in_noise"] == 1
    assert one["spent"][0] == {
        "unit": "gpu", "one_release": 0.4, "worst_year": 1.5, "full_year": 7.9,
    }  # fmt: skip
    assert one["spent"][1]["one_release"] is None
    assert one["collected"] == 3


def test_the_newest_release_comes_first_and_a_ledger_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content(replace(RELEASE, start_s=1), ledger=None))
    (tmp_path / "b.json").write_text(content())
    found = json.loads(fleet_releases.listed(tmp_path))["releases"]
    assert [one["id"] for one in found] == ["b", "a"]
    assert (found[1]["collected"], found[1]["spent"][0]["worst_year"]) == (0, None)


def test_what_is_no_release_is_counted_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_releases, "MAX_BYTES", 1 << 16)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"task": 3}')
    (tmp_path / "negative.json").write_text(content(deviation=-1.0))
    (tmp_path / "large.json").write_text(" " * (1 << 17))
    (tmp_path / "link.json").symlink_to("/dev/zero")
    (tmp_path / "notes.txt").write_text("")
    found = json.loads(fleet_releases.listed(tmp_path))
    assert (found["releases"], found["unreadable"]) == ([], 5)
    monkeypatch.setattr(fleet_releases, "MAX_FILES", 2)
    assert json.loads(fleet_releases.listed(tmp_path))["older"] == 3
    for folder in (None, tmp_path / "missing"):
        assert not json.loads(fleet_releases.listed(folder))["shown"]


def test_many_classes_are_cut_and_counted(tmp_path: Path) -> None:
    most = fleet_releases.MAX_CLASSES
    rows = [Row(i, f"app{i}", "gemm", "", 10_000 + i, 1.0, 0.0) for i in range(most + 5)]
    (tmp_path / "many.json").write_text(content(replace(RELEASE, rows=rows)))
    (one,) = json.loads(fleet_releases.listed(tmp_path))["releases"]
    assert len(one["applications"]["rows"]) == most
    assert one["applications"]["left_out"] == 5
