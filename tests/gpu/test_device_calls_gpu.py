# SPDX-License-Identifier: Apache-2.0
"""CUDA programs and a PyTorch loop on a real GPU: counts, bytes and directions are the truth.

Needs root, nvcc and PyTorch, and the native module; run where the repository is, not installed:

    PYTHONPATH=src python3 -m pytest -s tests/gpu/test_device_calls_gpu.py

Each test prints a table of truth and recorded, so that a run is a record of what was shown.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "kernel"))

from device_watch import DeviceWatch, Program

from sonde import _native, apis
from sonde.collect.entry_points import entry_points
from sonde.collect.mapped_files import installed

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs an NVIDIA GPU"),
]

PROGRAMS = Path(__file__).parents[1] / "programs"
COUNT = 2_000
STEPS = 500

Totals = dict[tuple[str, str, int], tuple[int, int]]
"""(count, bytes) by (function, direction, status)."""


@pytest.fixture(scope="module")
def nvcc():
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None:
        pytest.skip("needs nvcc")
    return found


@pytest.fixture(scope="module")
def counts(nvcc, tmp_path_factory):
    """The program by how it is linked: nvcc links the runtime statically by default."""
    folder = tmp_path_factory.mktemp("cuda")
    built = {}
    for linked in ("static", "shared"):
        built[linked] = folder / f"counts_{linked}"
        source = PROGRAMS / "cuda/counts.cu"
        options = ["-O2", "-arch=native", "-cudart", linked, "-o", str(built[linked]), "-ldl"]
        subprocess.run([nvcc, str(source), *options], check=True)
    built["stripped"] = folder / "counts_stripped"
    shutil.copy(built["static"], built["stripped"])
    subprocess.run(["strip", str(built["stripped"])], check=True)
    return built


def truth_of(ran: Program) -> Totals:
    found: Totals = {}
    for line in ran.lines:
        function, direction, status, count, size = line.split()
        found[function, direction.strip("-"), int(status)] = (int(count), int(size))
    return found


def seen(watch: DeviceWatch, pid: int) -> Totals:
    return {key[1:]: (n, watch.bytes[key]) for key, n in watch.calls.items() if key[0] == pid and n}


def table(title: str, truth: Totals, recorded: Totals) -> None:
    print(f"\n{title}\n  {'function':<28}{'way':<9}{'status':>6}{'calls':>12}{'recorded':>12}"
          f"{'bytes':>16}{'recorded':>16}")  # fmt: skip
    for key in sorted(truth.keys() | recorded.keys()):
        (calls, size), (calls_seen, size_seen) = truth.get(key, (0, 0)), recorded.get(key, (0, 0))
        mark = "" if (calls, size) == (calls_seen, size_seen) else "  <-- differs"
        print(f"  {key[0]:<28}{key[1]:<9}{key[2]:>6}{calls:>12,}{calls_seen:>12,}"
              f"{size:>16,}{size_seen:>16,}{mark}")  # fmt: skip


def record(*command: object, when: str, launches: bool) -> tuple[Program, DeviceWatch, float]:
    """Start the program before or after the recorder; what it does from `go` on is recorded.

    Returns the program, the recorder and the seconds from `go` to the program's end.
    """
    if when == "before":
        ran = Program(*command)
        ran.wait_for("ready")
    with DeviceWatch(launches=launches) as watch:
        if when == "after":
            ran = Program(*command)
            watch.follow(ran, "ready")
            watch.drain()
            watch.calls.clear()
            watch.bytes.clear()
        began = time.monotonic()
        ran.go()
        watch.finish(ran)
        elapsed_s = time.monotonic() - began
        print(f"\n{'; '.join(watch.notes_of('probes_attached'))}")
        print(f"slow: {watch.notes_of('probe_slow')}, refused: {watch.notes_of('probe_refused')}")
        print(f"losses: {dict(watch.collector.losses())}")
    return ran, watch, elapsed_s


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("linked", ["static", "shared"])
def test_a_cuda_program_of_known_calls(counts, linked, when):
    """Every kind of call of the runtime and of the driver, kernel launches among them."""
    ran, watch, _ = record(counts[linked], COUNT, "hold", when=when, launches=True)
    truth, recorded = truth_of(ran), seen(watch, ran.pid)
    table(f"runtime linked {linked}, started {when} the recorder", truth, recorded)
    # What the program does not speak of (streams, contexts) it does not count either.
    spoken_of = {key[0] for key in truth}
    assert {key: value for key, value in recorded.items() if key[0] in spoken_of} == truth
    # As CUDA 13 hands it out, cuCtxSynchronize fails with 709 here: perhaps it wants a context.
    assert {key[2] for key in truth if key[0] != "cuCtxSynchronize"} == {0}
    assert watch.collector.losses() == {}


def test_without_launches_they_are_left_alone(counts):
    ran, watch, _ = record(counts["static"], 200, "hold", when="after", launches=False)
    assert not {key for key in seen(watch, ran.pid) if "Launch" in key[0] and "Graph" not in key[0]}


def test_a_stripped_program_is_seen_through_the_driver(counts):
    """Its own runtime has no names left: the driver's functions, as they are handed out, count."""
    ran, watch, _ = record(counts["stripped"], COUNT, "hold", when="after", launches=False)
    truth, recorded = truth_of(ran), seen(watch, ran.pid)
    table("stripped: the runtime's calls appear as the driver's", truth, recorded)
    for way in ("h2d", "d2h"):
        runtime = sum(n for (name, d, _), (n, _) in truth.items() if d == way and "cuda" in name)
        driver = sum(n for (_, d, _), (n, _) in truth.items() if d == way) - runtime
        found = sum(n for (_, d, _), (n, _) in recorded.items() if d == way)
        print(f"  {way}: {runtime:,} by the runtime + {driver:,} by the driver; {found:,} recorded")
        assert found >= driver


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pytorch_loop_of_known_copies(when):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    script = PROGRAMS / "cuda/torch_loop.py"
    ran, watch, _ = record(sys.executable, script, STEPS, "hold", when=when, launches=False)
    truth, recorded = truth_of(ran), seen(watch, ran.pid)
    table(f"PyTorch, started {when} the recorder", truth, recorded)
    assert {key: recorded.get(key) for key in truth} == truth
    # Nor any other copy than those, under whatever name.
    copies = {key: value for key, value in recorded.items() if key[1]}
    assert copies == {key: value for key, value in truth.items() if key[1]}
    assert watch.collector.losses() == {}


