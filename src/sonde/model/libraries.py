# SPDX-License-Identifier: Apache-2.0
"""What kind of code a frame is, by the library that it belongs to.

The folder that a file lies in shows whose code it is, and the recorder knows it (`CodeOrigin`).
What no folder shows is listed here: which libraries are those of a device, a framework, a compiler
or a data loader, by file, by binary, and by the documented entry points of device APIs. Captures of
earlier versions and traces lack the folder: for them there is a list of installed packages, too.

The names of a program's own functions and threads are never looked at: they may be anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache

from sonde.model.code import CodeOrigin


class CodeKind(IntEnum):
    """The kind of code of one frame."""

    NEUTRAL = 0
    """Does not show what a thread does: the kernel, libc, Python itself, its standard library,
    unknown frames."""
    DEVICE = 1
    """The runtime, the driver, or a library of kernels of a device."""
    FRAMEWORK = 2
    """A framework on its way to a device: operators, modules, optimizers, autograd."""
    CPU_KERNEL = 3
    """A framework's or a library's computation on the CPU."""
    COMPILER = 4
    """Compiles or loads kernels."""
    LIBRARY = 5
    """Any other installed library: image codecs, serialization."""
    LOADER = 6
    """A data loader's package."""
    QUEUE = 7
    """Waits until another thread or process hands something over: queues, futures, conditions."""
    OWN_PYTHON = 8
    """Python code of the program."""
    OWN_NATIVE = 9
    """Machine code of the program, or of an extension module."""
    STORAGE = 12
    """A framework's code that serializes, saves and loads."""
    COMMUNICATION = 11
    """Exchanges data with other processes of the job: gloo, MPI, UCC."""
    SONDE = 10
    """Sonde's library in the process."""


