# SPDX-License-Identifier: Apache-2.0
"""A stack of some 60 frames, Python's and C's by turns: `nested.py LEVELS`."""

import functools
import sys

LEVELS = int(sys.argv[1])


def leaf(n):
    total = 0
    for i in range(n):
        total += i * i
    return total


def key(level):
    return leaf(3000) if level <= 0 else by_sort(level)


def by_sort(level):
    return sorted([level - 1], key=key)


while True:
    functools.reduce(lambda a, b: by_sort(LEVELS), range(2))
