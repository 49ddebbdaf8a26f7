# SPDX-License-Identifier: Apache-2.0
"""The main thread computes while another thread of the interpreter does."""

import threading
import time

from kit import Kit, work


def summarize(kit: Kit) -> None:
    while True:
        while kit.on:
            sorted(range(2000), key=lambda value: -value)
        time.sleep(0.005)


def main(kit: Kit) -> None:
    kit.cause("gil", summarize)
    threading.Thread(target=summarize, args=(kit,), daemon=True).start()
    for _ in kit.steps():
        work(50_000)
        time.sleep(0.001)


if __name__ == "__main__":
    main(Kit())
