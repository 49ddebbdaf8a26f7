# SPDX-License-Identifier: Apache-2.0
"""The table of agreement shows what does not hold, and what is missing."""

from __future__ import annotations

import json
import sys
import time

import pytest
from bench.signals import __main__ as session
from bench.signals import agreement

from sonde import procfs

SECOND_NS = 1_000_000_000
RECEIVED = 'hw_gpu_io_bytes_total{hw_id="0",network_io_direction="receive"}'
DRAM = 'sonde_gpu_dram_throughput_bytes_per_second{hw_id="0"}'


def scrape(second, received, dram=0.0):
    values = {RECEIVED: received, DRAM: dram}
    return {"time_ns": second * SECOND_NS, "values": values, "energy_j": None, "gpm_totals": {}}


def load(name, start, end, moved):
    times = {"start_ns": start * SECOND_NS, "end_ns": end * SECOND_NS}
    return {"name": name, "pace_s": 5.0, "bytes": moved} | times


@pytest.mark.parametrize(("lost", "holds"), [(0.0, True), (0.1, False)])
def test_bytes_that_a_page_lost_are_seen(lost, holds):
    """Each load alone and all together; headers of packets are no loss."""
    counted = (1 - lost) * 256e9 * 276 / 256
    scrapes = [scrape(0, 5.0), scrape(9, 5.0 + counted / 2), scrape(16, 5.0 + counted)]
    scrapes += [scrape(29, 5.0 + counted, dram=3e12), scrape(35, 5.0 + counted)]
    loads = [load("h2d", 1, 9, 256e9), load("stream", 17, 28, 33e12)]
    rows = agreement.page({"scrapes": scrapes, "loads": loads})
    data = [row for row in rows if row.figure == "PCIe receive, data"]
    assert [row.holds for row in data] == [holds, holds]
    (stream,) = [row for row in rows if row.figure == "DRAM rate"]
    assert stream.holds
    assert agreement.render(data).count("NO") == (0 if holds else 2)


def test_what_is_missing_is_named_and_the_rest_is_reported(tmp_path, monkeypatch, capsys):
    page = {"scrapes": [scrape(0, 0.0), scrape(9, 276e9)], "loads": [load("h2d", 1, 3, 256e9)]}
    (tmp_path / "page.json").write_text(json.dumps(page))
    monkeypatch.setattr(sys, "argv", ["agreement", str(tmp_path)])
    assert agreement.main() == 1
    out = capsys.readouterr().out
    assert "2 of 3 hold" in out  # there are no device calls
    assert "missing: phases: " in out
    assert json.loads((tmp_path / "agreement.json").read_text())["rows"]


def test_a_part_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def broken(_out):
        raise RuntimeError("no device")

    seen = []
    monkeypatch.setitem(session.PARTS, "phases", broken)
    monkeypatch.setitem(session.PARTS, "costs", seen.append)
    monkeypatch.setattr(sys, "argv", ["signals", str(tmp_path), "phases", "costs"])
    assert session.main() == 1
    assert seen == [tmp_path]
    out = capsys.readouterr().out
    assert "== phases: FAILED: no device" in out
    assert out.endswith("failed: phases\n")


def test_a_command_that_fails_ends_those_beside_it():
    with pytest.raises(RuntimeError, match="ended with 3"):
        session._run(30, [sys.executable, "-c", "exit(3)"], ["sleep", "60"])
    with pytest.raises(RuntimeError, match="took more than"):
        session._run(0.3, ["sleep", "60"])


def test_what_a_command_left_behind_is_ended_with_it(tmp_path):
    left = tmp_path / "left"
    with pytest.raises(RuntimeError, match="ended with 3"):
        session._run(30, ["sh", "-c", f"sleep 60 & echo $! > {left}; exit 3"])
    end_s = time.monotonic() + 30
    while (stat := procfs.read_stat(int(left.read_text()))) and stat.state != "Z":
        assert time.monotonic() < end_s  # it was killed, and the kernel takes its time
        time.sleep(0.01)