GIL_FRAMES = (
    *("take_gil", "PyEval_RestoreThread", "PyEval_AcquireThread", "PyEval_AcquireLock"),
    *("PyGILState_Ensure", "_PyThreadState_Attach"),
)
"""Functions of CPython that wait for the GIL; in interpreters without a symbol table, `take_gil`
has no name."""
_DEVICE_BINARY = re.compile(
    r"^(lib(cuda|cudart|cudadevrt|cudadebugger|cublas\w*|cudnn\w*|cudss\w*|cufft\w*|cufile\w*|cupti"
    r"|curand|cusolver\w*|cusparse\w*|cutensor\w*|nccl\w*|nvcomp\w*|nvcuvid|nvidia-encode|nvjpeg\w*"
    r"|npp[a-z]*|nvshmem\w*|nvToolsExt|nvperf_\w+|nvonnxparser\w*"
    r"|amdhip64|hip\w*|hsa-[\w-]+|roc(blas|fft|rand|solver|sparse|tx64|tracer64|profiler\w*)"
    r"|MIOpen\w*|rccl\w*|OpenCL|pocl|ze_\w+|sycl|mkl_sycl\w*|torch_cuda\w*|torch_hip\w*|torch_xpu\w*"
    r"|c10_cuda|c10_hip|c10_xpu)\b"
    r"|__triton_launcher|cuda_utils\b)"
)
_FRAMEWORK_BINARY = re.compile(
    r"^(libtorch|libtorch_cpu|libtorch_python|libc10|_C\b|libjax_common|xla_cuda_plugin"
    r"|xla_extension|libtensorflow|_pywrap_tensorflow|libpaddle|libmxnet|libonnxruntime|libnvinfer)"
)
_CPU_BINARY = re.compile(r"^lib(gomp|iomp5|mkl\w*|(scipy_)?openblas\w*|dnnl|blis|omp)\b")
_COMPILER_BINARY = re.compile(
    r"^(lib(nvrtc|nvJitLink|nvidia-ptxjitcompiler|nvidia-nvvm|nvptxcompiler|nvvm|hiprtc|triton|LLVM"
    r"|amd_comgr)"
    r"|ptxas)"
)
_NEUTRAL_BINARY = re.compile(
    r"^(lib(c|m|dl|rt|pthread|stdc\+\+|c\+\+|gcc_s|util|crypto|ssl|z|zstd|lzma|bz2|ffi|numa|jemalloc"
    r"|tcmalloc|mimalloc|protobuf|absl\w*|nvidia-ml|sqlite3|expat)[.-]|ld-linux|ld-musl|libpython"
    r"|python[\d.]*$|\[)"
)
_COMMUNICATION_BINARY = re.compile(r"^lib(mpi|gloo|ucc|ucp|ucs|horovod|ccl)\b")
_STORAGE_FUNCTION = re.compile(r"^(caffe2::serialize::|mz_|torch::jit::(Unp|P)ickler)")
_COMMUNICATION_FUNCTION = re.compile(r"^(c10d|gloo)::")
_COMMUNICATION_FILE = re.compile(
    r"^(torch/distributed/(distributed_c10d|_functional_collectives|nn/functional)\.py|mpi4py/"
    r"|horovod/)"
)
_CPU_FUNCTION = re.compile(r"wrapper_CPU|::(AVX2|AVX512|DEFAULT|NEON|SVE\d*)::|mkldnn|cpublas")
_COMPILER_FUNCTION = re.compile(r"^(llvm|mlir)::|nvrtc|NVPTXCompiler|CompileToTargetBinary")
_QUEUE_FUNCTION = re.compile(
    r"^(pthread_cond_(timed|clock)?wait|std::condition_variable|std::__future_base|cnd_wait)"
)
_PYTHON_QUEUE_BINARY = re.compile(r"^_queue\.")
_PYTHON_QUEUE_FUNCTION = re.compile(r"^_queue_SimpleQueue_get")
_LOADER_FILE = re.compile(
    r"^(torch/utils/data/|torchdata/|nvidia/dali/|tensorflow/python/data/|webdataset/|ffcv/"
    r"|datasets/(iterable|arrow)_dataset\.py|grain/|streaming/base/)"
)
_QUEUE_FILE = re.compile(
    r"^(queue\.py|concurrent/futures/|multiprocessing/(queues|pool|connection|managers)\.py)"
)
_COMPILER_FILE = re.compile(
    r"^(torch/(_dynamo|_inductor|fx|export|onnx)/|torch/jit/(frontend|_recursive|_trace|_freeze)\.py"
    r"|triton/compiler/)"
)
_COMPILED_FILE = re.compile(
    r"^torch/(_dynamo/(eval_frame|external_utils|utils|backends)"
    r"|_inductor/(runtime|utils|output_code|cudagraph_trees|cudagraph_utils)"
    r"|fx/(graph_module|_lazy_graph_module|interpreter|node))"
)
"""Files of compilers that run when compiled code runs: they show no compilation. (`_functorch` has
what wraps compiled code, and transforms that launch at once; its tracing runs below Dynamo or fx.)
"""
_GENERATED_FILE = re.compile(r"^([a-z2-7]{2})/c\1[a-z2-7]{49}\.py$")
"""What Inductor writes and runs in place of a compiled function: named by its hash, in the folder
of the hash's first letters."""
_FRAMEWORK_FILE = re.compile(
    r"^(torch|triton|jax|jaxlib|flax|optax|tensorflow|keras|apex|transformer_engine|functorch)/"
)
_UNAMBIGUOUS_FILE = re.compile(
    r"^(torch|torchdata|triton|jax|jaxlib|flax|optax|tensorflow|keras|apex|transformer_engine"
    r"|functorch|nvidia/dali|webdataset|ffcv|mpi4py|horovod)/"
)
"""Packages whose names no program's own folder has: in a checkout they count as installed ones
do. `datasets/`, `grain/`, `streaming/` are names of programs' folders, too."""
_STORAGE_FILE = re.compile(
    r"^(torch/(serialization|storage|_weights_only_unpickler|hub|random)\.py"
    r"|torch/(multiprocessing|profiler|testing|package|distributed/checkpoint|utils/tensorboard)/"
    r"|tensorflow/python/(checkpoint|training/saving)|flax/serialization\.py)"
)
_INSTALLED = frozenset(
    (
        *("PIL", "numpy", "scipy", "pandas", "cv2", "torchvision", "torchaudio", "torchtext"),
        *("transformers", "accelerate", "datasets", "tokenizers", "lightning", "safetensors"),
        *("pytorch_lightning", "deepspeed", "xformers", "flash_attn", "nvidia", "cupy", "numba"),
        *("sklearn", "ray", "pyarrow", "h5py", "zarr", "fsspec", "tqdm", "requests", "yaml"),
        *("pyopencl", "nibabel", "librosa", "soundfile", "msgpack", "orjson", "PyTorch", "timm"),
        *("imageio", "skimage", "albumentations", "kornia", "einops", "wandb", "tensorboard"),
        *("vllm", "sglang", "lightning_fabric", "torchmetrics", "peft", "trl", "bitsandbytes"),
        *("site-packages", "dist-packages", "importlib", "_distutils_hack"),
    )
)
"""Installed packages that programs often call, for frames whose folder is not known."""
_CONDITIONS = frozenset(("wait", "wait_for", "join"))
"""Functions of `threading.py` that wait for a condition or a thread's end, not for a lock."""
_BOUNDED_QUEUES = frozenset(("queue.py", "multiprocessing/queues.py"))
"""Files of queues that may be full. (That of asyncio blocks no thread.)"""
_RECEIVES = frozenset(
    (
        *("get", "get_nowait", "wait", "_wait", "join", "result", "exception", "as_completed"),
        *("recv", "recv_bytes", "_recv", "_recv_bytes", "poll", "_poll", "next", "__next__"),
    )
)
"""Functions of queues, futures and pipes that wait for what another thread hands over."""
_STANDARD = frozenset(sys.stdlib_module_names)
_STANDARD_PACKAGES = frozenset(
    (
        *("asyncio", "collections", "concurrent", "ctypes", "dbm", "email", "encodings", "html"),
        *("http", "json", "logging", "multiprocessing", "re", "sqlite3", "tomllib", "unittest"),
        *("urllib", "xml", "zipfile", "zoneinfo"),
        *("_pyrepl", "curses", "distutils", "ensurepip", "pathlib", "pydoc_data", "sysconfig"),
        *("tkinter", "wsgiref", "xmlrpc"),
    )
)
"""Packages of the standard library, for frames whose folder is not known: without those that a
project's folders may well be named as (`test`, `string`, `compression`)."""


