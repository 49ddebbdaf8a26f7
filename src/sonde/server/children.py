# SPDX-License-Identifier: Apache-2.0
"""The children of a server that compute what a caller's data decides the cost of.

What takes a timeline apart (a question about one, a file that somebody gives to the page) takes
seconds and hundreds of megabytes, as its rows like. It is done in a child with limits of memory and
time, so that the server's process goes on; all children share one budget. A child is a fork of a
process that has imported what it needs (forked_children.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sonde import interpreter, procfs
from sonde.errors import SinkError
from sonde.server.forked_children import POLL_S, ForkedChildren

AT_ONCE = 2
"""Children at a time, where there is memory for them; of one tenant, and for files of the page, one
at most."""
MEMORY_BYTES = 6 << 30
"""Memory of a child, at most."""
CONTAINERS_PART = 2
"""All children together may have one in this many parts of what the container may have. A kubelet
has the kernel end all of a container at once where it has reached its limit: that the children go
first does not help."""
LEAST_BYTES = 512 << 20
"""Where two children cannot have this much each, there is one at a time: the libraries need half of
it."""
ADDRESS_BYTES = 6 << 30
"""Address space, of which DuckDB reserves some without using it."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Somebody who waits for a child."""

    key: str
    is_file: bool


class BusyError(SinkError):
    """It was not the caller's turn to have a child."""


class Children:
    """Who may have a child: those that wait longest first, and one key (tenant) one at a time; one
    child at a time reads a file of the page. Thread-safe."""

    def __init__(self) -> None:
        self._forked = ForkedChildren()
        self._changed = threading.Condition()
        self._waiting: list[_Asked] = []
        self._running: dict[str, bool] = {}
        """By key: whether its child reads a file."""

    @contextmanager
    def place(self, key: str, wait_s: float, *, is_file: bool = False) -> Iterator[None]:
        """Within this context a child may run; `is_file`: it reads a file of the page. Raises
        BusyError where it is not the caller's turn within `wait_s`."""
        one = _Asked(key, is_file)
        at_once = _at_once(_budget_bytes())
        with self._changed:
            self._waiting.append(one)
            try:
                if not self._changed.wait_for(lambda: self._next(at_once) is one, wait_s):
                    raise BusyError("too much is computed at once", "try again later")
                self._running[key] = is_file
            finally:
                self._waiting.remove(one)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                del self._running[key]
                self._changed.notify_all()

    def output_of(
        self,
        module: str,
        arguments: Sequence[str],
        seconds: float,
        most_bytes: int,
        *,
        given: bytes = b"",
        stdin: int | None = None,
        is_over: Callable[[], bool] = _never,
    ) -> tuple[bytes, bool]:
        """As the function `output_of`, of a module's `main`: by a fork, or by a start where there
        can be none, or where memory is so short that what children are forked of has no room. The
        caller has a place. `stdin`: a file in place of `given`. Raises OSError."""
        ends_s = time.monotonic() + seconds
        if memory_bytes() >= LEAST_BYTES:
            found = self._forked.output_of(
                module, arguments, seconds, most_bytes,
                given=given, stdin=stdin, is_over=is_over,
            )  # fmt: skip
            if found is not None:
                return found
        argv = interpreter.command(module, *arguments)
        left_s = max(0.0, ends_s - time.monotonic())
        return output_of(argv, left_s, most_bytes, given=given, stdin=stdin, is_over=is_over)

    def close(self) -> None:
        """End what children are forked of, and children that still run."""
        self._forked.close()

    def others_wait(self, key: str) -> bool:
        """Whether somebody else than this key waits for a child."""
        with self._changed:
            return any(one.key != key for one in self._waiting)

    def _next(self, at_once: int) -> _Asked | None:
        if len(self._running) >= at_once:
            return None
        reads_file = any(self._running.values())
        return next(
            (
                one
                for one in self._waiting
                if one.key not in self._running and not (reads_file and one.is_file)
            ),
            None,
        )


def memory_bytes() -> int:
    """How much memory one child may take."""
    budget_bytes = _budget_bytes()
    return min(MEMORY_BYTES, budget_bytes // _at_once(budget_bytes))


def _budget_bytes() -> int:
    """Memory of all children together."""
    limit = procfs.memory_limit(os.getpid())
    return limit // CONTAINERS_PART if limit else AT_ONCE * MEMORY_BYTES


def _at_once(budget_bytes: int) -> int:
    return min(AT_ONCE, max(1, budget_bytes // LEAST_BYTES))


def keep_within(memory_bytes: int, cpu_s: int) -> None:
    """In the child, before it reads what is asked, and before anything large is imported where it
    is no fork: hold it to its limits."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    limit_libraries()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))


def limit_libraries() -> None:
    """Before they are imported: have libraries reserve little address space."""
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # Others reserve a gigabyte of it at once.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"  # Each thread reserves tens of megabytes.


def output_of(
    argv: Sequence[str],
    seconds: float,
    most_bytes: int,
    *,
    given: bytes = b"",
    stdin: int | None = None,
    is_over: Callable[[], bool] = _never,
) -> tuple[bytes, bool]:
    """(what a child wrote, b'' where it was killed or did not end well; whether it was killed for
    its time). `given`: its standard input; or `stdin`, a file. `is_over`: whether its time is over
    sooner; asked every `POLL_S`. Raises OSError."""
    if stdin is None:
        stdin = subprocess.PIPE if given else subprocess.DEVNULL
    child = interpreter.start(argv, stdin=stdin, ends_first=True)
    late, ended = threading.Event(), threading.Event()

    def end_in_time() -> None:
        ends_s = time.monotonic() + seconds
        while not ended.wait(min(POLL_S, max(0.0, ends_s - time.monotonic()))):
            if time.monotonic() >= ends_s or is_over():
                late.set()
                child.kill()
                return

    threading.Thread(target=end_in_time, name="sonde-deadline").start()
    try:
        if child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(given)
                child.stdin.close()
        assert child.stdout
        content = child.stdout.read(most_bytes + 1)
        is_whole = len(content) <= most_bytes and child.wait(5) == 0
    except subprocess.TimeoutExpired:
        is_whole = False
    finally:
        ended.set()
        interpreter.give_up(child)
    return (content if is_whole else b""), late.is_set()
