# SPDX-License-Identifier: Apache-2.0
"""The child that takes the stacks of ranks: a list of pids a line in, a line of JSON each out.

Niced, with a limit on CPU time: what the stacks of other programs make it read is theirs
to choose. The processes are not stopped (`sonde.agent.dump`).
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from typing import Final

import msgspec

from sonde import procfs
from sonde.agent.dump import dump
from sonde.diagnose.job import RankThread, StackFrame
from sonde.errors import SondeError
from sonde.model.thread_stack import ThreadStack

CPU_S: Final = 300
"""In its whole life; its parent starts another one."""
NICE: Final = 10
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


def stacks_of(pid: int) -> RankStacks:
    """Every thread's stack, bounded."""
    try:
        threads = dump(pid)
    except SondeError as error:
        return RankStacks(pid, [], error.cause[:TEXT])
    except Exception as error:  # its files and its memory have contents that nobody foresaw
        return RankStacks(pid, [], f"{type(error).__name__}: {error}"[:TEXT])

    def place(it: ThreadStack) -> tuple[bool, bool]:
        return it.tid != pid, not any(frame.kind == "python" for frame in it.frames)

    kept = sorted(threads, key=place)[:THREADS]
    return RankStacks(pid, [_thread(it) for it in kept])


def _thread(one: ThreadStack) -> RankThread:
    frames = tuple(
        StackFrame(
            frame.kind, frame.function[:TEXT],
            (frame.file if frame.kind == "python" else frame.binary)[-TEXT:], frame.line,
        ) for frame in one.frames[:FRAMES]
    )  # fmt: skip
    return RankThread(one.tid, one.name[:TEXT], one.state, frames)


def main() -> None:
    """Serve until the input ends."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    procfs.BROKER.warm_up()
    for line in sys.stdin.buffer:
        for pid in msgspec.json.decode(line, type=list[int])[:PIDS]:
            sys.stdout.buffer.write(msgspec.json.encode(stacks_of(pid)) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