_TYPED = frozenset(("<string>", "<stdin>"))
"""Code of `python -c` and of an input; that made for data classes and named tuples, too, has names
like `__init__`."""


@lru_cache(8192)
def kind_of_file(file: str, function: str = "", origin: str = "") -> CodeKind:
    """The kind of a Python frame, by its file: as captures and traces have it, without the folder
    of installed packages ('torch/nn/modules/module.py', 'threading.py', 'src/train.py').

    `function` matters in Python's own library only: waiting for a condition is not waiting for a
    lock, and filling a queue is not waiting for what it holds. `origin`: a value of `CodeOrigin`;
    where it is unknown, the name of the file decides.
    """
    if file in _TYPED and not function.rpartition(".")[2].startswith("__"):
        return CodeKind.OWN_PYTHON
    if not file or file.startswith("<"):
        return CodeKind.NEUTRAL
    if _GENERATED_FILE.match(file):
        return CodeKind.FRAMEWORK
    if origin == CodeOrigin.PROGRAM:
        # In a checkout, or below PYTHONPATH: a framework's code all the same.
        listed = _kind_of_framework(file) if _UNAMBIGUOUS_FILE.match(file) else None
        return CodeKind.OWN_PYTHON if listed is None else listed
    if origin in (CodeOrigin.INTERPRETER, CodeOrigin.UNKNOWN):
        waits = _kind_of_queue(file, function.rpartition(".")[2])
        if waits is not None:
            return waits
    if origin == CodeOrigin.INTERPRETER:
        return CodeKind.NEUTRAL
    listed = _kind_of_framework(file)
    if listed is not None:
        return listed
    if origin == CodeOrigin.PACKAGE:
        return CodeKind.LIBRARY
    top, folder, _ = file.partition("/")
    standard = top in _STANDARD_PACKAGES if folder else top.removesuffix(".py") in _STANDARD
    if standard:
        return CodeKind.NEUTRAL
    return CodeKind.LIBRARY if top in _INSTALLED else CodeKind.OWN_PYTHON


