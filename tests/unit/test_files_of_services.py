# SPDX-License-Identifier: Apache-2.0
"""What `sonde fleet`, `explain` and `diff` do in folders where another user got there first."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde import private_files
from sonde.cli import fleet_collect
from sonde.cli import main as cli
from sonde.errors import CaptureError, CaptureTooLarge, SinkError, UsageError
from sonde.fleet import result
from sonde.fleet.buckets import BucketSpace
from sonde.fleet.provision import provision
from sonde.fleet.result import Result
from sonde.fleet.sampling import read_records
from sonde.fleet.task import Privacy, Task
from sonde.query.capture import read
from sonde.readers import kineto, otlp_profiles
from sonde.readers.text import opened

ATTACKER = 54_321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users")


def small_task():
    privacy = Privacy("gpu", "laplace", 4.0, 1e-6, 1e9)
    return Task("t", "histogram", 16, 1, 4, 8, 2, 1, privacy)


def release():
    return Result("t", 0, 8, "gpu", {"gpu": 1.0}, 1e-6, 8.0, 1.0, [])


@pytest.fixture
def theirs(tmp_path):
    """A folder of the attacker, where everybody may look."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, ATTACKER, ATTACKER)
    return folder


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("root's own")
    path.chmod(0o600)
    return path


DROP = f"""
import ctypes, os, sys, time
os.setgroups([])
os.setresgid({ATTACKER}, {ATTACKER}, {ATTACKER})
os.setresuid({ATTACKER}, {ATTACKER}, {ATTACKER})
"""


def as_attacker(program, *arguments):
    """A process begun that is the attacker's, for real; the interpreter may lie where only root
    can start it."""
    return subprocess.Popen([sys.executable, "-c", DROP + program, *map(str, arguments)], cwd="/")


def attack(program, *arguments):
    assert as_attacker(program, *arguments).wait() == 0


# --- what is written -------------------------------------------------------------------------

SWAP = """
folder, victim, ends = sys.argv[1], sys.argv[2], time.monotonic() + 5
os.makedirs(folder + "/nodes")
os.chmod(folder, 0o777)
open(folder + "/ready", "w").close()
number = 0
while time.monotonic() < ends and number < 30:
    home = f"{folder}/nodes/{number:04}"
    if os.path.lexists(home):
        try:
            os.rename(home, home + "-roots")
            os.mkdir(home)
            for name in ("node.key", "task.json", "ca.crt"):
                os.symlink(victim, f"{home}/{name}")
        except OSError:
            pass
        number += 1
"""


@root_only
def test_a_trial_fleet_is_refused_where_another_user_could_exchange_it(theirs, victim):
    trial = theirs / "trial"
    swapping = as_attacker(SWAP, trial, victim)
    try:
        while not (trial / "ready").exists():
            time.sleep(0.01)
        with pytest.raises(UsageError, match="could be changed by other users"):
            provision(trial, small_task(), ["a"] * 30)
    finally:
        swapping.kill()
        swapping.wait()

    assert victim.read_text() == "root's own"
    assert not (trial / "leader").exists()


@root_only
def test_what_is_made_in_a_folder_stays_there_when_its_name_is_exchanged(theirs, victim):
    swap = (
        "os.chdir(sys.argv[1]); os.rename('home', 'away'); os.mkdir('home');"
        "os.symlink(sys.argv[2], 'home/key')"
    )
    held = os.open(theirs, os.O_PATH)
    with private_files.Folder(held, theirs).make("home") as home:
        attack(swap, theirs, victim)
        home.write("key", b"secret")
    os.close(held)

    assert victim.read_text() == "root's own"
    assert (theirs / "away" / "key").read_bytes() == b"secret"
    assert (theirs / "away" / "key").stat().st_uid == 0
    assert stat.S_IMODE((theirs / "away" / "key").stat().st_mode) == 0o600


def test_a_trial_fleets_files_are_for_one_user(tmp_path):
    provision(tmp_path / "deep" / "trial", small_task(), ["a", "b"])

    made = list((tmp_path / "deep" / "trial").rglob("*"))
    assert len([path for path in made if path.is_file()]) == 2 * 6 + 3 + 2 * 3
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_trial_fleet_never_replaces_one(tmp_path):
    (tmp_path / "nodes").mkdir()

    with pytest.raises(SinkError, match="File exists"):
        provision(tmp_path, small_task(), ["a"])


@root_only
@pytest.mark.parametrize("ending", ["html", "json", "csv", "parquet", "table"])
def test_a_collected_result_replaces_a_link_and_spares_what_it_leads_to(
    theirs, victim, ending, monkeypatch
):
    monkeypatch.setattr(fleet_collect, "_page", lambda *_: "<html>")
    path = theirs / f"totals.{ending}"
    attack("os.symlink(*sys.argv[1:])", victim, path)

    fleet_collect._write(ending, theirs, small_task(), release(), path)

    assert victim.read_text() == "root's own"
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == 0


@root_only
def test_a_simulated_result_is_not_written_through_a_link(theirs, victim):
    attack("os.symlink(*sys.argv[1:])", victim, theirs / "a.csv")

    result.write(release(), theirs / "a.csv")

    assert victim.read_text() == "root's own"


@root_only
def test_folders_are_not_made_behind_another_users_link(theirs, tmp_path):
    (tmp_path / "roots").mkdir()
    attack("os.symlink(*sys.argv[1:])", tmp_path / "roots", theirs / "out")

    with pytest.raises(SinkError, match="belongs to user 54321"):
        private_files.make_folder(theirs / "out" / "new")
    assert list((tmp_path / "roots").iterdir()) == []


