# SPDX-License-Identifier: Apache-2.0
"""Who is paused by whom, and which agents were seen; by a real server and its command."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from served import Server
from sonde.errors import UsageError
from sonde.server import seen_agents
from sonde.server.collection_pauses import ALL_TENANTS, CollectionPauses, PausedBy
from sonde.server.seen_agents import AgentState, SeenAgents
from sonde.server.service import Bucket
from sonde.server.tokens import Scope, Tokens
from sonde.sinks import server as sending
from sonde.sinks.server import ServerSink
from sonde.sinks.spool import Spool

OPERATOR, TENANT = PausedBy.OPERATOR, PausedBy.TENANT


def until(done: Callable[[], object], seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_pauses_are_lifted_by_those_who_may(tmp_path: Path) -> None:
    pauses = CollectionPauses(tmp_path)
    assert not pauses.is_paused("lab")
    pauses.pause("lab", TENANT)
    assert pauses.is_paused("lab")
    assert not pauses.is_paused("neighbour")
    pauses.pause(ALL_TENANTS, OPERATOR)
    assert CollectionPauses(tmp_path).is_paused("neighbour")  # another server of the directory

    assert pauses.resume("lab", TENANT)
    assert not pauses.resume("lab", TENANT)
    assert pauses.is_paused("lab")  # the operator's word stays
    assert [one.tenant for one in pauses.paused("lab")] == [ALL_TENANTS]
    pauses.pause("lab", TENANT)
    assert len(pauses.paused("neighbour")) == 1
    assert pauses.resume(ALL_TENANTS, OPERATOR)
    assert pauses.paused() == []
    with pytest.raises(UsageError, match="cannot be the name"):
        pauses.pause("../lab", OPERATOR)


def test_agents_that_go_silent_are_marked_and_the_oldest_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = SeenAgents(nodes_a_tenant=2)
    for node, word in (("old", "collecting"), ("one", "paused"), ("two", "nonsense")):
        seen.note("lab", node, word)
    states = {one.node: one.state for one in seen.of("lab")}
    assert states == {"one": AgentState.PAUSED, "two": AgentState.COLLECTING}
    assert seen.of("neighbour") == []
    later_s = time.time() + seen_agents.SILENT_S + 1
    monkeypatch.setattr(time, "time", lambda: later_s)
    assert {one.state for one in seen.of("lab")} == {AgentState.SILENT}
    assert seen.counts()[AgentState.SILENT] == 2


def test_a_rate_that_is_used_up_names_the_time_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    bucket = Bucket(2.0)
    assert bucket.take(20)
    assert not bucket.take(5)
    assert bucket.wait_s(5) == 3
    now_s[0] += 3
    assert bucket.take(5)
    assert bucket.wait_s(1_000) <= 10  # more never fits: not for ever


def command(action: str, *flags: str, token: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sonde", "collection", action, *flags],
        capture_output=True, text=True, env={"SONDE_TOKEN": token, "PATH": "/usr/bin"},
    )  # fmt: skip


def test_an_operators_order_reaches_a_sender_and_a_tenant_does_not_lift_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "SWITCH_S", 0.2)
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    tokens = Tokens(store)
    _, writes = tokens.make("lab", [Scope.INGEST])
    _, rules = tokens.make("lab", [Scope.ADMIN, Scope.READ])
    _, neighbour = tokens.make("neighbour", [Scope.ADMIN, Scope.READ])
    tokens.close()
    (tmp_path / "token").write_text(writes)
    with Server(store, "--keep-days", "0", token=rules) as server:
        url = f"http://127.0.0.1:{server.port}"
        switched: list[bool] = []
        sink = ServerSink(url, "one", Spool(tmp_path / "spool"), tmp_path / "token")
        sink.on_switch(switched.append)

        assert command("pause", "--store", str(store), "--all").returncode == 0
        until(lambda: switched == [False])
        until(lambda: server.ask("agents")["agents"][0]["state"] == "paused")
        assert command("resume", "--server", url, token=rules).stdout.endswith("are paused\n")
        (pause,) = server.ask("agents")["paused"]
        assert pause["authority"] == "operator"
        assert 'sonde_server_agents{state="paused"} 1' in server.get("/metrics")[1].decode()
        assert command("resume", "--store", str(store), "--all").returncode == 0
        until(lambda: switched == [False, True])

        done = command("pause", "--server", url, token=rules)
        assert done.returncode == 0, done.stderr
        until(lambda: switched[-1] is False)
        until(lambda: server.ask("agents")["agents"][0]["state"] == "paused")
        shown = command("agents", "--server", url, token=rules).stdout
        assert "paused by the tenant since" in shown
        assert "one: paused, seen " in shown
        assert "collect" in command("resume", "--server", url, token=neighbour).stdout
        assert command("agents", "--server", url, token=neighbour).stdout == ""
        assert command("resume", "--store", str(store), "--tenant", "lab").returncode == 0
        until(lambda: switched[-1])
        sink.close()

        refused = command("pause", "--server", url, token=writes)
        assert refused.returncode == 1
        assert "this token is not for admin" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("list", "--store", "/nowhere/at/all"), "is no directory"),
        (("agents", "--store", "/"), "only a running server"),
        (("agents", "--server", "http://192.0.2.1:1"), "in the clear"),
        (("agents", "--server", "http://127.0.0.1:9"), "does not answer"),
        (("agents", "--server", "ftp://x"), "no server's URL"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(flags: tuple[str, ...], reason: str) -> None:
    done = command(*flags, token="secret")

    assert done.returncode in (1, 2), done
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
