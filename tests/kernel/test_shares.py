# SPDX-License-Identifier: Apache-2.0
"""One user or container that floods what all share costs only its own detail."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from control_groups import group

from sonde.attach import library
from sonde.collect import blocks
from sonde.collect.kernel import Kernel, by_cpus
from sonde.collect.launch_sites import PARTY_DIVISOR, PROCESS_DIVISOR, ROWS, LaunchSites
from sonde.collect.tasks import TaskCollector

pytestmark = pytest.mark.bpf
NOBODY, DAEMON = 65534, 1
CALLS = """
import ctypes, sys
site = ctypes.CDLL(sys.argv[1]).sonde_inject_site
print("loaded", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2])):
    site(ctypes.c_uint64(number))
print("called", flush=True)
sys.stdin.readline()
"""


DEEP = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def begin(kinds):
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(kinds):
        return False
    lines = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
    for name, line in lines.items():
        try:
            open(f"/proc/self/{name}", "w").write(line)
        except PermissionError:
            assert name == "setgroups"
    return True
USER, PID = 0x10000000, 0x20000000
print(int(begin(USER | PID)), flush=True)
if (child := os.fork()):
    print(child, flush=True)
    os.waitpid(child, 0)
    os._exit(0)
levels = 1
while begin(USER):
    levels += 1
print(levels, flush=True)
"""
"""A pid namespace of a user's, and in it user namespaces as deep as the kernel allows."""


class Caller:
    """A user's process that maps the library and calls the site with ever new numbers."""

    def __init__(self, user: int, calls: int, *, is_deep: bool = False) -> None:
        code = DEEP + CALLS if is_deep else CALLS
        self.it = subprocess.Popen(
            ["/usr/bin/python3", "-I", "-c", code, str(library.path()), str(calls)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            user=user, group=user, extra_groups=[], env={"SONDE_INJECT": "off"},
        )  # fmt: skip
        self.pid = self.it.pid
        assert self.it.stdout is not None
        if is_deep:
            if self.it.stdout.readline() != "1\n":
                pytest.skip("users may make no namespaces")
            lines = {int(self.it.stdout.readline()), int(self.it.stdout.readline())}
            self.pid, self.levels = max(lines), min(lines)
        assert self.it.stdout.readline() == "loaded\n"

    def call(self) -> None:
        assert self.it.stdin is not None
        assert self.it.stdout is not None
        self.it.stdin.write("\n")
        self.it.stdin.flush()
        assert self.it.stdout.readline() == "called\n"

    def end(self) -> None:
        self.it.communicate("\n")


@pytest.mark.parametrize(("hostile", "is_deep"), [(1, False), (6, False), (10, True)])
def test_launches_that_one_user_makes_up_leave_others_their_stacks(hostile: int, is_deep: bool):
    sites = LaunchSites(Kernel(None))
    callers = [Caller(NOBODY, 20_000, is_deep=is_deep) for _ in range(hostile)]
    assert not is_deep or {caller.levels for caller in callers} == {33}
    victim = Caller(DAEMON, 200)
    for caller in (*callers, victim):
        assert sites.add(caller.pid)
    list(sites.drain())
    found: Counter[int] = Counter()
    began_s = drained_s = time.monotonic()
    for caller in (*callers, victim):
        caller.call()
        if time.monotonic() - drained_s >= 1:  # as a recorder does
            found.update(pid for (pid, _), _, _ in sites.drain())
            drained_s = time.monotonic()
    windows = int(time.monotonic() - began_s) + 2
    found.update(pid for (pid, _), _, _ in sites.drain())
    for caller in (*callers, victim):
        caller.end()
        sites.drop(caller.pid)

    assert found[victim.pid] == 200
    rows = by_cpus(ROWS)
    assert max(found.values()) <= rows // PROCESS_DIVISOR * windows
    posed = sum(found[caller.pid] for caller in callers)
    assert posed <= rows // PARTY_DIVISOR * windows
    assert sites.losses()["share"] == 20_000 * hostile - posed


def test_the_rows_of_launches_are_as_many_as_their_shares_are_parts_of():
    def maps() -> int:
        sizes = [
            int(re.search(r"max_entries:\t(\d+)", entry.read_text())[1])
            for entry in Path("/proc/self/fdinfo").iterdir()
            if entry.exists()
            and "map_type:\t1\nkey_size:\t24\nvalue_size:\t8\n" in entry.read_text()
        ]
        return sizes.count(by_cpus(ROWS))

    before = maps()  # those of a test that failed are open still
    sites = LaunchSites(Kernel(None))
    assert maps() - before == 2  # one is filled while the other is read
    del sites


@pytest.fixture
def tasks():
    it = TaskCollector(Kernel(None))
    it.start()
    it.drain(0, False)
    yield it
    it.stop()


def test_control_groups_that_a_user_makes_leave_others_their_notes(tasks):
    flood = """
import os, sys
for number in range(3000):
    os.mkdir(f"{sys.argv[1]}/{number % 7}")
    os.rmdir(f"{sys.argv[1]}/{number % 7}")
"""
    with ExitStack() as made:
        own = made.enter_context(group("memory", f"sonde-shares-{os.getpid()}"))
        os.chown(own, NOBODY, NOBODY)
        tasks.drain(0, False)
        command = ["/usr/bin/python3", "-I", "-c", flood, str(own)]
        subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", check=True)
        other = made.enter_context(group("memory", f"sonde-other-{os.getpid()}"))
        groups = tasks.drain(0, False).groups

    assert f"/{other.name}" in {it.path for it in groups}
    assert tasks.losses()["notes_full"] > 1000


def test_processes_that_a_user_starts_leave_others_their_notes(tasks):
    flood = "i=0; while [ $i -lt 4000 ]; do (:); i=$((i+1)); done"
    subprocess.run(["/bin/sh", "-c", flood], user=NOBODY, group=NOBODY, extra_groups=[], check=True)
    with subprocess.Popen(["/bin/true"]) as other:
        other.wait()
    notes = tasks.drain(0, False).notes

    assert other.pid in {it.pid for it in notes}
    assert tasks.losses()["notes_full"] > 0


def test_a_container_that_begins_user_namespaces_as_somebody_takes_nothing_of_theirs(tasks):
    flood = "i=0; while [ $i -lt 4000 ]; do (:); i=$((i+1)); done"
    as_daemon = ["setpriv", f"--reuid={DAEMON}", f"--regid={DAEMON}", "--clear-groups"]
    forge = ["unshare", "--pid", "--fork", *as_daemon, "unshare", "--user", "/bin/sh", "-c", flood]
    subprocess.run(forge, check=True)
    with subprocess.Popen(["/bin/true"], user=DAEMON, group=DAEMON, extra_groups=[]) as other:
        other.wait()
    batch = tasks.drain(0, False)

    assert other.pid in {it.pid for it in batch.notes}
    assert tasks.losses()["notes_full"] > 0


def test_root_of_a_container_poses_as_no_keeper_of_slurms_steps(tasks, tmp_path):
    keeper = tmp_path / "slurmstepd"
    keeper.write_bytes(Path("/bin/sh").read_bytes())
    keeper.chmod(0o755)
    flood = "i=0; while [ $i -lt 120 ]; do /bin/true; i=$((i+1)); done; exit 0"
    posed = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "PATH": "/bin", "PAD": "x" * 7000}
    subprocess.run(["unshare", "--pid", "--fork", keeper, "-c", flood], env=posed, check=True)
    real = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "1", "PATH": "/bin"}
    subprocess.run([keeper, "-c", "/bin/true; exit 0"], env=real, check=True)
    steps = Counter(it.step for it in tasks.drain(0, False).notes if it.step)

    assert steps["42", "1"] == 1
    assert steps["4711", "0"] == 0


