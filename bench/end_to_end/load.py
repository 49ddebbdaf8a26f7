# SPDX-License-Identifier: Apache-2.0
"""Programs that count what they get done: `python -m bench.end_to_end.load NAME FILE`.

FILE is `progress`. They go on until they are killed.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.end_to_end.progress import Progress

THREADS: Final = 16
SLEEPERS: Final = 2_000
CLIENTS: Final = 8
QUESTION: Final = 64
PAYLOAD: Final = 1 << 20


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


def threads() -> Callable[[], None]:
    """Python's work beside two thousand threads that wake once a second."""

    def sleep() -> None:
        while True:
            time.sleep(1)

    for _ in range(SLEEPERS):
        threading.Thread(target=sleep, daemon=True).start()
        time.sleep(0.0005)
    return python


def files_and_network() -> Callable[[], None]:
    """A megabyte into a file, to the disk, and by a socket to a thread that reads it."""
    reader, writer = socket.socketpair()

    def drain() -> None:
        while reader.recv(1 << 16):
            pass

    threading.Thread(target=drain, daemon=True).start()
    file, path = tempfile.mkstemp()
    Path(path).unlink()
    data = random.randbytes(PAYLOAD)

    def unit() -> None:
        os.pwrite(file, data, 0)
        os.fdatasync(file)
        writer.sendall(data)

    return unit


def locks(progress: Progress) -> None:
    """Threads that take turns by one lock."""
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                sum(range(500))
                progress.count()
            time.sleep(0)

    for _ in range(THREADS):
        threading.Thread(target=work, daemon=True).start()
    while True:
        time.sleep(60)


def clients(progress: Progress) -> list[socket.socket]:
    """A process whose threads ask and wait a little in between; returns the ends to answer at."""
    pairs = [socket.socketpair() for _ in range(CLIENTS)]
    if os.fork():
        return [end for end, _ in pairs]
    counting = threading.Lock()

    def ask(end: socket.socket) -> None:
        while True:
            began = time.perf_counter()
            end.sendall(b"x" * QUESTION)
            end.recv(QUESTION)
            took = time.perf_counter() - began
            with counting:
                progress.answered(took)
                progress.count()
            time.sleep(0.002)

    for _, end in pairs:
        threading.Thread(target=ask, args=(end,), daemon=True).start()
    while True:
        time.sleep(60)


def server(ends: list[socket.socket]) -> None:
    """Threads that answer, in turns by one lock."""
    lock = threading.Lock()
    shared: dict[int, int] = {}

    def answer(end: socket.socket) -> None:
        while asked := end.recv(QUESTION):
            with lock:
                for number in range(200):
                    shared[number] = shared.get(number, 0) + 1
            end.sendall(asked)

    for end in ends:
        threading.Thread(target=answer, args=(end,), daemon=True).start()
    while True:
        time.sleep(60)


UNITS = {"python": python, "mappings": mappings, "forks": forks}
MAKERS = {"threads": threads, "files": files_and_network}


def main() -> None:
    """Work until killed."""
    name, path = sys.argv[1:]
    progress = Progress(Path(path))
    ends = clients(progress) if name == "server" else []
    # As every framework has one: the library is brought in by a thread that sleeps.
    threading.Thread(target=time.sleep, args=(1 << 20,), daemon=True).start()
    if ends:
        server(ends)
    if name == "locks":
        locks(progress)
    if name.startswith("gpu-"):
        from bench.end_to_end import gpu_load

        gpu_load.work(name.removeprefix("gpu-"), progress)
    unit = MAKERS[name]() if name in MAKERS else UNITS[name]
    while True:
        unit()
        progress.count()


if __name__ == "__main__":
    main()
