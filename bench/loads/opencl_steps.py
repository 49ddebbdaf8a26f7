# SPDX-License-Identifier: Apache-2.0
"""An OpenCL loop that can be repeated bit by bit; the same conversation as torch_steps.py."""

from __future__ import annotations

import hashlib
import itertools
import json
import select
import sys
import time

import numpy as np
import pyopencl as cl

EVERY = 200
SOURCE = (
    "__kernel void f(__global uint *x) { int i = get_global_id(0); x[i] = x[i] * 1664525u + i; }"
)


def main() -> None:
    """Step until told to end."""
    context = cl.create_some_context(interactive=False)
    queue = cl.CommandQueue(context)
    kernel = cl.Kernel(cl.Program(context, SOURCE).build(), "f")
    host = np.arange(1024, dtype=np.uint32)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffer = cl.Buffer(context, flags, hostbuf=host)
    count, until, hashes = 0, 1 << 60, []
    timing_until = 0.0
    blocks: list[float] = []
    print("ready", flush=True)
    while count < until:
        for _ in range(EVERY):
            kernel(queue, host.shape, None, buffer)
        count += EVERY
        cl.enqueue_copy(queue, host, buffer)
        hashes.append(hashlib.sha256(host.tobytes()).hexdigest()[:12])
        now = time.perf_counter()
        if timing_until:
            blocks.append(now)
            if now >= timing_until:
                pairs = itertools.pairwise(blocks)
                print(json.dumps([1e6 * (b - a) / EVERY for a, b in pairs]), flush=True)
                timing_until, blocks = 0.0, []
        if select.select([0], [], [], 0.001)[0]:  # sleeps, as programs do that read their input
            words = sys.stdin.readline().split() or ["end"]
            match words:
                case ["until", number]:
                    until = int(number)
                case ["time", seconds]:
                    timing_until = now + float(seconds)
                case _:
                    break
    print(json.dumps({"steps": count, "hashes": hashes}), flush=True)


if __name__ == "__main__":
    main()
