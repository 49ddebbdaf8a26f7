# SPDX-License-Identifier: Apache-2.0
"""Early warnings: on made-up levels, and on a control group whose memory grows."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde import procfs
from sonde.agent import trends
from sonde.agent.trends import Trends
from sonde.diagnose.early import AGAIN_S, MAX_SERIES, EarlyWarnings, Sign

STEP_S = 5
LIMIT = 1000.0
PATIENCE_S = 30.0


def follow(levels, *, step_s=STEP_S, limit=LIMIT):
    """Warnings with the number of the level at which each came."""
    early = EarlyWarnings()
    found = []
    for number, level in enumerate(levels):
        now_ns = (number + 1) * step_s * 10**9
        one = early.take(Sign.MEMORY, "group", level, limit, now_ns)
        if one is not None:
            found.append((number, one))
    return found


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_what_grows_towards_its_limit_is_reported_with_the_time_that_is_left(noise):
    chance = random.Random(5)
    levels = [400 + 10 * number + chance.uniform(-noise, noise) for number in range(60)]
    number, warning = follow(levels)[0]
    left_s = STEP_S * (60 - number)  # the limit is reached with the 60th
    assert number < 44  # it has risen for twice as long as it still will
    assert warning.lead_s == pytest.approx(left_s, rel=0.15)
    assert warning.slope == pytest.approx(10 / STEP_S, rel=0.15)


@pytest.mark.parametrize(
    "levels",
    [
        [900.0] * 60,  # full, and stays so
        [400 + 100 * math.sin(number / 4) for number in range(60)],  # comes and goes
        [500 + 300 * (number > 20) for number in range(60)],  # one jump
        [random.Random(number).uniform(300, 900) for number in range(60)],
        [float(number) for number in range(60)],  # far from the limit
        [400 + 0.1 * number for number in range(60)],  # hours away
        [900 - 10 * number for number in range(60)],
        [min(800, 400 + 20 * number) for number in range(20)] + [800.0] * 40,
    ],
)
def test_what_does_not_go_on_is_no_warning(levels):
    warned = [number for number, _ in follow(levels)]
    # The last one did go on for a while, and is not reported any more once it has levelled off.
    assert all(number < 24 for number in warned)
    assert len(warned) <= (1 if levels[-1] == 800.0 and levels[0] == 400 else 0)


def test_the_same_is_not_reported_again_at_once():
    levels = [310 + 10 * number for number in range(69)]
    assert len(follow(levels)) == 1
    assert AGAIN_S >= STEP_S * 69


def test_what_only_begins_to_rise_is_no_warning():
    """Such as a model that is loaded: it levels off."""
    assert follow([300 + 20 * number for number in range(20)] + [700.0] * 80) == []


def test_what_rises_for_hours_is_reported_long_before():
    """A disk that is full after ten hours: from 300 of 1,000 on, by 0.097 each 5 s."""
    number, warning = follow([300 + 700 * number / 7_200 for number in range(7_200)])[0]
    left_s = STEP_S * (7_200 - number)
    assert 1_800 < left_s < 3_600
    assert warning.lead_s == pytest.approx(left_s, rel=0.05)


def test_a_rise_behind_hours_without_one_is_reported_in_time():
    levels = [500.0 + number % 7 for number in range(3_000)]
    levels += [500 + 500 * number / 120 for number in range(120)]
    number, warning = follow(levels)[0]
    left_s = STEP_S * (3_120 - number)
    assert 40 < left_s < 300
    assert warning.lead_s == pytest.approx(left_s, rel=0.15)


@pytest.mark.parametrize("level", [math.nan, math.inf, -1.0, 1e300])
def test_levels_that_are_none_end_nothing(level):
    follow([level] * 20)
    follow([500.0] * 20, limit=level)


def test_series_beyond_the_bound_are_left_out_and_counted():
    early = EarlyWarnings()
    for number in range(MAX_SERIES + 5):
        early.take(Sign.DISK, str(number), 1.0, 2.0, 10**9)
    assert early.left_out == 5


def test_a_sensor_that_gets_hotter(tmp_path, monkeypatch):
    monkeypatch.setattr(Trends, "_disks", lambda _: ())
    monkeypatch.setattr(trends, "_run_queue", lambda: ())
    zone = tmp_path / "thermal_zone0"
    zone.mkdir()
    (zone / "trip_point_0_type").write_text("passive\n")
    (zone / "trip_point_0_temp").write_text("90000\n")
    looks = Trends(tmp_path)
    found = []
    for number in range(55):
        (zone / "temp").write_text(f"{60_000 + 500 * number}\n")
        found += looks.look((number + 1) * trends.EVERY_NS, ())
    assert [(it.sign, it.subject, it.limit) for it in found] == [
        (Sign.TEMPERATURE, "thermal_zone0", 90.0)
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a control group")
def test_a_control_group_whose_memory_grows(monkeypatch):
    """Its own time is made up: a look each 5 s takes too long here."""
    mounts = procfs.mounts_by_controller()
    folder = Path(mounts.get("memory") or mounts.get("v2") or "") / f"sonde-early-{os.getpid()}"
    try:
        folder.mkdir()
        limit = next(
            (folder / name for name in ("memory.limit_in_bytes", "memory.max")
             if (folder / name).exists()), None,
        )  # fmt: skip
        if limit is None:
            pytest.skip("no control group of this machine limits memory")
        limit.write_text(str(140 << 20))
    except OSError as error:
        folder.rmdir() if folder.exists() else None
        pytest.skip(f"no control group can be made: {error}")
    grows = (
        "import sys\nkept = []\n"
        "for _ in sys.stdin:\n kept.append(bytearray(b'x') * (4 << 20)); print('more', flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", grows], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    monkeypatch.setattr(Trends, "_disks", lambda _: ())
    monkeypatch.setattr(trends, "_run_queue", lambda: ())
    looks, found = Trends(Path("/nonexistent")), []
    try:
        (folder / "cgroup.procs").write_text(str(child.pid))
        assert child.stdin is not None and child.stdout is not None
        for number in range(30):
            child.stdin.write("more\n")
            child.stdin.flush()
            child.stdout.readline()
            found += looks.look((number + 1) * trends.EVERY_NS, [child.pid])
    finally:
        child.kill()
        child.communicate()
        ends_s = time.monotonic() + PATIENCE_S
        while folder.exists() and time.monotonic() < ends_s:
            try:
                folder.rmdir()
            except OSError:
                time.sleep(0.02)
    (warning,) = [it for it in found if it.subject == str(folder)]
    assert warning.sign == Sign.MEMORY
    assert warning.limit == 140 << 20
    assert 0 < warning.lead_s < 600


@pytest.mark.parametrize(
    ("stat", "used"),
    [
        ("anon 600\nfile 300\ninactive_file 250\nactive_file 50\n", 650),
        ("cache 300\ninactive_file 10\ntotal_inactive_file 250\n", 650),  # version 1
        ("inactive_file 2000\n", 0),  # it is read later than the usage
        ("inactive_file many\n", 900),
        ("", 900),
    ],
)
def test_pages_of_files_that_the_kernel_takes_back_are_not_used_memory(tmp_path, stat, used):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text(stat)
    assert procfs.working_set_of(str(tmp_path)) == (used, 1000)
    assert procfs.working_set_in(files(tmp_path)) == (used, 1000)
    (tmp_path / "memory.max").write_text("max\n")
    assert procfs.working_set_of(str(tmp_path)) == (0, 0)
    assert procfs.working_set_in(files(tmp_path)) == (0, 0)


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_each_file_system_in_memory_is_followed(tmp_path, monkeypatch):
    """All have the same source, tmpfs."""
    monkeypatch.setattr(trends, "MAX_MOUNTS", 1_000)
    points = [tmp_path / "a é", tmp_path / "c"]
    try:
        for point in points:
            point.mkdir()
            options = f"size={trends.MIN_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], check=True)
        subprocess.run(["mount", "--bind", points[1], points[1]], check=True)  # not twice
        (points[1] / "file").write_bytes(b"x" * (1 << 20))
        found = {it[1]: it[2:] for it in Trends(tmp_path)._disks()}
    finally:
        for point in (*points, points[1]):
            subprocess.run(["umount", point], check=False, stderr=subprocess.DEVNULL)
    assert found[str(points[0])] == (0.0, trends.MIN_BYTES)
    assert found[str(points[1])] == (1 << 20, trends.MIN_BYTES)
    assert [*found].count(str(points[1])) == 1


def test_disks_go_before_file_systems_in_memory(tmp_path, monkeypatch):
    memory = "{0} 1 0:{0} / /run/{0} rw - tmpfs tmpfs rw\n"
    mounts = "".join(memory.format(number) for number in range(30, 70))
    mounts += "90 1 8:1 / /data rw - ext4 /dev/sda1 rw\n"
    monkeypatch.setattr(trends, "_text", {Path("/proc/self/mountinfo"): mounts}.get)
    seen = []

    def asked(point):
        seen.append(point)
        raise OSError

    monkeypatch.setattr(trends.os, "statvfs", asked)
    assert [*Trends(tmp_path)._disks()] == []
    assert seen[0] == "/data"
    assert len(seen) == trends.MAX_MOUNTS


def test_what_is_beyond_the_bounds_of_a_reading_is_counted(tmp_path, monkeypatch):
    disk = "{0} 1 8:{0} / /mnt/{0} rw shared:1 - ext4 /dev/{0} rw\n"
    mounts = "".join(disk.format(number) for number in range(trends.MAX_MOUNTS + 3))
    texts = {"/proc/self/mountinfo": mounts, "/proc/loadavg": ""}
    monkeypatch.setattr(trends, "_text", lambda path: texts.get(str(path), ""))
    for number in range(trends.MAX_SENSORS + 5):
        (tmp_path / f"thermal_zone{number}").mkdir()
    deep = [f"/group/{number}" for number in range(trends.MAX_GROUPS + 7)]
    monkeypatch.setattr(trends.procfs, "mounts_by_controller", lambda: {"v2": "/group"})
    monkeypatch.setattr(trends.procfs, "groups_of", lambda pid, _: deep)
    look = lambda asked, *_, **__: ([None] * len(asked), 2)  # noqa: E731
    monkeypatch.setattr(trends.procfs.GROUPS, "look", look)
    looks = Trends(tmp_path)
    looks.look(trends.EVERY_NS, range(1, trends.MAX_PROCESSES + 12), lambda _: 0)
    assert looks.left_out == 3 + 5 + 7 + 11 + 2
