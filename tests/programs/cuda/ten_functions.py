# SPDX-License-Identifier: Apache-2.0
"""Ten functions that keep the device busy for known times: ten_functions.py READY.

Prints what a launch of each takes, in microseconds, by CUDA events around a hundred of them in a
row; makes the file READY, and goes round.
"""

import json
import sys
import time
from pathlib import Path

import torch

UNIT = 16_000
"""Cycles: some 8 microseconds on an H200."""
AT_ONCE = 100

spin = torch._C._cuda_sleep


def one():
    spin(UNIT)


def two():
    spin(2 * UNIT)


def three():
    spin(3 * UNIT)


def four():
    spin(4 * UNIT)


def five():
    spin(5 * UNIT)


def six():
    spin(6 * UNIT)


def seven():
    spin(7 * UNIT)


def eight():
    spin(8 * UNIT)


def nine():
    spin(9 * UNIT)


def ten():
    spin(10 * UNIT)


FUNCTIONS = (one, two, three, four, five, six, seven, eight, nine, ten)


def took_us(function):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(2_000_000)  # the host is ahead by then
    begin.record()
    for _ in range(AT_ONCE):
        function()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / AT_ONCE


def main():
    torch.zeros(1, device="cuda")
    for function in FUNCTIONS:
        took_us(function)
    print(json.dumps({it.__name__: took_us(it) for it in FUNCTIONS}), flush=True)
    Path(sys.argv[1]).touch()
    while True:
        for function in FUNCTIONS:
            function()
        torch.cuda.synchronize()
        time.sleep(0.003)


main()
