# SPDX-License-Identifier: Apache-2.0
"""Incidents for the page, over files that `sonde diagnose --keep` wrote."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

from sonde.server import incidents
from sonde.server.service import Service
from sonde.server.tokens import Caller, Scope

DATA = Path(__file__).parents[1] / "data" / "incidents"


def test_kept_incidents_are_listed_with_verdict_and_time(tmp_path: Path) -> None:
    for name in ("cpu-quota--opencl", "lock--opencl"):
        shutil.copy(DATA / f"{name}.json.gz", tmp_path)
    (tmp_path / "broken.json.gz").write_bytes(gzip.compress(b'{"incident": 3}'))
    (tmp_path / "link.json.gz").symlink_to("/dev/zero")
    (tmp_path / "other.txt").write_text("")
    found = json.loads(incidents.listed(tmp_path))
    assert found["shown"]
    assert found["unreadable"] == 2
    assert {one["verdict"]["cause"] for one in found["incidents"]} == {"cpu-quota", "lock"}
    for one in found["incidents"]:
        modified_ns = (tmp_path / f"{one['id']}.json.gz").stat().st_mtime_ns
        assert one["explained_ns"] == modified_ns
        assert one["began_ns"] <= one["noticed_ns"] <= one["explained_ns"]
        assert one["verdict"]["candidates"][0]["evidence"]


def test_the_time_and_the_node_that_were_kept_count(tmp_path: Path) -> None:
    raw = json.loads(gzip.decompress((DATA / "lock--opencl.json.gz").read_bytes()))
    raw |= {"node": "trainer-0", "wall_offset_ns": 10**18}
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(raw).encode()))
    (one,) = json.loads(incidents.listed(tmp_path))["incidents"]
    assert one["node"] == "trainer-0"
    assert one["began_ns"] == raw["incident"]["began_ns"] + 10**18


def test_a_tenant_sees_its_own_folder_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "lab").mkdir(parents=True)
    service = Service(tmp_path / "store", flushes=False, incidents=kept)
    try:
        for tenant, folder in (("lab", kept / "lab"), ("..", None), ("other", None)):
            assert service.incidents_of(Caller("t", tenant, frozenset(Scope))) == folder
    finally:
        service.close()
    assert json.loads(incidents.listed(None)) == {
        "shown": False, "incidents": [], "older": 0, "unreadable": 0,
    }  # fmt: skip
