# SPDX-License-Identifier: Apache-2.0
"""Kernel threads that ended waits are named in a recording of chosen processes."""

from __future__ import annotations

import os

import pytest

from sonde import procfs
from sonde.agent import kernel_wakers
from sonde.agent.kernel_wakers import KernelWakers


def row(waker, kind="blocked", tid=None):
    return (0, kind, "socket", "", "recv", "", 0, 1, 2, 1, 1, 9, 0, 9, waker, tid or waker)


@pytest.fixture
def stats(monkeypatch):
    """What /proc shows: 2 and its children are kernel threads; the pids that were asked about."""
    asked = []

    def read_stats(pids):
        asked.extend(pids)
        parents = {2: 0, 14: 2, 15: 2, 30: 1}
        return [
            procfs.Stat(f"c{pid}", "S", parents[pid], 7, 0, 0, 0) if pid in parents else None
            for pid in pids
        ]

    monkeypatch.setattr(procfs, "read_stats", read_stats)
    return asked


def test_kernel_threads_have_a_row_once(stats):
    wakers = KernelWakers()
    found = wakers.rows([row(14), row(14), row(30), row(0), row(77), row(15, tid=16)], 5)
    assert [(one.name, one.pid, one.text) for one in found] == [("kernel_thread", 14, "c14")]
    assert wakers.rows([row(14), row(2, "runqueue"), row(15, "peer")], 6)[0].pid == 2
    assert stats == [14, 30, 77, 2]


def test_looks_are_bounded(stats, monkeypatch):
    monkeypatch.setattr(kernel_wakers, "MOST", 2)
    monkeypatch.setattr(kernel_wakers, "MAX_KNOWN", 3)
    wakers = KernelWakers()
    for _ in range(9):
        wakers.rows([row(pid) for pid in range(100, 200)], 5)
    assert len(stats) == 2


def test_this_process_is_none():
    assert KernelWakers().rows([row(os.getpid())], 1) == []
