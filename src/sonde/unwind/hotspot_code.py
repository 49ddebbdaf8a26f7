# SPDX-License-Identifier: Apache-2.0
"""The code that a running HotSpot has generated: its interpreter, stubs and compiled methods.

Each piece is a "blob", in a block of one of a few code heaps. A heap's segment map has a 0 where a
block begins, so comparing it with the one read before finds new code without reading all of it.
"""

from __future__ import annotations

import re
import struct
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from sonde.unwind.hotspot_layout import HotspotLayout
from sonde.unwind.process_memory import Memory, read_exactly, read_word

MAX_HEAPS: Final = 8
MAX_RESERVED_BYTES: Final = 1 << 30
"""Of all code heaps of a JVM, which are next to one another."""
MAX_BLOBS: Final = 65_536
"""Of one JVM; code beyond it is not known, and counted."""
MAX_ROWS: Final = 1 << 19
"""Rules of one JVM, which take 50 MB. Ordinary code has some five a method."""
MAX_BLOB_ROWS: Final = 4096
"""Rules of one blob: three for each return. Code with more counts as code that is not known."""
MAX_BLOCKS: Final = 2 * MAX_BLOBS
"""Of all heaps of one JVM, free ones included."""
MAX_SEGMENTS: Final = 8 << 20
"""Of all heaps of one JVM."""
READ_BYTES: Final = 256 << 10
"""Of code that is read at once."""
READ_GAP: Final = 4096
"""Blocks that are this close, in bytes, are read together."""
CHECKS: Final = 16
"""Code that is known already is read again, a 16th of it at each refresh: it may be replaced."""
MAX_KINDS: Final = 4096
"""Names of kinds of blobs that are kept."""
MAX_KIND_READS: Final = 32
"""Reads of names for the code of one read; names that are near one another are read together."""
MAX_FRAME_WORDS: Final = 1 << 16
_COMPILED: Final = (b"nmethod", b"native nmethod")
_INTERPRETER: Final = b"Interpreter"
_ROUTINES: Final = b"StubRoutines"
_NAME_BYTES: Final = 32
_PUSH_RBP: Final = 0x55
_RETURN_BYTES: Final = 40
"""From the last instruction of a frame to its `ret`, at most."""

Rule = tuple[int, int, int, int]
"""(cfa, rbp, offset, rbp_offset): `struct unwind_rule` of abi/unwind.h."""
_CFA_RSP, _CFA_RBP, _CFA_GENERATED, _CFA_INTERPRETED = 2, 3, 12, 13
_UNCHANGED, _AT_CFA = 0, 1
GENERATED: Final[Rule] = (_CFA_GENERATED, _UNCHANGED, 0, 0)
"""Code that is not known (yet): by frame pointers, and the walk requests a look for new code."""
CALLED: Final[Rule] = (_CFA_RSP, _UNCHANGED, 8, 0)
"""No frame: the return address is on top of the stack."""
PUSHED: Final[Rule] = (_CFA_RSP, _AT_CFA, 16, -16)
"""The caller's rbp is on top of the stack, the return address above it."""
LINKED: Final[Rule] = (_CFA_RBP, _AT_CFA, 16, -16)
"""A frame that rbp points to."""
INTERPRETED: Final[Rule] = (_CFA_INTERPRETED, _UNCHANGED, 0, 0)
"""A frame of HotSpot's interpreter."""

# sub rsp, N | add rsp, N; with N as 8 or 32 bits
_GROW: Final = re.compile(rb"\x48(?:\x83\xec(.)|\x81\xec(....))", re.DOTALL)
_SHRINK: Final = re.compile(rb"\x48(?:\x83\xc4(.)|\x81\xc4(....))\x5d", re.DOTALL)
# pop rbp; then ret, or the check for a safepoint: cmp rsp, [r15 + N]
_POP: Final = re.compile(rb"\x5d(?=\xc3|\x49\x3b[\x67\xa7])", re.DOTALL)


@dataclass(slots=True)
class Blob:
    """One piece of code."""

    start: int
    end: int
    method: int
    """Address of its Method; 0: none."""
    rules: list[tuple[int, Rule]]
    """By address, from `start` on."""
    head: bytes
    """What identifies it; where this differs, another blob is there now."""
    kind: str
    """HotSpot's name for it."""


