# SPDX-License-Identifier: Apache-2.0
"""Mappings of processes that make them long, and paths that lead to what must not be opened."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde import procfs
from sonde.attach import glibc
from sonde.collect import mapped_files
from sonde.collect.mapped_files import FIRST_BYTES, UnreadProcesses, mapped_by, mapped_now
from sonde.collect.ring_budget import Allowance, Turn, fair, shares
from sonde.errors import TargetRefused
from sonde.resolve.process_image import ProcessImage

HERE = os.getpid()


@pytest.fixture
def many(program, tmp_path):
    """A process with 65,000 mappings of a file with a path of 4,000 bytes."""
    command = [str(part) for part in (program("hostile/many_mappings"), tmp_path, 65_000)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def cpu_of(work):
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def test_no_reader_of_mappings_takes_long_over_very_many(many):
    def counted():
        unread = UnreadProcesses()
        files = list(mapped_by(many, unread))
        assert unread.processes == 1
        assert len(files) < 20, "each file once"

    def refused():
        with pytest.raises(TargetRefused, match="more mappings"):
            glibc.mappings_of(many)

    def resolved():
        image = ProcessImage(many, "proc")
        assert len(image.space()) <= 16_384
        assert image.left_out == 1

    for work in (counted, refused, resolved):
        assert cpu_of(work) < 1.5


def test_a_process_with_very_many_mappings_comes_last_and_delays_nobody(many, monkeypatch):
    few = subprocess.Popen(["sleep", "60"])  # not this process, which maps what other tests use
    monkeypatch.setattr(mapped_files.procfs, "pids", lambda: [many, few.pid])
    monkeypatch.setattr(mapped_files, "LONG_CPU_S", -1.0)
    unread = UnreadProcesses()
    try:
        assert {file.pid for file in mapped_now(unread)} == {many, few.pid}
    finally:
        few.kill()
        few.wait()
    assert unread.processes == 1
    assert cpu_of(lambda: list(mapped_by(many, None, FIRST_BYTES))) < 0.1


def test_all_of_an_ordinary_process_is_read_line_by_line():
    whole = Path("/proc/self/maps").read_bytes()
    with procfs.MapsReader(HERE) as reader:
        lines = list(reader.lines())
    assert not reader.is_cut
    assert len(lines) == pytest.approx(whole.count(b"\n"), abs=5)
    assert all(line.count(b" ") >= 5 for line in lines)


@pytest.mark.parametrize("most", [1, 100, 4096])
def test_what_is_beyond_the_bound_is_cut_between_lines_and_known_to_be(most):
    with procfs.MapsReader(HERE, most_bytes=most) as reader:
        lines = list(reader.lines())
    assert reader.is_cut
    whole = Path("/proc/self/maps").read_bytes().split(b"\n")
    assert lines == whole[: len(lines)]


@pytest.mark.parametrize("sign", ["\r", "\x0b", "\x1c", "\u2028"])
def test_a_path_that_looks_like_a_line_end_makes_no_line(tmp_path, sign):
    name = f"x{sign}7f0000000000-7f0000001000 r-xp 00000000 08:01 99 libcuda.so"
    path = tmp_path / name
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    with view:
        files = list(mapped_by(HERE))
        mapped = glibc.mappings_of(HERE)
    assert str(path) in {file.path for file in files}
    assert 0x7F0000000000 not in {it.start for it in (*files, *mapped)}


OPENS = """
import os, sys
from sonde import procfs
found = getattr(procfs, sys.argv[1])(*eval(sys.argv[2]))
print(found is None, open("/proc/self/stat").read().rpartition(")")[2].split()[4] == "0")
"""


@pytest.mark.parametrize("way", ["open_regular", "open_memory"])
def test_a_terminal_is_not_opened_and_becomes_nobodys(way, tmp_path):
    master, slave = os.openpty()
    arguments = (os.ttyname(slave), *([1 << 20] if way == "open_memory" else []))
    done = subprocess.run(
        [sys.executable, "-c", OPENS, way, repr(arguments)],
        start_new_session=True, capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"]
    os.close(master)
    os.close(slave)


def test_of_a_pipe_a_link_and_a_device_none_is_opened(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/etc/hostname")
    for path in (pipe, link, "/dev/zero", tmp_path):
        assert procfs.open_regular(str(path)) is None


def test_memory_is_what_memfd_create_made_and_of_its_size(tmp_path):
    fd = os.memfd_create("memory", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8192)
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    found = procfs.open_memory(f"/proc/self/fd/{fd}", 8192)
    assert found is not None
    assert os.path.sameopenfile(found, fd)
    assert procfs.open_memory(f"/proc/self/fd/{fd}", 4096) is None
    assert procfs.open_memory(str(file), 8192) is None
    os.close(found)
    os.close(fd)


def test_a_budget_goes_first_to_those_who_want_little():
    assert fair({"a": 10, "b": 1_000, "c": 1_000}, 210) == {"a": 10, "b": 100, "c": 100}
    assert fair({"a": 10, "b": 20}, 1_000) == {"a": 10, "b": 20}
    assert fair({}, 100) == {}


def test_a_user_with_many_processes_takes_nothing_from_another():
    wanted = dict.fromkeys(range(1_000), 65_536) | {5_000: 300}
    users = dict.fromkeys(range(1_000), 65_534) | {5_000: 1_000}
    parts = shares(wanted, users, 16_384)
    assert parts[5_000] == 300
    assert sum(parts.values()) <= 16_384


def test_a_process_gets_what_it_was_asked_to_time_and_no_more():
    allowance = Allowance()
    allowance.records = 0
    for _ in range(100):
        allowance.earn(227, 0.1, with_stacks=False)
    assert 227 * 10 <= allowance.records <= 4_096
    assert allowance.earn(227, 3600.0, with_stacks=False) < 3 * 227 * 2 * 3600


def test_what_a_turn_spares_the_next_one_may_use_but_not_for_long():
    turn = Turn.of(3600.0)
    assert turn.seconds == 4.0
    assert turn.spare_s == 1.0
    turn.stacks = 0
    assert turn.spare_s == 0.0
