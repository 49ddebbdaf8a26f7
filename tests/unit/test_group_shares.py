# SPDX-License-Identifier: Apache-2.0
"""Control groups that one user makes by the thousand, under any name, cost nobody else anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sonde import procfs
from sonde.agent.group_io import MAX_SUMS, GroupIo
from sonde.collect.collector import Batch
from sonde.collect.host import groups
from sonde.collect.host.groups import MAX_GROUPS, MAX_KEPT_OF_PARTY, Groups
from sonde.collect.polling import Points
from sonde.metrics import labels
from sonde.sinks import exposition, otlp, plain_series
from sonde.sinks.plain_series import PlainSeries
from sonde.sinks.series import MetricRegistry

SECOND = 1_000_000_000
ATTACKER, VICTIM = 12_345, 23_456
CONTAINER = "4f2c" * 16
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes folders of other users")


class Tree:
    """Folders and files as the kernel shows control groups of version 2."""

    def __init__(self, root: Path) -> None:
        self.root = root / "tree"
        self.root.mkdir()
        self.mountinfo = root / "mountinfo"
        self.mountinfo.write_text(f"1 1 0:1 / {self.root} rw - cgroup2 cgroup2 rw\n")

    def add(self, path: str | bytes, uid: int = 0, limit: str = "") -> bytes:
        """A group, and those above it where they are not there."""
        folder = os.fsencode(self.root)
        for part in os.fsencode(path).strip(b"/").split(b"/"):
            folder += b"/" + part
            if not os.path.isdir(folder):  # noqa: PTH112
                os.mkdir(folder)  # noqa: PTH102
                os.chown(folder, uid if folder.endswith(os.fsencode(path)) else 0, -1)
        files = {"memory.max": limit} if limit else {}
        if limit:
            files |= {"memory.current": "7\n", "memory.events": "max 0\n", "memory.stat": "x 0\n"}
            files |= {"memory.pressure": "some total=0\n"}
        for name, content in files.items():
            Path(os.fsdecode(folder), name).write_text(content)
        return folder

    def watched(self) -> Groups:
        return Groups(self.mountinfo)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def values_of(points: Points, series: str) -> list[float]:
    return [value for _, name, _, value in points.metrics if name == series]


def shown(points: Points) -> set[str]:
    """The groups that memory was reported of."""
    rows = [row for row in points.metrics if row[1] == "sonde.cgroup.memory.usage"]
    return {json.loads(row[2])["sonde.cgroup"] for row in rows}


@pytest.mark.parametrize(
    ("path", "owners", "party"),
    [
        ("/", {}, "/"),
        ("/own/x/y", {"/own": ATTACKER}, f"user {ATTACKER}"),
        ("/own/x/y", {"/own": ATTACKER, "/own/x": VICTIM}, f"user {ATTACKER}"),
        ("/a/b/c", {"/a/b/c": ATTACKER}, f"user {ATTACKER}"),
        (f"/own/docker/{CONTAINER}", {"/own": ATTACKER}, f"user {ATTACKER}"),
        (f"/docker/{CONTAINER}/x", {}, f"container {CONTAINER}"),
        (f"/docker/{CONTAINER}/x", {f"/docker/{CONTAINER}": VICTIM}, f"container {CONTAINER}"),
        (f"/docker/{CONTAINER}/x", {f"/docker/{CONTAINER}/x": 5}, f"container {CONTAINER}"),
        ("/system.slice/a.service/x/y", {}, "/system.slice/a.service"),
        ("/system.slice/a.service/x", {"/system.slice/a.service": 7}, "user 7"),
        ("/user.slice/user-7.slice/session-3.scope", {}, "user 7"),
        ("/x/user-7.slice", {}, "/x"),
        ("/slurm/uid_7/job_1/step_2/task_3", {}, "user 7"),
        ("/system.slice/slurmstepd.scope/job_1/step_2/user/task_3", {}, "job 1"),
    ],
)
def test_whose_a_group_is(path: str, owners: dict[str, int], party: str) -> None:
    assert procfs.party_of_group(path, lambda at: owners.get(at, 0)).name == party


@needs_root
def test_parties_of_groups_that_are_gone_are_known(tree: Tree) -> None:
    tree.add("/own", ATTACKER)
    parties = procfs.GroupParties(tree.mountinfo)
    assert parties.of("/own/gone/long/ago") == f"user {ATTACKER}"
    assert parties.of("/other") == "/other"
    assert parties.of("unknown") == procfs.MACHINE


@needs_root
def test_limited_groups_of_one_user_hide_nobody_elses_and_what_is_left_out_stays_reported(
    tree: Tree,
) -> None:
    victims = "/jobs/slurmstepd.scope/job_7/step_0/user/task_0"
    tree.add("/own", ATTACKER)
    for number in range(MAX_GROUPS + 44):
        tree.add(f"/own/g{number}", ATTACKER, limit="5")
    tree.add(victims, limit="5")
    watched = tree.watched()
    watched.open()
    try:
        for _ in range(2):
            points = Points()
            watched._look(points)
            watched._read(points)
            assert values_of(points, "sonde.cgroup.left_out") == [45]
        groups_shown = watched._files._paths
    finally:
        watched.close()
    assert victims in groups_shown
    assert len(groups_shown) == MAX_GROUPS


@needs_root
def test_limited_groups_of_one_user_take_few_descriptors(tree: Tree) -> None:
    tree.add("/own", ATTACKER)
    for number in range(100):
        tree.add(f"/own/g{number}", ATTACKER, limit="5")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    watched = tree.watched()
    watched.open()
    try:
        points = Points()
        watched._read(points)
        taken = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
    finally:
        watched.close()
    assert len(shown(points)) == 100
    assert 0 < taken <= 4 * MAX_KEPT_OF_PARTY


@needs_root
def test_groups_that_one_user_makes_do_not_keep_others_from_being_looked_at(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "MAX_VISITED", 64)
    tree.add("/own", ATTACKER)
    for number in range(200):
        tree.add(f"/own/g{number}", ATTACKER)
    tree.add("/own-not/a/b/c/d", limit="5")
    watched = tree.watched()
    watched.open()
    points = Points()
    watched._look(points)
    watched._read(points)
    watched.close()
    assert shown(points) == {"/own-not/a/b/c/d"}
    assert values_of(points, "sonde.cgroup.unvisited")[0] > 100


@needs_root
def test_names_that_are_no_text_stay_apart_and_spoil_no_output(tree: Tree) -> None:
    names = (b"job\xff", b"job\xfe", b"job\xed\xa0\x80", b"job?", rb"job\xff", "jöb".encode())
    for name in names:
        tree.add(b"/own/" + name, ATTACKER, limit="5")
    watched = tree.watched()
    watched.open()
    points = Points()
    watched._read(points)
    watched.close()
    board = MetricRegistry(clock=lambda: points.metrics[0][0])
    board.record(points.metrics)
    families = board.families()
    page = exposition.render(families, {}).encode()  # strict
    lines = [line for line in page.split(b"\n") if line.startswith(b"sonde_cgroup_memory_usage")]
    assert len({line.rpartition(b" ")[0] for line in lines}) == len(names)
    body = otlp._encoded(otlp.request(families, {}, 0, 0))
    assert "\udcff" not in json.dumps(json.loads(body), ensure_ascii=False)
    assert rb"job\\xff" in body
    assert "jöb".encode() in body


def test_text_that_is_none_does_not_cost_a_push() -> None:
    body = otlp._encoded({"a": "x\udcff\ud800"})
    json.loads(body)
    assert b"\\ud" not in body


def party_of(path: str) -> str:
    return path.split("/")[1] if path.startswith("/") else procfs.MACHINE


def rows(path: str, now_ns: int) -> list[tuple[int, str, str, float]]:
    label = labels(sonde__cgroup=path)
    names = ("memory.usage", "memory.limit_hits", "cpu.throttled", "cpu.periods")
    return [(now_ns, f"sonde.cgroup.{name}", label, 1.0) for name in names]


def test_groups_of_one_user_leave_room_on_the_page_and_what_is_left_out_stays_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_series, "MAX_SERIES", 400)
    now_ns = SECOND
    board = MetricRegistry(clock=lambda: now_ns, party_of_group=party_of)

    def record(*paths: str) -> dict[str, list[dict[str, str]]]:
        for path in paths:
            board.record(rows(path, now_ns))
        found = board.families()
        board.record([(now_ns, "hw.power", labels(hw__id="GPU-1"), 1.0)])
        return {metric.name: [one.attributes for one in all_of] for metric, all_of in found}

    attackers = [f"/attacker/g{number}" for number in range(150)]
    for _ in range(5):
        found = record(*attackers)
        now_ns += 30 * SECOND
        assert found["sonde.series.left_out"] == [{"sonde.party": "attacker"}]
    now_ns += 31 * SECOND
    assert "sonde.series.left_out" not in record(*attackers[:40])

    record(*attackers)
    victims = [f"/victim/g{number}" for number in range(40)]
    now_ns += SECOND
    found = record(*victims, *attackers)
    paths = [one["sonde.cgroup"] for one in found["sonde.cgroup.memory.usage"]]
    assert set(victims) <= set(paths)
    assert "hw.power" in found
    assert len(board) <= 401
    before = board.folded
    record(*victims)
    assert board.folded == before


def test_interfaces_of_namespaces_leave_room_for_groups_and_for_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_series, "MAX_OF_NAMESPACES", 100)
    board = MetricRegistry(clock=lambda: SECOND, party_of_group=party_of)
    for namespace, count in (("1", 200), ("2", 30)):
        for number in range(count):
            label = labels(
                network__interface__name=f"x{number}", sonde__network__namespace=namespace
            )
            board.record([(SECOND, "system.network.io", label, 1.0)])
    board.record(rows("/victim/x", SECOND))
    ((_, found), *_) = [it for it in board.families() if it[0].name == "system.network.io"]
    of_two = [one for one in found if one.attributes["sonde.network.namespace"] == "2"]
    assert len(of_two) == 30
    assert len(found) == 100


def test_one_partys_series_left_out_do_not_hide_anothers(monkeypatch) -> None:
    monkeypatch.setattr(plain_series, "MAX_SERIES", 4)
    monkeypatch.setattr(plain_series, "MAX_LEFT_OUT", 10)
    board = PlainSeries(party_of)

    def ask(party: str, number: int) -> None:
        label = (("sonde.cgroup", f"/{party}/g{number}"),)
        if last := board.slot(("sonde.cgroup.processes", label), SECOND):
            last.time_ns = SECOND

    for number in range(30):
        ask("attacker", number)
    for number in range(5):
        ask("victim", number)
    found = dict(board.left_out())
    assert set(found) == {"attacker", "victim"}
    assert found["victim"] == 3
    assert sum(found.values()) == 10


def test_disk_io_of_one_users_groups_is_summed_where_others_have_their_own() -> None:
    paths: dict[int, str] = {}
    io = GroupIo(lambda _, number: paths.get(number), party_of)

    def summed(numbers: range, now_ns: int) -> dict[str, float]:
        batch = Batch()
        batch.group_io = {(0, number, "sda", "read"): (1, 4096, 1, 1) for number in numbers}
        return {
            json.loads(label)["sonde.cgroup"]: value
            for _, series, label, value in io.rows(batch, now_ns)
            if series == "sonde.cgroup.disk.operations"
        }

    attackers, victims = range(1, MAX_SUMS + 501), range(10_000, 10_100)
    paths |= {number: f"/attacker/g{number}" for number in attackers}
    paths |= {number: f"/victim/g{number}" for number in victims}
    first = summed(attackers, SECOND)
    assert first["other"] == 500
    assert sum(first.values()) == len(attackers)
    later = summed(victims, 2 * SECOND)
    assert set(later) == {paths[number] for number in victims}
    paths |= {number: f"/new/g{number}" for number in range(20_000, 20_000 + MAX_SUMS)}
    last = summed(range(20_000, 20_000 + MAX_SUMS), 200 * SECOND)
    assert "other" not in last  # those of nobody's late work made room
