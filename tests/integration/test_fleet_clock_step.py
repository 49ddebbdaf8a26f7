# SPDX-License-Identifier: Apache-2.0
"""Real aggregator processes whose wall clock is set by 30 days and back, by libfaketime."""

import json
import os
import time
from pathlib import Path

import pytest

from parties import Party, free_ports, run
from sonde.fleet import node, provision
from sonde.fleet.clock import FILE
from sonde.fleet.task import Privacy, Task

MONTH_S = 30 * 86_400
LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="needs Debian's faketime")


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """(directory, task, parties, set the clock by seconds)."""
    offset = tmp_path / "offset"

    def step(seconds):
        offset.with_suffix(".new").write_text(f"{seconds:+d}\n")
        offset.with_suffix(".new").replace(offset)

    step(0)
    leader, helper = free_ports(2)
    privacy = Privacy("gpu", "laplace", 1.0, 1e-6, 100.0)
    task = Task(
        "stepped", "histogram", 64, 1, 3600, 3600, 600, 2, privacy,
        f"https://127.0.0.1:{leader}", f"https://127.0.0.1:{helper}",
    )  # fmt: skip
    task = provision.provision(tmp_path / "fleet", task, ["a"] * 4)
    with monkeypatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(LIBRARY))
        environment.setenv("FAKETIME_TIMESTAMP_FILE", str(offset))
        environment.setenv("FAKETIME_NO_CACHE", "1")
        environment.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")  # nor CLOCK_BOOTTIME
        parties = [Party(tmp_path / "fleet" / name) for name in ("helper", "leader")]
        yield tmp_path / "fleet", task, parties, step
    for party in parties:
        party.process.terminate()
        party.process.wait(20)


def send(directory, task, number):
    home = directory / "nodes" / f"{number:04}"
    report = node.make_report(task, provision.load_node(home), [1], int(time.time()))
    return node.upload(task, report.encode(), provision.client_tls(home)).reason


def verified(directory, task):
    """Of the leader, by its operator's token; waits for the proofs."""
    from sonde.http_client import request

    bundle = provision.Credentials.load(directory / "leader")
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        answer = request(
            "GET", f"{task.leader_url}/tasks/{task.id.hex()}/status", tls=bundle.client_tls(),
            headers={"Authorization": f"Bearer {bundle.operator_token}"},
            deadline_s=10, max_bytes=1 << 20,
        )  # fmt: skip
        found = json.loads(answer.body)
        if not found["waiting"]:
            break
        time.sleep(0.05)
    return sum(found["verified"].values()), found["refused"], round(found["clock_step_s"] / 86_400)


def test_thirty_days_ahead_and_back_lose_no_report_and_refuse_no_node(fleet):
    directory, task, parties, step = fleet
    assert [send(directory, task, n) for n in (0, 1)] == ["", ""]
    assert verified(directory, task) == (2, {}, 0)
    step(MONTH_S)
    time.sleep(0.2)
    assert send(directory, task, 2) == ""
    assert verified(directory, task) == (3, {}, 30)
    for party in parties:  # a start lets expire what is old
        party.stop()
        party.start()
    assert verified(directory, task) == (3, {}, 30)
    step(0)
    time.sleep(0.2)
    assert send(directory, task, 3) == ""
    assert verified(directory, task) == (4, {}, 0)


def test_another_boot_waits_for_the_operator_and_then_goes_on(fleet):
    directory, task, parties, step = fleet
    assert send(directory, task, 0) == ""
    assert verified(directory, task)[0] == 1
    for party in parties:
        party.stop()
        kept = json.loads((party.directory / FILE).read_text())
        (party.directory / FILE).write_text(json.dumps({**kept, "boot": "another"}))
    step(MONTH_S)
    assert "LD_PRELOAD" in os.environ
    for party in parties:
        refused = run("aggregate", "--state", party.directory)
        assert refused.returncode == 3
        assert "30.0 days after" in refused.stderr
    step(0)  # the clock was wrong: nothing to accept, and nothing was deleted
    for party in parties:
        party.start()
    assert verified(directory, task)[0] == 1
