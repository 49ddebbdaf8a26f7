# SPDX-License-Identifier: Apache-2.0
"""Attaches by root to programs of an ordinary user that are made to misuse it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import storms

from sonde.attach import library, lock, process, remote
from sonde.errors import AttachFailed, SondeError, TargetRefused

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64", reason="needs root on x86-64"
)
NOBODY = 65534
TRIES = 4


@pytest.fixture(scope="module")
def bin_() -> Iterator[Path]:
    """Hostile programs, where an ordinary user can reach them."""
    folder = Path("/var/tmp") / f"sonde-hostile-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        storms.build(folder)
        command = ["cc", "-O2", "-pthread", str(storms.PROGRAMS / "swap.c")]
        subprocess.run([*command, "-o", str(folder / "swap")], check=True)
        shutil.copy("/usr/bin/sleep", folder / "set-uid-sleep")
        (folder / "set-uid-sleep").chmod(0o4755)
        yield folder
    finally:
        shutil.rmtree(folder)


def hostile(*command: str) -> subprocess.Popen[str]:
    """A program of an ordinary user, at work."""
    it = subprocess.Popen(
        list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
    )  # fmt: skip
    assert it.stdout is not None
    assert it.stdout.readline() == "ready\n"
    return it


def race(until: str, content: Path, *command: str) -> list[str]:
    """What came of attaches to such programs, until one swapped the number before the write."""
    came: list[str] = []
    while len(came) < 40 and not (came and until in came[-1]):
        it = hostile(*command)
        try:
            remote.load(it.pid, content, "raced", wait_s=0.5)
            came.append("loaded")
        except SondeError as error:
            came.append(error.cause)
        it.communicate()  # a swap after the write may end it: what it then loads is its own file
    return came


def test_a_file_of_another_is_not_overwritten_through_a_swapped_descriptor(bin_: Path) -> None:
    victim = bin_ / "victim"
    victim.write_bytes(b"root's own" * 20_000)
    victim.chmod(0o600)
    before = victim.read_bytes()
    words = (str(bin_ / "swap"), str(victim))

    came = race("the process put another file in its place", bin_ / "payload.so", *words)

    assert victim.read_bytes() == before, came
    assert "another file" in came[-1], came


def test_a_memfd_that_the_program_can_write_is_not_taken_for_the_library(bin_: Path) -> None:
    came = race("cannot be sealed", bin_ / "payload.so", str(bin_ / "swap"), "--own", "raced")

    assert "cannot be sealed" in came[-1], came


LOCKS = """
import fcntl, os, sys, time
for path in sys.argv[1:]:
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
    except OSError:
        print("cannot", path, file=sys.stderr)
print("ready", flush=True)
time.sleep(60)
"""


def test_nobody_else_can_keep_attaches_away_with_a_lock(bin_: Path) -> None:
    target = subprocess.Popen(["/usr/bin/sleep", "60"])
    started_ns = process.start_time(target.pid)
    own = library.runtime_folders()[0] / f"attach-{target.pid}-{started_ns}.lock"
    with lock.alone(target.pid, 0.0):
        assert own.stat().st_mode & 0o777 == 0o600
        paths = (f"/proc/{target.pid}", str(own), str(own.parent))
        locks = hostile("/usr/bin/python3", "-c", LOCKS, *paths)
        with (
            pytest.raises(TargetRefused, match="somebody else is attaching"),
            lock.alone(target.pid, 0.1),
        ):
            pass
    try:
        began_s = time.monotonic()
        remote.load(target.pid, bin_ / "payload.so", "locked")
        took_s = time.monotonic() - began_s
    finally:
        for it in (locks, target):
            it.kill()
            it.communicate()

    assert took_s < 5.0
    assert not own.exists()


BORROWS_LATE = """
import sys
from pathlib import Path
from sonde import _native
from sonde.attach import glibc, threads
from sonde.attach.image import ProcessMemory

