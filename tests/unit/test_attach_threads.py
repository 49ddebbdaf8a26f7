# SPDX-License-Identifier: Apache-2.0
"""Which threads are worth borrowing: by their call, stack and filters; and the kill switch."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde.attach import kill_switch, sockets
from sonde.attach.glibc import Mapped, mappings_of
from sonde.attach.threads import SAFE_CALLS, _stack, sleepers
from sonde.errors import TargetRefused

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
MAPPED = [
    Mapped(0x10000, 0x20000, "rw-p", 0, 0, ""),
    Mapped(0x30000, 0x40000, "r--p", 0, 0, ""),
    Mapped(0x7FF000000000, 0x7FF000100000, "rw-p", 0, 0, "[stack]"),
]
PID = 4_190_000  # of nobody: what is looked at lies in a folder of the test's own


@pytest.fixture
def made(tmp_path):
    """The sleepers among threads: tid to (the line of its call, more of its status)."""

    def made(threads):
        for tid, (call, status) in threads.items():
            task = tmp_path / str(PID) / "task" / str(tid)
            (task / "fd").mkdir(parents=True)
            (task / "syscall").write_text(call)
            (task / "status").write_text(
                f"Name:\tx\nState:\tS (sleeping)\nTgid:\t{PID}\nPid:\t{tid}\n"
                f"Uid:\t0\t0\t0\t0\n{status}"
            )
            (task / "fd/3").symlink_to("pipe:[77]")
            (task / "fd/4").symlink_to("/etc/passwd")
            (task / "fd/5").symlink_to("socket:[78]")
        return list(sleepers(PID, MAPPED, tmp_path))

    return made


def call(number, *arguments, sp=0x18000):
    padded = [*arguments, *[0] * (6 - len(arguments))]
    words = [str(number), *(hex(word) for word in padded), hex(sp), "0x401000"]
    return " ".join(words) + "\n"


def test_calls_that_are_safe_have_the_numbers_of_the_kernel():
    if not HEADER.exists():
        pytest.skip("needs the kernel's headers of x86-64")
    found = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text()))
    assert {int(found[name]): name for name in SAFE_CALLS.values()} == SAFE_CALLS


@pytest.mark.parametrize("number", SAFE_CALLS)
def test_a_thread_in_a_safe_call_may_be_borrowed(made, number):
    (one,) = made({7: (call(number, 3), "Seccomp:\t0\n")})
    assert (one.tid, one.call, one.sp, one.stack) == (7, number, 0x18000, (0x10000, 0x20000))
    assert (one.is_main, one.filters) == (False, 0)


@pytest.mark.parametrize(
    "line",
    [
        "running\n",
        call(202),  # futex
        call(0, 4),  # reads a file
        call(0, 9),  # what is not open
        call(45, 3, 0, 0, 0x100),  # MSG_WAITALL
        call(47, 3, 0, 0x100),
        call(7, sp=0x38000),  # a stack that cannot be written
        call(7, sp=0x20000),  # behind a mapping
        call(7, sp=0x5000),  # before all of them
    ],
)
def test_other_threads_are_left_alone(made, line):
    assert made({7: (line, "Seccomp:\t0\n"), 8: (call(7), "")})[0].tid == 8


@pytest.mark.parametrize(
    ("status", "filters"),
    [
        ("", 0),
        ("Seccomp:\t0\nSeccomp_filters:\t0\n", 0),
        ("Seccomp:\t2\nSeccomp_filters:\t3\n", 3),
        ("Seccomp:\t2\n", -1),  # an older kernel
        ("Seccomp:\t1\n", None),  # strict
    ],
)
def test_filters_are_counted_where_the_kernel_counts_them(made, status, filters):
    found = made({7: (call(7), status)})
    assert [one.filters for one in found] == ([] if filters is None else [filters])


def test_the_newest_thread_comes_first_and_the_main_one_last(made, monkeypatch):
    monkeypatch.setattr("sonde.attach.threads._stack_limit_bytes", lambda pid: None)
    threads = {tid: (call(7), "") for tid in (5, 9, 7)}
    threads[PID] = (call(7, sp=0x7FF000000100), "")
    assert [one.tid for one in made(threads)] == [9, 7, 5, PID]


@pytest.mark.parametrize(
    ("line", "starts_over"),
    [
        (call(7, 3), False),
        (call(232, 3, 0, 1, 500), True),
        (call(232, 3, 0, 1, 0xFFFFFFFF), False),
        (call(128, 1, 0, 0), False),
        (call(128, 1, 0, 0x5000), True),
        (call(43, 3), True),
        (call(0, 3), False),
        (call(0, 5), True),
        (call(45, 5), True),
    ],
)
def test_whether_a_timeout_starts_over(made, monkeypatch, line, starts_over):
    monkeypatch.setattr(sockets, "low_water_mark", lambda *_: 1)
    (one,) = made({7: (line, "")})
    assert one.starts_over is starts_over


RECEIVES = """
import os, socket, sys, threading
here, there = socket.socketpair()
here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, int(sys.argv[1]))
receive = {"recv": here.recv, "recvmsg": here.recvmsg, "read": lambda n: os.read(here.fileno(), n)}
thread = threading.Thread(target=receive[sys.argv[2]], args=(100,))
thread.start()
print("ready", flush=True)
sys.stdin.read()
there.close()
"""


@pytest.mark.parametrize("call", ["recv", "recvmsg", "read"])
@pytest.mark.parametrize("low_water_bytes", [1, 20])
def test_a_thread_that_wants_more_than_has_come_is_left_alone(call, low_water_bytes):
    """Interrupted, its call would return less than it waits for."""
    command = [sys.executable, "-c", RECEIVES, str(low_water_bytes), call]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        found, until_s = [], time.monotonic() + 5
        # The thread's stack; that it sleeps takes a moment.
        while not found and time.monotonic() < until_s:
            mappings = mappings_of(child.pid)
            found = [one for one in sleepers(child.pid, mappings) if not one.is_main]
            if low_water_bytes > 1 and _receives(child.pid):
                break
        assert bool(found) is (low_water_bytes == 1)


def _receives(pid):
    tasks = Path(f"/proc/{pid}/task")
    calls = [(it / "syscall").read_text().split() for it in tasks.iterdir() if it.name != str(pid)]
    return any(len(words) == 9 and words[0] in ("0", "45", "47") for words in calls)


LINGERS = """
import socket, struct, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
one.setblocking(False)
try:
    while True:
        one.send(bytes(1 << 16))
