# SPDX-License-Identifier: Apache-2.0
"""Where the simulation processes blocks of reports: threads of this machine, or a Ray cluster.

Both run the same pure functions (`verification`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Protocol, TypeVar

from sonde.errors import MissingDependency, UsageError

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Engine(Protocol):
    """Applies a pure function to each item; results come in any order."""

    workers: int

    def map(
        self, function: Callable[[ItemT], ResultT], items: Iterable[ItemT]
    ) -> Iterator[ResultT]: ...


class LocalEngine:
    """Threads: the native code releases the interpreter lock, so blocks run in parallel."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        cores = cycle(sorted(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(workers, initializer=lambda: _stay_on(next(cores)))

    def map(
        self, function: Callable[[ItemT], ResultT], items: Iterable[ItemT]
    ) -> Iterator[ResultT]:
        return self._pool.map(function, items)

    def close(self) -> None:
        self._pool.shutdown()


class RayEngine:
    """Ray tasks: on this machine, or on the cluster that RAY_ADDRESS names."""

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependency("Ray is not installed", "pip install ray") from error
        self.workers = workers
        self._ray: Any = ray
        ray.init(
            num_cpus=None if _has_cluster() else workers,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )

    def map(
        self, function: Callable[[ItemT], ResultT], items: Iterable[ItemT]
    ) -> Iterator[ResultT]:
        apply, shared = self._ray.remote(_apply), self._ray.put(function)
        waiting = [apply.remote(shared, item) for item in items]
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=1)
            yield from self._ray.get(done)

    def close(self) -> None:
        self._ray.shutdown()


def _stay_on(core: int) -> None:
    """Pins the calling thread to a core. Otherwise threads that work for milliseconds are woken
    where they last ran, possibly all on one core.
    """
    os.sched_setaffinity(0, {core})


def _apply(function: Callable[[ItemT], ResultT], item: ItemT) -> ResultT:
    return function(item)


def _has_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


@contextmanager
def open_engine(name: str, workers: int) -> Iterator[LocalEngine | RayEngine]:
    """The engine of that name, closed at the end. Raises UsageError where there is none."""
    makers: dict[str, Callable[[int], LocalEngine | RayEngine]] = {
        "local": LocalEngine,
        "ray": RayEngine,
    }
    if name not in makers:
        raise UsageError(f"no such engine: {name}", f"use one of {', '.join(makers)}")
    engine = makers[name](workers)
    try:
        yield engine
    finally:
        engine.close()
