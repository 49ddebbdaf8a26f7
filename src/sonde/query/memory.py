# SPDX-License-Identifier: Apache-2.0
"""Host memory: what processes mapped and touched, and what grows.

A stack is suspected of a leak by how it grew, not by how much: a program that fills its caches
grows at first and then no more, one that leaks grows in every part of its life. What frees memory
into an allocator's own lists and maps nothing anew does not grow at all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sonde.model.answers import MemoryGrowth, MemoryUse
from sonde.model.code import NO_STACK, Frame, Stacks
from sonde.query.questions import EVERYTHING, RUNTIME_LIBRARIES, Where
from sonde.query.session import Session

WINDOWS = 10
"""Parts that the time of a process is cut into, fewer where it was seen in fewer ticks."""
LEAST_WINDOWS = 3
GREW_SHARE = 0.6
"""Of those parts, in which a suspect grew; one of them is among the last two."""
LEAST_BYTES = 1 << 20
"""What grew by less is told of no one."""
FRAMES_TOLD = 4


def memory(session: Session, where: Where = EVERYTHING) -> list[MemoryUse]:
    """What each process mapped, unmapped and touched, who touched most first."""
    clause, parameters = where.sql("kind IN ('mapped', 'unmapped', 'faulted')")

    def total(of: str, what: str = "bytes") -> str:
        return f"CAST(sum(CASE WHEN {of} THEN {what} ELSE 0 END) AS BIGINT)"

    sums = (
        total("kind = 'mapped' AND name <> 'reserved'"),
        total("kind = 'unmapped'"),
        total("name = 'reserved'"),
        total("kind = 'faulted'", '"count"'),
        total("kind = 'faulted'"),
    )
    rows = session.rows(
        f"SELECT process, {', '.join(sums)} "
        f"FROM activity {clause} GROUP BY process ORDER BY 6 DESC, 2 DESC, 1",
        parameters,
    )
    return [MemoryUse(session.processes[number], *sums) for number, *sums in rows]


@dataclass(slots=True)
class _Way:
    """What came by one way through the code, by the time of it."""

    mapped: float = 0.0
    unmapped: float = 0.0
    at: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, time_ns: int, mapped: float, unmapped: float) -> None:
        self.mapped += mapped
        self.unmapped += unmapped
        self.at[time_ns] += mapped - unmapped


def growth(session: Session, where: Where = EVERYTHING) -> list[MemoryGrowth]:
    """Ways through the code that hold more than at first, suspects first, then by bytes."""
    clause, parameters = where.sql("kind IN ('mapped', 'unmapped')", "name <> 'reserved'")
    rows = session.rows(
        "WITH part AS (SELECT process, stack, time_ns,"
        " sum(CASE kind WHEN 'mapped' THEN weight_bytes ELSE 0 END) AS mapped,"
        " sum(CASE kind WHEN 'mapped' THEN 0 ELSE weight_bytes END) AS unmapped"
        f" FROM sample {clause} GROUP BY process, stack, time_ns) "
        "SELECT process, stack, time_ns, mapped, unmapped FROM part",
        parameters,
    )
    ways: dict[tuple[int, tuple[Frame, ...]], _Way] = defaultdict(_Way)
    known: dict[int, tuple[Frame, ...]] = {}
    placeless = _Placeless(session.stacks)
    for process, stack, time_ns, mapped, unmapped in rows:
        if stack not in known:
            known[stack] = placeless.frames(stack)
        ways[process, known[stack]].add(time_ns, mapped, unmapped)
    seen = _seen(session, where)
    found = []
    for (process, frames), way in ways.items():
        held = round(way.mapped - way.unmapped)
        if held < LEAST_BYTES:
            continue
        grew, windows, is_suspect = _judge(way, *seen[process])
        found.append(
            MemoryGrowth(
                process=session.processes[process],
                frames=_told(frames),
                bytes=held,
                mapped_bytes=round(way.mapped),
                unmapped_bytes=round(way.unmapped),
                grew=grew,
                windows=windows,
                is_suspect=is_suspect,
            )
        )
    return sorted(found, key=lambda it: (not it.is_suspect, -it.bytes))


def _seen(session: Session, where: Where) -> dict[int, tuple[int, int, int]]:
    """(first, last, how many) ticks in which each process did anything that was recorded."""
    clause, parameters = where.sql()
    rows = session.rows(
        "SELECT process, min(time_ns), max(time_ns), count(DISTINCT time_ns) FROM ("
        f" SELECT process, time_ns FROM (SELECT * FROM activity {clause}) a UNION ALL"
        f" SELECT process, time_ns FROM (SELECT * FROM sample {clause}) s) GROUP BY process",
        [*parameters, *parameters],
    )
    return {process: (first, last, ticks) for process, first, last, ticks in rows}


def _judge(way: _Way, first_ns: int, last_ns: int, ticks: int) -> tuple[int, int, bool]:
    """(windows in which it grew, windows, whether it is a suspect)."""
    windows = max(1, min(WINDOWS, ticks))
    length_ns = max(1, last_ns - first_ns)
    changes = [0.0] * windows
    for time_ns, change in way.at.items():
        changes[min(windows - 1, windows * (time_ns - first_ns) // length_ns)] += change
    grew = sum(change > 0 for change in changes)
    is_suspect = (
        windows >= LEAST_WINDOWS
        and grew >= GREW_SHARE * windows
        and any(change > 0 for change in changes[-2:])
    )
    return grew, windows, is_suspect


class _Placeless:
    """User frames of stacks, inner first, without their places: calls from several lines of a
    function are one way through the code."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._made: dict[Frame, Frame] = {}
        self._of: dict[int, Frame | None] = {}

    def frames(self, stack: int) -> tuple[Frame, ...]:
        """Of one stack; `NO_STACK` alone where none was taken."""
        indices = self._stacks.indices(stack)
        found = (self._frame(index) for index in indices)
        return tuple(frame for frame in found if frame) if len(indices) else (NO_STACK,)

    def _frame(self, index: int) -> Frame | None:
        if index not in self._of:
            one = self._stacks.frames[index]
            made = Frame(one.kind, one.name, one.binary, file=one.file)
            made = self._made.setdefault(made, made)
            self._of[index] = None if one.kind == "kernel" else made
        return self._of[index]


def _told(frames: tuple[Frame, ...]) -> tuple[str, ...]:
    """Names of the innermost frames: Python's where there are any, else not the C library's."""
    python = [frame for frame in frames if frame.kind == "python"]
    own = [frame for frame in frames if not frame.binary.startswith(RUNTIME_LIBRARIES)]
    return tuple(frame.name for frame in (python or own or frames)[:FRAMES_TOLD])
