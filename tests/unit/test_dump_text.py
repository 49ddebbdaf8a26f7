# SPDX-License-Identifier: Apache-2.0
"""What `sonde dump` prints: equal stacks once, and which thread has the interpreter lock."""

from __future__ import annotations

import pytest

from sonde.cli.dump import WIDTH, text
from sonde.model.code import Frame
from sonde.model.interpreter_lock import LockUse, lock_uses
from sonde.model.thread_stack import ThreadStack

LOOKUP = Frame("python", "lookup", "[python]", file="shop.py", line=17)
WORK = Frame("python", "work", "[python]", file="shop.py", line=30)
RUN = Frame("python", "Thread.run", "[python]", file="threading.py", line=982)
SEM_WAIT = Frame("user", "sem_wait", "libc.so.6")
SUM = Frame("user", "builtin_sum", "libpython3.11.so.1.0")
TAKE_GIL = Frame("user", "take_gil", "libpython3.11.so.1.0")
SAVE = Frame("user", "PyEval_SaveThread", "libpython3.11.so.1.0")
DEFLATE = Frame("user", "deflate", "libz.so.1")
SYSCALL = Frame("kernel", "do_syscall_64", "[kernel]")
TIMER = Frame("kernel", "asm_sysvec_apic_timer_interrupt", "[kernel]")


def thread(tid: int, *frames: Frame, state: str = "S", name: str = "python3") -> ThreadStack:
    return ThreadStack(tid, name, state, frames, True, "")


def test_equal_stacks_are_shown_once_with_the_threads_that_have_them() -> None:
    waiting = [thread(tid, SEM_WAIT, LOOKUP, RUN) for tid in range(100, 130)]
    other = thread(99, SEM_WAIT, LOOKUP, RUN, state="R")
    lines = text(7, "python3", [other, *waiting], set()).splitlines()

    assert lines[0] == "process 7 (python3), 31 threads"
    assert lines[2] == "thread 99 (python3), running, in lookup shop.py:17"
    assert lines[7] == "30 threads (python3), each sleeping, in lookup shop.py:17"
    assert lines[8].startswith("threads 100, 101, ")
    assert all(str(tid) in " ".join(lines[8:11]) for tid in range(100, 130))
    assert max(map(len, lines)) <= WIDTH
    assert sum("sem_wait" in line for line in lines) == 2


def test_threads_with_other_names_are_named_each() -> None:
    pool = [thread(tid, SEM_WAIT, RUN, name=f"pool-{tid}") for tid in (5, 6)]
    lines = text(7, "python3", pool, set()).splitlines()
    assert lines[2:4] == [
        "2 threads, each sleeping, in Thread.run threading.py:982",
        "threads pool-5 (5), pool-6 (6)",
    ]


def test_stacks_that_differ_in_what_is_hidden_alone_are_equal() -> None:
    threads = [thread(5, SEM_WAIT, LOOKUP), thread(6, SUM, LOOKUP)]
    assert "2 threads (python3)" in text(7, "python3", threads, {"user"})
    assert "2 threads (python3)" not in text(7, "python3", threads, set())


@pytest.mark.parametrize(
    ("frames", "state", "use"),
    [
        ((SUM, WORK, RUN), "R", LockUse.HOLDS),
        ((TIMER, SUM, WORK, RUN), "R", LockUse.HOLDS),
        ((WORK, RUN), "R", LockUse.HOLDS),
        ((SUM, WORK, RUN), "S", LockUse.NONE),
        ((DEFLATE, WORK, RUN), "R", LockUse.NONE),
        ((SYSCALL, SEM_WAIT, WORK, RUN), "R", LockUse.NONE),
        ((SAVE, WORK, RUN), "R", LockUse.NONE),
        ((SEM_WAIT, TAKE_GIL, WORK, RUN), "S", LockUse.WAITS),
        ((SUM,), "R", LockUse.NONE),
    ],
)
def test_who_runs_the_interpreter_holds_its_lock(
    frames: tuple[Frame, ...], state: str, use: LockUse
) -> None:
    waiting = thread(6, SYSCALL, SEM_WAIT, TAKE_GIL, LOOKUP)
    one = thread(5, *frames, state=state)

    assert lock_uses([one, waiting]) == [use, LockUse.WAITS]
    shown = text(7, "python3", [one, waiting], set())
    assert ("holds the interpreter lock (GIL)" in shown) == (use == LockUse.HOLDS)