READERS = """
import mmap, os, sys
f = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
page = mmap.mmap(-1, 4096)
for number in range(int(sys.argv[2])):
    if (pid := os.fork()) == 0:
        os.preadv(f, [page], 4096 * number)
        os._exit(0)
    os.wait()
    print(pid)
"""


def test_processes_of_a_user_that_read_a_disk_leave_others_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(8 << 20))
    os.sync()
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("needs O_DIRECT")
    monkeypatch.setattr(blocks, "ROWS", 1024)
    monkeypatch.setattr(blocks, "FREE_DIVISOR", 128)
    monkeypatch.setattr(blocks, "PARTY_DIVISOR", 128)
    collector = blocks.BlockCollector(Kernel(None))
    collector.start()
    try:
        collector.drain(0, False)
        command = ["/usr/bin/python3", "-I", "-c", READERS, str(file)]
        for user, count in ((NOBODY, "1500"), (DAEMON, "4")):
            done = subprocess.run(
                [*command, count],
                capture_output=True,
                user=user,
                group=user,
                extra_groups=[],
                cwd="/",
                check=True,
            )
        batch = collector.drain(0, False)
    finally:
        collector.stop()
    if not batch.seen:
        pytest.skip("the file system is on no block device")
    pids = {row[7] for row in batch.rows["activity"]}
    assert {int(pid) for pid in done.stdout.split()} <= pids
    assert collector.losses()["by_process"] > 100
