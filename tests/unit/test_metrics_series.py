# SPDX-License-Identifier: Apache-2.0
"""Series that exporters hold: bounded whatever the node does, summed by owner."""

from __future__ import annotations

import random

import pytest

from sonde.agent.owner_attributes import Holders, attributes
from sonde.metrics import labels
from sonde.model.owner import Owner
from sonde.procfs import parties
from sonde.sinks import plain_series, series, tenants
from sonde.sinks.series import COMMAND, OTHER, PROGRAM, MetricRegistry

SECOND = 1_000_000_000
GPU = "GPU-1"


class Clock:
    now_ns = SECOND

    def __call__(self):
        return self.now_ns


def of_process(pid, gpu=GPU):
    return labels(hw__id=gpu, process__pid=pid, sonde__process__start=pid)


def values(board, name):
    for metric, found in board.families():
        if metric.name == name:
            return {tuple(sorted(one.attributes.items())): one.value for one in found}
    return {}


@pytest.fixture
def clock():
    return Clock()


def test_the_last_value_counts(clock):
    board = MetricRegistry(clock=clock)
    board.record(
        [(1, "hw.power", labels(hw__id=GPU), 1.0), (2, "hw.power", labels(hw__id=GPU), 2.0)]
    )
    assert values(board, "hw.power") == {(("hw.id", GPU),): 2.0}


def test_processes_of_one_owner_are_one_series(clock):
    board = MetricRegistry(lambda pid, start: {PROGRAM: "train" if pid < 10 else "serve"}, clock)
    board.record(
        (clock.now_ns, "sonde.process.gpu.memory", of_process(pid), 10.0) for pid in (1, 2, 11)
    )
    assert values(board, "sonde.process.gpu.memory") == {
        (("hw.id", GPU), (PROGRAM, "train")): 20.0,
        (("hw.id", GPU), (PROGRAM, "serve")): 10.0,
    }


def test_a_process_that_is_gone_is_taken_away(clock):
    board = MetricRegistry(lambda pid, start: {PROGRAM: "train"}, clock)
    board.record(
        (clock.now_ns, "sonde.process.gpu.memory", of_process(pid), 10.0) for pid in (1, 2)
    )
    clock.now_ns += 4 * SECOND
    board.record([(clock.now_ns, "sonde.process.gpu.memory", of_process(1), 10.0)])
    clock.now_ns += 2 * SECOND
    assert list(values(board, "sonde.process.gpu.memory").values()) == [10.0]
    clock.now_ns += 60 * SECOND
    assert not values(board, "sonde.process.gpu.memory")


def test_a_counter_never_falls_when_processes_end(clock):
    board = MetricRegistry(lambda pid, start: {PROGRAM: "train"}, clock)
    before = 0.0
    for pid in range(1, 400):
        clock.now_ns += SECOND
        board.record([(clock.now_ns, "sonde.process.gpu.engine.time", of_process(pid), 2.0)])
        (now,) = values(board, "sonde.process.gpu.engine.time").values()
        assert now >= before
        before = now
    assert before == 2.0 * 399


def test_ten_thousand_short_lived_processes_do_not_grow_the_series(clock):
    """Each with another program: the worst there is."""
    board = MetricRegistry(lambda pid, start: {PROGRAM: f"program-{pid}"}, clock)
    total = 0.0
    for pid in range(1, 10_001):
        clock.now_ns += 5_000_000
        board.record([(clock.now_ns, "sonde.process.gpu.engine.time", of_process(pid), 1.0)])
        board.count("process.cpu.time", {"process.pid": str(pid)}, 1.0)
        total += 1.0
    assert len(board) <= 2 * (series.MAX_OWNED + 1)
    for name in ("sonde.process.gpu.engine.time",):
        found = values(board, name)
        assert sum(found.values()) == total  # nothing is lost: the rest is under `other`
        assert any((PROGRAM, OTHER) in attributes for attributes in found)
    assert board.folded > 9_000
    assert len(board._plans) <= series.MAX_PLANS


def test_series_of_other_kinds_are_bounded_too(clock, monkeypatch):
    monkeypatch.setattr(plain_series, "MAX_SERIES", 50)
    board = MetricRegistry(clock=clock)
    for number in range(1000):
        board.record([(clock.now_ns, "hw.power", labels(hw__id=f"GPU-{number}"), 1.0)])
    assert len(board) == 50
    assert board.folded == 950


def test_more_series_than_plans_leave_the_plans_in_use(clock, monkeypatch):
    monkeypatch.setattr(series, "MAX_PLANS", 50)
    board = MetricRegistry(clock=clock)
    made = []
    plan_of = board._folded
    monkeypatch.setattr(board, "_folded", lambda a: made.append(a["hw.id"]) or plan_of(a))
    for number in range(1_000):
        for one in (GPU, f"other-{number}"):
            board.record([(clock.now_ns, "hw.power", labels(hw__id=one), 1.0)])
        assert len(board._plans) <= 50
    assert made.count(GPU) == 1


