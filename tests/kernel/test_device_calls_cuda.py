# SPDX-License-Identifier: Apache-2.0
"""CUDA without a GPU: the real runtime, whose every call fails, and a stand-in for the driver.

The counterpart on a real device is tests/gpu/test_device_calls_gpu.py.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
from pathlib import Path

import pytest
from device_watch import DeviceWatch, Program, compare

from sonde.collect.mapped_files import identity

pytestmark = pytest.mark.bpf

PROGRAMS = Path(__file__).parents[1] / "programs"
COUNT = 200
NO_DRIVER = 35
"""cudaErrorInsufficientDriver"""


@pytest.fixture(scope="module")
def cuda():
    """The folder with CUDA's headers and libraries, as the wheels lay it out."""
    for packages in site.getsitepackages():
        found = Path(packages) / "nvidia/cu13"
        if (found / "include/crt/host_defines.h").exists() and (found / "lib").exists():
            return found
    pytest.skip("needs the wheels nvidia-cuda-runtime and nvidia-cuda-crt")


def compiled(cuda, folder, *libraries):
    target = folder / "counts"
    source = PROGRAMS / "cuda/counts.cu"
    command = ["g++", "-O2", "-x", "c++", source, "-x", "none", f"-I{cuda}/include", *libraries]
    subprocess.run([*map(str, command), "-ldl", "-lrt", "-pthread", "-o", str(target)], check=True)
    return target


def truth_of(ran):
    found = {}
    for line in ran.lines:
        function, direction, status, count, size = line.split()
        found[function, direction.strip("-"), int(status)] = (int(count), int(size))
    return found


def seen(watch, pid):
    return {key[1:]: (n, watch.bytes[key]) for key, n in watch.calls.items() if key[0] == pid and n}


@pytest.mark.parametrize("linked", ["statically", "shared"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_runtime_call_with_the_real_runtime(cuda, tmp_path, linked, when):
    """nvcc links the runtime statically: it is found by the program's own symbols."""
    library = "libcudart_static.a" if linked == "statically" else "libcudart.so.13"
    program = compiled(cuda, tmp_path, cuda / "lib" / library)
    command = (program, COUNT, "hold")
    env = {"LD_LIBRARY_PATH": str(cuda / "lib")}
    if when == "before":
        ran = Program(*command, env=env)
        ran.wait_for("ready")
    with DeviceWatch(launches=True) as watch:
        if when == "after":
            ran = Program(*command, env=env)
            watch.follow(ran, "ready")
        ran.go()
        watch.finish(ran)
        truth = truth_of(ran)
        assert len(truth) > 25
        if not Path("/dev/nvidiactl").exists():
            assert {status for _, _, status in truth} == {NO_DRIVER}
        assert seen(watch, ran.pid) == truth
        assert watch.collector.losses() == {}


def test_functions_of_the_driver_that_no_symbol_names(program, tmp_path):
    """The library is asked where they are; what it exports calls them, and counts once."""
    library = tmp_path / "libcuda.so.1"
    shutil.copy(program("cuda/hidden_driver", "-shared", "-fPIC"), library)
    with DeviceWatch() as watch:
        ran = Program(program("cuda/asks", "-ldl"), library, COUNT)
        fd = os.open(library, os.O_RDONLY)
        key = identity(fd)
        assert watch.collector._probes.examine(fd, key, library.name, trusted=True)
        watch.follow(ran, "ready")
        ran.go()
        watch.finish(ran)
        compare(watch, ran)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the stubs are x86-64 code")
def test_calls_through_a_library_of_stubs_are_counted_where_they_lead_to(tmp_path):
    """JAX maps 20 such libraries: probes on all of them took minutes to take off again."""

    def built(name, *options):
        source = PROGRAMS / "cuda/forwards.c"
        subprocess.run(["cc", "-o", tmp_path / name, source, *options], check=True)

    built("libcuda.so.1", "-shared", "-fPIC", "-DDRIVER")
    built("libstubs.so", "-shared", "-fPIC", "-DSTUBS")
    built("forwards", tmp_path / "libstubs.so")
    ran = Program(tmp_path / "forwards", COUNT, env={"LD_LIBRARY_PATH": str(tmp_path)})
    ran.wait_for("ready")
    with DeviceWatch() as watch:
        ran.go()
        watch.finish(ran)
        assert seen(watch, ran.pid) == {
            ("cuMemAlloc", "", 0): (COUNT, COUNT * 4096),
            ("cuMemFree", "", 0): (COUNT, 0),
        }
        probed = {file.name for file in watch.collector._probes.files.values()}
        assert "libcuda.so.1" in probed and "libstubs.so" not in probed
        spared = {event[2]: event[5] for event in watch.events if event[2] == "probes_spared"}
        assert spared == {"probes_spared": 2}
        assert watch.collector.losses() == {}
