# SPDX-License-Identifier: Apache-2.0
"""One CPU for this process and three busy ones that it started."""

import os
import signal

from kit import Kit, work


def busy() -> None:
    while True:
        work(100_000)


def main(kit: Kit) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    kit.cause("cpu_starvation", busy)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            busy()
        kit.child(child)
    stopped = False
    for _ in kit.steps():
        if not kit.on and not stopped:
            stopped = True
            for child in kit.children:
                os.kill(child, signal.SIGSTOP)
        work(50_000)


if __name__ == "__main__":
    main(Kit())
