# SPDX-License-Identifier: Apache-2.0
"""What /proc has of a process: whatever it is called, and when it is gone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from sonde import procfs
from sonde.procfs import opening, processes

NOBODY = 500_000_001
"""A pid that no kernel gives out."""
NAMED = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode("utf-8", "surrogateescape"))  # PR_SET_NAME
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def named(name: str) -> Iterator[int]:
    command = [sys.executable, "-c", NAMED, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        assert child.stdin is not None
        child.stdin.close()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain", "plain"),
        ("two words", "two words"),
        (") S 1 (", ") S 1 ("),
        (") Z 1 1 1 1) (", ") Z 1 1 1 1) ("),
        ("a\nb", r"a\x0ab"),
        ("\udcff(", r"\xff("),
    ],
)
def test_a_process_may_be_called_anything(name: str, shown: str) -> None:
    with named(name) as pid:
        stat = procfs.read_stat(pid)

        assert stat is not None
        assert (stat.comm, stat.ppid) == (shown, os.getpid())
        assert stat.state in "RSD"
        assert procfs.read_stat(pid, pid) is not None


def test_its_figures_are_those_of_the_kernel() -> None:
    stat = procfs.read_stat(os.getpid())

    assert stat is not None
    assert stat.start_ns % procfs.START_UNIT_NS == 0
    assert 0 <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) - stat.start_ns < 3600 * 10**9
    used = resource.getrusage(resource.RUSAGE_SELF)
    now = procfs.read_stat(os.getpid())
    assert now is not None
    # The kernel makes both from the same sums, which go on while we ask.
    assert now.cpu_ns / 1e9 == pytest.approx(used.ru_utime + used.ru_stime, abs=0.1)
    # Counted by CPU and summed now and then: some pages more or less.
    assert 1 << 20 < stat.resident_bytes < used.ru_maxrss * 1024 + (8 << 20)
    (code,) = (
        line
        for line in (procfs.read_maps(os.getpid()) or b"").splitlines()
        if int(line.partition(b"-")[0], 16) <= stat.start_code
        and stat.start_code < int(line.partition(b"-")[2].partition(b" ")[0], 16)
    )
    assert b"x" in code.split()[1]


def test_what_is_gone_is_none() -> None:
    with named("short") as pid:
        pass

    for gone in (pid, NOBODY):
        assert procfs.read_stat(gone) is None
        assert procfs.read_stat(gone, gone) is None
        assert procfs.read_credentials(gone) is None
        assert procfs.read_comm(gone, gone) is None
        assert list(procfs.parents(gone)) == []
        assert not procfs.has_threads(gone)


def test_a_process_descends_from_who_began_it_and_not_from_who_adopts_all() -> None:
    with named("child") as pid:
        line = list(procfs.parents(pid))

        assert line[:2] == [it for it in (os.getpid(), os.getppid()) if it]
        assert procfs.descends(pid, {pid})
        assert procfs.descends(pid, {NOBODY, os.getpid()})
        assert not procfs.descends(pid, {NOBODY})
        assert not procfs.descends(pid, {1})
    assert procfs.descends(1, {1})


def test_a_process_of_our_own_namespace_has_one_pid() -> None:
    owner = procfs.read_credentials(os.getpid())

    assert owner is not None
    assert (owner.uids, owner.levels) == ((os.getuid(), os.geteuid()), 1)
    assert owner.inner_pid == os.getpid()


def test_the_busiest_are_those_that_run_then_those_that_ran_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = procfs.read_stat(os.getpid())
    assert real is not None
    rested, old, spins, ended, kernel = (
        replace(real, state=state, cpu_ns=cpu_ns, start_code=code)
        for state, cpu_ns, code in (
            ("S", 1, 1), ("S", 900, 1), ("R", 5, 1), ("Z", 999, 1), ("R", 999, 0),
        )
    )  # fmt: skip
    table = {11: rested, 12: old, 13: spins, 14: ended, 15: kernel, 16: None}
    monkeypatch.setattr(processes, "pids", lambda: list(table))
    monkeypatch.setattr(processes, "read_stats", lambda pids: [table[pid] for pid in pids])

    assert procfs.busiest(2) == [13, 12]
    assert procfs.busiest(9) == [13, 12, 11]


def test_the_busiest_of_this_machine_hold_this_process() -> None:
    assert os.getpid() in procfs.busiest(1 << 20)
    assert len(procfs.busiest(1)) == 1


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/proc/12/root/etc/passwd", (12, "etc/passwd")),
        ("/proc/12/root//x", (12, "x")),
        ("/proc/self/root/x", (0, "")),
        ("/proc/thread-self/root/x", (0, "")),
        ("/proc/\u0663/root/x", (0, "")),
        ("/proc/12/maps", (0, "")),
        ("/etc/passwd", (0, "")),
    ],
)
def test_the_root_of_a_process_is_seen_in_a_path(path: str, found: tuple[int, str]) -> None:
    assert opening.root_of(path) == found
