# SPDX-License-Identifier: Apache-2.0
"""The unwinder at its bounds: no room, bad tables, old kernels, long stacks dropped."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from walk_watch import Watch

from sonde import procfs
from sonde.agent.stacks import StackReader
from sonde.collect.kernel import BpfObject, Kernel
from sonde.unwind.paging import PAGING_S

pytestmark = pytest.mark.bpf

PROGRAMS = Path(__file__).parents[1] / "programs" / "stacks"
SMALL_ROOM_BYTES = 3 << 19
"""Less than libpython and OpenBLAS take."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    program = tmp_path_factory.mktemp("unwinder") / "tree"
    flags = ["-O2", "-fomit-frame-pointer", "-fno-optimize-sibling-calls"]
    source = PROGRAMS / "tree.cpp"
    subprocess.run([compiler, *flags, "-o", program, source, "-lpthread"], check=True)
    return program


@pytest.fixture
def deep(tree):
    """A program with 500 frames on its stack."""
    process = subprocess.Popen([tree, "60", "500"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def watch(tmp_path):
    opened = []

    def start(pid, **how):
        opened.append(Watch(pid, tmp_path, **how))
        return opened[-1]

    yield start
    for it in opened:
        it.close()


def test_dropping_long_stacks_drops_all_their_pieces(watch, deep):
    it = watch(deep.pid)
    it.settle(deep.pid)
    found = it.sample()
    assert max(len(user) for _, _, user, _ in found.values()) > 400
    assert it.sampler._bpf.stacks_kept() > len(found)
    it.kernel.forget_stacks(list(found))
    assert it.sampler._bpf.stacks_kept() == 0


def test_stacks_of_one_piece_are_dropped_together_though_some_are_gone(watch, tree):
    process = subprocess.Popen([tree, "60", "20"])
    try:
        it = watch(process.pid)
        it.settle(process.pid)
        found = list(it.sample())
        assert len(found) > 1
        assert not any(walk.is_long for walk in it.kernel.walks(found))
        it.kernel.forget_stacks([], short=found[:1])
        assert it.sampler._bpf.stacks_kept() == len(found) - 1
        it.kernel.forget_stacks([], short=[*found, 1])
        assert it.sampler._bpf.stacks_kept() == 0
    finally:
        process.kill()
        process.wait()


def test_walks_that_are_named_together_are_named_as_each_by_itself(watch):
    source = "def f(n):\n    return [f(n - 1), f(n - 2)] if n > 1 else sorted(range(9))\n"
    process = subprocess.Popen([sys.executable, "-c", source + "while True: f(12)\n"])
    try:
        it = watch(process.pid)
        it.settle(process.pid)
        it.sample(0.3)
        walks = it.kernel.walks(list(it.sample()))
        runs = it.resolver.processes.find(process.pid, procfs.read_stat(process.pid).start_ns)
        reader = StackReader(it.resolver, it.unwinder)
        alone = {walk.id: tuple(reader.frames(runs, walk.kernel, walk.user)) for walk in walks}
        runs.forget_frames()
        it.resolver.kernel_frames.clear()
        reader = StackReader(it.resolver, it.unwinder)
        together = {walk.id: frames for walk, frames in reader.named(runs, walks)}
        assert together == alone
        again = {walk.id: frames for walk, frames in reader.named(runs, walks)}
        assert again == alone
        kinds = {one.frame.kind for frames in alone.values() for one in frames}
        assert kinds >= {"python", "user"}
        assert len(alone) > 50
    finally:
        process.kill()
        process.wait()


def test_dropping_some_stacks_leaves_the_pieces_that_others_go_on_in(watch, deep):
    it = watch(deep.pid)
    it.settle(deep.pid)
    found = it.sample()
    kept = list(found)[::2]
    it.kernel.forget_stacks([stack for stack in found if stack not in kept])
    assert it.walks(kept) == {stack: found[stack] for stack in kept}


def test_without_bpf_loop_stacks_are_walked_by_frame_pointers(watch, deep):
    it = watch(deep.pid, constants={"unwind_by_tables": 0})
    it.settle(deep.pid)
    found = it.sample()
    assert found
    assert set(it.unwinder.stops()) == {"no_bpf_loop"}


@pytest.mark.parametrize("name", ["waits", "device_calls"])
def test_every_object_loads_without_bpf_loop(name):
    kernel = Kernel(None)
    skip = ["on_call_entry_multi", "on_call_return_multi"]
    kernel.load(BpfObject(name, {"unwind_by_tables": 0}, skip))


def test_a_walk_is_no_longer_than_it_may_be(watch, deep):
    it = watch(deep.pid, constants={"unwind_steps": 128})
    it.settle(deep.pid)
    found = it.sample()
    assert max(len(user) for _, _, user, _ in found.values()) == 128
    assert it.unwinder.stops()["too_deep"] > 0


def test_a_process_with_more_tables_than_there_is_room_for_costs_nobody_else(watch, deep):
    numpy = pytest.importorskip("numpy")
    del numpy
    busy = "import numpy, time\nwhile True: pass"
    large = subprocess.Popen([sys.executable, "-c", busy])
    try:
        time.sleep(1)
        it = watch(deep.pid, room_bytes=1 << 20)  # OpenBLAS alone needs more
        it.kernel.watch(large.pid)
        it.settle(deep.pid)
        it.unwinder.expect([large.pid])
        it.sample(3)
        usage = it.unwinder.usage()
        assert usage["table_bytes"] <= 1 << 20
        assert usage["left_out"] > 0
        assert usage["processes"] == 2  # the large one too is listed, with the tables there are
        found = it.sample(3)
        ends = Counter(stop for _, _, user, stop in found.values() if len(user) > 100)
        assert ends[0] > 0.9 * ends.total(), ends
    finally:
        large.kill()
        large.wait()


def test_generated_code_leaves_room_for_the_pages_of_other_tables(watch, tree):
    process = subprocess.Popen([tree, "60", "20"])
    room_bytes = 8 << 20
    try:
        maps = watch(process.pid, room_bytes=room_bytes).unwinder._maps
        rules = [(0x10000 + at, (2, at % 2, 8, 0)) for at in range(65_000)]
        tables = []
        for _ in range(40):
            try:
                tables.append(maps.add_rules(rules, 0x20000))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                break
        assert len(tables) > 20
        size, free, *_ = maps.usage()
        assert room_bytes - (size - free) >= room_bytes // 8
        maps.drop_table(tables.pop())
        maps.drop_table(tables.pop())
        time.sleep(1.1)  # walks that began before may still read them
        maps.add_rules(rules, 0x20000)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def products():
    """A program whose libraries have larger tables than SMALL_ROOM_BYTES."""
    pytest.importorskip("numpy")
    busy = (
        "import numpy as np\na = np.ones((300, 300))\nprint('ready', flush=True)\nwhile True: a @ a"
    )
    command = ["env", "OPENBLAS_NUM_THREADS=1", sys.executable, "-c", busy]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "ready\n"
    yield program
    program.kill()
    program.communicate()


def test_of_a_large_table_the_pages_are_loaded_that_walks_need(watch, products):
    it = watch(products.pid, room_bytes=SMALL_ROOM_BYTES)
    it.settle(products.pid)
    until_s = time.monotonic() + 20
    share = 0.0
    while share < 0.99 and time.monotonic() < until_s:
        found = it.sample(1)
        ends = Counter(stop for _, _, _, stop in found.values())
        share = ends[0] / ends.total()
        it.kernel.clear_stacks()
    assert share >= 0.99, it.unwinder.stops()
    usage = it.unwinder.usage()
    assert usage["pages_loaded"] > 0
    assert usage["table_bytes"] <= SMALL_ROOM_BYTES


def test_the_pages_that_a_run_needed_are_there_in_the_next_one(watch, products):
    first = watch(products.pid, room_bytes=SMALL_ROOM_BYTES)
    first.settle(products.pid)
    until_s = time.monotonic() + 5
    while not (asked := first.unwinder.usage()["pages_loaded"]) and time.monotonic() < until_s:
        first.sample(1)
    assert asked
    first.sample(1)
    first.close()

    second = watch(products.pid, room_bytes=SMALL_ROOM_BYTES)
    second.settle(products.pid)
    second.sampler.start()
    time.sleep(0.5)  # and nobody looks for pages
    second.sampler.stop()
    ends = Counter(second.unwinder.stops())
    assert ends["table_missing"] <= 0.05 * ends.total(), ends


def test_a_page_that_is_asked_for_again_is_not_loaded_again(watch, products):
    """Walks that began before it was there put it on the list once more."""
    it = watch(products.pid, room_bytes=SMALL_ROOM_BYTES)
    it.settle(products.pid)
    maps = it.unwinder._maps
    it.sampler.start()
    until_s = time.monotonic() + 20
    wanted = []
    while not wanted and time.monotonic() < until_s:
        time.sleep(0.01)
        wanted = [row[0] for row in it.kernel.unwind.entries("unwind_pages")]
    it.sampler.stop()
    assert wanted
    assert maps.load_pages() == 0
    loaded, free = maps.usage()[4], maps.usage()[1]
    assert loaded >= len(wanted)
    for reference in wanted:
        it.kernel.unwind.set_hash("unwind_pages", struct.pack("=I", reference), b"\1\0\0\0")
    assert maps.load_pages() == 0
    assert (maps.usage()[4], maps.usage()[1]) == (loaded, free)


def test_while_pages_are_asked_for_more_are_looked_for_soon(watch, monkeypatch):
    """Each stays away until somebody looks, and cuts every walk that comes by meanwhile."""
    now_s = 1000.0
    monkeypatch.setattr("sonde.unwind.unwinder.time.monotonic", lambda: now_s)
    it = watch(os.getpid()).unwinder
    asked = 0
    monkeypatch.setattr(
        it,
        "_maps",
        SimpleNamespace(
            usage=lambda: (0, 0, 0, 0, asked), load_pages=lambda: 0, wanted=list, stops=list
        ),
    )
    it.update()
    assert not it.is_paging
    it.expect_pages()
    assert it.is_paging
    now_s += PAGING_S
    assert not it.is_paging
    asked = 1
    it.update()
    assert it.is_paging
    # Where they never end, there is no hurry for long.
    paging_s = 0.0
    for _ in range(3000):
        now_s, asked = now_s + 0.01, asked + 1
        paging_s += 0.01 * it.is_paging
        it.update()
    assert paging_s < 30 / 2
    now_s += 60
    asked += 1
    it.update()
    assert it.is_paging


def test_a_table_that_is_no_good_is_made_once_more_and_then_given_up(watch, deep, monkeypatch):
    it = watch(deep.pid)
    build = it.cache.request
    asked = Counter()

    def spoilt(name, fd, party):
        asked[name] += 1
        build(name, fd, party)

    class Spoilt:
        """The kernel's maps, where no table is any good."""

        def __init__(self, maps):
            self._maps = maps

        def __getattr__(self, name):
            return getattr(self._maps, name)

        def add_table(self, path, pages):
            raise OSError(22, "a damaged unwind table")

    monkeypatch.setattr(it.cache, "request", spoilt)
    it.unwinder._files._maps = Spoilt(it.unwinder._maps)
    it.settle(deep.pid)
    for _ in range(20):
        it.unwinder.resync()
        it.unwinder.update()
        time.sleep(0.01)
    assert asked
    assert it.cache.built <= 2 * len(asked)
    assert it.unwinder.usage()["tables_failed"] == len(asked)