def _kind_of_queue(file: str, function: str) -> CodeKind | None:
    """Of Python's queues, futures, pipes and conditions; None for any other file."""
    if file == "threading.py" and function in _CONDITIONS:
        return CodeKind.QUEUE
    if _QUEUE_FILE.match(file):
        return CodeKind.QUEUE if function in _RECEIVES else CodeKind.NEUTRAL
    return None


def is_put(file: str, function: str) -> bool:
    """Whether a frame of Python puts something into a queue of the standard library, which waits
    where that is full. `file`: below the library's folder; `function`: its qualified name."""
    return file in _BOUNDED_QUEUES and function.rpartition(".")[2] == "put"


def is_python_queue(binary: str, function: str, origin: str = "") -> bool:
    """Whether a frame of machine code is `queue.SimpleQueue.get` of CPython, which no Python frame
    shows. It waits by the same calls as locks do. `origin`: a value of `CodeOrigin`.

    Builds without symbols have it in an extension module, whose one function that waits it is.
    """
    if _PYTHON_QUEUE_BINARY.match(binary) and origin not in (
        CodeOrigin.PROGRAM,
        CodeOrigin.PACKAGE,
    ):
        return not function or bool(_PYTHON_QUEUE_FUNCTION.match(function))
    is_python = not binary or bool(_NEUTRAL_BINARY.match(binary))
    return is_python and bool(_PYTHON_QUEUE_FUNCTION.match(function))


def _kind_of_framework(file: str) -> CodeKind | None:
    """Of the files of frameworks and data loaders; None for any other."""
    if _LOADER_FILE.match(file):
        return CodeKind.LOADER
    if _COMMUNICATION_FILE.match(file):
        return CodeKind.COMMUNICATION
    if _COMPILER_FILE.match(file):
        runs_compiled = _COMPILED_FILE.match(file)
        return CodeKind.FRAMEWORK if runs_compiled else CodeKind.COMPILER
    if _FRAMEWORK_FILE.match(file):
        return CodeKind.STORAGE if _STORAGE_FILE.match(file) else CodeKind.FRAMEWORK
    return None


_OF_ORIGIN: Mapping[str, CodeKind] = {
    CodeOrigin.PACKAGE: CodeKind.LIBRARY,
    CodeOrigin.SYSTEM: CodeKind.LIBRARY,
    CodeOrigin.INTERPRETER: CodeKind.NEUTRAL,
}
"""Machine code that no list names; all other is the program's."""


@lru_cache(8192)
def kind_of_native(binary: str, function: str, origin: str = "") -> CodeKind:
    """The kind of a frame of machine code, by the name of its file and, within libraries, by its
    function. `origin`: a value of `CodeOrigin`."""
    if binary.startswith("[memfd:sonde"):
        return CodeKind.SONDE
    if _COMPILER_BINARY.match(binary):
        return CodeKind.COMPILER
    if _DEVICE_BINARY.match(binary):
        return CodeKind.COMPILER if _COMPILER_FUNCTION.search(function) else CodeKind.DEVICE
    if _COMMUNICATION_BINARY.match(binary):
        return CodeKind.COMMUNICATION
    if _FRAMEWORK_BINARY.match(binary):
        if _COMMUNICATION_FUNCTION.match(function):
            return CodeKind.COMMUNICATION
        if _STORAGE_FUNCTION.match(function):
            return CodeKind.STORAGE
        if _CPU_FUNCTION.search(function):
            return CodeKind.CPU_KERNEL
        return CodeKind.COMPILER if _COMPILER_FUNCTION.search(function) else CodeKind.FRAMEWORK
    if _CPU_BINARY.match(binary):
        return CodeKind.CPU_KERNEL
    if is_python_queue(binary, function, origin):
        return CodeKind.QUEUE
    if not binary or _NEUTRAL_BINARY.match(binary):
        waits = _QUEUE_FUNCTION.match(function)
        return CodeKind.QUEUE if waits else CodeKind.NEUTRAL
    return _OF_ORIGIN.get(origin, CodeKind.OWN_NATIVE)
