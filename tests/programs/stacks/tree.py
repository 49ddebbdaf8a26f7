# SPDX-License-Identifier: Apache-2.0
"""Call trees that are known: python tree.py SECONDS. Runs on every CPython from 3.10 on."""

import functools
import sys
import threading
import time

UNTIL = time.monotonic() + float(sys.argv[1])


def leaf(n):
    total = 0
    for i in range(n):
        total += i * i
    return total


def key(x):
    return leaf(30) + x


def by_sort():
    return sorted(range(50), key=key)


def generate(n):
    for _ in range(n):
        yield leaf(40)


def by_generator():
    return sum(generate(50))


class Thing:
    def __init__(self):
        self.value = leaf(100)

    def __eq__(self, other):
        return leaf(100) == 1

    __hash__ = None


def by_constructor():
    things = []
    for _ in range(10):
        things.append(Thing())
    return things


def by_comparison(things):
    return things[0] in things[1:]


def add(a, b):
    return a + leaf(50)


def by_reduce():
    return functools.reduce(add, range(20))


def recurse(depth):
    return leaf(300) if depth == 0 else recurse(depth - 1) + 1


async def coroutine():
    return leaf(300)


def by_coroutine():
    try:
        coroutine().send(None)
    except StopIteration as end:
        return end.value


def work():
    while time.monotonic() < UNTIL:
        by_sort()
        by_generator()
        by_comparison(by_constructor())
        by_reduce()
        recurse(30)
        by_coroutine()


def main():
    thread = threading.Thread(target=work)
    thread.start()
    work()
    thread.join()


main()