def test_two_threads_cannot_hold_the_lock_at_once() -> None:
    threads = [thread(tid, SUM, WORK, RUN, state="R") for tid in (5, 6)]
    assert lock_uses(threads) == [LockUse.HELD, LockUse.HELD]


def kernel(*functions: str) -> tuple[Frame, ...]:
    return tuple(Frame("kernel", one, "[kernel]") for one in (*functions, "do_syscall_64"))


FUTEX = kernel("futex_do_wait", "do_futex", "__x64_sys_futex")
READ = kernel("folio_wait_bit_common", "filemap_read", "vfs_read", "__x64_sys_read")
PIPE = kernel("anon_pipe_read", "vfs_read", "ksys_read")
SOCKET = kernel("schedule_timeout", "sock_read_iter", "vfs_read", "__x64_sys_read")
PYTHON = "libpython3.11.so.1.0"
ACQUIRE = Frame("user", "PyThread_acquire_lock_timed", PYTHON)
COND = Frame("user", "pthread_cond_timedwait@@GLIBC_2.3.2", "libc.so.6")
NAMELESS = Frame("user", "", PYTHON, offset=0x1A2B)
GET = Frame("python", "Queue.get", "[python]", file="queue.py", line=171)
WAIT = Frame("python", "Condition.wait", "[python]", file="threading.py", line=327)
MUTEX = Frame("user", "__lll_lock_wait", "libc.so.6")


@pytest.mark.parametrize(
    ("frames", "state", "shown"),
    [
        ((*FUTEX, SEM_WAIT, ACQUIRE, LOOKUP, RUN), "S", "waits for a lock, in lookup"),
        ((*FUTEX, MUTEX, Frame("user", "add", "shop")), "S", "waits for a lock"),
        ((*FUTEX, SEM_WAIT, ACQUIRE, WAIT, GET, WORK), "S", "waits for another thread, in work"),
        ((*FUTEX, COND, NAMELESS, WORK), "S", "waits for the interpreter lock (GIL), in work"),
        ((*FUTEX, SEM_WAIT, Frame("user", "run", "shop")), "S", "waits for a lock or another thr"),
        ((*READ, WORK), "S", "reads a file, in work"),
        ((*READ, WORK), "D", "uninterruptible sleep, reads a file, in work"),
        ((*READ, WORK), "R", "running, reads a file, in work"),
        ((*PIPE, WORK), "S", "waits for data in a pipe, in work"),
        ((*SOCKET, WORK), "S", "waits for data on a socket, in work"),
        ((*kernel("hrtimer_nanosleep", "__x64_sys_clock_nanosleep"), WORK), "S", "sleeps, in work"),
        ((*kernel("inet_csk_accept", "__x64_sys_accept4"), WORK), "S", "waits for a connection"),
        ((*kernel("do_sys_poll", "__x64_sys_poll"), WORK), "S", "waits for events, in work"),
        ((*kernel("do_sys_poll", "__x64_sys_poll"), WORK), "R", "running, in work"),
        ((*kernel("ext4_sync_file", "__x64_sys_fsync"), WORK), "D", "syncs a file to its disk"),
        ((*kernel("filemap_fault", "asm_exc_page_fault"), WORK), "D", "waits for memory"),
        (
            (*kernel("do_wait", "kernel_wait4", "__do_sys_wait4"), WORK),
            "S",
            "waits for a child process",
        ),
        ((*kernel("schedule", "worker_thread"),), "I", "idle"),
        ((SEM_WAIT, WORK), "S", "sleeping, in work"),
    ],
)
def test_what_a_thread_waits_for_is_shown(
    frames: tuple[Frame, ...], state: str, shown: str
) -> None:
    assert shown in text(7, "python3", [thread(5, *frames, state=state)], set()).splitlines()[2]
