# SPDX-License-Identifier: Apache-2.0
"""known_cause.py CAUSE: feeds an OpenCL device in a loop that is held up by one thing.

device: kernels that the host waits for; loader: a slow thread that hands batches over; sleep: the
feeding thread sleeps; host: it computes in Python. Prints "ready" before
the loop. Runs until its standard input ends.
"""

import os
import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyopencl as cl

cause = sys.argv[1]
device = cl.get_platforms()[0].get_devices()[0]
context = cl.Context([device])
commands = cl.CommandQueue(context)
while "SONDE_INJECT" in os.environ and not (
    commands.properties & cl.command_queue_properties.PROFILING_ENABLE
):  # until the library that came with us has seen that there is OpenCL, and asks for times
    time.sleep(0.01)
    commands = cl.CommandQueue(context)
source = """
kernel void busy(global float *x, int rounds) {
    float y = x[get_global_id(0)];
    for (int i = 0; i < rounds; i++) y = y * 1.0001f + 0.5f;
    x[get_global_id(0)] = y;
}
"""
busy = cl.Program(context, source).build().busy
data = np.zeros(4096, np.float32)
there = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=data)
rounds = np.int32(10_000 if cause == "device" else 200)
batches: queue.Queue[int] = queue.Queue(1)


def load() -> None:
    # Nothing in the name shows that it loads.
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("A")
    while True:
        time.sleep(0.02)
        batches.put(1)


def watch() -> None:
    sys.stdin.read()
    os._exit(0)


threading.Thread(target=watch, daemon=True).start()
if cause == "loader":
    threading.Thread(target=load, daemon=True).start()
busy(commands, (4096,), None, there, rounds)
commands.finish()  # compiled by now, however cold the compiler's cache was
print("ready", flush=True)
while True:
    if cause == "loader":
        batches.get()
    elif cause == "sleep":
        time.sleep(0.02)
    elif cause == "host":
        sum(i * i for i in range(100_000))
    busy(commands, (4096,), None, there, rounds)
    commands.finish()
