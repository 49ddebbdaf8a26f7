# SPDX-License-Identifier: Apache-2.0
"""A Python program at work: calls, objects, dicts. Counts units in a shared file (see cpu.c)."""

import mmap
import sys
from pathlib import Path


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x = x
        self.y = y

    def moved(self, by: int) -> "Point":
        return Point(self.x + by, self.y - by)


def tree(depth: int) -> int:
    if not depth:
        return Point(1, 2).moved(3).x
    return tree(depth - 1) + tree(depth - 1)


def unit() -> int:
    counts: dict[int, int] = {}
    for i in range(50):
        counts[i % 7] = counts.get(i % 7, 0) + i
    return tree(6) + sum(counts.values())


def main() -> None:
    with Path(sys.argv[1]).open("r+b") as file:
        units = memoryview(mmap.mmap(file.fileno(), 64)).cast("Q")
        while True:
            unit()
            units[0] += 1


main()
