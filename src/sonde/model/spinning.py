# SPDX-License-Identifier: Apache-2.0
"""Pools of native threads that wait by spinning: they poll a word of memory, or yield in a loop, in
place of sleeping. So their waits look like work, and take CPUs from the thread that they wait for.

What a thread does is known by the innermost function of the pool's library on its stack: these
libraries compute in other functions than those in which they wait. Names of threads are not looked
at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum


class SpinningPool(StrEnum):
    """A library whose pool of threads spins."""

    OPENBLAS = "OpenBLAS"
    OPENMP = "OpenMP"
    MKL = "MKL"
    """OpenMP's threads, called by MKL."""
    BLIS = "BLIS"


POOLS: tuple[SpinningPool, ...] = tuple(SpinningPool)
"""The pool of each number in columns: 1 + its index; 0: none."""

REMEDIES: Mapping[SpinningPool, str] = {
    SpinningPool.OPENBLAS: "OPENBLAS_NUM_THREADS=1",
    SpinningPool.OPENMP: "OMP_NUM_THREADS=1 (PyTorch: torch.set_num_threads(1))",
    SpinningPool.MKL: "MKL_NUM_THREADS=1 (PyTorch: torch.set_num_threads(1))",
    SpinningPool.BLIS: "BLIS_NUM_THREADS=1",
}
"""How the pool's threads are limited, in the environment that the program is started with."""

MOST_CHARS = 256
"""Of a name that is looked at: it is the program's choice, and some patterns take its square."""
YIELDS = ("sched_yield", "do_sched_yield", "__sched_yield")
"""Functions by which a thread gives its CPU to others."""
_OPENBLAS_BINARY = re.compile(r"^lib(scipy_)?openblas|^libf?blas\b|^liblapack\b")
_OPENMP_BINARY = re.compile(r"^lib(gomp|iomp5|omp|omp5)\b")
_MKL_BINARY = re.compile(r"^libmkl")
_BLIS_BINARY = re.compile(r"^libblis")
_OPENBLAS_SERVER = re.compile(r"^blas_thread_server\b")
"""In whichever file: programs link OpenBLAS into themselves, too."""
_OPENBLAS_WAITS = re.compile(
    r"^(exec_blas(_async(_wait)?)?|exec_threads|inner_thread|inner_advanced_thread)\b"
)
"""Functions that wait for other threads of the pool between calls of the functions that compute,
and do little else themselves."""
_OPENMP_WAITS = re.compile(
    r"^(gomp_(team_|simple_)?barrier|gomp_thread_start|gomp_dock|gomp_\w*wait|do_spin|do_wait"
    r"|_*(INTERNAL\w+)?_*kmp\w*(wait|barrier|yield|launch|pause|flag)|kmp_flag)"
)
_BLIS_WAITS = re.compile(r"^bli_(thrcomm|thread|thrinfo)_?\w*barrier")


def pool_of_library(binary: str) -> int:
    """1 + the number in `POOLS` of the pool that a library of machine code has; 0: none."""
    if _OPENBLAS_BINARY.match(binary):
        return 1 + POOLS.index(SpinningPool.OPENBLAS)
    if _OPENMP_BINARY.match(binary):
        return 1 + POOLS.index(SpinningPool.OPENMP)
    if _MKL_BINARY.match(binary):
        return 1 + POOLS.index(SpinningPool.MKL)
    return 1 + POOLS.index(SpinningPool.BLIS) if _BLIS_BINARY.match(binary) else 0


def pool_that_spins(binary: str, function: str) -> int:
    """The same of the pool whose threads wait in a function of machine code; 0 where it computes.

    What has no name in the library of an OpenMP runtime waits: such a library computes nothing.
    """
    binary, function = binary[:MOST_CHARS], function[:MOST_CHARS]
    if _OPENBLAS_SERVER.match(function):
        return 1 + POOLS.index(SpinningPool.OPENBLAS)
    pool = pool_of_library(binary)
    if not pool:
        return 0
    waits = {
        SpinningPool.OPENBLAS: _OPENBLAS_WAITS,
        SpinningPool.OPENMP: _OPENMP_WAITS,
        SpinningPool.BLIS: _BLIS_WAITS,
    }.get(POOLS[pool - 1])
    unnamed = POOLS[pool - 1] == SpinningPool.OPENMP and not function
    return pool if unnamed or (waits is not None and waits.match(function)) else 0
