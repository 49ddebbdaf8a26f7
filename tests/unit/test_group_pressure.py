# SPDX-License-Identifier: Apache-2.0
"""Pressure of control groups, from a made-up tree of files to the page and the report."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from captures import START_NS, Writer
from sonde.agent import signals
from sonde.cli import main as cli
from sonde.collect.host import group_pressure
from sonde.collect.host.group_pressure import MAX_KEPT_OF_PARTY, GroupPressure
from sonde.collect.polling import Points, Schedule, SourceUnavailable
from sonde.config import Config
from sonde.export import table
from sonde.query.capture import read
from sonde.query.session import Session
from sonde.sinks import exposition
from sonde.sinks.series import MetricRegistry

SECOND_NS = 1_000_000_000


class Tree:
    """Control groups of version 2, and a /proc of who is in which."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.root.mkdir()
        self.mountinfo = folder / "mountinfo"
        self.mountinfo.write_text(f"1 1 0:1 / {self.root} rw - cgroup2 cgroup2 rw\n")
        self.processes = folder / "proc"

    def add(self, path: str, total_us: int = 0, populated: int = 1, has_psi: bool = True) -> Path:
        """A group, whose tasks waited so long for memory."""
        folder = self.root / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
        for resource, us in (("cpu", 0), ("memory", total_us), ("io", 0)):
            if has_psi:
                averages = "avg10=1.00 avg60=0.50 avg300=0.10"
                lines = [f"{kind} {averages} total={us // part}\n"
                         for kind, part in (("some", 1), ("full", 2))]  # fmt: skip
                (folder / f"{resource}.pressure").write_text("".join(lines))
        return folder

    def put(self, pid: int, path: str) -> None:
        """A process is in a group of version 2, and in one of version 1."""
        (self.processes / str(pid)).mkdir(parents=True, exist_ok=True)
        (self.processes / str(pid) / "cgroup").write_text(f"4:memory:/old\n0::{path}\n")

    def source(self, *pids: int, are_limited_read: bool = False) -> GroupPressure:
        return GroupPressure(
            frozenset(pids) or None,
            are_limited_read=are_limited_read,
            mountinfo=self.mountinfo,
            processes=self.processes,
        )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def asked(source: GroupPressure) -> Points:
    """What it reports at first, and a look later."""
    points = Points()
    source.open()
    try:
        for poll in source.polls():
            poll.read(points)
    finally:
        source.close()
    return points


def values_of(
    points: Points, series: str = "sonde.cgroup.pressure"
) -> dict[tuple[str, ...], float]:
    """Values by the values of their attributes: group, pressure, resource."""
    found = [(json.loads(row[2] or "{}"), row[3]) for row in points.metrics if row[1] == series]
    return {tuple(value for _, value in sorted(of.items())): seconds for of, seconds in found}


def test_groups_that_have_processes_are_reported(tree: Tree) -> None:
    tree.add("/a.slice", 3_000_000)
    tree.add("/a.slice/b.service", 2_000_000)
    tree.add("/a.slice/empty.service", 9_000_000, populated=0)
    points = asked(tree.source())
    found = values_of(points)
    assert found["/a.slice", "some", "memory"] == 3.0
    assert found["/a.slice/b.service", "full", "memory"] == 1.0
    assert found["/a.slice/b.service", "some", "io"] == 0.0
    assert len(found) == 2 * 3 * 2
    assert values_of(points, "sonde.cgroup.pressure_left_out") == {(): 0.0}


def test_of_recorded_processes_their_groups_alone(tree: Tree) -> None:
    tree.add("/mine", 1_000_000)
    tree.add("/others", 1_000_000)
    tree.put(os.getpid(), "/mine")
    assert {path for path, _, _ in values_of(asked(tree.source(os.getpid())))} == {"/mine"}


@pytest.mark.parametrize("path", ["/", "/../outside", "/gone (deleted)"])
def test_a_process_in_no_group_that_can_be_read_is_no_error(tree: Tree, path: str) -> None:
    tree.put(os.getpid(), path)
    assert not values_of(asked(tree.source(os.getpid())))


