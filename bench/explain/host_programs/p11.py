# SPDX-License-Identifier: Apache-2.0
"""The rate is held down by a sleep in each step."""

import time

from kit import Kit, work


def throttle() -> None:
    time.sleep(0.01)


def main(kit: Kit) -> None:
    kit.cause("pause", throttle)
    for _ in kit.steps():
        work(50_000)
        if kit.on:
            throttle()


if __name__ == "__main__":
    main(Kit())