@dataclass(frozen=True, slots=True)
class _Heap:
    """One code heap."""

    low: int
    high: int
    """Start (`low`) and end of what is reserved for it."""
    used: int
    used_end: int
    """Start and end of what is used of that."""
    segment_map: int
    """Its address."""
    shift: int
    """Bytes of a segment, as a power of two."""

    @property
    def segments(self) -> int:
        """How many are used."""
        return (self.used_end - self.used) >> self.shift

    def blocks(self, memory: Memory, most: int) -> tuple[int, ...]:
        """Where blocks begin. Raises ValueError where they are more than `most`."""
        starts = read_exactly(memory, self.segments, self.segment_map) if self.segments else b""
        if starts.count(0) > most:
            raise ValueError("too many blocks")
        found = re.finditer(rb"\0", starts)
        return tuple(self.used + (it.start() << self.shift) for it in found)


class HotspotCode:
    """The blobs of one JVM."""

    def __init__(self, layout: HotspotLayout) -> None:
        self._layout = layout
        self._blobs: dict[int, Blob] = {}
        """By address of the block."""
        self._kinds: dict[int, bytes] = {}
        """Names of kinds of blobs by the pointer to them."""
        self._heaps_at: tuple[int, ...] = ()
        self._starts: list[int] = []
        self._sorted: list[Blob] = []
        self._rows = 0
        """Rules of all blobs."""
        self._turn = 0
        """Which 16th of the known code is checked at this refresh."""
        self._next_heap = 0
        """Index of the heap where the next refresh begins: before it, time ran out."""
        self._is_cut = False
        """Time ran out within a heap since heap 0 was looked at."""
        self._is_changed = False
        """Blobs changed since the last refresh that ended without an error."""
        self.most_blobs = MAX_BLOBS
        """Blobs that this JVM may have now, beside those of others."""
        self.most_rows = MAX_ROWS
        """The same of rules."""
        self.bounds = (0, 0)
        """What is reserved for code: first address, end."""
        self.left_out = 0
        """Blobs beyond `most_blobs` or `most_rows` at the last refresh."""
        self.is_behind = False
        """Time ran out: call `refresh` again."""
        self.has_replaced = False
        """The last refresh found code gone or replaced."""

    def __len__(self) -> int:
        return len(self._blobs)

    @property
    def rows(self) -> int:
        """Rules of all its code."""
        return self._rows

    def refresh(self, memory: Memory, until_s: float) -> bool:
        """Read what is new, until `until_s` (CLOCK_MONOTONIC). Returns whether anything changed.

        Raises OSError, ValueError or struct.error where the memory holds something else.
        """
        self.is_behind = self.has_replaced = False
        self.left_out = 0
        known: set[int] = set()
        new: list[tuple[int, int]] = []
        to_check: list[tuple[int, int]] = []
        if not self._next_heap:
            self._turn = (self._turn + 1) % CHECKS
            self._is_cut = False
        heaps = self._heaps(memory)
        self.bounds = min(it.low for it in heaps), max(it.high for it in heaps)
        if self.bounds[1] - self.bounds[0] > MAX_RESERVED_BYTES:
            raise ValueError("code heaps far apart")
        other = heaps[: self._next_heap]
        looked_at = heaps[self._next_heap :]
        self._next_heap = 0
        left_blocks = MAX_BLOCKS
        for number, heap in enumerate(looked_at, len(other)):
            if known and time.monotonic() > until_s:
                other += heaps[number:]
                self._next_heap = number
                break
            blocks = heap.blocks(memory, left_blocks)
            left_blocks -= len(blocks)
            known.update(blocks)
            ends = (*blocks[1:], heap.used_end) if blocks else ()
            for at, (block, end) in enumerate(zip(blocks, ends, strict=True)):
                blob = self._blobs.get(block)
                if blob is None or blob.end > end:
                    new.append((block, end))
                elif at * CHECKS // len(blocks) == self._turn:
                    to_check.append((block, end))
        for block in [block for block in self._blobs if block not in known]:
            if not any(it.low <= block < it.high for it in other):
                self._drop(block)
                self._is_changed = True
        for blocks_read in chain(self._read(memory, new), self._read(memory, to_check)):
            self._learn_kinds(memory, blocks_read)
            for block, raw in blocks_read:
                self._is_changed |= self._take(block, raw)
            if time.monotonic() > until_s:
                self._is_cut = True
                break
        self.is_behind = self._is_cut or self._next_heap > 0
        if not self._is_changed:
            return False
        self._is_changed = False
        self._sorted = sorted(self._blobs.values(), key=lambda it: it.start)
        self._starts = [it.start for it in self._sorted]
        return True

    def find(self, address: int) -> Blob | None:
        """The blob at an address."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._sorted[at].end:
            return None
        return self._sorted[at]

    def rules(self) -> list[tuple[int, Rule]]:
        """(address, rule from there on), in order, for all memory that is reserved for code."""
        found = [(self.bounds[0], GENERATED)]
        end = self.bounds[0]
        for blob in self._sorted:
            if blob.start < end:
                continue  # overlaps, which code of a JVM does not
            found += blob.rules
            end = blob.end
            found.append((end, GENERATED))
        return [it for it in found if it[0] < self.bounds[1]]

    def _addresses(self, memory: Memory) -> tuple[int, ...]:
        """Addresses of the code heaps, which are made when the JVM starts."""
        layout = self._layout
        if self._heaps_at and self._turn:
            return self._heaps_at
        array = read_word(memory, layout.heaps)
        count = int.from_bytes(read_exactly(memory, 4, array + layout.array_length), "little")
        if not 0 < count <= MAX_HEAPS:
            raise ValueError("no code heaps")
        data = read_word(memory, array + layout.array_data)
        found = struct.unpack(f"<{count}Q", read_exactly(memory, 8 * count, data))
        self._heaps_at = tuple(dict.fromkeys(found))
        return self._heaps_at

    def _heaps(self, memory: Memory) -> list[_Heap]:
        layout = self._layout
        found = []
        for heap in self._addresses(memory):
            raw = read_exactly(memory, layout.heap_bytes, heap)
            reserved, reserved_end, low, high = (
                struct.unpack_from("<Q", raw, layout.heap_memory + it)[0] for it in layout.space
            )
            (shift,) = struct.unpack_from("<i", raw, layout.heap_shift)
            (segments,) = struct.unpack_from("<Q", raw, layout.heap_segments + layout.space[2])
            if not reserved <= low <= high <= reserved_end <= reserved + MAX_RESERVED_BYTES:
                raise ValueError("a code heap without bounds")
            if not 6 <= shift <= 16:
                raise ValueError("segments of another size")
            found.append(_Heap(reserved, reserved_end, low, high, segments, shift))
        if sum(it.segments for it in found) > MAX_SEGMENTS:
            raise ValueError("too many segments")
        return found

    def _read(
        self, memory: Memory, wanted: list[tuple[int, int]]
    ) -> Iterator[list[tuple[int, bytes]]]:
        """Blocks with their content; neighbours are read at once."""
        wanted.sort()
        at = 0
        while at < len(wanted):
            first, end = wanted[at]
            last = at + 1
            while (
                last < len(wanted)
                and wanted[last][0] - end < READ_GAP
                and wanted[last][1] - first < READ_BYTES
            ):
                end = wanted[last][1]
                last += 1
            raw = memory.read_at(min(end - first, 4 * READ_BYTES), first)
            yield [(block, raw[block - first : until - first]) for block, until in wanted[at:last]]
            at = last

    def _take(self, block: int, raw: bytes) -> bool:
        """Keep the blob of a block. Returns whether it is another one than before."""
        before = self._blobs.get(block)
        blob = self._blob(block, raw)
        if before is not None:
            if blob and before.head == blob.head and before.rules == blob.rules:
                return False
            self._drop(block)
        if blob is None:
            return before is not None
        if len(self._blobs) >= self.most_blobs or self._rows + len(blob.rules) > self.most_rows:
            self.left_out += 1  # the blob that was there before is gone all the same
            return before is not None
        self._blobs[block] = blob
        self._rows += len(blob.rules)
        return True

    def _drop(self, block: int) -> None:
        """A block is free, or has another blob."""
        self._rows -= len(self._blobs.pop(block).rules)
        self.has_replaced = True

    def _blob(self, block: int, raw: bytes) -> Blob | None:
        """A block as a blob; None where it is free, or being made."""
        layout = self._layout
        header = layout.block_bytes
        if len(raw) < header + layout.blob_bytes or not raw[8]:
            return None
        head = raw[header : header + layout.blob_bytes]
        start, end = (
            struct.unpack_from("<Q", head, it)[0] for it in (layout.code_begin, layout.code_end)
        )
        frame_size, complete = (
            struct.unpack_from("<i", head, it)[0]
            for it in (layout.frame_size, layout.frame_complete)
        )
        if not block < start < end <= block + len(raw) or frame_size > MAX_FRAME_WORDS:
            return None
        kind = self._kinds.get(struct.unpack_from("<Q", head, layout.blob_name)[0], b"")
        code = raw[start - block : end - block]
        method = 0
        if kind in _COMPILED:
            (method,) = struct.unpack_from("<Q", head, layout.nmethod_method)
            (verified,) = struct.unpack_from("<Q", head, layout.verified_entry)
            rules = _bounded(start, _of_method(code, start, verified, frame_size, complete))
        elif kind == _INTERPRETER:
            rules = [(start, INTERPRETED)]
        elif frame_size > 1:
            rules = _bounded(start, _of_method(code, start, start, frame_size, complete))
        else:
            rules = [(start, LINKED if kind.startswith(_ROUTINES) else CALLED)]
        identity = b"%d %d %d %d" % (start, end, frame_size, method) + kind
        return Blob(start, end, method, rules, identity, kind.decode("ascii", "replace"))

    def _learn_kinds(self, memory: Memory, blocks: list[tuple[int, bytes]]) -> None:
        """Read the names of kinds that are not known, neighbours at once."""
        at = self._layout.block_bytes + self._layout.blob_name
        pointers = {struct.unpack_from("<Q", raw, at)[0] for _, raw in blocks if len(raw) > at + 8}
        unknown = sorted(pointers - self._kinds.keys())
        if len(self._kinds) > MAX_KINDS:
            self._kinds.clear()
        for _ in range(MAX_KIND_READS):
            if not unknown:
                break
            first = unknown[0]
            near = [it for it in unknown if it < first + READ_BYTES]
            unknown = unknown[len(near) :]
            raw = b""
            with suppress(OSError, OverflowError):
                raw = memory.read_at(near[-1] - first + _NAME_BYTES, first)
            for it in near:
                self._kinds[it] = raw[it - first :][:_NAME_BYTES].partition(b"\0")[0]


def _bounded(start: int, rules: Iterator[tuple[int, Rule]]) -> list[tuple[int, Rule]]:
    """The rules of a blob; where they are too many, that of code that is not known."""
    found = list(islice(rules, MAX_BLOB_ROWS + 1))
    return found if len(found) <= MAX_BLOB_ROWS else [(start, GENERATED)]


def _of_method(
    code: bytes, start: int, verified: int, frame_size: int, complete: int
) -> Iterator[tuple[int, Rule]]:
    """The rules of code with a frame of `frame_size` words, the return address and rbp included.

    `verified`: address at which the code begins for callers that know the receiver's class;
    `complete`: offset at which the frame is made, 0 or less: unknown.
    """
    size = 8 * frame_size
    whole: Rule = (_CFA_RSP, _AT_CFA, size, -16)
    if size < 16:
        yield start, CALLED
        return
    yield start, CALLED
    entry = max(0, min(verified - start, len(code)))
    body = min(complete, len(code)) if complete > 0 else min(entry + 64, len(code))
    at = 0
    if grown := _grown(code, entry, body, size - 8):  # mov [rsp + N - 8], rbp follows
        yield start + grown, (_CFA_RSP, _UNCHANGED, size, 0)
        at = min(grown + (5 if size - 16 < 128 else 8), len(code) - 1)
    elif size == 16:
        at = code.find(_PUSH_RBP, entry, body) + 1
    elif grown := _grown(code, entry, body, size - 16):
        pushed = code.rfind(_PUSH_RBP, entry, grown - 3) + 1
        if pushed:
            yield start + pushed, PUSHED
        at = grown
    at = at or max(1, body if complete > 0 else entry + 8)
    if at >= len(code):
        return
    yield start + at, whole
    for ended, popped in _ends(code, at, size - 16):
        returned = code.find(b"\xc3", popped, popped + _RETURN_BYTES)
        if returned < 0 or ended <= at:
            continue
        at = returned
        if ended < popped - 1 or size > 16:
            yield start + popped - 1, PUSHED
        yield start + popped, CALLED
        if returned + 1 < len(code):
            yield start + returned + 1, whole


def _grown(code: bytes, entry: int, end: int, size: int) -> int:
    """Offset behind the instruction that subtracts `size` from the stack pointer; 0: none does."""
    for found in _GROW.finditer(code, entry, end):
        if size == int.from_bytes(found[1] or found[2], "little", signed=True):
            return found.end()
    return 0


def _ends(code: bytes, at: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the instructions that remove a frame's `size` bytes and restore rbp."""
    if not size:
        yield from ((it.start(), it.end()) for it in _POP.finditer(code, at))
        return
    for found in _SHRINK.finditer(code, at):
        if size == int.from_bytes(found[1] or found[2], "little", signed=True):
            yield found.start(), found.end()