def test_what_is_beyond_the_bound_is_counted_and_hides_no_other_party(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_pressure, "MAX_GROUPS", 40)
    for number in range(60):
        tree.add(f"/many.service/g{number}", 1)
    tree.add("/one.service", 1)
    points = asked(tree.source())
    assert len({path for path, _, _ in values_of(points)}) == 40
    assert ("/one.service", "some", "memory") in values_of(points)
    assert values_of(points, "sonde.cgroup.pressure_left_out") == {(): 21.0}


def test_groups_of_one_party_take_few_descriptors(tree: Tree) -> None:
    for number in range(100):
        tree.add(f"/many.service/g{number}")
    source = tree.source()
    before = len(list(Path("/proc/self/fd").iterdir()))
    source.open()
    source._read(Points())
    taken = len(list(Path("/proc/self/fd").iterdir())) - before
    source.close()
    assert 0 < taken <= 3 * MAX_KEPT_OF_PARTY


def test_a_limited_group_is_reported_once(tree: Tree) -> None:
    (tree.add("/limited", 1_000_000) / "memory.max").write_text("4096\n")
    found = values_of(asked(tree.source(are_limited_read=True)))
    assert {resource for _, _, resource in found} == {"cpu", "io"}
    assert len(values_of(asked(tree.source()))) == 3 * 2


def test_a_group_that_is_removed_is_no_error(tree: Tree) -> None:
    tree.add("/stays", 1)
    gone = tree.add("/gone", 1)
    source = tree.source()
    source.open()
    for file in gone.iterdir():
        file.write_text("")  # one that stays open has nothing then
        file.unlink()
    points = Points()
    source._read(points)
    source._look(points)
    source.close()
    assert {path for path, _, _ in values_of(points)} == {"/stays"}


def test_a_machine_without_pressure_of_groups_is_a_gap_with_its_reason(tree: Tree) -> None:
    tree.add("/a", has_psi=False)
    with pytest.raises(SourceUnavailable, match="psi=1"):
        tree.source().open()
    tree.mountinfo.write_text("1 1 0:1 / /x rw - cgroup cgroup rw,memory\n")
    points = Points()
    Schedule(tree.source()).run_due(points)
    assert values_of(points, "sonde.source.up") == {("psi",): 0.0}
    assert [event.text for event in points.events] == [
        "psi: no control groups of version 2 are mounted"
    ]


@pytest.mark.parametrize("has_host", [True, False])
def test_it_is_off_unless_asked_for(has_host: bool) -> None:
    def sources(**options: bool) -> list[str]:
        config = Config(host_metrics=has_host, device_metrics=False, **options)
        assert signals.are_wanted(config) == (has_host or "group_pressure" in options)
        return [source.name for source in signals.sources_beside(config)]

    assert "psi" not in sources()
    assert sources(group_pressure=True).count("psi") == 1


@pytest.mark.parametrize("command", ["record", "agent"])
def test_both_commands_have_its_flag(command: str) -> None:
    args = cli.build_parser().parse_args([command, "--group-pressure"])
    assert args.group_pressure


def test_it_is_on_the_page_and_in_the_report(tree: Tree, tmp_path: Path) -> None:
    folder = tree.add("/a.service")
    source = tree.source()
    source.open()
    writer, points = Writer(), Points()
    for second in range(10):
        (folder / "memory.pressure").write_text(f"some total={500_000 * second}\n")
        points = Points()
        source._read(points)
        for _, series, labels, value in points.metrics:
            time_ns = START_NS + second * SECOND_NS
            row = {"time_ns": time_ns, "series": series, "labels": labels, "value": value}
            writer.rows["metric"].append(row)
    source.close()
    board = MetricRegistry(clock=lambda: points.metrics[0][0])
    board.record(points.metrics)
    page = exposition.render(board.families(), {})
    assert (
        'sonde_cgroup_pressure_seconds_total{sonde_cgroup="/a.service",'
        'sonde_pressure="some",sonde_resource="memory"} 4.5'
    ) in page
    session = Session(read(writer.write(tmp_path / "a.sonde")))
    out = io.BytesIO()
    table.write(session, out)
    (line,) = [
        line
        for line in out.getvalue().decode().splitlines()
        if line.startswith("sonde.cgroup.pressure ")
    ]
    assert "/a.service, some, memory" in line
    assert "50.0 %" in line
