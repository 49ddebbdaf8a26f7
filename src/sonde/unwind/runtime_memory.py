# SPDX-License-Identifier: Apache-2.0
"""The memory of what is known of the runtimes in processes (JVMs, V8s, Rubies, PHPs): names, paths
and tables that their processes choose, and the frames made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from sonde import _native
from sonde.model.code import KnownFrame
from sonde.procfs.party_memory import PartyMemory
from sonde.resolve.frame_fields import frame_bytes
from sonde.resolve.tracked_process import TrackedProcess

MOST_BYTES: Final = 24 << 20
"""Of all runtimes together. What is known of a large program takes some MB."""


class RuntimeMemory(ABC):
    """A runtime, whose names and frames are counted, and dropped where their party has most."""

    def __init__(self, process: TrackedProcess, memory: PartyMemory | None) -> None:
        """`memory`: that all runtimes share; None: it has a bound for itself."""
        self.party = process.party
        self._memory_of_all = PartyMemory(MOST_BYTES) if memory is None else memory
        self._counted_bytes = 0
        """As the bound for all knows it."""
        self._frames = _native.FrameCache()
        """Frames by the two words of a walk."""
        self._frame_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Memory of what is known of it, about."""
        return self._name_bytes + self._frame_bytes

    @property
    @abstractmethod
    def _name_bytes(self) -> int:
        """Memory of names and tables."""

    @abstractmethod
    def _forget_names(self) -> None:
        """Drop names and tables."""

    def empty(self) -> None:
        """Drop what is known of it: it is read again where it is needed."""
        self._forget_names()
        self._forget_frames()
        self._counted_bytes = self.held_bytes

    def _forget_frames(self) -> None:
        self._frames = _native.FrameCache()
        self._frame_bytes = 0

    def _count_frame(self, known: KnownFrame) -> None:
        self._frame_bytes += frame_bytes(known)

    def _count(self) -> None:
        """Have the bound for all count what it holds now."""
        held = self.held_bytes
        if not self._counted_bytes:
            self._memory_of_all.add(self)
        grown, self._counted_bytes = held - self._counted_bytes, held
        self._memory_of_all.grew(grown)
