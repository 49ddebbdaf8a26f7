# SPDX-License-Identifier: Apache-2.0
"""Takes records out of the ring of a profiled process, and trusts nothing that it reads.

The process may write anything at any time. So numbers are checked where they are used, a record
that is not the one expected is counted and left out, and `_native.demangle` bounds the names.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Final, NamedTuple

from sonde import _native
from sonde.collect import inject_abi as abi
from sonde.collect.ring_budget import KEPT_BYTES, Turn
from sonde.collect.stream_numbers import StreamNumbers
from sonde.procfs.party_memory import PartyMemory

MAX_A_TURN: Final = 16_384
"""Records read from one process at a time; the others stay in the ring, which may get full."""
MAX_NAME_BYTES: Final = 2 << 20
"""Of names of one ring that are kept, so that they are not read again: as they are in memory."""
ENTRY_BYTES: Final = 256
"""Memory of a kept name beside its text: the entry of a dictionary, and its key."""
LONGEST_NS: Final = 3_600_000_000_000
"""No run on a device takes an hour; what claims more is wrong."""
MAX_WEIGHT: Final = 1e7
"""A larger one is wrong."""
MAX_STACK_BYTES: Final = 1 << 20
"""Of stacks of a ring whose run has not come yet, some 700 of a hundred frames: the library puts
them just before it."""
STACK_BYTES: Final = 512
"""Memory of such a stack beside its addresses."""
ADDRESS_BYTES: Final = 9
"""Of an address, and of the room for more that an array has."""
IDS_HELD: Final = 16_384
"""Stacks of a ring that the kernel took and whose run has not come yet."""
NUMBER_BYTES: Final = 192
"""Memory of a number by another one."""


@dataclass(slots=True)
class _Stack:
    """Parts of a stack that have come, packed."""

    parts: int = 0
    addresses: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return STACK_BYTES + ADDRESS_BYTES * len(self.addresses)


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
    stacks_dropped: int = 0
    """Stacks whose run had not come yet when their memory was needed for others."""


_DIRECTIONS: Final = {1: "h2d", 2: "d2h", 8: "d2d", 10: "p2p"}
_RUNS: Final[Mapping[int, abi.Type]] = {
    int(kind): kind
    for kind in (abi.Type.KERNEL, abi.Type.REPLAY, abi.Type.COPY, abi.Type.SET, abi.Type.SYNC)
}


class Ring:
    """The reading end of one process's ring. It does not close the descriptor."""

    def __init__(
        self, fd: int, tail: int, memory: PartyMemory | None = None, party: int = 0
    ) -> None:
        """`memory`: that all rings share, between parties (`procfs.party_of`)."""
        self._fd = fd
        self.tail = tail
        """Records taken, ever; as the library is to know it (`abi.Control`)."""
        self.party = party
        self._names: OrderedDict[int, str] = OrderedDict()
        self._name_bytes = 0
        self._turn: Turn | None = None
        self._stacks: OrderedDict[int, _Stack] = OrderedDict()
        self._stack_bytes = 0
        self._stacks_dropped = 0
        """Not yet in a `Taken`."""
        self._stack_ids: OrderedDict[int, int] = OrderedDict()
        """Of stacks that the kernel took of launches whose run has not come yet, by correlation."""
        self._streams = StreamNumbers()
        self._memory = PartyMemory(KEPT_BYTES) if memory is None else memory
        self._memory.add(self)

    @property
    def held_bytes(self) -> int:
        """Memory of what is kept of it, about, but for the numbers of streams."""
        return self._name_bytes + self._stack_bytes + NUMBER_BYTES * len(self._stack_ids)

    def empty(self) -> None:
        """Drop what is kept of it: names are read again, stacks are lost. Streams keep their
        numbers (`stream_numbers`)."""
        self._stacks_dropped += len(self._stacks) + len(self._stack_ids)
        self._names, self._stacks, self._stack_ids = OrderedDict(), OrderedDict(), OrderedDict()
        self._name_bytes = self._stack_bytes = 0

    def keep_stack_id(self, correlation: int, stack_id: int) -> None:
        """Keep the id of a stack that the kernel took until its run comes."""
        new = correlation not in self._stack_ids
        self._stack_ids[correlation] = stack_id
        if len(self._stack_ids) > IDS_HELD:
            self._stack_ids.popitem(last=False)  # most likely its launch was never timed
        elif new:
            self._memory.grew(NUMBER_BYTES)

    def stack_id(self, correlation: int) -> int:
        """The id of the stack that the kernel took of a launch, once; 0 none."""
        found = self._stack_ids.pop(correlation, 0)
        if found:
            self._memory.grew(-NUMBER_BYTES)
        return found

    def stream(self, handle: int) -> int:
        """A small number for a stream."""
        return self._streams.of(handle)

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
        taken, held = Taken(), self.held_bytes
        try:
            self._take(head, now_ns, min(limit, MAX_A_TURN), taken)
        finally:
            self._memory.grew(self.held_bytes - held)
        taken.stacks_dropped, self._stacks_dropped = self._stacks_dropped, 0
        return taken

    def _take(self, head: int, now_ns: int, limit: int, taken: Taken) -> None:
        waiting = head - self.tail
        if waiting < 0 or waiting > abi.RING_RECORDS:
            # A library that began again, or a process that writes there itself.
            taken.skipped += min(abs(waiting), abi.RING_RECORDS)
            self.tail = head
            return
        left = min(waiting, limit)
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
        held = self._stacks.get(correlation)
        before = held.parts if held is not None else 0
        if not 0 < frames <= abi.FRAMES_EACH or part != before or part >= parts:
            taken.wrong += 1
            self._drop_stack(correlation)
            return
        if held is None:
            held = self._stacks[correlation] = _Stack()
            self._stack_bytes += STACK_BYTES
        held.parts += 1
        held.addresses.extend(addresses[:frames])
        self._stack_bytes += ADDRESS_BYTES * frames
        while self._stack_bytes > MAX_STACK_BYTES:
            self._drop_stack(next(iter(self._stacks)))
            self._stacks_dropped += 1

    def _drop_stack(self, correlation: int) -> Iterable[int]:
        held = self._stacks.pop(correlation, None)
        if held is None:
            return ()
        self._stack_bytes -= held.bytes
        return held.addresses

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
            tuple(address for address in stack if address),
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
            turn.name_bytes -= getsizeof(text)
        self._names[offset] = text
        self._name_bytes += ENTRY_BYTES + getsizeof(text)
        while self._name_bytes > MAX_NAME_BYTES:
            _, oldest = self._names.popitem(last=False)
            self._name_bytes -= ENTRY_BYTES + getsizeof(oldest)
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
