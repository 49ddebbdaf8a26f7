# SPDX-License-Identifier: Apache-2.0
"""A wall clock that is set moves no window of a fleet, expires nothing, and shuts no node out."""

import json
import logging
import os
from dataclasses import dataclass

import pytest

from sonde.cli import fleet_collect
from sonde.cli.main import main
from sonde.errors import SinkError
from sonde.fleet import clock as clocks
from sonde.fleet import collector
from sonde.fleet.aggregator import Refused
from sonde.fleet.clock import FILE, ClockNotTrusted, ClockSources, PartyClock, accept, examine, read
from sonde.fleet.evaluation.local_deployment import HOUR_S, START_S, LocalDeployment, small_task

DAY_S, MONTH_S = 86_400, 30 * 86_400


@dataclass
class Machine:
    """Its clocks, and what happens to them."""

    wall_s: float = START_S + 60.0
    uptime_s: float = 5000.0
    boot: str = "first"

    @property
    def sources(self):
        return ClockSources(lambda: self.wall_s, lambda: self.uptime_s, lambda: self.boot)

    def passes(self, seconds):
        self.wall_s += seconds
        self.uptime_s += seconds

    def reboots(self, off_s=60.0):
        self.wall_s += off_s
        self.uptime_s, self.boot = 10.0, f"{self.boot}+"


@pytest.fixture
def machine():
    return Machine()


class Fleet(LocalDeployment):
    """Both aggregators go by this machine's clocks, as their processes do."""

    def __init__(self, directory, machine):
        self.machine, self.home = machine, directory
        super().__init__(directory, small_task(), ["a"] * 4)

    def open(self):
        self._party = PartyClock(self.home, self.machine.sources)
        super().open()

    def _clock(self):
        self.now_s = self._party()
        return self.now_s


@pytest.fixture
def fleet(tmp_path, machine):
    made = Fleet(tmp_path, machine)
    yield made
    made.close()


def verified(fleet):
    return [party.store.counts() for party in (fleet.leader, fleet.helper)]


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted meanwhile"])
@pytest.mark.parametrize("step_s", [MONTH_S, -MONTH_S, 2 * HOUR_S, 40 * 365 * DAY_S])
def test_a_step_and_back_expires_nothing_and_refuses_no_node(fleet, machine, step_s, restarted):
    assert fleet.send(fleet.report(0, [1]), fleet.report(1, [1])) == ["", ""]
    machine.wall_s += step_s
    if restarted:
        fleet.close()
        fleet.open()
    assert (fleet.leader.expire(), fleet.helper.expire()) == (0, 0)
    fleet._clock()
    assert fleet.send(fleet.report(2, [1])) == [""]  # in the middle of it
    machine.wall_s -= step_s
    fleet._clock()
    assert fleet.send(fleet.report(3, [1])) == [""]
    assert verified(fleet) == [{START_S: 4}] * 2
    machine.passes(HOUR_S + 700)
    assert len(fleet.collect().rows) == 16
    assert fleet.leader.store.refusals() == {}


def test_a_step_closes_no_batch_before_its_time(fleet, machine):
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    machine.wall_s += MONTH_S
    with pytest.raises(Refused, match="still open"):
        fleet.leader.release(START_S, HOUR_S)
    with pytest.raises(Refused, match="still open"):
        fleet.helper.check_release(START_S, HOUR_S)


def test_across_boots_a_day_is_followed_and_more_waits_with_nothing_deleted(fleet, machine):
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    fleet.close()
    machine.reboots(off_s=DAY_S - 100)
    fleet.open()
    assert fleet._clock() == machine.wall_s
    fleet.close()
    held = (fleet.home / "leader.sqlite").read_bytes()
    machine.reboots(off_s=MONTH_S)
    for _ in range(3):  # as a service that is started again and again
        with pytest.raises(ClockNotTrusted, match=r"30.0 days after .* --accept"):
            fleet.open()
    assert (fleet.home / "leader.sqlite").read_bytes() == held
    machine.wall_s -= MONTH_S  # time synchronisation came up
    fleet.open()
    assert verified(fleet) == [{START_S: 2}] * 2


