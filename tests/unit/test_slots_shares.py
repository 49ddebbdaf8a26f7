# SPDX-License-Identifier: Apache-2.0
"""Whose slots are looked for first: programs that change all the time keep nobody waiting."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sonde import _native, interpreter, procfs
from sonde.collect import inject_abi as abi
from sonde.collect import slots
from sonde.collect.slots import Slots

LOOK_S = 0.4
HOGS = 12
CHILD = f"""
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    with open(sys.argv[1], "a") as log:
        print(request["pid"], time.monotonic(), file=log)
    time.sleep({LOOK_S})
    print('{{"slots": [], "cut": false, "bytes": 0, "cpu_s": {LOOK_S}}}', flush=True)
"""


class Program:
    """A process of a user, and what its library's memory would hold."""

    def __init__(self, uid: int) -> None:
        self.process = subprocess.Popen(["sleep", "120"], user=uid, group=uid)
        self.fd = os.memfd_create("library")
        os.ftruncate(self.fd, abi.SLOTS_AT)
        os.pwrite(self.fd, struct.pack("=Q", 4096), abi.FUNCTIONS_AT)
        self.modules = 0
        self.change(functions_seq=1, functions_count=1)

    def change(self, **fields: int) -> None:
        """More modules, and other fields of the state."""
        self.modules += 1
        for name, value in {**fields, "modules": self.modules}.items():
            at, code = abi.STATE_FIELDS[name]
            os.pwrite(self.fd, struct.pack("=" + code, value), abi.STATE_AT + at)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    made = [Program(4_000_001), *(Program(4_000_002) for _ in range(HOGS))]
    yield made
    for one in made:
        one.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users")
def test_many_that_change_all_the_time_keep_nobody_of_another_user_waiting(
    programs: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slots, "_report", lambda self, followed: None)
    log = tmp_path / "log"
    log.touch()
    follower = Slots((sys.executable, "-c", CHILD, str(log)))
    ending = threading.Event()

    def change() -> None:
        while not ending.wait(0.02):
            for one in programs[1:]:
                one.change()

    changing = threading.Thread(target=change)
    changing.start()
    victim = programs[0]
    waited_s = []
    try:
        for one in programs:
            stat = procfs.read_stat(one.process.pid)
            assert stat is not None
            follower.follow(one.process.pid, stat.start_ns, one.fd)
        for _ in range(3):
            time.sleep(3 * LOOK_S)
            victim.change()
            changed_s, waited = time.monotonic(), None
            while waited is None:
                assert time.monotonic() < changed_s + 30
                time.sleep(0.02)
                for line in log.read_text().splitlines():
                    pid, at_s = line.split()
                    if int(pid) == victim.process.pid and float(at_s) > changed_s:
                        waited = float(at_s) - changed_s
            waited_s.append(waited)
        ends_s = time.monotonic() + 60
        looked: set[int] = set()
        while len(looked) < len(programs):
            assert time.monotonic() < ends_s
            time.sleep(LOOK_S)
            looked = {int(line.split()[0]) for line in log.read_text().splitlines()}
        failed = follower.failed
    finally:
        ending.set()
        changing.join()
        follower.close()
    # A look that goes on, and the pause after the victim's own.
    assert sorted(waited_s)[1] < 3 * LOOK_S + slots.FIRST_PAUSE_S
    assert failed == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users")
