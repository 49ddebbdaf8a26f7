# SPDX-License-Identifier: Apache-2.0
"""Whose code a frame is: by the folder of its file where the recorder knew it, by lists else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from captures import Writer
from sonde.model.code import CodeOrigin
from sonde.model.libraries import CodeKind, kind_of_file, kind_of_native
from sonde.query.capture import read
from sonde.query.schema import TABLES, conform
from sonde.resolve.code_origin import origin_of_binary, origin_of_source

PROGRAM, PACKAGE = CodeOrigin.PROGRAM, CodeOrigin.PACKAGE
INTERPRETER, SYSTEM = CodeOrigin.INTERPRETER, CodeOrigin.SYSTEM
UNKNOWN = CodeOrigin.UNKNOWN


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("/home/ada/.venv/lib/python3.12/site-packages/vllm/engine/llm.py", PACKAGE),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", PACKAGE),
        ("/opt/conda/lib/python3.11/site-packages/megatron/core/optimizer.py", PACKAGE),
        ("lib/python3.11/site-packages/torch/nn/functional.py", PACKAGE),
        ("/usr/lib/python3.13/pathlib/_local.py", INTERPRETER),
        ("/root/.pyenv/versions/3.14t/lib/python3.14t/queue.py", INTERPRETER),
        ("/opt/pypy/lib/pypy3.10/threading.py", INTERPRETER),
        ("/usr/lib/python311.zip/json/decoder.py", INTERPRETER),
        ("<frozen importlib._bootstrap>", INTERPRETER),
        ("<string>", UNKNOWN),
        ("", UNKNOWN),
        ("/home/ada/megatron/pretrain_gpt.py", PROGRAM),  # a checkout, or in editable mode
        ("/home/ada/python3.12/train.py", PROGRAM),
        ("/usr/lib/trainer/main.py", PROGRAM),
        ("train.py", PROGRAM),
        ("./src/queue.py", PROGRAM),
    ],
)
def test_whose_a_python_file_is_shows_its_folder(path, origin):
    assert origin_of_source(path) == origin


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("/usr/lib/x86_64-linux-gnu/libjpeg.so.62", SYSTEM),
        ("/lib64/libz.so.1", SYSTEM),
        ("/usr/local/cuda-13.0/targets/x86_64-linux/lib/libnvblas.so.13", SYSTEM),
        ("/opt/rocm-6.2.0/lib/libmigraphx.so", SYSTEM),
        ("/usr/lib/python3.12/lib-dynload/_zlib.cpython-312-x86_64-linux-gnu.so", INTERPRETER),
        ("/v/lib/python3.12/site-packages/PIL/_imaging.cpython-312-x86_64-linux-gnu.so", PACKAGE),
        ("/usr/bin/server", PROGRAM),
        ("/home/ada/engine/build/lib/libengine.so", PROGRAM),
        ("/home/ada/project/_native.cpython-312-x86_64-linux-gnu.so", PROGRAM),
        ("[vdso]", UNKNOWN),
    ],
)
def test_whose_a_binary_is_shows_its_folder(path, origin):
    assert origin_of_binary(path) == origin


def test_the_folders_of_this_interpreter_are_known():
    paths = sysconfig.get_paths()
    assert origin_of_source(f"{paths['purelib']}/anything/train.py") == PACKAGE
    assert origin_of_source(f"{paths['stdlib']}/queue.py") == INTERPRETER
    assert origin_of_source(str(Path(__file__).resolve())) == PROGRAM


def test_a_project_in_editable_mode_stays_the_users_own(tmp_path):
    """A path file in `site-packages` leads to it; its code objects have its own folder."""
    project, packages = tmp_path / "project/src/vllm", tmp_path / "lib/python3.12/site-packages"
    for folder in (project, packages):
        folder.mkdir(parents=True)
    (project / "__init__.py").write_text("def step(): pass\n")
    (packages / "__editable__.vllm-1.pth").write_text(f"{project.parent}\n")
    program = (
        f"import site; site.addsitedir({str(packages)!r}); import vllm\n"
        "print(vllm.step.__code__.co_filename)"
    )
    found = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )
    assert origin_of_source(found.stdout.strip()) == PROGRAM


@pytest.mark.parametrize(
    ("file", "function", "origin", "kind"),
    [
        ("vllm/v1/engine/core.py", "step", PACKAGE, CodeKind.LIBRARY),
        ("megatron/core/optimizer.py", "step", PACKAGE, CodeKind.LIBRARY),
        ("never_heard_of/loop.py", "fit", PACKAGE, CodeKind.LIBRARY),
        ("never_heard_of/loop.py", "fit", PROGRAM, CodeKind.OWN_PYTHON),
        ("never_heard_of/loop.py", "fit", UNKNOWN, CodeKind.OWN_PYTHON),
        ("vllm/v1/engine/core.py", "step", UNKNOWN, CodeKind.LIBRARY),
        ("vllm/v1/engine/core.py", "step", PROGRAM, CodeKind.OWN_PYTHON),
        ("torch/nn/modules/module.py", "_call_impl", PACKAGE, CodeKind.FRAMEWORK),
        ("torch/utils/data/dataloader.py", "__next__", PACKAGE, CodeKind.LOADER),
        ("torch/distributed/distributed_c10d.py", "all_reduce", PACKAGE, CodeKind.COMMUNICATION),
        # The program's own files and folders may be named as a library's are.
        ("datasets/images.py", "decode", PROGRAM, CodeKind.OWN_PYTHON),
        ("grain/loop.py", "step", PROGRAM, CodeKind.OWN_PYTHON),
        ("streaming/base/world.py", "step", PROGRAM, CodeKind.OWN_PYTHON),
        # Frameworks are also used from a checkout, or below PYTHONPATH.
        ("torch/nn/modules/module.py", "_call_impl", PROGRAM, CodeKind.FRAMEWORK),
        ("torch/utils/data/dataloader.py", "__next__", PROGRAM, CodeKind.LOADER),
        ("triton/compiler/compiler.py", "compile", PROGRAM, CodeKind.COMPILER),
        ("jax/_src/pjit.py", "call", PROGRAM, CodeKind.FRAMEWORK),
        ("tensorflow/python/ops/math_ops.py", "add", PROGRAM, CodeKind.FRAMEWORK),
        ("queue.py", "get", PROGRAM, CodeKind.OWN_PYTHON),
        ("threading.py", "wait", PACKAGE, CodeKind.LIBRARY),
        ("pathlib/_local.py", "read_text", INTERPRETER, CodeKind.NEUTRAL),
        ("pathlib/_local.py", "read_text", UNKNOWN, CodeKind.NEUTRAL),
        ("compression/zstd/_zstdfile.py", "read", INTERPRETER, CodeKind.NEUTRAL),
        ("queue.py", "Queue.get", INTERPRETER, CodeKind.QUEUE),
        ("queue.py", "Queue.put", INTERPRETER, CodeKind.NEUTRAL),
        ("threading.py", "Condition.wait", INTERPRETER, CodeKind.QUEUE),
        ("threading.py", "Thread.run", INTERPRETER, CodeKind.NEUTRAL),
        ("<string>", "f", UNKNOWN, CodeKind.OWN_PYTHON),
        ("<string>", "<module>", UNKNOWN, CodeKind.OWN_PYTHON),
        ("<stdin>", "<module>", UNKNOWN, CodeKind.OWN_PYTHON),
        ("<string>", "Point.__init__", UNKNOWN, CodeKind.NEUTRAL),
        ("<eval_with_key>.7", "forward", UNKNOWN, CodeKind.NEUTRAL),
        ("", "f", PACKAGE, CodeKind.NEUTRAL),
    ],
)
def test_the_kind_of_a_python_frame(file, function, origin, kind):
    assert kind_of_file(file, function, origin) == kind


@pytest.mark.parametrize(
    "binary",
    [
        *("libcuda.so.580.159.04", "libcudart.so.13", "libcudart-d0da41ae.so.11.0"),
        *("libcublas.so.13", "libcublasLt.so.13", "libcudnn_engines_precompiled.so.9"),
        *("libcusparse.so.12", "libcusparseLt.so.0", "libcusolver.so.12", "libcusolverMg.so.12"),
        *("libnvshmem_host.so.3", "libnccl.so.2", "libnccl-net.so", "libnvjpeg.so.13"),
        *("libcutensor.so.2", "libcutensorMg.so.2", "libcufile.so.0", "libcufile_rdma.so.1"),
        *("libcufftXt.so.12", "libcurand.so.10", "libcupti.so.13", "libnppif.so.13"),
        *("librccl.so.1", "libamdhip64.so.6", "libhipblaslt.so.0", "libhipfft.so.0"),
        *("librocblas.so.4", "librocsolver.so.0", "libMIOpen.so.1", "libhsa-runtime64.so.1"),
        *("libOpenCL.so.1", "libpocl.so.2.12", "libze_loader.so.1", "libtorch_cuda_linalg.so"),
    ],
)
def test_libraries_of_devices_are_known_wherever_they_lie(binary):
    for origin in CodeOrigin:
        assert kind_of_native(binary, "", origin) == CodeKind.DEVICE


@pytest.mark.parametrize(
    ("binary", "origin", "kind"),
    [
        *((it, PACKAGE, CodeKind.COMPILER) for it in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0",
          "libnvJitLink.so.13", "libhiprtc.so.6", "libamd_comgr.so.2", "libtriton.so")),
        *((it, PACKAGE, CodeKind.CPU_KERNEL) for it in ("libscipy_openblas64_-32a4b2a6.so",
          "libmkl_intel_thread.so.2", "libopenblasp-r0-23e5df77.so", "libgomp-a34b3233.so.1")),
        ("libtorch_cpu.so", PACKAGE, CodeKind.FRAMEWORK),
        ("libc.so.6", SYSTEM, CodeKind.NEUTRAL),
        ("python3.12", PROGRAM, CodeKind.NEUTRAL),
        ("libjpeg.so.62", SYSTEM, CodeKind.LIBRARY),
        ("_imaging.cpython-312-x86_64-linux-gnu.so", PACKAGE, CodeKind.LIBRARY),
        ("_multiprocessing.cpython-312-x86_64-linux-gnu.so", INTERPRETER, CodeKind.NEUTRAL),
        ("_queue.cpython-312-x86_64-linux-gnu.so", PROGRAM, CodeKind.OWN_NATIVE),
        ("server", PROGRAM, CodeKind.OWN_NATIVE),
        ("libcudf.so", PACKAGE, CodeKind.LIBRARY),
        ("libhelpers.so", PROGRAM, CodeKind.OWN_NATIVE),
        ("anything.so", UNKNOWN, CodeKind.OWN_NATIVE),
        ("anything.so", "of a later version", CodeKind.OWN_NATIVE),
    ],
)  # fmt: skip
def test_the_kind_of_machine_code(binary, origin, kind):
    assert kind_of_native(binary, "f", origin) == kind


def test_captures_of_earlier_versions_have_no_origin(tmp_path):
    writer = Writer(seconds=5)
    key = writer.process(42, "train")
    writer.on_cpu(key, 42, writer.stack("main"), 5)
    frames = read(writer.write(tmp_path / "a.sonde")).tables["frame"]
    earlier = conform("frame", frames.drop_columns(["origin"]))

    assert earlier.schema == TABLES["frame"]
    assert set(earlier.column("origin").to_pylist()) == {""}


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("torch/fx/_symbolic_trace.py", CodeKind.COMPILER),
        ("torch/fx/graph.py", CodeKind.COMPILER),
        ("torch/export/exported_program.py", CodeKind.COMPILER),
        ("torch/jit/_recursive.py", CodeKind.COMPILER),
        ("torch/fx/graph_module.py", CodeKind.FRAMEWORK),  # it runs what was traced
        ("torch/fx/interpreter.py", CodeKind.FRAMEWORK),
        ("torch/jit/_script.py", CodeKind.FRAMEWORK),
        ("torch/nn/modules/module.py", CodeKind.FRAMEWORK),
    ],
)
def test_tracing_a_model_is_no_launch_path(file: str, kind: CodeKind) -> None:
    for origin in (PACKAGE, PROGRAM, UNKNOWN):
        assert kind_of_file(file, "f", origin) == kind