# --- what is read ----------------------------------------------------------------------------


def read_text(path):
    with opened(path) as file:
        file.read()


READERS = [read, read_text, lambda path: list(read_records(path))]


@root_only
@pytest.mark.parametrize("read_it", READERS, ids=["capture", "text", "records"])
@pytest.mark.parametrize("kind", ["pipe", "device", "terminal"])
@pytest.mark.timeout(10)
def test_a_pipe_or_device_in_a_users_folder_is_refused_unopened(theirs, read_it, kind):
    path = theirs / "a.json"
    if kind == "pipe":
        attack("os.mkfifo(sys.argv[1])", path)
    else:
        target = "/dev/zero" if kind == "device" else "/dev/ptmx"
        attack("os.symlink(*sys.argv[1:])", target, path)

    with pytest.raises(CaptureError, match=r"is a (pipe|device)"):
        read_it(path)


FLIP = """
a, b = (os.fsencode(name) for name in sys.argv[1:])
renameat2 = ctypes.CDLL(None).renameat2
while os.getppid() != 1:
    renameat2(-100, a, -100, b, 2)
"""


@root_only
@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_pipe_while_it_is_opened_never_blocks(theirs):
    attack("os.chdir(sys.argv[1]); open('a', 'w').close(); os.mkfifo('b')", theirs)
    flipping = as_attacker(FLIP, theirs / "a", theirs / "b")
    seen = set()
    try:
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            try:
                read_text(theirs / "a")
                seen.add("file")
            except CaptureError as error:
                seen.add("pipe" if "is a pipe" in error.cause else error.cause)
    finally:
        flipping.kill()
        flipping.wait()

    assert seen == {"file", "pipe"}


def test_a_pipe_that_the_user_hands_over_is_read():
    ours, theirs_ = os.pipe()
    os.write(theirs_, b"hello")
    os.close(theirs_)
    with opened(Path(f"/dev/fd/{ours}")) as file:
        assert file.read() == b"hello"
    os.close(ours)


@pytest.mark.timeout(20)
def test_a_profile_that_names_one_location_many_times_is_read_in_time_of_its_size(tmp_path):
    profiles = pytest.importorskip("opentelemetry.proto.profiles.v1development.profiles_pb2")
    data = profiles.ProfilesData()
    tables = data.dictionary
    tables.string_table.extend(["", "cpu", "nanoseconds"])
    tables.function_table.add()
    location = tables.location_table.add()
    for _ in range(100_000):
        location.lines.add().function_index = 0
    tables.stack_table.add().location_indices.extend([0] * 200_000)
    profile = data.resource_profiles.add().scope_profiles.add().profiles.add()
    profile.sample_type.type_strindex, profile.sample_type.unit_strindex = 1, 2
    sample = profile.samples.add()
    sample.values.append(1000)
    sample.timestamps_unix_nano.append(10**9)
    (tmp_path / "q.otlp").write_bytes(data.SerializeToString())

    assert len(otlp_profiles.read(tmp_path / "q.otlp").samples.time_ns) == 1


def test_a_trace_that_comes_through_a_pipe_is_explained():
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 5, "pid": 1, "tid": 1,
             "args": {"device": 0, "stream": 7, "correlation": 1}}  # fmt: skip
    text = json.dumps({"traceEvents": [{**event, "ts": 10 * n} for n in range(500)]})
    done = subprocess.run(
        [sys.executable, "-m", "sonde", "explain", "/dev/stdin"],
        input=text, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "GPU0 — " in done.stdout


def test_a_trace_of_more_devices_than_a_host_has_is_refused(tmp_path):
    kernels = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": n, "dur": 5, "pid": 1, "tid": 1,
         "args": {"device": n, "stream": 7, "correlation": n + 1}}
        for n in range(300)
    ]  # fmt: skip
    (tmp_path / "k.json").write_text(json.dumps({"traceEvents": kernels}))

    with pytest.raises(CaptureTooLarge, match="more than 256 devices"):
        kineto.read(tmp_path / "k.json")


@pytest.mark.parametrize(
    "change",
    [
        *({"buckets": 1 << 31}, {"kind": "l1boundsum", "max_samples": 1 << 40}),
        *({"space": {"applications": -4, "kernels": -4}}, {"space": {"levels": {"a": 1}}}),
        {"space": {"applications": "x"}},
    ],
)
def test_a_task_of_another_party_takes_no_more_than_its_bounds(change):
    fields = json.loads(small_task().to_json())

    with pytest.raises(UsageError):
        BucketSpace.of_task(Task.from_json(json.dumps({**fields, **change})))


def test_a_kernel_record_beyond_all_time_is_no_defect(tmp_path):
    path = tmp_path / "k.jsonl"
    path.write_text('{"name":"k","start_ns":1e400,"duration_ns":1}\n')

    with pytest.raises(UsageError, match="holds no kernel records"):
        list(read_records(path))


# --- what is printed -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "explain", "diff x", "unknown"])
def test_a_files_name_sends_nothing_to_the_terminal(tmp_path, capfd, command):
    name = str(tmp_path / "e\x1b]0;pwn\x07\x9b31m.json")
    with contextlib.suppress(SystemExit):
        cli.main([*command.split(), name, *(["more\x1b[31m"] if command == "report" else [])])

    shown = capfd.readouterr().err
    assert shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
