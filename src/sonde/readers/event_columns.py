# SPDX-License-Identifier: Apache-2.0
"""Tables of events while they grow: columns of numbers, not rows of objects."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from sonde.model.timeline import Events, events


@dataclass(slots=True)
class EventColumns:
    """One table while it grows. Columns are those of `sonde.model.timeline.Events`."""

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("B"))
    name: array[int] = field(default_factory=lambda: array("i"))
    track: array[int] = field(default_factory=lambda: array("i"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("q"))
    blocks: array[int] = field(default_factory=lambda: array("i"))
    direction: array[int] = field(default_factory=lambda: array("B"))
    memory: array[int] = field(default_factory=lambda: array("B"))

    def add(
        self,
        start: int,
        end: int,
        kind: int,
        name: int,
        track: int,
        correlation: int = 0,
        size: int = 0,
        blocks: int = 0,
        direction: int = 0,
        memory: int = 0,
    ) -> None:
        """Appends a row. Readers refuse values that do not fit their columns before."""
        self.start.append(start)
        self.end.append(end)
        self.kind.append(kind)
        self.name.append(name)
        self.track.append(track)
        self.correlation.append(correlation)
        self.size.append(size)
        self.blocks.append(blocks)
        self.direction.append(direction)
        self.memory.append(memory)

    def events(self) -> Events:
        """The table, sorted."""
        return events(
            start_ns=np.frombuffer(self.start, np.int64),
            end_ns=np.frombuffer(self.end, np.int64),
            kind=np.frombuffer(self.kind, np.uint8),
            name=np.frombuffer(self.name, np.int32),
            track=np.frombuffer(self.track, np.int32),
            correlation=np.frombuffer(self.correlation, np.int64),
            bytes=np.frombuffer(self.size, np.int64),
            blocks=np.frombuffer(self.blocks, np.int32),
            direction=np.frombuffer(self.direction, np.uint8),
            memory=np.frombuffer(self.memory, np.uint8),
        )
