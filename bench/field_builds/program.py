# SPDX-License-Identifier: Apache-2.0
"""Run by the interpreter of a build: imports it, has its CUDA runtime meet the driver, and waits.

    python program.py MODULE

Prints a line of JSON: version, the libraries of CUDA that it maps, what its runtime answered.
"""

import ctypes
import importlib
import json
import re
import sys
import threading
import time
from pathlib import Path


def mapped(pattern: str) -> list[str]:
    """Paths of mapped files whose name matches."""
    found = dict.fromkeys(re.findall(r"(/\S+)$", Path("/proc/self/maps").read_text(), re.M))
    return [it for it in found if re.match(pattern, Path(it).name)]


module = importlib.import_module(sys.argv[1])
if sys.argv[1] == "onnxruntime":
    module.preload_dlls()
    for path in Path(str(module.__file__)).parent.glob("capi/libonnxruntime_providers_*.so"):
        try:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as error:
            print(error, file=sys.stderr)


def ask() -> None:
    """How many devices there are, as the framework asks."""
    try:
        if sys.argv[1] == "cupy":
            module.cuda.runtime.getDeviceCount()
        if sys.argv[1] == "jax":
            module.devices("cuda")
    except Exception as error:  # there is none
        print(error, file=sys.stderr)


asking = threading.Thread(target=ask, daemon=True)
asking.start()
asking.join(30.0)
answers: list[int] = []


def meet_the_driver() -> None:
    """In every runtime that is mapped. It may never come back (`driver`)."""
    for library in mapped(r"libcudart[-.\w]*\.so"):
        count = ctypes.c_int()
        answers.append(ctypes.CDLL(library).cudaGetDeviceCount(ctypes.byref(count)))


meeting = threading.Thread(target=meet_the_driver, daemon=True)
meeting.start()
meeting.join(5.0)
threading.Thread(target=time.sleep, args=(1 << 20,), daemon=True).start()
libraries = [Path(it).name for it in mapped(r"libcud(a|art)[-.\w]*\.so")]
version = getattr(module, "__version__", "")
print(json.dumps({"version": version, "libraries": libraries, "answers": answers}), flush=True)
while True:
    sum(range(1000))
    time.sleep(0.001)
