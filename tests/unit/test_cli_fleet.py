# SPDX-License-Identifier: Apache-2.0
"""`sonde fleet`: a dry run shows what is sent, and names of others cannot steer the terminal."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sonde.cli import doctor, health
from sonde.cli.main import main
from sonde.cli.top import table
from sonde.fleet import collector, discovery, node
from sonde.fleet.sampling import rng_of_period

HOSTILE = "a\x1b[2J\x1b]0;owned\x07\r\n\x9b31mb"
KERNELS = ("sgemm", "softmax_fwd", "ncclDevKernel_AllReduce", "flash_fwd", "layer_norm", "adam")


def steers(text: str) -> bool:
    return any(not (c.isprintable() or c == "\n") for c in text) or "\nb" in text


def trial(folder, *more):
    assert main(["fleet", "aggregate", "--new", str(folder), "--nodes", "2", *more]) == 0
    return folder / "nodes" / "0000"


def records(path, names):
    lines = [{"name": name, "start_ns": at, "duration_ns": 1} for at, name in enumerate(names)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def dry_run(home, kernels):
    return ["fleet", "report", "--node", str(home), "--kernels", str(kernels), "--dry-run"]


@pytest.fixture
def half_past(monkeypatch):
    """The clock of a node, in the middle of a period."""
    now_s = [1_800_000 * 1000.0 + 1800]
    monkeypatch.setattr("sonde.fleet.clock.PartyClock", lambda *_, **__: lambda: now_s[0])
    monkeypatch.setattr("sonde.cli.fleet_clock.warn_of_step", lambda _: None)
    return now_s


def test_a_dry_run_shows_the_bucket_that_is_then_sent(tmp_path, capsys, monkeypatch, half_past):
    home, sent = trial(tmp_path / "trial"), []
    kernels = records(tmp_path / "kernels.jsonl", KERNELS * 50)
    make = node.make_report
    monkeypatch.setattr(node, "make_report", lambda *of: sent.append(of[2]) or make(*of))
    monkeypatch.setattr(node, "upload_with_retry", lambda *_: SimpleNamespace(accepted=True))
    shown = set()
    for _ in range(24):  # hours
        capsys.readouterr()
        assert [main(dry_run(home, kernels)) for _ in range(3)] == [0] * 3
        assert main(dry_run(home, kernels)[:-1]) == 0
        lines = capsys.readouterr().out.split("\n")
        buckets = {line.split(":")[0] for line in lines if line.startswith("bucket")}
        assert buckets == {f"bucket {bucket}" for bucket in sent[-1]}
        shown |= buckets
        half_past[0] += 3600
    assert len(shown) > 2


def test_the_instants_of_a_period_are_uniform_and_each_nodes_own():
    key, task = bytes(range(32)), bytes(32)
    draws = [rng_of_period(key, task, period).randrange(4) for period in range(4000)]
    assert all(abs(draws.count(it) - 1000) < 4 * 1000**0.5 for it in range(4))
    first = rng_of_period(key, task, 1).getrandbits(64)
    others = [(bytes(32), task, 1), (key, bytes([1]) * 32, 1), (key, task, 2)]
    assert first == rng_of_period(key, task, 1).getrandbits(64)
    assert first not in [rng_of_period(*other).getrandbits(64) for other in others]


def test_a_dry_run_shows_a_hostile_name_masked(tmp_path, capsys, half_past):
    home = trial(tmp_path / "trial", "--discovery")
    kernels = records(tmp_path / "kernels.jsonl", [HOSTILE] * 100)
    capsys.readouterr()
    assert main(dry_run(home, kernels)) == 0
    out = capsys.readouterr().out
    assert "hash of a\N{REPLACEMENT CHARACTER}[2J" in out
    assert not steers(out)


def test_known_names_are_shown_masked(tmp_path, capsys, monkeypatch, half_past):
    trial(tmp_path / "trial", "--discovery")
    names = tmp_path / "names.txt"
    names.write_text("a\x1b[2Jb\n")
    monkeypatch.setattr(
        collector, "collect", lambda *_: SimpleNamespace(privacy_guarantee=lambda: "ε = 1")
    )
    found = discovery.DiscoveredKernel(7, ("a\x1b[2Jb", HOSTILE), 100, 1.0)
    monkeypatch.setattr(discovery, "discover", lambda *_: [found])
    state = tmp_path / "trial" / "collector"
    capsys.readouterr()
    assert main(["fleet", "discover", "--state", str(state), "--names", str(names)]) == 0
    out = capsys.readouterr().out
    assert "a\N{REPLACEMENT CHARACTER}[2Jb or a" in out
    assert not steers(out)


def test_no_table_of_a_command_passes_control_characters_on():
    finding = SimpleNamespace(
        name="library", status="fail", detail=HOSTILE, needed_for="x", remedy=HOSTILE
    )
    result = SimpleNamespace(
        device="gpu0", check="link", status="fail", figure=HOSTILE, expected="1", remedy=HOSTILE
    )
    usage = SimpleNamespace(
        pid=1, user=HOSTILE, name=HOSTILE, cpu=0.1, resident_bytes=1, device=None
    )
    texts = (
        doctor.table([finding], width=80, colour=False),
        health.table([result], width=80, colour=False),
        health.line([result]),
        table([usage], [usage], 200, HOSTILE),
    )
    assert [text for text in texts if steers(text)] == []