@pytest.mark.parametrize("off_s", [MONTH_S, -MONTH_S, -START_S])
def test_the_operator_accepts_a_clock_across_boots(fleet, machine, off_s):
    fleet.send(fleet.report(0, [1]))
    fleet.close()
    machine.reboots(off_s)
    with pytest.raises(ClockNotTrusted, match="after" if off_s > 0 else "before"):
        fleet.open()
    assert accept(fleet.home, machine.sources) == machine.wall_s
    fleet.open()
    assert fleet._clock() == machine.wall_s


def test_what_is_accepted_while_a_party_runs_is_followed_in_a_minute(tmp_path, machine, caplog):
    clock = PartyClock(tmp_path, machine.sources)
    machine.wall_s += MONTH_S
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert clock() == machine.wall_s - MONTH_S
    assert clock.step_s == MONTH_S
    assert caplog.text.count("30.0 days") == 1  # noted once
    accept(tmp_path, machine.sources)
    machine.passes(61)
    assert clock() == machine.wall_s
    assert clock.step_s == 0


def test_small_steps_are_followed_and_many_of_them_lead_nowhere(tmp_path, machine):
    clock = PartyClock(tmp_path, machine.sources)
    machine.wall_s += 200
    assert clock() == machine.wall_s
    for _ in range(1000):
        machine.wall_s += 200
        machine.passes(1)
        clock()
    assert clock() - (START_S + 60 + 1000) <= 301


def test_a_clock_that_is_set_right_once_a_day_is_followed_for_a_year(tmp_path, machine):
    clock = PartyClock(tmp_path, machine.sources)
    for _ in range(130):
        machine.passes(DAY_S)
        machine.wall_s += 8  # a hundred millionths
        assert clock() == machine.wall_s


def test_suspend_is_time_that_passes(tmp_path, machine):
    clock = PartyClock(tmp_path, machine.sources)
    machine.passes(10 * DAY_S)  # CLOCK_BOOTTIME goes on meanwhile
    assert (clock(), clock.step_s) == (machine.wall_s, 0)


def test_downtime_counts_from_the_last_time_that_was_seen(tmp_path, machine):
    clock = PartyClock(tmp_path, machine.sources)
    for _ in range(100):
        machine.passes(DAY_S)
        clock()
    machine.reboots(off_s=3600)
    assert PartyClock(tmp_path, machine.sources)() == machine.wall_s


def test_a_boot_without_a_name_and_a_time_namespace_are_other_boots(tmp_path, machine):
    machine.boot = ""
    PartyClock(tmp_path, machine.sources)
    machine.wall_s += MONTH_S
    with pytest.raises(ClockNotTrusted):
        PartyClock(tmp_path, machine.sources)
    accept(tmp_path, machine.sources)
    machine.boot = "b"
    PartyClock(tmp_path, machine.sources)
    machine.uptime_s -= 4000
    PartyClock(tmp_path, machine.sources)
    machine.wall_s += MONTH_S
    machine.uptime_s -= 400
    with pytest.raises(ClockNotTrusted):
        PartyClock(tmp_path, machine.sources)


def test_a_file_cut_at_any_byte_waits_for_the_operator_and_is_never_a_first_start(
    tmp_path, machine
):
    PartyClock(tmp_path, machine.sources)
    whole = (tmp_path / FILE).read_bytes()
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [b"[" * 100_000, b"{}", b"null", b"\xff", whole.replace(b"5000.0", b"NaN")]
    for content in damaged:
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(ClockNotTrusted, match="cannot be read"):
            PartyClock(tmp_path, machine.sources)
    accept(tmp_path, machine.sources)
    assert PartyClock(tmp_path, machine.sources)() == machine.wall_s


