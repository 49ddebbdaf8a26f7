# SPDX-License-Identifier: Apache-2.0
"""Takes records out of the ring of a profiled process, and trusts nothing that it reads.

The process may write anything at any time. So numbers are checked where they are used, a record
that is not the one expected is counted and left out, and `_native.demangle` bounds the names.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sonde import _native
from sonde.collect import inject_abi as abi
from sonde.collect.ring_budget import Turn

MAX_A_TURN: Final = 16_384
"""Records read from one process at a time; the others stay in the ring, which may get full."""
MAX_NAMES: Final = 20_000
MAX_NAME_BYTES: Final = 1 << 20
"""Names of one ring that are kept, so that they are not read again, and their bytes."""
LONGEST_NS: Final = 3_600_000_000_000
"""No run on a device takes an hour; what claims more is wrong."""
MAX_WEIGHT: Final = 1e7
"""A larger one is wrong."""
STACKS_HELD: Final = 4_096
"""Stacks of a ring whose run has not come yet."""
ADDRESSES_HELD: Final = 65_536
"""Of those stacks together."""


class Run(NamedTuple):
    """One record of a run on a device, checked."""

    type: abi.Type
    source: int
    name: str
    correlation: int
    start_ns: int
    end_ns: int
    weight: float
    stream: int
    bytes: int
    tid: int
    device: int
    window: int
    direction: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    registers: int
    stack: tuple[int, ...]
    """Addresses, leaf first; () none."""


@dataclass(slots=True)
class Taken:
    """What one turn took out of a ring."""

    runs: list[Run] = field(default_factory=list)
    wrong: int = 0
    """Records that could not be true."""
    skipped: int = 0
    """Records that were overwritten, or whose count was nonsense."""


_DIRECTIONS: Final = {1: "h2d", 2: "d2h", 8: "d2d", 10: "p2p"}
_RUNS: Final[Mapping[int, abi.Type]] = {
    int(kind): kind
    for kind in (abi.Type.KERNEL, abi.Type.REPLAY, abi.Type.COPY, abi.Type.SET, abi.Type.SYNC)
}


class Ring:
    """The reading end of one process's ring. It does not close the descriptor."""

    def __init__(self, fd: int, tail: int) -> None:
        self._fd = fd
        self.tail = tail
        """Records taken, ever; as the library is to know it (`abi.Control`)."""
        self._names: OrderedDict[int, str] = OrderedDict()
        self._name_bytes = 0
        self._turn: Turn | None = None
        self._stacks: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        self._addresses = 0
        """In `_stacks`."""

    def waiting(self, head: int) -> int:
        """How many records there are up to `head`, as the library gave it; 0 where it cannot be."""
        waiting = head - self.tail
        return waiting if 0 <= waiting <= abi.RING_RECORDS else 0

    def take(
        self, head: int, now_ns: int, limit: int = MAX_A_TURN, turn: Turn | None = None
    ) -> Taken:
        """Records up to `head`, as the library gave it, and at most `limit`.

        `turn`: what new names may cost. Raises OSError where the memory cannot be read.
        """
        self._turn = turn
        taken = Taken()
        waiting = head - self.tail
        if waiting < 0 or waiting > abi.RING_RECORDS:
            # A library that began again, or a process that writes there itself.
            taken.skipped += min(abs(waiting), abi.RING_RECORDS)
            self.tail = head
            return taken
        left = min(waiting, limit, MAX_A_TURN)
        while left:
            at = self.tail % abi.RING_RECORDS
            count = min(left, abi.RING_RECORDS - at)
            data = os.pread(self._fd, count * abi.RECORD_BYTES, abi.RING_AT + at * abi.RECORD_BYTES)
            if len(data) != count * abi.RECORD_BYTES:
                raise OSError("the ring was cut short")
            records = map(abi.Record._make, abi.RECORD.iter_unpack(data))
            for number, record in enumerate(records):
                self.tail += 1
                if record.seq != self.tail:
                    taken.skipped += 1
                elif record.type == abi.Type.FRAMES:
                    frames = abi.FRAMES.unpack_from(data, number * abi.RECORD_BYTES)
                    self._take_frames(frames, taken)
                else:
                    self._take_run(record, now_ns, taken)
            left -= count
        return taken

    def _take_run(self, record: abi.Record, now_ns: int, taken: Taken) -> None:
        kind = _RUNS.get(record.type)
        if kind is not None:
            run = self._run(record, kind, now_ns)
            if run is None:
                taken.wrong += 1
            else:
                taken.runs.append(run)
        else:
            taken.wrong += 1

    def _take_frames(self, record: Iterable[int], taken: Taken) -> None:
        """`record`: the fields of abi.Frames."""
        _, _, part, parts, frames, correlation, _, _, *addresses = record
        held = self._stacks.setdefault(correlation, [])
        if frames > abi.FRAMES_EACH or part != len(held) or part >= parts:
            taken.wrong += 1
            self._drop_stack(correlation)
            return
        held.append(tuple(addresses[:frames]))
        self._addresses += frames
        while len(self._stacks) > STACKS_HELD or self._addresses > ADDRESSES_HELD:
            self._drop_stack(next(iter(self._stacks)))

    def _drop_stack(self, correlation: int) -> list[tuple[int, ...]]:
        held = self._stacks.pop(correlation, [])
        self._addresses -= sum(map(len, held))
        return held

    def _run(self, record: abi.Record, kind: abi.Type, now_ns: int) -> Run | None:
        correlation, weight, moved = record.correlation, record.weight, record.bytes
        start_ns, end_ns = record.start_ns, record.end_ns
        stack = self._drop_stack(correlation)
        if not (0 <= end_ns - start_ns <= LONGEST_NS and start_ns <= now_ns + LONGEST_NS):
            return None
        if not 0 < weight <= MAX_WEIGHT or moved >= 1 << 62:
            return None
        return Run(
            kind,
            record.source,
            self._name(record.name),
            correlation,
            start_ns,
            end_ns,
            weight,
            record.stream,
            moved,
            record.tid,
            record.device,
            record.window,
            _DIRECTIONS.get(record.kind, "unknown" if kind == abi.Type.COPY else ""),
            (record.grid_0, record.grid_1, record.grid_2),
            (record.block_0, record.block_1, record.block_2),
            record.shared_bytes,
            record.registers,
            tuple(address for part in stack for address in part if address),
        )

    def _name(self, offset: int) -> str:
        known = self._names.get(offset)
        if known is not None:
            return known
        turn = self._turn
        if turn is not None and turn.name_bytes <= 0:
            turn.names_left_out += 1
            return ""
        text = self._read_name(offset)
        if turn is not None:
            turn.name_bytes -= len(text)
        self._names[offset] = text
        self._name_bytes += len(text)
        while len(self._names) > MAX_NAMES or self._name_bytes > MAX_NAME_BYTES:
            self._name_bytes -= len(self._names.popitem(last=False)[1])
        return text

    def _read_name(self, offset: int) -> str:
        if not 8 <= offset <= abi.NAMES_BYTES - abi.NAME.size or offset % 8:
            return ""
        head = os.pread(self._fd, abi.NAME.size, abi.NAMES_AT + offset)
        if len(head) != abi.NAME.size:
            return ""
        length, _ = abi.NAME.unpack(head)
        room = abi.NAMES_BYTES - offset - abi.NAME.size
        if length > min(abi.NAME_MAX, room):
            return ""
        raw = os.pread(self._fd, length, abi.NAMES_AT + offset + abi.NAME.size)
        return _native.demangle(raw)