def test_what_the_driver_hands_out():
    """Prints whether cuGetProcAddress gives other addresses than the exported symbols."""
    [driver] = [api for api in apis.load() if api.name == "cuda-driver"]
    found = list(installed(driver.is_library)) or [
        str(path) for path in Path("/usr/local/nvidia").rglob("libcuda.so.*") if path.is_file()
    ]
    assert found, "no CUDA driver library"
    functions = {call.function: call for call in driver.calls}
    for path in found:
        fd = os.open(path, os.O_RDONLY)
        handed_out = entry_points(fd, functions)
        symbols = [symbol for call in driver.calls for symbol in call.symbols]
        exported = {(it.name, it.offset) for it in _native.find_functions(path, symbols)}
        offsets = {offset for _, offset in exported}
        others = [(name, offset) for name, offset in handed_out if offset not in offsets]
        print(f"\n{path}: {len(exported)} exported, {len(handed_out)} handed out, "
              f"{len(others)} of them elsewhere, e.g. {others[:3]}")  # fmt: skip
        classes: dict[str, int] = {}
        asked = [(offset, 0, False) for _, offset in [*exported, *others]]
        for _, cost_class, *_ in _native.probe_sites(path, asked, 60.0):
            classes[cost_class] = classes.get(cost_class, 0) + 1
        print(f"  cost at the entry: {classes}")
        assert handed_out
        os.close(fd)


def test_what_a_call_costs(counts):
    """The same program without and with probes: what a call costs more, on average over all."""
    alone = Program(counts["shared"], COUNT, "hold")
    alone.wait_for("ready")
    began = time.monotonic()
    alone.go()
    alone.process.wait()
    alone_s = time.monotonic() - began
    ran, watch, recorded_s = record(counts["shared"], COUNT, "hold", when="after", launches=True)
    calls = sum(n for n, _ in seen(watch, ran.pid).values())
    extra_us = (recorded_s - alone_s) / calls * 1e6
    print(f"\n{calls:,} calls: {alone_s:.2f} s alone, {recorded_s:.2f} s recorded: "
          f"{extra_us:+.2f} µs a call")  # fmt: skip