def test_a_write_that_fails_leaves_the_last_one_and_the_time_goes_on(
    tmp_path, machine, monkeypatch
):
    clock = PartyClock(tmp_path, machine.sources)
    before = read(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(clocks.os, "fsync", full)
    machine.passes(100)
    assert clock() == machine.wall_s
    assert read(tmp_path) == before
    with pytest.raises(SinkError, match="cannot store the time"):
        PartyClock(tmp_path, machine.sources)
    assert PartyClock(tmp_path, machine.sources, must_persist=False)() == machine.wall_s


def test_looking_changes_nothing(tmp_path, machine):
    PartyClock(tmp_path, machine.sources)
    before = (tmp_path / FILE).read_bytes()
    machine.wall_s += MONTH_S
    assert examine(tmp_path, machine.sources) == (machine.wall_s - MONTH_S, MONTH_S)
    assert (tmp_path / FILE).read_bytes() == before


def test_the_file_is_the_partys_alone(tmp_path, machine):
    PartyClock(tmp_path, machine.sources)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / "elsewhere").write_text("theirs")
    for link in ("symlink_to", "hardlink_to"):
        getattr(tmp_path / f"{FILE}.new", link)(tmp_path / "elsewhere")
        accept(tmp_path, machine.sources)
    assert (tmp_path / "elsewhere").read_text() == "theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user than the party")
def test_what_root_accepts_the_party_can_read(tmp_path, machine):
    os.chown(tmp_path, 65534, 65534)
    accept(tmp_path, machine.sources)
    assert (tmp_path / FILE).stat().st_uid == 65534


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def set_machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(clocks, "ClockSources", lambda: machine.sources)
    return machine


def test_a_collector_that_follows_skips_no_batch_when_the_clock_is_set(
    tmp_path, set_machine, monkeypatch, capsys
):
    (tmp_path / "task.json").write_text(small_task().to_json())
    PartyClock(tmp_path)
    set_machine.wall_s += MONTH_S
    asked = []

    def denies(state, start_s):
        asked.append(start_s)
        raise collector.ReleaseDenied("too few", "")

    monkeypatch.setattr(collector, "collect", denies)
    monkeypatch.setattr(fleet_collect.time, "sleep", set_machine.passes)
    out = ("--state", str(tmp_path), "--follow", "-o", str(tmp_path / "out"), "--releases", "3")
    assert main(["fleet", "collect", *out, "--format", "csv"]) == 0
    assert asked == [START_S - 2 * HOUR_S + n * HOUR_S for n in range(3)]
    assert "was stepped by 30.0 days" in capsys.readouterr().err


@pytest.mark.parametrize("party", ["collector", "nodes/0000", "leader"])
def test_every_party_waits_after_a_reboot_until_its_operator_accepts(
    tmp_path, set_machine, capsys, party
):
    trial, kernels = tmp_path / "trial", tmp_path / "kernels.csv"
    kernels.write_text("name,start_ns,duration_ns\ngemm,0,1000\n")
    assert main(["fleet", "aggregate", "--new", str(trial), "--nodes", "2"]) == 0
    home = trial / party
    ask = {
        "collector": ["collect", "--state", str(home), "--schedule"],
        "nodes/0000": ["report", "--node", str(home), "--kernels", str(kernels), "--dry-run"],
        "leader": ["aggregate", "--state", str(home)],
    }[party]
    PartyClock(home)
    set_machine.reboots(MONTH_S)
    capsys.readouterr()
    assert main(["fleet", *ask]) == 3
    output = capsys.readouterr().err
    assert f"sonde fleet clock --state {home} --accept" in output
    assert main(["fleet", "clock", "--state", str(home)]) == 3
    assert main(["fleet", "clock", "--state", str(home), "--accept"]) == 0
    assert json.loads((home / FILE).read_text())["wall_s"] == set_machine.wall_s
    assert main(["fleet", "clock", "--state", str(home)]) == 0
    if party != "leader":
        assert main(["fleet", *ask]) == 0
