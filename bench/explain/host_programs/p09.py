# SPDX-License-Identifier: Apache-2.0
"""Garbage is collected by hand over a large heap."""

import gc

from kit import Kit, work


def tidy() -> None:
    gc.collect()


def main(kit: Kit) -> None:
    heap = [{"number": number, "list": [number]} for number in range(150_000)]
    kit.cause("gc", tidy)
    for number in kit.steps():
        work(100_000)
        if kit.on and number % 5 == 0:
            tidy()
    assert heap


if __name__ == "__main__":
    main(Kit())
