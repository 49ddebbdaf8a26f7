# SPDX-License-Identifier: Apache-2.0
"""What a program on a GPU does to itself, from the command to do so: `victims` calls these."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ON_GPU = torch.cuda.is_available()
SETTING: dict[str, float] = {}
LOADER: dict[str, Any] = {}
"""Values shared with the workers of a loader: seconds of work, and of sleep, a sample."""
LOCK = threading.Lock()
PAGE = 4096
MANAGED_BYTES = 512 << 20
LOG_BYTES = 64 << 20
_GARBAGE: list[Any] = []
_MANAGED: list[_Managed] = []


def obey(lines: Iterable[str]) -> None:
    """Take commands, a line each."""
    for line in lines:
        name, _, value = line.partition(" ")
        SETTING[name] = float(value)
        if name == "gil":
            for _ in range(int(float(value))):
                threading.Thread(target=_hog, daemon=True).start()
        elif name == "lock":
            threading.Thread(target=_hold, daemon=True).start()
        elif name in ("busy", "sleep") and name in LOADER:
            LOADER[name].value = float(value)


def after_step(log: Path) -> None:
    """What the program does to itself after each step."""
    if SETTING.get("lock"):
        with LOCK:
            pass
    if objects := int(SETTING.get("gc", 0)):
        while len(_GARBAGE) < objects:
            _GARBAGE.append([len(_GARBAGE)])
        gc.collect()
    if kilobytes := int(SETTING.get("fsync", 0)):
        with log.open("ab") as file:
            file.write(os.urandom(1024 * kilobytes))
            file.flush()
            os.fsync(file.fileno())
        if log.stat().st_size > LOG_BYTES:
            log.unlink()
    if share := SETTING.get("recompile", 0.0):
        _recompile(share)
    if megabytes := int(SETTING.get("managed", 0)):
        _touch_managed(megabytes)


def in_layer() -> None:
    """After each layer of a model."""
    for _ in range(int(SETTING.get("sync", 0))):
        if ON_GPU:
            torch.cuda.synchronize()


def read_norms(model: nn.Module) -> None:
    """Reads the norm of each gradient on the host, one after another."""
    for _ in range(int(SETTING.get("norms", 0))):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.norm().item()


def save(model: nn.Module) -> None:
    """A checkpoint."""
    path = Path(f"/var/tmp/sonde-faults-{os.getpid()}.ckpt")
    try:
        torch.save(model.state_dict(), path)
    finally:
        path.unlink()


class Temporary:
    """Large tensors that live for a step, each time of another size: the allocator of the program
    has to have room for them (`temporary MEGABYTES`). With `streams STEPS` another stream has them
    after this many steps: what the allocator holds for one is not there for the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chance = random.Random(0)
        self._streams = [torch.cuda.Stream() for _ in range(2)] if ON_GPU else []
        self._count = 0

    def use(self) -> None:
        """Take and give back."""
        megabytes = SETTING.get("temporary", 0.0)
        if not megabytes:
            return
        self._count += 1
        steps = int(SETTING.get("streams", 0))
        other = bool(steps) and self._count // steps % 2 == 1
        with torch.cuda.stream(self._streams[other]) if ON_GPU else contextlib.nullcontext():
            self._hold(megabytes)

    def _hold(self, megabytes: float) -> None:
        sizes = [int(megabytes * self._chance.uniform(0.5, 1.5)) << 20 for _ in range(3)]
        held = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        for one in held:
            one[:1024].zero_()


def _hog() -> None:
    """Python code that never lets the interpreter's lock go by itself."""
    count = 0
    while SETTING.get("gil"):
        for number in range(10_000):
            count += number * number


def _hold() -> None:
    while share := SETTING.get("lock"):
        with LOCK:
            _busy(0.04 * share)
        time.sleep(0.04 * (1 - share) + 0.0002)


def _busy(seconds: float) -> None:
    """Work outside the interpreter's lock."""
    until = time.monotonic() + seconds
    matrix = torch.ones(160, 160)
    while time.monotonic() < until:
        matrix = matrix @ matrix
        matrix /= matrix.max()


_compiled = 0
_compile_s = 0.0
_since_s = 0.0


def _recompile(share: float) -> None:
    """Compiles a kernel that was never there, as often as is a `share` of the time."""
    global _compiled, _compile_s, _since_s
    now_s = time.monotonic()
    _since_s = _since_s or now_s
    if _compile_s > share * (now_s - _since_s):
        return
    _compiled += 1
    _compile(f"// {os.getpid()} {_compiled} {now_s}\n")
    _compile_s += time.monotonic() - now_s


def _compile(comment: str) -> None:
    """Compile a kernel with a comment that no other one has, and launch it."""
    if not ON_GPU:
        _busy(0.03)
        return
    with contextlib.suppress(AttributeError, RuntimeError, OSError, TypeError):
        body = 'extern "C" __global__ void scale(float *x) { x[threadIdx.x] *= 0.5f; }'
        kernel: Any = torch.cuda._compile_kernel(f"{body} {comment}", "scale")
        kernel((1, 1, 1), (64, 1, 1), (torch.ones(64, device="cuda"),))
        return
    create: Any = torch.cuda.jiterator._create_jit_fn
    text = f"template <typename T> T f(T x) {{ return x * T({random.random()}); }}"
    create(text)(torch.ones(64, device="cuda"))


class _Managed:
    """Managed memory, seen from the device as a tensor."""

    def __init__(self, size: int) -> None:
        free, _ = torch.cuda.mem_get_info()
        if size > free // 2:
            raise MemoryError("more managed memory than half of the free device memory")
        library = ctypes.CDLL(_runtime_library())
        pointer = ctypes.c_void_p()
        code = library.cudaMallocManaged(ctypes.byref(pointer), ctypes.c_size_t(size), 1)
        if code or not pointer.value:
            raise MemoryError(f"cudaMallocManaged: {code}")
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer.value, False), "version": 3,
        }  # fmt: skip
        host = (ctypes.c_uint8 * size).from_address(pointer.value)
        self.host = torch.frombuffer(host, dtype=torch.uint8)
        self.tensor = torch.as_tensor(self, device="cuda")


def _runtime_library() -> str:
    """The CUDA runtime that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libcudart.so" in line:
            return line.split()[-1]
    return "libcudart.so"


def _touch_managed(megabytes: int) -> None:
    """Writes to managed memory on the host, then on the device: its pages move there and back."""
    size = megabytes << 20
    if not ON_GPU:
        _busy(0.01)
        return
    if not _MANAGED:
        _MANAGED.append(_Managed(MANAGED_BYTES))
    one = _MANAGED[0]
    one.host[:size:PAGE].fill_(1)
    one.tensor[:size].add_(1)
    torch.cuda.synchronize()