def test_more_owners_than_are_cached_leave_those_in_use(clock):
    board, kept = MetricRegistry(clock=clock), []
    for number in range(3 * series.MAX_OWNED):
        for name in ("stays", f"p{number}"):
            board.count_owned({PROGRAM: name}, [("sonde.cpu.samples", {}, 1.0)])
        kept.append(board._wholes[(PROGRAM, "stays"),])
    assert all(one is kept[0] for one in kept)
    assert len(board._wholes) <= series.MAX_OWNED


def test_what_is_not_reported_any_more_is_forgotten(clock):
    board = MetricRegistry(clock=clock)
    board.record([(clock.now_ns, "hw.power", labels(hw__id=GPU), 1.0)])
    clock.now_ns += int(1.5 * series.FORGOTTEN_AFTER_S * SECOND)
    assert not values(board, "hw.power")


def test_random_rows_never_break_it(clock):
    chance = random.Random(7)
    board = MetricRegistry(lambda pid, start: {PROGRAM: f"p{pid % 7}"}, clock)
    names = ["hw.power", "sonde.process.gpu.memory", "sonde.process.gpu.engine.time", "unheard.of"]
    for _ in range(5_000):
        clock.now_ns += chance.randrange(10**8)
        name = chance.choice(names)
        tags = of_process(chance.randrange(500)) if "process" in name else labels(hw__id=GPU)
        board.record([(clock.now_ns, name, tags, chance.random())])
        if chance.random() < 0.01:
            board.families()
    assert len(board) < 20


def test_the_names_of_one_user_cost_no_other_users_counters(clock):
    board = MetricRegistry(clock=clock)
    for number in range(600):
        mallory = {PROGRAM: f"n{number}", "process.owner": "mallory"}
        board.count_owned(mallory, [("process.cpu.time", {}, 1.0)])
    victim = {PROGRAM: "train", "process.owner": "ada"}
    board.count_owned(victim, [("process.cpu.time", {}, 5.0)])

    found = values(board, "process.cpu.time")
    assert found[("process.executable.name", "train"), ("process.owner", "ada")] == 5.0
    rest = found[("process.executable.name", OTHER), ("process.owner", "mallory")]
    assert rest == 600 - series.MAX_OF_TENANT
    assert sum(found.values()) == 605
    assert board.folded == rest


def test_where_many_owners_hold_all_room_an_owner_keeps_its_total(clock):
    board = MetricRegistry(clock=clock)
    for number in range(600):
        user = {PROGRAM: f"n{number}", "process.owner": f"user{number % 8}"}
        board.count_owned(user, [("process.cpu.time", {}, 1.0)])
    board.count_owned({PROGRAM: "a", "process.owner": "ada"}, [("process.cpu.time", {}, 5.0)])
    board.count_owned({PROGRAM: "b", "process.owner": "ada"}, [("process.cpu.time", {}, 2.0)])

    found = values(board, "process.cpu.time")
    assert found[("process.executable.name", OTHER), ("process.owner", "ada")] == 7.0
    assert len(found) <= series.MAX_OWNED + series.MAX_RESTS + 1


