# SPDX-License-Identifier: Apache-2.0
"""Collects garbage for a part of its time, asked for and by itself, and prints which part.

python3 collects.py SECONDS: CPU time in the collector, and in all, as the interpreter's own
callbacks have it (`gc.callbacks`).
"""

import gc
import sys
import time

began = [0.0]
collecting = [0.0]


def note(phase, _):
    """CPU time between the start and the end of a collection."""
    if phase == "start":
        began[0] = time.thread_time()
    else:
        collecting[0] += time.thread_time() - began[0]


gc.callbacks.append(note)
KEPT = [{"of": None} for _ in range(200_000)]
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    several = [[number] for number in range(20_000)]
    sum(range(400_000))
    if len(KEPT) == 200_000:
        gc.collect(1)
print(collecting[0] / time.thread_time(), flush=True)
