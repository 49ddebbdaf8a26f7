# SPDX-License-Identifier: Apache-2.0
"""Host memory: what processes mapped and touched, and what looks like a leak.

A call path is suspected of a leak by how steadily it grew, not by how much: a program that fills
its caches grows at first and then stops, one that leaks grows all the time. Memory that an
allocator keeps in its free lists and reuses does not grow at all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sonde.model.answers import MemoryGrowth, MemoryUse
from sonde.model.code import NO_STACK, Frame, Stacks
from sonde.query.own_frames import RUNTIME_LIBRARIES
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session
from sonde.query.validation import MAX_NUMBER

WINDOWS = 10
"""Equal parts of the time in which a process has rows; fewer where those are of fewer ticks."""
LEAST_WINDOWS = 3
"""With fewer, growth all the time cannot be distinguished from growth at first."""
GREW_SHARE = 0.6
"""A suspect grew in at least this share of the windows, and in one of the last two."""
LEAST_BYTES = 1 << 20
"""Call paths that grew by less are not reported."""
FRAMES_SHOWN = 4
"""Innermost frames by which a call path is named."""


def memory(session: Session, where: Where = EVERYTHING) -> list[MemoryUse]:
    """What each process mapped, unmapped and page-faulted, most page-faulted bytes first. A program
    may ask for any number of bytes: sums end at MAX_NUMBER."""
    clause, parameters = where.sql("kind IN ('mapped', 'unmapped', 'faulted')")

    def total(condition: str, column: str = "bytes") -> str:
        whole = f"sum(CASE WHEN {condition} THEN {column} ELSE 0 END)"
        return f"CAST(least({whole}, {MAX_NUMBER}) AS BIGINT)"

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
class _CallPath:
    """Bytes mapped and unmapped by one call path; `at`: change by time in ns."""

    mapped: float = 0.0
    unmapped: float = 0.0
    at: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, time_ns: int, mapped: float, unmapped: float) -> None:
        self.mapped += mapped
        self.unmapped += unmapped
        self.at[time_ns] += mapped - unmapped


def growth(session: Session, where: Where = EVERYTHING) -> list[MemoryGrowth]:
    """Call paths with at least `LEAST_BYTES` mapped and not unmapped: suspects first, then by
    bytes."""
    clause, parameters = where.sql("kind IN ('mapped', 'unmapped')", "name <> 'reserved'")
    rows = session.rows(
        "WITH part AS (SELECT process, stack, time_ns,"
        " sum(CASE kind WHEN 'mapped' THEN weight_bytes ELSE 0 END) AS mapped,"
        " sum(CASE kind WHEN 'mapped' THEN 0 ELSE weight_bytes END) AS unmapped"
        f" FROM sample {clause} GROUP BY process, stack, time_ns) "
        "SELECT process, stack, time_ns, mapped, unmapped FROM part",
        parameters,
    )
    paths: dict[tuple[int, tuple[Frame, ...]], _CallPath] = defaultdict(_CallPath)
    known: dict[int, tuple[Frame, ...]] = {}
    user_frames = _UserFrames(session.stacks)
    for process, stack, time_ns, mapped, unmapped in rows:
        if stack not in known:
            known[stack] = user_frames.frames(stack)
        paths[process, known[stack]].add(time_ns, mapped, unmapped)
    ticks = _ticks_of(session, where)
    found = []
    for (process, frames), path in paths.items():
        held = round(path.mapped - path.unmapped)
        if held < LEAST_BYTES:
            continue
        grew, windows, is_suspect = _growth_of(path, *ticks[process])
        found.append(
            MemoryGrowth(
                process=session.processes[process],
                frames=_frame_names(frames),
                bytes=held,
                mapped_bytes=round(path.mapped),
                unmapped_bytes=round(path.unmapped),
                grew=grew,
                windows=windows,
                is_suspect=is_suspect,
            )
        )
    return sorted(found, key=lambda it: (not it.is_suspect, -it.bytes))


def _ticks_of(session: Session, where: Where) -> dict[int, tuple[int, int, int]]:
    """By process: (time of its first tick, of its last, their number); a tick counts if it has rows
    of the process."""
    clause, parameters = where.sql()
    rows = session.rows(
        "SELECT process, min(time_ns), max(time_ns), count(DISTINCT time_ns) FROM ("
        f" SELECT process, time_ns FROM (SELECT * FROM activity {clause}) a UNION ALL"
        f" SELECT process, time_ns FROM (SELECT * FROM sample {clause}) s) GROUP BY process",
        [*parameters, *parameters],
    )
    return {process: (first, last, ticks) for process, first, last, ticks in rows}


def _growth_of(path: _CallPath, first_ns: int, last_ns: int, ticks: int) -> tuple[int, int, bool]:
    """(windows in which the path grew, windows, whether it is suspected of a leak)."""
    windows = max(1, min(WINDOWS, ticks))
    length_ns = max(1, last_ns - first_ns)
    changes = [0.0] * windows
    for time_ns, change in path.at.items():
        changes[min(windows - 1, windows * (time_ns - first_ns) // length_ns)] += change
    grew = sum(change > 0 for change in changes)
    is_suspect = (
        windows >= LEAST_WINDOWS
        and grew >= GREW_SHARE * windows
        and any(change > 0 for change in changes[-2:])
    )
    return grew, windows, is_suspect


class _UserFrames:
    """User frames of stacks, innermost first, without line and offset, so that calls from several
    lines of a function are one call path.
    """

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._equal: dict[Frame, Frame] = {}
        self._by_index: dict[int, Frame | None] = {}

    def frames(self, stack: int) -> tuple[Frame, ...]:
        """Frames of one stack; `NO_STACK` alone where no stack was recorded."""
        indices = self._stacks.indices(stack)
        found = (self._frame(index) for index in indices)
        return tuple(frame for frame in found if frame) if len(indices) else (NO_STACK,)

    def _frame(self, index: int) -> Frame | None:
        if index not in self._by_index:
            one = self._stacks.frames[index]
            made = Frame(one.kind, one.name, one.binary, file=one.file)
            made = self._equal.setdefault(made, made)
            self._by_index[index] = None if one.kind == "kernel" else made
        return self._by_index[index]


def _frame_names(frames: tuple[Frame, ...]) -> tuple[str, ...]:
    """Names of the innermost frames: of Python code if any, else of code outside the C library."""
    python = [frame for frame in frames if frame.kind == "python"]
    own = [frame for frame in frames if not frame.binary.startswith(RUNTIME_LIBRARIES)]
    return tuple(frame.name for frame in (python or own or frames)[:FRAMES_SHOWN])
