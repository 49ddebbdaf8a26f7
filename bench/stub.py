# SPDX-License-Identifier: Apache-2.0
"""A stub of the CUDA driver and a runtime upon it, so that scripts for a GPU can be tried.

Its figures mean nothing for a GPU: it shows that a script runs from its begin to its end.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

PROGRAMS = Path(__file__).parent.parent / "tests/programs/inject"
KERNELS = {"stub_long": 30_000, "stub_short": 8_000}
"""Names and ns."""
FOLDER = "SONDE_BENCH_STUB"
"""Names the folder with the built stub, for the processes of a benchmark."""


def build(folder: Path) -> None:
    """Compile both into a folder, and set the environment of child processes to it."""
    driver, runtime = folder / "libcuda.so.1", folder / "libruntime.so"
    cc = ["cc", "-O2", "-shared", "-fPIC", "-pthread"]
    subprocess.run(
        [*cc, "-Wl,-soname,libcuda.so.1", "-o", driver, PROGRAMS / "stub_cuda.c"], check=True
    )
    subprocess.run(
        [*cc, "-o", runtime, PROGRAMS / "runtime.c", driver, f"-Wl,-rpath,{folder}"], check=True
    )
    os.environ[FOLDER] = str(folder)


class StubDevice:
    """The device as the stub has it."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(os.environ[FOLDER] + "/libruntime.so")
        self._runtime.runtime_kernel.restype = ctypes.c_void_p
        self._runtime.runtime_kernel.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
        self._runtime.runtime_launch.argtypes = [ctypes.c_void_p]
        self._runtime.runtime_replay.argtypes = [ctypes.c_void_p]
        self._runtime.runtime_begin()
        kernel = self._runtime.runtime_kernel
        self._kernels = [kernel(name.encode(), ns) for name, ns in KERNELS.items()]
        self._graph = kernel(b"graph", 90_000)

    def make_loop(self, name: str) -> Callable[[], None]:
        """One step of a loop."""
        launch, replay = self._runtime.runtime_launch, self._runtime.runtime_replay

        def ops() -> None:
            for _ in range(5):
                for kernel in self._kernels:
                    launch(kernel)

        if name == "graph":
            return lambda: replay(self._graph)

        def decode() -> None:
            replay(self._graph)
            ops()
            self.synchronize()

        return decode if name == "decode" else ops

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self._runtime.runtime_synchronize()

    def trace(self, run: Callable[[], None]) -> list[tuple[str, int]]:
        """(name, ns) of each kernel that `run` launches; here what the stub was given."""
        run()
        return [(name, ns) for name, ns in KERNELS.items() for _ in range(10)]