except BlockingIOError:
    print(one.fileno(), flush=True)
sys.stdin.read()
"""


def test_closing_our_duplicate_of_a_socket_is_not_held_up_by_the_program(monkeypatch):
    """The program ends while it is looked at, and had not sent all that it wanted to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", LINGERS, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            number = int(child.stdout.readline())
            link = str(Path(f"/proc/{child.pid}/fd/{number}").readlink())
            status_of = os.fstat

            def ended(fd):
                child.kill()
                child.wait()
                return status_of(fd)

            monkeypatch.setattr(sockets.os, "fstat", ended)
            peer, _ = server.accept()
            began_s = time.monotonic()
            assert sockets.low_water_mark(child.pid, number, link) == 1
            assert time.monotonic() - began_s < 5
            peer.close()


def test_a_socket_that_cannot_be_asked_is_left_alone(made, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(sockets, "low_water_mark", refuse)
    assert made({7: (call(45, 5), "")}) == []


@pytest.mark.parametrize("limit", [1 << 20, 8 << 20, None])
def test_the_main_stack_reaches_down_to_its_limit(limit):
    most = limit or resource.RLIM_INFINITY

    def set_limit():
        resource.setrlimit(resource.RLIMIT_STACK, (most, resource.RLIM_INFINITY))

    command = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, preexec_fn=set_limit)
    try:
        stack, end = MAPPED[2], MAPPED[2].end
        grown = stack.start - (4 << 20)
        lowest = grown if limit is None else max(grown, end - limit)
        assert _stack(child.pid, [stack], 0, True) == (min(lowest, stack.start), end)
        below = Mapped(stack.start - (2 << 20), stack.start - (2 << 20) + 4096, "rw-p", 0, 0, "")
        gap = max(lowest, below.end + (1 << 20))
        assert _stack(child.pid, [below, stack], 1, True) == (min(gap, stack.start), end)
        assert _stack(child.pid, [below], 0, True) is None, "no main stack"
    finally:
        child.communicate(b"\n", timeout=20)


# ---- the kill switch ----


def test_nothing_is_brought_into_any_process_while_a_switch_is_thrown(monkeypatch, tmp_path):
    files = (tmp_path / "etc", tmp_path / "run")
    monkeypatch.setattr(kill_switch, "FILES", files)
    kill_switch.require_allowed()
    for file in files:
        file.touch()
        assert kill_switch.found_file() == file
        with pytest.raises(TargetRefused, match=re.escape(os.fspath(file))):
            kill_switch.require_allowed()
        file.unlink()
    kill_switch.require_allowed()


def test_a_thread_above_another_ones_stack_in_one_mapping_is_left_alone(made):
    """Stacks of one array (pthread_attr_setstack), or without guard pages: the upper thread's would
    grow into the lower one's. That one may be in any call."""
    poll = call(7)
    found = made({11: (poll, ""), 12: (call(202, sp=0x14000), "")})
    assert [one.tid for one in found] == []
