# SPDX-License-Identifier: Apache-2.0
"""Python over numpy: products in OpenBLAS, loops in C, calls back into Python."""

import numpy as np

A = np.random.default_rng(1).random((300, 300))


def product(x):
    return np.tanh(x @ A) / 300


def rank(x):
    return np.sort(x, axis=0)


def fold(x):
    return np.apply_along_axis(lambda row: row.sum(), 1, x[:50])


def solve():
    return np.linalg.svd(A[:60, :60])


def work(x):
    while True:
        x = product(x)
        rank(x)
        fold(x)
        solve()


work(A)
