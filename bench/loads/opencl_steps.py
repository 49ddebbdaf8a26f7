# SPDX-License-Identifier: Apache-2.0
"""An OpenCL loop that can be repeated bit by bit."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
from conversation import converse

EVERY = 200
SOURCE = (
    "__kernel void f(__global uint *x) { int i = get_global_id(0); x[i] = x[i] * 1664525u + i; }"
)


def main() -> None:
    """Step until the command to end."""
    context = cl.create_some_context(interactive=False)
    queue = cl.CommandQueue(context)
    kernel = cl.Kernel(cl.Program(context, SOURCE).build(), "f")
    host = np.arange(1024, dtype=np.uint32)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    buffer = cl.Buffer(context, flags, hostbuf=host)

    def state() -> bytes:
        cl.enqueue_copy(queue, host, buffer)
        return host.tobytes()

    converse(lambda: kernel(queue, host.shape, None, buffer), state, EVERY, wait_s=0.001)


if __name__ == "__main__":
    main()
