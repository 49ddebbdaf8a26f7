# SPDX-License-Identifier: Apache-2.0
"""Each step maps a large buffer, writes it once, and drops it."""

import mmap

from kit import Kit, work


def fresh(size: int) -> int:
    with mmap.mmap(-1, size) as buffer:
        for at in range(0, size, 4096):
            buffer[at] = 1
        return buffer[0]


def reused(buffer: mmap.mmap, size: int) -> int:
    for at in range(0, size, 4096):
        buffer[at] = 1
    return buffer[0]


def main(kit: Kit) -> None:
    size = 24 << 20
    kept = mmap.mmap(-1, size)
    kit.cause("memory", fresh)
    for _ in kit.steps():
        work(5_000)
        if kit.on:
            fresh(size)
        else:
            reused(kept, size)


if __name__ == "__main__":
    main(Kit())