pid = int(sys.argv[1])
auxv = Path(f"/proc/{pid}/auxv").read_bytes()
with ProcessMemory(pid) as memory:
    landmarks = glibc.landmarks(memory, glibc.mappings_of(pid))
borrower = _native.ThreadBorrower(pid, landmarks, auxv)
print("known", flush=True)
sys.stdin.readline()
(sleeper,) = threads.sleepers(pid, glibc.mappings_of(pid))
attempt = borrower.load(
    sleeper.tid, b"library", "late", inner_tid=sleeper.inner_tid, call=sleeper.call,
    sp=sleeper.sp, stack=sleeper.stack, is_main=sleeper.is_main, filters=0, path_seed=1,
    bound_s=1.0,
)
borrower.close()
print(attempt.outcome, attempt.why)
"""


def test_a_program_with_other_rights_is_not_borrowed_by_what_the_first_one_showed(
    bin_: Path,
) -> None:
    """The landmarks are the first program's word: on them root would jump in the second one."""
    program = f"read x; exec {bin_}/set-uid-sleep 30"
    it = hostile("/bin/sh", "-c", f"echo ready; {program}")
    with subprocess.Popen(
        [sys.executable, "-c", BORROWS_LATE, str(it.pid)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as borrows:  # fmt: skip
        assert borrows.stdout is not None
        assert borrows.stdin is not None
        assert borrows.stdout.readline() == "known\n"
        assert it.stdin is not None
        it.stdin.write("\n")
        it.stdin.flush()
        while Path(f"/proc/{it.pid}/comm").read_text() != "set-uid-sleep\n":
            time.sleep(0.01)
        time.sleep(0.1)
        now = process.read_status(it.pid)
        output, _ = borrows.communicate("\n")
    alive = it.poll() is None
    it.kill()
    it.communicate()

    assert now is not None
    assert now.capabilities != 0, "it runs with root's rights"
    assert output == "passed-over it runs another program by now\n"
    assert alive


@pytest.fixture(scope="module")
def set_uid(bin_: Path) -> Path:
    """What became of a set-uid program of root's, as it notes; the program lies beside it."""
    notes = bin_ / "notes"
    notes.touch(mode=0o600)
    command = ["cc", "-O2", "-no-pie", f'-DNOTES="{notes}"', str(storms.PROGRAMS / "set_uid.c")]
    command += ["-Wl,--section-start=.marked=0x500000,--section-start=.bss=0x600000"]
    subprocess.run([*command, "-o", str(bin_ / "set-uid")], check=True)
    (bin_ / "set-uid").chmod(0o4755)
    command = ["cc", "-O2", "-fPIE", "-pie", str(storms.PROGRAMS / "execs.c")]
    subprocess.run([*command, "-o", str(bin_ / "execs")], check=True)
    (bin_ / "own").mkdir()
    os.chown(bin_ / "own", NOBODY, NOBODY)
    return notes


@pytest.mark.parametrize("how", ["plain", "execveat", "int80", "x32", "spin"])
def test_a_borrowed_thread_that_executes_a_set_uid_program_is_let_go(
    bin_: Path, set_uid: Path, how: str
) -> None:
    for _ in range(TRIES):
        set_uid.write_text("")
        it = subprocess.Popen(
            [str(bin_ / "execs"), str(bin_ / "own/libc.so.6"), str(bin_ / "set-uid"), how],
            stdout=subprocess.PIPE, text=True, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
        )  # fmt: skip
        assert it.stdout is not None
        keeper = int(it.stdout.readline().removeprefix("ready "))
        try:
            with pytest.raises(SondeError) as raised:
                remote.load(it.pid, bin_ / "payload.so", "executed", wait_s=3)
            assert it.wait(5) == 0, "the set-uid program came to its end"
        finally:
            os.kill(keeper, signal.SIGKILL)
            it.kill()
            it.wait()
            it.stdout.close()

        assert set_uid.read_text() == "untouched\n", raised.value.cause
        assert "another program" in raised.value.cause
        assert not isinstance(raised.value, AttachFailed), "nothing failed that is ours"
