# SPDX-License-Identifier: Apache-2.0
"""Files of the kernel that are read again and again."""

from __future__ import annotations

import os
import socket

import pytest

from sonde import procfs
from sonde.collect.host import files
from sonde.collect.host.files import AGAIN_S, Unmoved
from sonde.collect.host.network import _wanted
from sonde.collect.polling import STEADY_S
from sonde.health.node import _KernelLog


@pytest.fixture
def passes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


def test_a_line_that_did_not_move_is_worked_out_again_now_and_then(passes):
    lines = Unmoved()
    assert not lines.holds(b"lo: 1")
    passes(STEADY_S)
    assert lines.holds(b"lo: 1")
    assert not lines.holds(b"lo: 2")
    assert lines.holds(b"lo: 2")
    passes(AGAIN_S + STEADY_S)
    assert not lines.holds(b"lo: 2")
    assert lines.holds(b"lo: 2")


def test_places_of_what_is_told_are_found_by_name():
    found = {
        series: place for place, series, _ in _wanted(b"Tcp: A InSegs OutSegs RetransSegs", "")
    }
    assert found == {"sonde.host.tcp.segments": 3, "sonde.host.tcp.retransmits": 4}
    assert not list(_wanted(b"IcmpMsg: InType3", ""))
    assert not list(_wanted(b"", ""))


def test_whose_a_process_is_is_read_from_its_status():
    found = procfs.read_owner(os.getpid())
    assert found is not None
    assert found.uids == (os.getuid(), os.geteuid())
    assert found.levels >= 1
    assert procfs.read_owner(2**22 + 1) is None


def test_the_kernel_s_log_is_read_on_from_where_it_was():
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a record a read, as it is
    ours.setblocking(False)
    log = _KernelLog()
    log._fd = ours.fileno()
    xid = "3,1,2,-;NVRM: Xid (PCI:0000:1B:00): {}, pid=7, name=x"
    with kernel, ours:
        for text in (xid.format(79), "6,2,3,-;eth0: up", xid.format(48)):
            kernel.send(text.encode())
        assert log.xids() == [("0000:1b:00", 79), ("0000:1b:00", 48)]
        assert log.xids() == [("0000:1b:00", 79), ("0000:1b:00", 48)]
        kernel.send(xid.format(13).encode())
        assert log.xids()[2:] == [("0000:1b:00", 13)]