POSES = {
    "sessions": lambda n: Owner(
        user="mallory", unit=f"session-{n}.scope",
        cgroup=f"/user.slice/user-7.slice/session-{n}.scope",
    ),
    "subordinate users": lambda n: Owner(
        user=str(100_000 + n), unit="user@7.service",
        cgroup=f"/user.slice/user-7.slice/user@7.service/app.slice/a{n}.service",
    ),
    "steps": lambda n: Owner(user="mallory", job="4", step=str(n)),
    "jobs": lambda n: Owner(user="mallory", job=str(n), step="batch"),
    "users of a container": lambda n: Owner(user=str(n), runtime="docker", container="c0de" * 16),
    "containers of a pod": lambda n: Owner(
        user=str(n), pod_uid="u", pod="p", namespace="n", container=f"{n:064}",
        container_name=f"c{n}",
    ),
    "cron": lambda n: Owner(user="mallory", unit=f"cron-{n}.service"),
    "users of a container in a unit": lambda n: Owner(
        user=str(20_000 + n), unit="web.service", inner_container="c0de" * 16,
        cgroup=f"/system.slice/web.service/libpod-payload-{'c0de' * 16}",
    ),
    "containers in a unit": lambda n: Owner(
        user=str(20_000 + n), unit="web.service", inner_container=f"{n:064}",
        cgroup=f"/system.slice/web.service/{n:064}",
    ),
    "pid namespaces in a unit": lambda n: Owner(
        user=str(20_000 + n), unit="web.service", cgroup="/system.slice/web.service",
        inner_pid=2,
    ),
    "pid namespaces in no unit": lambda n: Owner(
        user=str(20_000 + n), cgroup="/own", inner_pid=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("pose", POSES.values(), ids=POSES)
def test_however_many_owners_one_tenant_poses_as_the_others_keep_their_series(clock, pose):
    board = MetricRegistry(clock=clock)
    for number in range(1000):
        mallory = attributes("spin", pose(number), 1000 + number)
        board.count_owned(mallory, [("process.cpu.time", {}, 1.0)])
    for number in range(10):
        ada = attributes(f"train{number}", Owner(user="ada", job="9", step="0"))
        board.count_owned(ada, [("process.cpu.time", {}, 5.0)])

    found = values(board, "process.cpu.time")
    adas = {key: value for key, value in found.items() if ("process.owner", "ada") in key}
    assert list(adas.values()) == [5.0] * 10
    assert sum(found.values()) == 1050
    assert len(found) <= series.MAX_OF_TENANT + series.MAX_RESTS_OF_TENANT + 1 + 10


def test_who_is_no_container_keeps_the_user_and_the_units_share():
    service = Owner(user="ada", unit="web.service", cgroup="/system.slice/web.service", inner_pid=7)
    assert attributes("train", service, 7)["process.owner"] == "ada"
    inside = attributes("train", service, 1007)
    assert "process.owner" not in inside
    root = Owner(user="root", unit="web.service", cgroup="/system.slice/web.service", inner_pid=1)
    its = [tuple(sorted(one.items())) for one in (inside, attributes("train", root, 1007))]
    assert tenants.tenant_of(its[0]) != tenants.tenant_of(its[1])


def test_a_users_own_containers_are_the_users():
    its = "/user.slice/user-7.slice/user@7.service/app.slice/libpod-" + "c0de" * 16
    found = attributes(
        "train", Owner(user="ada", unit="user@7.service", cgroup=its, inner_pid=2), 9
    )
    assert found["process.owner"] == "ada"


def test_a_users_subordinate_ids_are_his_wherever_they_run(clock, monkeypatch, tmp_path):
    """In cron or a service, that is: no unit of a logged-in user shows whose they are."""
    subordinate = tmp_path / "subuid"
    subordinate.write_text("7:100000:65536\n")
    monkeypatch.setattr(parties, "_SUBORDINATE", subordinate)
    monkeypatch.setattr(parties, "_holders", parties._Holders())
    board = MetricRegistry(clock=clock, holder_of=Holders().of)
    for number in range(1000):
        owner = Owner(user=str(100_000 + number), unit="cron.service")
        board.count_owned(attributes("spin", owner), [("process.cpu.time", {}, 1.0)])
    ada = attributes("train", Owner(user="20001", unit="cron.service"))
    board.count_owned(ada, [("process.cpu.time", {}, 5.0)])

    found = values(board, "process.cpu.time")
    assert [value for key, value in found.items() if ("process.owner", "20001") in key] == [5.0]
    assert sum(found.values()) == 1005
    assert len(found) <= series.MAX_OF_TENANT + series.MAX_RESTS_OF_TENANT + 2


def test_counters_of_processes_that_are_gone_give_their_room_back(clock):
    board = MetricRegistry(clock=clock)
    for number in range(600):
        mallory = {PROGRAM: f"n{number}", "process.owner": "mallory"}
        board.count_owned(mallory, [("process.cpu.time", {}, 1.0)])
    clock.now_ns += int(1.5 * series.COUNTERS_FORGOTTEN_AFTER_S * SECOND)

    assert not values(board, "process.cpu.time")
    board.count_owned({PROGRAM: "n", "process.owner": "mallory"}, [("process.cpu.time", {}, 1.0)])
    assert list(values(board, "process.cpu.time").values()) == [1.0]


def test_scripts_of_one_interpreter_are_series_as_far_as_there_is_room(clock):
    """Of a tenant with very many scripts, further ones are one series of their program, and no
    more room is taken from its other programs."""
    board = MetricRegistry(clock=clock)
    for number in range(100):
        script = {PROGRAM: "python3.11", COMMAND: f"job{number}.py", "process.owner": "ada"}
        board.count_owned(script, [("process.cpu.time", {}, 1.0)])
    board.count_owned({PROGRAM: "redis", "process.owner": "ada"}, [("process.cpu.time", {}, 3.0)])

    found = values(board, "process.cpu.time")
    first = (COMMAND, "job0.py"), (PROGRAM, "python3.11"), ("process.owner", "ada")
    assert found[first] == 1.0
    assert found[(PROGRAM, "python3.11"), ("process.owner", "ada")] == 75.0
    assert found[(PROGRAM, "redis"), ("process.owner", "ada")] == 3.0
    assert board.folded == 0
    clock.now_ns += int(2 * series.COUNTERS_FORGOTTEN_AFTER_S * SECOND)
    board.families()
    assert not any(board._commands["process.cpu.time"].values())
