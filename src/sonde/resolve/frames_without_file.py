# SPDX-License-Identifier: Apache-2.0
"""Frames of code that is in no ELF file: just-in-time compiled, or unknown.

A program can have any number of code addresses in memory that it made, each of them a new
frame, and a perf map with a name for each. New frames of a party (parties.py) are bounded, and so
is the time for them. Beyond either, a mapping has one frame, without an offset.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from sonde.model.code import Frame, KnownFrame
from sonde.resolve.allowance import Allowance
from sonde.resolve.counters import Counters
from sonde.resolve.frame_fields import frame_bytes, frame_id, label_of
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.mappings import Mapping
from sonde.resolve.naming_budget import NamingBudget
from sonde.resolve.perf_maps import PerfMaps
from sonde.resolve.tracked_process import TrackedProcess

NEW_BURST: Final = 32_768
"""New frames of one party at once: four times what a large Java program compiles while it
starts."""
NEW_A_SECOND: Final = 500
"""How many more each second."""
MAX_BYTES: Final = 12 << 20
"""Of frames that are remembered to be given again."""
_JIT: Final = "[jit]"


class FramesWithoutFile:
    """Makes them; equal ones are one object."""

    def __init__(self, counters: Counters, budget: NamingBudget, max_frames: int) -> None:
        """`max_frames`: that are remembered to be given again."""
        self._counters = counters
        self._budget = budget
        self._perf_maps = PerfMaps(counters, budget)
        self._known: LruCache[Frame, KnownFrame] = LruCache(max_frames, MAX_BYTES, frame_bytes)
        self._new = Allowance(NEW_BURST, NEW_A_SECOND)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def evicted(self) -> int:
        """Frames that were dropped to make room."""
        return self._known.evicted

    def expire(self) -> None:
        """Drop perf maps of processes that are gone."""
        self._perf_maps.expire()

    def at(
        self, process: TrackedProcess, places: Sequence[tuple[Mapping, int]]
    ) -> tuple[list[KnownFrame], bool]:
        """The frames of addresses of one process, each with its mapping; whether they are to be
        looked up again: they have names, for which its party has no time left."""
        party = process.party
        if self._budget.is_over(party):
            self._counters.frames_without_offset += len(places)
            is_named_later = process.generated_code is not None
            return [self._whole(mapping) for mapping, _ in places], is_named_later
        if self._new.left(party) <= 0:
            self._counters.frames_without_offset += len(places)
            return [self._whole(mapping) for mapping, _ in places], False
        before = self._counters.frames_new
        with self._budget.charged(party):
            found = [self._one(process, mapping, address) for mapping, address in places]
        if new := self._counters.frames_new - before:
            self._new.take(party, new)
        return found, False

    def shared(self, frame: Frame) -> KnownFrame:
        """A frame with its id: the same object for equal frames."""
        known = self._known.get(frame)
        if known is None:
            known = KnownFrame(frame_id(frame), frame)
            self._known.put(frame, known)
            self._counters.frames_new += 1
            self._counters.frames_unnamed += not frame.function
        return known

    def _one(self, process: TrackedProcess, mapping: Mapping, address: int) -> KnownFrame:
        name = None
        if process.generated_code is not None:
            name = process.generated_code.name_at(address)
        if name is None:
            name = self._perf_maps.find(process, address, time.monotonic_ns())
        if name is not None:
            return self.shared(Frame(name.kind, name.function, _JIT, file=name.file))
        start = mapping.start - (mapping.offset if mapping.has_file else 0)
        label = label_of(mapping)
        return self.shared(Frame("unknown", "", label.name, offset=address - start))

    def _whole(self, mapping: Mapping) -> KnownFrame:
        return self.shared(Frame("unknown", "", label_of(mapping).name))
