# SPDX-License-Identifier: Apache-2.0
"""The child that takes the stacks of ranks. It reads lines with a JSON list of pids, and writes a
line of JSON (`RankStacks`) for each pid.

It runs at a lower priority, with limits on CPU time and memory, and is what the OOM killer ends
first: other programs decide how much there is to read for their stacks. The processes are not
stopped (`sonde.agent.dump`).
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
"""Of the child's whole life (RLIMIT_CPU); its parent starts another one."""
MEMORY_BYTES: Final = 256 << 20
"""RLIMIT_DATA; where it is reached, a process's stacks are missing, with that reason."""
NICE: Final = 5
KEPT_S: Final = 12.0
"""How long a dumper is kept: it does not know files that processes map later."""
MAX_PIDS: Final = 64
"""Of one request; those beyond get a line with that reason."""
MAX_THREADS: Final = 48
"""Of a process that are kept: the first one, those with Python code, then the others."""
MAX_FRAMES: Final = 160
"""Of a stack, from the leaf."""
MAX_TEXT: Final = 200
"""Characters of any name."""


class RankStacks(msgspec.Struct):
    """The stacks of one process."""

    pid: int
    threads: list[RankThread] = []
    failed: str = ""
    """Why there are none."""


class RankDump:
    """Takes stacks; keeps its dumper for the next request, which comes soon (the second look)."""

    def __init__(self) -> None:
        self._dumper: Dumper | None = None
        self._pids: set[int] = set()
        self._made_s = 0.0

    def take(self, pids: Sequence[int]) -> Iterator[RankStacks]:
        """The stacks of each process, cut to the limits above. Raises nothing."""
        pids, beyond = pids[:MAX_PIDS], pids[MAX_PIDS:]
        yield from (RankStacks(pid, [], f"beyond {MAX_PIDS} processes") for pid in beyond)
        try:
            dumper = self._ready(pids)
        except Exception as error:
            yield from (RankStacks(pid, [], _text(error)) for pid in pids)
            return
        for pid in pids:
            try:
                threads = dumper.take(pid).threads
            except Exception as error:  # its files and its memory may have anything in them
                yield RankStacks(pid, [], _text(error))
                continue

            def order(it: ThreadStack, pid: int = pid) -> tuple[bool, bool]:
                return it.tid != pid, not any(frame.kind == "python" for frame in it.frames)

            kept = sorted(threads, key=order)[:MAX_THREADS]
            yield RankStacks(pid, [_thread(it) for it in kept])

    def close(self) -> None:
        """Free the dumper."""
        if self._dumper is not None:
            self._dumper.close()
            self._dumper = None

    def _ready(self, pids: Sequence[int]) -> Dumper:
        """A dumper that knows these processes, the one from before where it can be."""
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
        return error.cause[:MAX_TEXT]
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]


def _thread(one: ThreadStack) -> RankThread:
    frames = tuple(
        StackFrame(
            frame.kind, frame.function[:MAX_TEXT],
            (frame.file if frame.kind == "python" else frame.binary)[-MAX_TEXT:], frame.line,
            frame.origin,
        ) for frame in one.frames[:MAX_FRAMES]
    )  # fmt: skip
    return RankThread(one.tid, one.name[:MAX_TEXT], one.state, frames)


def limit_itself() -> None:
    """Limit what this process, and each that it starts, may use, as far as the kernel allows it."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    # The soft limit alone: the child that makes unwind tables for it sets another one for itself.
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, hard))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)


def main() -> None:
    """Serve until the input ends."""
    limit_itself()
    procfs.BROKER.warm_up()
    taker = RankDump()
    while True:
        # Sees no line that readline() has buffered: the parent sends one when it has all answers.
        if not select.select([sys.stdin.buffer], [], [], KEPT_S)[0]:
            taker.close()  # frees BPF programs and maps while nothing is asked
            continue
        if not (line := sys.stdin.buffer.readline()):
            return
        for one in taker.take(msgspec.json.decode(line, type=list[int])):
            sys.stdout.buffer.write(msgspec.json.encode(one) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