def test_whose_process_makes_a_look_hang_is_left_alone(
    programs: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, such a subprocess goes on, as one does that waits for a user's file system."""
    monkeypatch.setattr(Slots, "_report", lambda self, followed: None)
    monkeypatch.setattr(slots, "DEADLINE_S", 0.3)
    monkeypatch.setattr(slots, "LATE_S", 0.3)
    hanging = []

    class Hanging(subprocess.Popen[bytes]):
        def poll(self) -> int | None:
            return None

    def start(command: object, **_: object) -> subprocess.Popen[bytes]:
        hanging.append(Hanging(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return hanging[-1]

    monkeypatch.setattr(interpreter, "start", start)
    follower = Slots()
    try:
        for one in programs[1:]:
            stat = procfs.read_stat(one.process.pid)
            assert stat is not None
            follower.follow(one.process.pid, stat.start_ns, one.fd)
        ends_s = time.monotonic() + 30
        while follower.failed < HOGS:
            assert time.monotonic() < ends_s
            for one in programs[1:]:
                one.change()
            time.sleep(0.02)
        assert len(hanging) == slots.HANGING_OF_PARTY
        assert follower._may_look_at(procfs.party_of(programs[0].process.pid))
    finally:
        follower.close()
        for child in hanging:
            child.kill()
            subprocess.Popen.wait(child)


def test_a_process_that_changes_all_the_time_gets_its_share() -> None:
    one = slots._Followed(1, 0, -1, 0, 0.0)
    assert one.credit(0.0) == slots.CREDIT_S
    one.credit_s = -1.0
    assert one.credit(10.0) == pytest.approx(-1 + 10 * slots.SHARE)
    assert one.credit(1e6) == slots.CREDIT_S


def test_a_span_of_terabytes_ends_with_the_bytes_that_may_be_read(tmp_path: Path) -> None:
    """The file of a module has the size that its maker writes."""
    library = tmp_path / "sonde-inject-0.so"
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    head += struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, 4096, 64 << 40, 4096)
    library.write_bytes(head.ljust(8192, b"\0"))
    script = (
        "import mmap, sys, time\n"
        "f = open(sys.argv[1], 'rb')\n"
        "m = mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)\n"
        "print(m[:1] and 'ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began_s = time.process_time()
        found, cut, _ = _native.SlotFinder().find(process.pid, [0x7F12_3456_7801], True, 1 << 30)
        took_s = time.process_time() - began_s
        process.kill()
    assert (found, cut) == ([], True)
    assert took_s < 5


def test_a_file_that_changes_all_the_time_takes_bounded_memory(tmp_path: Path) -> None:
    """Each time it is opened it is another file, with as many imports as are kept of one."""
    source, library = tmp_path / "many.c", tmp_path / "libmany.so"
    names = ", ".join(["cuInit"] * 16_384)
    source.write_text(f"extern int cuInit(unsigned);\nvoid *table[] = {{ {names} }};\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    program = (
        "import mmap, os, sys, time\n"
        "f = open(sys.argv[1], 'rb')\n"
        "held = [mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)\n"
        "        for _ in range(1_000)]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    os.utime(sys.argv[1])\n"
        "    time.sleep(0.0002)\n"
    )
    look = (
        "import re, sys\n"
        "from sonde import _native\n"
        "finder = _native.SlotFinder()\n"
        "for _ in range(3):\n"
        "    _, cut, _ = finder.find(int(sys.argv[1]), [0x7F12_3456_7801], True, 1 << 30)\n"
        "peak_kb = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(cut, int(peak_kb) >> 10)\n"
    )
    command = [sys.executable, "-c", program, str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        looked = [sys.executable, "-c", look, str(process.pid)]
        cut, peak_mb = subprocess.check_output(looked, text=True, timeout=120).split()
        process.kill()
    assert cut == "True"
    assert int(peak_mb) < 150


def test_looks_go_on_for_weeks_and_after_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slots, "_report", lambda self, followed: None)
    program = Program(os.geteuid())
    follower = Slots((sys.executable, "-c", CHILD, str(tmp_path / "log")))

    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    try:
        stat = procfs.read_stat(program.process.pid)
        assert stat is not None
        follower.follow(program.process.pid, stat.start_ns, program.fd)
        (followed,) = follower._followed.values()
        until(lambda: followed.looks == 1)
        followed.looks, followed.next_look_s = 1_024, 0.0
        until(lambda: followed.looks == 1_025)
        assert not follower.failed
        monkeypatch.setattr(follower, "_ask", lambda *_: {"slots": [], "cut": 0})  # what it lacks
        followed.next_look_s = 0.0
        until(lambda: follower.failed == 1)
        assert follower._thread is not None
        assert follower._thread.is_alive()
    finally:
        follower.close()
        program.close()
