# SPDX-License-Identifier: Apache-2.0
"""User ids and pids of processes, by each way that a kernel has, and what finding them costs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sonde import procfs
from sonde.procfs import ids
from sonde.procfs.ids import Ids

USER = 65534
WAYS = [ids._by_handle, ids._by_status, ids._by_parts]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users")


@contextmanager
def running(program: str, *around: str) -> Iterator[int]:
    """A Python program, which prints `there` and waits: its pid in our numbers."""
    with subprocess.Popen(
        [*around, "/usr/bin/python3", "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as started:  # fmt: skip
        assert started.stdout is not None
        assert started.stdout.readline() == "there\n"
        yield max(procfs.family([started.pid]))
        if around:  # kill() would reach what is around it alone
            assert started.stdin is not None
            started.stdin.close()
        else:
            started.kill()


WAITS = "print('there', flush=True); sys.stdin.read()"


def without_handles(monkeypatch: pytest.MonkeyPatch, *, handles: bool = True) -> None:
    """As before Linux 6.13; without `handles`, before Linux 5.5."""
    monkeypatch.setattr(ids._kernel, "has_info", False)
    monkeypatch.setattr(ids._kernel, "has_handles", handles)


@pytest.mark.parametrize("way", WAYS, ids=["a handle", "status", "short files"])
def test_each_way_finds_the_same(way) -> None:
    if way is ids._by_handle and not ids._kernel.has_info:
        pytest.skip("before Linux 6.13")
    with running(f"import os, sys; os.setuid({USER}); {WAITS}") as pid:
        assert way(pid) == Ids(USER, USER, os.getpid(), (pid,))
    with running(f"import sys; {WAITS}", "unshare", "--pid", "--fork") as pid:
        found = way(pid)
        assert found is not None
        assert (found.pids, found.levels, found.is_first) == ((pid, 1), 2, True)
    assert way(2**22 + 1) is None


@pytest.mark.parametrize("has_info", [True, False])
def test_of_a_program_with_its_files_user_the_real_one_counts(has_info, monkeypatch) -> None:
    if not has_info:
        without_handles(monkeypatch)
    with running(f"import os, sys; os.setresuid({USER}, 0, 0); {WAITS}") as pid:
        found = procfs.read_credentials(pid)
        assert found is not None
        assert found.uids == (USER, 0)
        assert procfs.party_of(pid) == USER


@pytest.mark.parametrize("has_info", [True, False])
def test_all_user_ids_of_a_process(has_info, monkeypatch) -> None:
    if not has_info:
        without_handles(monkeypatch)
    with running(f"import os, sys; os.setresuid({USER}, 1, 2); {WAITS}") as pid:
        assert procfs.user_ids(pid) == (USER, 1, 2, 1)
    assert procfs.user_ids(2**22 + 1) == ()


CHAIN = (
    "import os, sys\n"
    "os.setgroups(range(4000000000, 4000065536))\n"
    "for _ in range(40):\n"
    "    if os.fork(): os.wait(); os._exit(0)\n"
    "os.setuid(1)\n" + WAITS
)


@pytest.mark.parametrize("has_info", [True, False])
def test_a_container_with_every_group_and_many_parents_is_found_in_little_time(
    has_info, monkeypatch
) -> None:
    """Each of its 40 status files takes 10 ms."""
    if not has_info:
        without_handles(monkeypatch)
        monkeypatch.setattr(ids, "_allowance", ids._Allowance())
    with running(CHAIN, "unshare", "--pid", "--fork") as pid:
        first = sorted(procfs.family([pid]))[0]
        began_s = time.thread_time()
        parties = {procfs.party_of(pid) for _ in range(5)}
        took_s = time.thread_time() - began_s
        assert first == pid
        assert len(parties) == 1
        assert parties.pop() < procfs.NOBODY
        assert took_s < 0.25  # 2 s where each is read


def test_long_status_files_are_read_again_after_a_while(monkeypatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(ids.time, "monotonic", lambda: now_s)
    left = ids._Allowance()
    for _ in range(5):
        assert not left.is_over()
        left.charge(1 << 20)
        now_s += 0.01
    now_s += 0.5
    assert left.is_over()
    now_s += 1
    assert not left.is_over()
    now_s += 1e6
    assert not left.is_over()
    left.charge(5 << 20)
    assert left.is_over()


def test_what_is_left_out_of_long_status_files_makes_nobody_another_party(monkeypatch) -> None:
    """A user of the machine stays that user; without any way to find its namespaces it is one of
    those of whom nothing is known."""
    groups = f"import os, sys; os.setgroups(range(65536)); os.setuid({USER}); {WAITS}"
    with running(groups) as pid:
        assert procfs.party_of(pid) == USER
        without_handles(monkeypatch)
        monkeypatch.setattr(ids, "_allowance", left := ids._Allowance())
        assert procfs.party_of(pid) == USER
        left.charge(16 << 20)
        assert procfs.party_of(pid) == USER
        without_handles(monkeypatch, handles=False)
        assert procfs.party_of(pid) == procfs.UNKNOWN_PARTY
        assert procfs.party_of(2**22 + 1) == procfs.NOBODY


def test_handles_of_another_pid_namespace_are_not_asked(monkeypatch) -> None:
    monkeypatch.setattr(ids.os, "getpid", lambda: 1)
    kernel = ids._Kernel()
    assert (kernel.has_handles, kernel.has_info) == (False, False)
    with running(f"import sys; {WAITS}") as pid:
        handle = os.pidfd_open(os.getppid())
        try:
            assert ids._pids_of(handle, pid) == ()
        finally:
            os.close(handle)


def test_a_kernel_that_refuses_handles_is_asked_once(monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "a filter")

    with running(f"import sys; {WAITS}") as pid:
        monkeypatch.setattr(ids, "_kernel", kernel := ids._Kernel())
        monkeypatch.setattr(ids.fcntl, "ioctl", refuse)
        assert ids.ids_of(pid) == Ids(0, 0, os.getpid(), (pid,))
        assert (kernel.has_info, kernel.has_handles) == (False, True)
        kernel.has_info = True
        monkeypatch.setattr(ids.os, "pidfd_open", refuse)
        assert ids.ids_of(pid) == Ids(0, 0, os.getpid(), (pid,))
        assert (kernel.has_info, kernel.has_handles) == (False, False)
