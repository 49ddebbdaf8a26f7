# SPDX-License-Identifier: Apache-2.0
"""The child that takes the stacks of ranks: a list of pids a line in, a line of JSON each out.

Niced, with limits on CPU time and memory, and the first to go where memory is short: what the
stacks of other programs make it read is theirs to choose. The processes are not stopped
(`sonde.agent.dump`).
"""

from __future__ import annotations

import os
import resource
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from sonde import procfs
from sonde.agent.dump import Dumper
from sonde.diagnose.job import RankThread, StackFrame
from sonde.errors import SondeError
from sonde.model.thread_stack import ThreadStack

CPU_S: Final = 300
"""In its whole life; its parent starts another one."""
MEMORY_BYTES: Final = 256 << 20
"""Beyond it a process's stacks are not taken, with that reason."""
NICE: Final = 5
OOM_SCORE_ADJ: Final = 1000
"""The most: of all processes, the kernel ends this one first."""
KEPT_S: Final = 12.0
"""Files that a process maps later are unknown to what was made before."""
PIDS: Final = 64
"""Of one request."""
THREADS: Final = 48
"""Of a process that are kept: the first one, those with Python code, then the others."""
FRAMES: Final = 160
"""Of a stack, from the leaf."""
TEXT: Final = 200
"""Characters of any name."""


class RankStacks(msgspec.Struct):
    """What was seen of one process."""

    pid: int
    threads: list[RankThread] = []
    failed: str = ""
    """Why nothing was."""


class RankDump:
    """Keeps what a look needed for the next one, which comes soon."""

    def __init__(self) -> None:
        self._dumper: Dumper | None = None
        self._pids: set[int] = set()
        self._made_s = 0.0

    def take(self, pids: Sequence[int]) -> Iterator[RankStacks]:
        """The stacks of each, bounded. Raises nothing."""
        try:
            dumper = self._ready(pids)
        except Exception as error:
            yield from (RankStacks(pid, [], _text(error)) for pid in pids)
            return
        for pid in pids:
            try:
                threads = dumper.take(pid)
            except Exception as error:  # its files and its memory have contents nobody foresaw
                yield RankStacks(pid, [], _text(error))
                continue

            def place(it: ThreadStack, pid: int = pid) -> tuple[bool, bool]:
                return it.tid != pid, not any(frame.kind == "python" for frame in it.frames)

            kept = sorted(threads, key=place)[:THREADS]
            yield RankStacks(pid, [_thread(it) for it in kept])

    def close(self) -> None:
        """Give back what was kept."""
        if self._dumper is not None:
            self._dumper.close()
            self._dumper = None

    def _ready(self, pids: Sequence[int]) -> Dumper:
        is_old = time.monotonic() - self._made_s > KEPT_S
        if is_old or not self._pids.issuperset(pids):
            self.close()
        if self._dumper is None:
            alive = [pid for pid in pids if procfs.read_stat(pid) is not None]
            self._dumper = Dumper(alive)
            self._pids, self._made_s = set(pids), time.monotonic()
        return self._dumper


def _text(error: Exception) -> str:
    if isinstance(error, SondeError):
        return error.cause[:TEXT]
    return f"{type(error).__name__}: {error}"[:TEXT]


def _thread(one: ThreadStack) -> RankThread:
    frames = tuple(
        StackFrame(
            frame.kind, frame.function[:TEXT],
            (frame.file if frame.kind == "python" else frame.binary)[-TEXT:], frame.line,
            frame.origin,
        ) for frame in one.frames[:FRAMES]
    )  # fmt: skip
    return RankThread(one.tid, one.name[:TEXT], one.state, frames)


def bound_itself() -> None:
    """Limit what this process, and what it starts, may use; each as far as the kernel allows it."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    with suppress(OSError, ValueError):  # what makes unwind tables for it has a limit for itself
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, most))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    with suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"%d" % OOM_SCORE_ADJ)
        finally:
            os.close(fd)


def main() -> None:
    """Serve until the input ends."""
    bound_itself()
    procfs.BROKER.warm_up()
    taker = RankDump()
    while True:
        if not select.select([sys.stdin.buffer], [], [], KEPT_S)[0]:
            taker.close()  # what is in the kernel for it does not stay there
            continue
        if not (line := sys.stdin.buffer.readline()):
            return
        for one in taker.take(msgspec.json.decode(line, type=list[int])[:PIDS]):
            sys.stdout.buffer.write(msgspec.json.encode(one) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
