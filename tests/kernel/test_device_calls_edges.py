# SPDX-License-Identifier: Apache-2.0
"""Calls that begin and end oddly, files that come and go, probes that cost too much."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from device_watch import DeviceWatch, Program

from sonde.collect import device_calls, discovery, kernel
from sonde.collect.mapped_files import identity
from sonde.host import syscalls

pytestmark = pytest.mark.bpf

COUNT = 2_000


@pytest.fixture(scope="module")
def edges(program):
    # Jumps into other functions are part of what is tried here.
    return program("opencl/edges", "-foptimize-sibling-calls")


def true_calls(ran: Program) -> dict[tuple[int, str], int]:
    """Lines of "pid function count"."""
    return {
        (int(pid), function): int(count)
        for pid, function, count in (line.split() for line in ran.lines)
    }


def seen_calls(watch: DeviceWatch, ran: Program) -> dict[tuple[int, str], int]:
    """What was recorded of the processes that the program speaks of."""
    pids = {pid for pid, _ in true_calls(ran)}
    found: dict[tuple[int, str], int] = {}
    for (pid, function, _, _), count in watch.calls.items():
        if pid in pids and count:
            found[pid, function] = found.get((pid, function), 0) + count
    return found


def run_case(watch: DeviceWatch, edges: Path, case: str, count: int = COUNT) -> Program:
    """Run a case once its file is known."""
    ran = Program(edges, case, count, "hold")
    watch.follow(ran, "ready")
    ran.go()
    watch.finish(ran)
    return ran


@pytest.mark.parametrize(
    ("case", "left"),
    [("fork", 0), ("tail", 0), ("nest", 0), ("threads", 0), ("jump", COUNT), ("end", COUNT)],
)
def test_what_returns_counts_once_and_what_does_not_is_a_loss(edges, case, left):
    """A call left by a jump or by the end of its thread is counted among the losses."""
    with DeviceWatch() as watch:
        ran = run_case(watch, edges, case)
        assert seen_calls(watch, ran) == true_calls(ran)
        assert watch.collector.losses() == ({"nested_call": left} if left else {})


def test_a_call_that_does_not_return_is_seen_while_it_lasts(edges):
    with DeviceWatch() as watch:
        ran = Program(edges, "hang", 2, "hold")
        watch.follow(ran, "ready")
        ran.go()
        ran.wait_for("inside")
        began = time.monotonic()
        watch.poll_events(1.0)
        watch.drain()
        key = (ran.pid, "clEnqueueMigrateMemObjects", "", 0)
        assert watch.calls[key] == 0
        assert watch.ns[key] / 1e9 == pytest.approx(time.monotonic() - began, abs=0.1)
        watch.finish(ran)
        assert watch.calls[key] == 1
        assert watch.ns[key] / 1e9 == pytest.approx(2.0, abs=0.1)


def test_a_file_attached_twice_counts_once(edges):
    """As happens for a moment when probes are regrouped, and where one file has two identities."""
    with DeviceWatch() as watch:
        ran = Program(edges, "nest", COUNT, "hold")
        watch.follow(ran, "ready")
        fd = os.open(edges, os.O_RDONLY)
        assert watch.collector._probes.examine(fd, (0, 0, 1), "again")
        ran.go()
        watch.finish(ran)
        assert seen_calls(watch, ran) == true_calls(ran)
        assert watch.collector.losses() == {}


def test_without_uprobe_multi_each_site_is_attached_alone(edges, monkeypatch):
    monkeypatch.setattr(device_calls, "has_uprobe_multi", lambda: False)
    with DeviceWatch() as watch:
        real = watch.collector._bpf
        attached = []

        class Older:
            """A kernel before 6.6."""

            def __getattr__(self, name):
                return getattr(real, name)

            def attach_uprobes(self, path, sites, entry, leave, multi):
                if multi:
                    raise OSError(22, "Invalid argument")
                attached.append(sites)
                return real.attach_uprobes(path, sites, entry, leave, multi)

        monkeypatch.setattr(watch.collector._probes, "_bpf", Older())
        ran = run_case(watch, edges, "nest")
        assert attached and all(len(sites) == 1 for sites in attached)
        assert seen_calls(watch, ran) == true_calls(ran)


def test_a_site_over_the_budget_comes_off_and_the_others_stay(edges):
    """clFlush has no instruction that a probe could replace cheaply."""
    with DeviceWatch(budget=0.001) as watch:
        ran = run_case(watch, edges, "threads", 20_000)
        [slow] = [text for text in watch.notes_of("probe_slow") if "clFlush" in text]
        assert "edges" in slow
        [taken_off] = watch.notes_of("probe_taken_off")
        assert taken_off.startswith("clFlush of edges")
        seen = seen_calls(watch, ran).get((ran.pid, "clFlush"), 0)
        assert 0 < seen <= true_calls(ran)[ran.pid, "clFlush"]
        again = run_case(watch, edges, "tail")
        assert seen_calls(watch, again)[again.pid, "clFinish"] == COUNT
        assert (again.pid, "clFlush") not in seen_calls(watch, again)


def test_a_cheap_site_over_the_budget_leaves_its_group_without_a_gap(edges):
    """Its neighbours are attached again before the old probes go: nothing is missed in between."""
    with DeviceWatch() as watch:
        ran = Program(edges, "nest", 60_000, "hold")
        watch.follow(ran, "ready")
        probes = watch.collector._probes
        [(key, file)] = [(k, f) for k, f in probes.files.items() if f.name == "edges"]
        ran.go()
        watch.poll_events(0.1)
        assert ran.process.poll() is None
        for name in ("clFinish", "clEnqueueMigrateMemObjects"):
            [site] = [s for group in file.links.values() for s in group if s.call.function == name]
            probes.take_off(key, site)
        watch.finish(ran)
        assert seen_calls(watch, ran) == true_calls(ran)
        assert watch.collector.losses() == {}


def test_probes_come_off_files_that_nobody_maps(edges, tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "UNMAPPED_S", 0.3)
    binary = tmp_path / "edges"
    shutil.copy(edges, binary)
    with DeviceWatch() as watch:
        ran = Program(binary, "nest", 10, "hold")
        watch.follow(ran, "ready")
        watch.poll_events(0.5)
        watch.drain()
        fd = os.open(binary, os.O_RDONLY)
        key = identity(fd)
        os.close(fd)
        assert key in watch.collector._probes.files
        ran.go()
        watch.finish(ran)
        watch.poll_events(0.5)
        watch.drain()
        assert key not in watch.collector._probes.files
        assert any("no process maps it" in text for text in watch.notes_of("probes_detached"))
        again = run_case(watch, binary, "nest")
        assert seen_calls(watch, again)[again.pid, "clEnqueueSVMMigrateMem"] == COUNT


def test_follows_a_fork_and_an_exec(edges):
    """The child inherits the mapping without an event; the shell becomes the program."""
    with DeviceWatch() as watch:
        ran = Program("sh", "-c", f"sh -c 'exec {edges} fork {COUNT} hold'")
        watch.follow(ran, "ready")
        ran.go()
        watch.finish(ran)
        assert seen_calls(watch, ran) == true_calls(ran)


def test_stacks_begin_with_the_called_function_then_its_caller(edges):
    symbols = {}
    for line in subprocess.check_output(["nm", "-S", str(edges)], text=True).splitlines():
        match line.split():
            case [address, size, _, name]:
                symbols[name] = range(int(address, 16), int(address, 16) + int(size, 16))
    with DeviceWatch() as watch:
        # Long enough for tens of stacks: about a hundred a second are taken of a thread.
        ran = Program(edges, "jump", 100_000, "hold")
        watch.follow(ran, "ready")
        [base] = [
            int(line.split("-")[0], 16)
            for line in Path(f"/proc/{ran.pid}/maps").read_text().splitlines()
            if line.endswith("/edges") and " 00000000 " in line
        ]
        ran.go()
        watch.finish(ran)
        callers = set()
        for stack, *_ in watch.samples[ran.pid, "clFlush"]:
            kernel, user = watch.stacks[stack]
            assert not kernel
            assert user[0] - base in symbols["clFlush"]
            [caller] = [name for name in ("main", "deeper") if user[1] - 1 - base in symbols[name]]
            callers.add(caller)
            if caller == "deeper":
                assert user[2] - 1 - base in symbols["main"]
        assert callers == {"main", "deeper"}


def test_a_kernel_with_uprobe_multi_is_known_by_its_types(tmp_path):
    kernel.has_uprobe_multi.cache_clear()
    types = tmp_path / "types"
    assert not kernel.has_uprobe_multi(types)
    types.write_bytes(b"\0bpf_uprobe_multi_link\0")
    assert not kernel.has_uprobe_multi(types), "asked once"
    kernel.has_uprobe_multi.cache_clear()
    assert kernel.has_uprobe_multi(types)
    kernel.has_uprobe_multi.cache_clear()
    assert kernel.has_uprobe_multi() == (syscalls.link_uprobe_multi() == 0)


def test_where_one_link_for_all_is_refused_each_site_has_one_of_its_own(edges, monkeypatch):
    with DeviceWatch() as watch:
        real = watch.collector._bpf
        attached = []

        class Picky:
            """Refuses more than one place."""

            def __getattr__(self, name):
                return getattr(real, name)

            def attach_uprobes(self, path, sites, entry, leave, multi):
                if len(sites) > 1:
                    raise OSError(22, "Invalid argument")
                attached.append(sites)
                return real.attach_uprobes(path, sites, entry, leave, multi)

        monkeypatch.setattr(watch.collector._probes, "_bpf", Picky())
        ran = run_case(watch, edges, "nest")
        assert attached
        assert seen_calls(watch, ran) == true_calls(ran)
