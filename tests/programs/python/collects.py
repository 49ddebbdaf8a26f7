# SPDX-License-Identifier: Apache-2.0
"""Collects garbage for a part of its time, asked for and by itself, and prints which part.

python3 collects.py SECONDS, or until SIGTERM. The truth is CPU time between the interpreter's own
callbacks (`gc.callbacks`).
"""

import gc
import signal
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
ends = []
signal.signal(signal.SIGTERM, lambda *_: ends.append(True))
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until and not ends:
    several = [[number] for number in range(20_000)]
    sum(range(400_000))
    if len(KEPT) == 200_000:
        gc.collect(1)
print(collecting[0] / time.thread_time(), flush=True)
