# SPDX-License-Identifier: Apache-2.0
"""Programs that count what they get done: `python -m bench.end_to_end.load NAME FILE`.

FILE holds a u64 of units of work that were done. They go on until they are killed.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

THREADS = 16


def python() -> None:
    """Sorts, compresses, evaluates, collects garbage: what a training script does on its CPU."""
    values = [random.random() for _ in range(4_000)]
    values.sort()
    zlib.compress(bytes(range(256)) * 64)
    cycles: list[object] = []
    for _ in range(500):
        cycles.append([cycles])
    cycles.clear()
    gc.collect(0)


def mappings() -> None:
    """Maps a megabyte, touches it, and lets it go; forty times."""
    for _ in range(40):
        with mmap.mmap(-1, 1 << 20) as memory:
            memory[:: 1 << 12] = bytes(1 << 8)


def forks() -> None:
    """Starts a program and waits for it."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)


def locks(count: Callable[[], None]) -> None:
    """Threads that take turns by one lock."""
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                sum(range(500))
                count()
            time.sleep(0)

    for _ in range(THREADS):
        threading.Thread(target=work, daemon=True).start()
    while True:
        time.sleep(60)


UNITS = {"python": python, "mappings": mappings, "forks": forks}


def main() -> None:
    """Work until killed."""
    name, path = sys.argv[1:]
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 8) as view:
        done = ctypes.c_uint64.from_buffer(view)

        def count() -> None:
            done.value += 1

        # As every framework has one: the library is brought in by a thread that sleeps.
        threading.Thread(target=time.sleep, args=(1 << 20,), daemon=True).start()
        if name == "locks":
            locks(count)
        unit = UNITS[name]
        while True:
            unit()
            count()


if __name__ == "__main__":
    main()
