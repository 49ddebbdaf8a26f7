# SPDX-License-Identifier: Apache-2.0
"""Stops itself below a generator, a sort's key function and a method, each its own Python frame."""

import os
import signal


def stop(value):
    os.kill(os.getpid(), signal.SIGSTOP)
    return value


class Work:
    def method(self, value):
        return stop(value)


def key(value):
    return Work().method(value) if value == 2 else value


def generator():
    yield sorted([2, 1], key=key)


def recurse(depth):
    return recurse(depth - 1) if depth else next(generator())


for function in (stop, Work.method, key, generator, recurse):
    print(hex(id(function.__code__)), function.__qualname__, flush=True)
recurse(6)
