# SPDX-License-Identifier: Apache-2.0
"""Measures copy bandwidth from the host to each device, on request, never on a device in use.

Runs in a separate process through the driver's C interface (libcuda), so that a hang or a crash
of the driver is a result, too. Takes about a second and 256 MiB of device memory for each device.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from itertools import pairwise

from sonde import interpreter, system_libraries
from sonde.errors import HostError, UsageError
from sonde.health.facts import Facts, is_part

BYTES = 256 << 20
"""Of one copy."""
ROUNDS = 16
"""Copies that are timed together."""
DEADLINE_S = 60.0
"""For all devices."""
BUSY_SHARE, HELD_BYTES = 0.02, 2 << 30
"""A device with more utilization or memory in use counts as used: an idle one has less."""
LIBRARY = "libcuda.so.1"
"""The CUDA driver's library."""


def measure(facts: Facts) -> dict[str, float]:
    """uuid to bytes a second. Raises UsageError where a device is in use, HostError where the
    driver does not work.
    """
    wanted = [device for device in facts.devices if not is_part(device.about)]
    for device in wanted:
        busy = device.get("hw.gpu.utilization", hw__gpu__task="general") or 0.0
        held = device.get("hw.gpu.memory.usage") or 0.0
        if busy > BUSY_SHARE or held > HELD_BYTES:
            raise UsageError(
                f"{device.label} is in use ({100 * busy:.0f} % busy, {held / 2**30:.1f} GiB used)",
                "Measure bandwidth when no job has the node.",
            )
    if not wanted:
        return {}
    command = interpreter.command("sonde.health.bandwidth", *(d.uuid for d in wanted))
    try:
        done = interpreter.run(command, DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise HostError("copies to the device hang", "Look for XIDs with dmesg.") from error
    if done.returncode:
        raise HostError(
            f"copies to the device failed: {done.stderr.strip().rpartition(chr(10))[2]}",
            "Look for XIDs with dmesg, and at the driver with sonde doctor.",
        )
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


class _Cuda:
    """The CUDA driver's library. It is called with a function's name and arguments; raises OSError
    where that returns an error."""

    def __init__(self) -> None:
        self._library = system_libraries.load(LIBRARY)
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} failed with {code}")


def _rate(cuda: _Cuda, device: ctypes.c_int) -> float:
    """Bytes a second of copies from pinned host memory, after two that are not timed."""
    context = ctypes.c_void_p()
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    host, there = ctypes.c_void_p(), ctypes.c_void_p()
    size = ctypes.c_size_t(BYTES)
    cuda("cuMemAllocHost_v2", ctypes.byref(host), size)
    cuda("cuMemAlloc_v2", ctypes.byref(there), size)
    for _ in range(2):
        cuda("cuMemcpyHtoDAsync_v2", there, host, size, None)
    cuda("cuCtxSynchronize")
    began_s = time.perf_counter()
    for _ in range(ROUNDS):
        cuda("cuMemcpyHtoDAsync_v2", there, host, size, None)
    cuda("cuCtxSynchronize")
    seconds = time.perf_counter() - began_s
    cuda("cuMemFree_v2", there)
    cuda("cuMemFreeHost", host)
    cuda("cuDevicePrimaryCtxRelease_v2", device)
    return ROUNDS * BYTES / seconds


def main() -> None:
    """The child: rates of the devices named by uuid, as JSON."""
    cuda = _Cuda()
    count = ctypes.c_int()
    cuda("cuDeviceGetCount", ctypes.byref(count))
    rates = {}
    for number in range(count.value):
        device = ctypes.c_int()
        cuda("cuDeviceGet", ctypes.byref(device), number)
        raw = (ctypes.c_ubyte * 16)()
        cuda("cuDeviceGetUuid", raw, device)
        digits = bytes(raw).hex()
        borders = (0, 8, 12, 16, 20, 32)  # of the groups of digits in a UUID
        parts = (digits[a:b] for a, b in pairwise(borders))
        uuid = f"GPU-{'-'.join(parts)}"
        if uuid in sys.argv[1:]:
            rates[uuid] = _rate(cuda, device)
    sys.stdout.write(json.dumps(rates))


if __name__ == "__main__":
    main()
