# SPDX-License-Identifier: Apache-2.0
"""Batches come from a worker process through a pipe; it is too slow."""

import multiprocessing
import zlib
from multiprocessing.connection import Connection

from kit import Kit, work


def produce(there: Connection) -> None:
    image = bytes(range(256)) * 2000
    while True:
        for _ in range(3):
            packed = zlib.compress(image, 9)
        there.send_bytes(packed)


def next_batch(here: Connection) -> bytes:
    return here.recv_bytes()


def main(kit: Kit) -> None:
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe(False)
    worker = forked.Process(target=produce, args=(there,), daemon=True)
    worker.start()
    assert worker.pid is not None
    kit.child(worker.pid)
    kit.cause("input_pipeline", next_batch)
    for _ in kit.steps():
        if kit.on:
            next_batch(here)
        work(40_000)


if __name__ == "__main__":
    main(Kit())
