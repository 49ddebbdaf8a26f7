# SPDX-License-Identifier: Apache-2.0
"""Words that lead into device libraries, as found from outside and handed to the library."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde import _native, procfs
from sonde.collect import inject_abi as abi
from sonde.collect import slots
from sonde.collect.slots import Slots
from stub_driver import build, find, start

REQUEST = abi.Request.EVENTS | abi.Request.SLOTS
SLOT = struct.Struct("=QQII")


@pytest.fixture(scope="module", params=["-Wl,-z,lazy", "-Wl,-z,now"])
def bursts(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stub")
    return build(folder, request.param, names=("bursts",)) / "bursts"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "sonde-inject-0.so"
    path.write_bytes(_native.inject_library())
    return path


@pytest.fixture
def program(bursts, library):
    """One that waits for a byte before its first launch, with the library idle in it."""
    process = start(bursts, library, 2, 3, "waits", request="0:0")
    yield process
    process.kill()
    process.wait()


def begin(memory, request=REQUEST):
    memory.ask(per_second=1000, every=1, request=request)
    memory.heartbeat()


def until(memory, is_so, seconds=5.0):
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        memory.heartbeat()
        if is_so(counts := memory.seen().counts):
            return counts
        time.sleep(0.02)
    raise AssertionError(memory.seen())


def hand_over(memory, *words):
    content = b"".join(SLOT.pack(*word, 0) for word in words)
    sequence = memory.control()["slots_seq"] + 1
    os.pwrite(memory.fd, content, abi.SLOTS_AT)
    memory.ask(slots_count=len(words), slots_seq=sequence)
    return until(memory, lambda it: it["slots_done"] == sequence)


def functions(memory):
    until(memory, lambda it: it["functions_seq"])
    return slots._functions(memory.fd, slots._state(memory.fd))


def found(memory):
    return _native.SlotFinder().find(memory.pid, functions(memory), True, 1 << 30)[0]


def test_launches_are_timed_by_words_found_from_outside(program):
    with find(program.pid) as memory:
        begin(memory)
        follower = Slots()
        stat = procfs.read_stat(program.pid)
        follower.follow(program.pid, stat.start_ns, memory.fd)
        try:
            until(memory, lambda it: it["hooks"] > 0)
            program.stdin.write("\n")
            program.stdin.flush()
            counts = {}
            while program.poll() is None:
                memory.heartbeat()
                counts = memory.seen().counts
                time.sleep(0.02)
        finally:
            follower.close()
        launched = sum(map(int, program.stdout.read().split()))
        assert program.returncode == 0
        assert counts["timed"] > 0.5 * launched
        assert counts["looks_cut"] == 0
        assert counts["self_ns"] < 100_000_000


def test_what_is_not_as_described_stays_as_it_is(program):
    with find(program.pid) as memory:
        begin(memory)
        (address, value, relocation), *_ = words = found(memory)
        real = functions(memory)[0]
        wrong = [
            (8, real, 0),  # not mapped
            (address, value ^ 8, 0),  # not what it holds
            (address, 0, 1 << 30),  # no such relocation
            (address, value, 40 if relocation else 1 << 31),  # of another word
            (address + 1, value, relocation),
            ((1 << 63) + 8, real, 0),
            (real & ~7, real, 0),  # code
        ]
        for word in wrong:
            counts = hand_over(memory, word)
            assert counts["hooks"] == 0
        assert counts["slots_refused"] == len(wrong)
        hand_over(memory, *reversed([*words, (1 << 62, 0, 0)]))  # not ascending
        assert found(memory) == words
        assert hand_over(memory, *words)["hooks"] > 0
        assert program.poll() is None


def test_a_list_that_an_earlier_agent_left_keeps_nobody_from_timing(program):
    with find(program.pid) as memory:
        memory.ask(slots_count=0, slots_seq=41)
        follower = Slots()
        follower.follow(program.pid, procfs.read_stat(program.pid).start_ns, memory.fd)
        begin(memory)
        try:
            until(memory, lambda it: it["hooks"] > 0)
        finally:
            follower.close()


def test_a_count_of_any_size_and_a_list_that_changes_end(program):
    with find(program.pid) as memory:
        begin(memory)
        functions(memory)
        os.pwrite(memory.fd, os.urandom(abi.SLOTS_MOST * SLOT.size), abi.SLOTS_AT)
        memory.ask(slots_count=(1 << 32) - 1, slots_seq=7)
        until(memory, lambda it: it["slots_done"] == 7)
        assert program.poll() is None


def test_detaching_puts_every_word_back(program):
    with find(program.pid) as memory:
        begin(memory)
        before = found(memory)
        assert hand_over(memory, *before)["hooks"] > 0
        assert found(memory) != before
        memory.ask(request=abi.Request.LEAVE)
        until(memory, lambda it: it["status"] == abi.Status.LEFT)
        restored = {at: value for at, value, _ in found_again(memory, before)}
        assert all(restored.get(at) for at, _, _ in before)


def found_again(memory, before):
    """Words that were not bound lead to the real functions once they were put back."""
    addresses = slots._functions(memory.fd, slots._state(memory.fd))
    again = _native.SlotFinder().find(memory.pid, addresses, True, 1 << 30)[0]
    return [it for it in again if it[0] in {at for at, _, _ in before}]


def test_a_process_that_is_no_more_is_not_read():
    child = slots.CHILD
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    follower = Slots(child)
    answer = follower._ask(
        {"pid": ended.pid, "start_ticks": 1, "addresses": [1], "wide": True}, 0, 10.0
    )
    follower.close()
    follower._end_child()
    assert "slots" not in answer


def test_files_that_are_no_programs_say_nothing(tmp_path):
    """Mapped as code by a process that likes to: cut short, and with numbers of any size."""
    whole = Path("/bin/true").read_bytes()
    shapes = [whole[:64], whole[:200], whole[:24] + b"\xff" * 200 + whole[224:]]
    shapes += [whole[:at] + b"\xff" * 8 + whole[at + 8 :] for at in range(16, 700, 8)]
    folder = tmp_path / "files"
    folder.mkdir()
    for number, content in enumerate(shapes):
        (folder / str(number)).write_bytes(content)
    text = (
        "import mmap, os, sys\n"
        "kept = []\n"
        "for name in os.listdir(sys.argv[1]):\n"
        "    file = open(os.path.join(sys.argv[1], name), 'rb')\n"
        "    kept.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | 4))\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        began_s = time.process_time()
        _native.SlotFinder().find(process.pid, [1 << 40], True, 1 << 28)
        assert time.process_time() - began_s < 2.0
    finally:
        process.kill()
        process.communicate()
