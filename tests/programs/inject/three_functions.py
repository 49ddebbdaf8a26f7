# SPDX-License-Identifier: Apache-2.0
"""Launches from three functions for some seconds; prints what each asked of the device, in ns."""

import ctypes
import signal
import sys
import time

runtime = ctypes.CDLL(sys.argv[1])
runtime.runtime_kernel.restype = ctypes.c_void_p
runtime.runtime_kernel.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
runtime.runtime_launch.argtypes = [ctypes.c_void_p]
runtime.runtime_begin()
SHORT = runtime.runtime_kernel(b"short", 10_000)
LONG = runtime.runtime_kernel(b"long", 40_000)
asked = {"embed": 0, "attend": 0, "project": 0}


def embed():
    runtime.runtime_launch(SHORT)
    asked["embed"] += 10_000


def attend():
    for _ in range(3):
        runtime.runtime_launch(LONG)
    runtime.runtime_launch(SHORT)
    asked["attend"] += 130_000


def project():
    runtime.runtime_launch(LONG)
    runtime.runtime_launch(SHORT)
    asked["project"] += 50_000


def layer():
    embed()
    attend()
    project()


def over(*_):
    global end
    end = 0.0


signal.signal(signal.SIGTERM, over)
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    layer()
    time.sleep(0.0005)
for name, ns in asked.items():
    print(name, ns)
