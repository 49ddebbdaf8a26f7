# SPDX-License-Identifier: Apache-2.0
"""copies.py COUNT [hold]: what copies.c does, through pyopencl and the loader its wheel brings."""

import sys

import numpy as np
import pyopencl as cl

count = int(sys.argv[1])
device = cl.get_platforms()[0].get_devices()[0]
context = cl.Context([device])
queue = cl.CommandQueue(context)
if sys.argv[2:] == ["hold"]:
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit(1)

host = np.zeros(2048, dtype=np.uint8)
flags = cl.mem_flags
there = cl.Buffer(context, flags.READ_WRITE, 2048)
other = cl.Buffer(context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=host)
calls = {"Write": [0, 0], "Copy": [0, 0], "Read": [0, 0]}
buffer_bytes = 4096
for i in range(count):
    size = 16 + i * 37 % 1009
    cl.Buffer(context, flags.READ_ONLY, size).release()
    buffer_bytes += size
    match i % 3:
        case 0:
            cl.enqueue_copy(queue, there, host[:size], is_blocking=True)
        case 1:
            cl.enqueue_copy(queue, other, there, byte_count=size)
        case 2:
            cl.enqueue_copy(queue, host[:size], other, is_blocking=True)
    seen = list(calls.values())[i % 3]
    seen[0] += 1
    seen[1] += size
queue.finish()
there.release()
other.release()
print(f"clCreateBuffer {count + 2} {buffer_bytes}")
print(f"clReleaseMemObject {count + 2} 0")
for name, (number, size) in calls.items():
    print(f"clEnqueue{name}Buffer {number} {size}")
