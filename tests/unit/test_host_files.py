# SPDX-License-Identifier: Apache-2.0
"""Files of the kernel that are read again and again."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import subprocess
from pathlib import Path

import pytest

from sonde import procfs
from sonde.collect.host import files, network
from sonde.collect.host.files import AGAIN_S, Counters, KernelFile, UnchangedLines
from sonde.collect.host.network import (
    ALL_AGAIN_S,
    MAX_NAMESPACES,
    Network,
    _ProcessNamespaces,
    _wanted,
)
from sonde.collect.host.pressure import Pressure
from sonde.collect.polling import NORMAL_S, Points, SourceUnavailable
from sonde.errors import UsageError
from sonde.health.node import MAX_RECORDS, XIDS_KEPT, _KernelLog, _xids, _xids_in


@pytest.mark.parametrize(
    ("number", "is_off"), [(errno.EOPNOTSUPP, True), (errno.EACCES, False), (errno.EIO, False)]
)
def test_psi_is_switched_off_where_the_kernel_answers_so(tmp_path, monkeypatch, number, is_off):
    (tmp_path / "cpu").touch()

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "pread", fail)
    with pytest.raises(SourceUnavailable) as caught:
        Pressure(tmp_path).open()

    assert caught.value.whole
    assert ("psi=1" in caught.value.reason) == is_off
    assert os.strerror(number) in caught.value.reason


@pytest.fixture
def passes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


def test_a_line_that_did_not_move_is_worked_out_again_now_and_then(passes):
    lines = UnchangedLines()
    assert lines.changed([b"lo: 1", b"eth0: 1"]) == [b"lo: 1", b"eth0: 1"]
    passes(NORMAL_S)
    assert lines.changed([b"lo: 1", b"eth0: 2"]) == [b"eth0: 2"]
    assert lines.changed([b"lo: 1", b"eth0: 2"]) == []
    assert lines.changed([b"lo: 1", b"eth0: 1"]) == [b"eth0: 1"]
    passes(AGAIN_S + NORMAL_S)
    assert lines.changed([b"lo: 1", b"eth0: 1"]) == [b"lo: 1", b"eth0: 1"]
    assert lines.changed([b"lo: 1", b"eth0: 1"]) == []


def test_lines_that_always_change_take_no_more_memory_than_one_read():
    lines = UnchangedLines()
    for turn in range(50):
        lines.changed([b"if%d: %d" % (number, turn) for number in range(100)])
    assert len(lines._seen) == 100


def test_more_series_than_are_remembered_leave_those_in_use(passes, monkeypatch):
    monkeypatch.setattr(files, "MAX_SERIES", 100)
    counters, points = Counters(), Points()
    for number in range(1_000):  # of groups that come and go, beside 50 that stand still
        passes(AGAIN_S / 500)
        counters.report(points, "gone", 1.0, str(number))
        for stays in range(50):
            counters.report(points, "stays", 1.0, str(stays))
        assert len(counters._last) <= 100
    reported = sum(row[1] == "stays" for row in points.metrics)
    assert reported <= 50 * (1_000 / 500 + 1)


def test_a_file_is_read_up_to_a_bound_in_whole_lines(tmp_path):
    path = tmp_path / "dev"
    path.write_bytes(b"a 1\nb 22\nc 333\n")
    file = KernelFile(path)
    for max_bytes, expected in (
        (100, b"a 1\nb 22\nc 333\n"), (15, b"a 1\nb 22\nc 333\n"), (14, b"a 1\nb 22\n"),
        (9, b"a 1\nb 22\n"), (8, b"a 1\n"), (2, b""),
    ):  # fmt: skip
        assert file.read(max_bytes) == expected
    file.close()


def test_positions_in_a_report_are_found_by_name():
    found = {
        series: place for place, series, _ in _wanted(b"Tcp: A InSegs OutSegs RetransSegs", "")
    }
    assert found == {"sonde.host.tcp.segments": 3, "sonde.host.tcp.retransmits": 4}
    assert not list(_wanted(b"IcmpMsg: InType3", ""))
    assert not list(_wanted(b"", ""))


def test_whose_a_process_is_is_read_from_its_status():
    found = procfs.read_credentials(os.getpid())
    assert found is not None
    assert found.uids == (os.getuid(), os.geteuid())
    assert found.levels >= 1
    assert procfs.read_credentials(2**22 + 1) is None


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


def test_records_of_the_kernels_log_that_others_push_out_are_counted():
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    log = _KernelLog()
    log._fd = ours.fileno()
    record = "3,{},2,-;NVRM: Xid (PCI:0000:1B:00): {}, pid=7, name=x"
    with kernel, ours:
        for number, xid in ((4, 79), (5, 79), (5_000, 48)):
            kernel.send(record.format(number, xid).encode())
        assert log.xids() == [("0000:1b:00", 79), ("0000:1b:00", 48)]
        assert log.lost == 4 + 4_994
        kernel.send(record.format(5_001, 48).encode())
        log.xids()
        assert log.lost == 4 + 4_994


def test_a_log_that_grows_while_it_is_read_is_read_so_far_and_its_first_errors_stay():
    log, read = _KernelLog(), []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield f"3,{number},2,-;NVRM: Xid (PCI:0000:1B:00): {number}"

    log._new = endless
    found = log.xids()
    assert len(read) == MAX_RECORDS
    assert found[0] == ("0000:1b:00", 0)
    assert len(found) == XIDS_KEPT


FORGED = "NVRM: Xid (PCI:0000:17:00): 79"
"""What a user gives mount(2) as an option in a user namespace, for the kernel to log."""
FORGED_RECORDS = (
    f"3,3917,54622666081,-;tmpfs: Unknown parameter '{FORGED} GPU has fallen off the bus'",
    f"3,1239,57197660086,-;tmpfs: Unknown parameter 'x\\x0a{FORGED} y\\x0a[    1.000000] {FORGED}'",
    f"3,1239,57197660086,-;tmpfs: Unknown parameter '3,1,2,-;{FORGED}'",
    f"3,1239,57197660086,-;tmpfs: Unknown parameter 'x'\n {FORGED}\n DEVICE=;{FORGED}",
    f"12,1240,57199734090,-;{FORGED} by hand",  # written to /dev/kmsg by a program
)
GENUINE = (
    "NVRM: Xid (PCI:0000:1B:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:1B:00): 48, pid=7, name=x, An uncorrectable double bit error (DBE) has",
    "NVRM: Xid (PCI:0000:1B:00): 13, Graphics SM Warp Exception on (GPC 0, TPC 1): Out Of Range",
)
NUMBERS = [("0000:1b:00", 79), ("0000:1b:00", 48), ("0000:1b:00", 13)]


def test_what_a_user_has_the_kernel_log_is_no_error_of_a_device():
    assert _xids(FORGED_RECORDS) == []
    for prefix in ("3,1,2,-;", "4,1234,57199734090,c;", "0,1,2,-,caller=T1;"):
        assert _xids(prefix + text for text in GENUINE) == NUMBERS


def test_a_flood_of_forged_lines_leaves_the_real_errors_where_they_are():
    log = _KernelLog()
    log._new = lambda: iter(["3,1,2,-;" + GENUINE[0], *FORGED_RECORDS * XIDS_KEPT])
    assert log.xids() == NUMBERS[:1]


@pytest.mark.parametrize(
    "form", ["[   12.000{}] ", "kern  :err   : [   12.000{}] ", "3,1,200{},-;"]
)
def test_a_file_of_the_log_has_errors_only_where_a_record_begins(form):
    forged = [form.format(0) + record.partition(";")[2] for record in FORGED_RECORDS[:3]]
    forged += [f"               {FORGED}", FORGED, form.format(0) + f"x {FORGED}"]
    real = [form.format(at) + text for at, text in enumerate(GENUINE, 1)]
    assert _xids_in("\n".join([*forged, *real, *forged])) == NUMBERS


def test_a_record_of_several_lines_is_no_driver_s_where_dmesg_repeats_its_time():
    text = f"[57197.660086] tmpfs: Unknown parameter 'x\n[57197.660086] {FORGED} y'\n"
    assert _xids_in(text + f"[57197.660087] {GENUINE[0]}") == NUMBERS[:1]


def test_a_file_without_the_beginnings_of_records_is_refused():
    forged = f"tmpfs: Unknown parameter 'x\n[    1.000000] {FORGED}'\n"  # as dmesg -t writes it
    for text in (forged, GENUINE[0], "Jan  1 00:00:00 host kernel: " + GENUINE[0]):
        with pytest.raises(UsageError, match="no times"):
            _xids_in(text)
    assert _xids_in("") == []


def test_old_processes_are_seldom_asked_for_their_namespace(passes, monkeypatch):
    others = {"1": 11, "7": 11, "8": 12}
    there = {"self": 11, **others}
    asked = []

    def read_inode(path):
        pid = path.split("/")[2]
        asked.append(pid)
        return there[pid]

    monkeypatch.setattr(network.procfs, "pids", lambda: [*map(int, others)])
    monkeypatch.setattr(network.procfs, "read_inode", read_inode)
    lives = _ProcessNamespaces()
    for expected in (4, 8, 8):
        assert list(lives.namespaces()) == [(11, 0), (12, 8)]
        assert len(asked) == expected
    others["9"] = there["9"] = 13
    assert list(lives.namespaces()) == [(11, 0), (12, 8), (13, 9)]
    assert asked[8:] == ["9"]
    there["7"] = 14  # moved late in its life
    assert (14, 7) not in list(lives.namespaces())
    passes(ALL_AGAIN_S)
    assert (14, 7) in list(lives.namespaces())


@pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users")
def test_namespaces_of_one_user_hide_nobody_elses_and_the_rest_is_counted():
    def lives_apart(user):
        return subprocess.Popen(
            ["unshare", "-Urn", "sh", "-c", "echo ready; exec sleep 60"],
            user=user, group=user, extra_groups=[], stdout=subprocess.PIPE, cwd="/",
        )  # fmt: skip

    everybody = [lives_apart(65_534) for _ in range(MAX_NAMESPACES + 8)]
    watched = Network()
    try:
        if any(one.stdout.readline() != b"ready\n" for one in everybody):
            pytest.skip("users may make no namespaces")
        watched.open()
        everybody.append(lives_apart(65_533))
        assert everybody[-1].stdout.readline() == b"ready\n"
        points = Points()
        watched._look(points)
        victims = Path(f"/proc/{everybody[-1].pid}/ns/net").stat().st_ino
        before = set(watched._namespaces)
        watched._look(Points())
    finally:
        watched.close()
        for one in everybody:
            one.kill()
            one.communicate()
    assert victims in before
    assert len(before) == MAX_NAMESPACES
    (left_out,) = [
        row[3] for row in points.metrics if row[1] == "sonde.network.namespaces_left_out"
    ]
    assert left_out >= 9
