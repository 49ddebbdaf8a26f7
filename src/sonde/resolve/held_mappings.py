# SPDX-License-Identifier: Apache-2.0
"""How many mappings the images of all processes hold, and whose they are dropped if too many.

Images that several processes share count once, for the party of the first of them. What is held
ends with its image, in many ways: so all of it is counted again at each tick. What is queued or
built in between is added, and what is dropped subtracted; so is the limit enforced in between.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sonde.resolve.counters import Counters
from sonde.resolve.mappings import PATH_UNIT_BYTES
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.tracked_process import TrackedProcess, images_of

MAX_MAPPINGS_HELD: Final = 131_072
"""Of all processes together, where long paths count for several: some 50 MB. A thousand usual
processes have 50,000, which count for 75,000 with paths of 80 characters."""
_MAX_SWEEPS: Final = 2
"""How often in a tick all images are looked at to drop the largest: it takes some 50 ms where there
are 16,000 processes."""


class HeldMappings:
    """Counts the mappings in the images of the processes that `processes` returns."""

    def __init__(
        self, processes: Callable[[], Iterable[TrackedProcess]], counters: Counters
    ) -> None:
        self.total = 0
        """Mappings, where long paths count for several; too many rather than too few between
        ticks, as what ends with its process is subtracted at the next."""
        self._processes = processes
        self._counters = counters
        self._parties: Counter[int] = Counter()
        """The same by party (`procfs.party_of`), since the last sweep of this tick; empty before
        the first."""
        self._sweeps = 0
        """Of this tick."""
        self._has_dropped = False
        """Whether images may refer to dropped ones."""

    def note_queued(self, path_bytes: int) -> None:
        """Count a queued mapping; `path_bytes`: of its path, as it is in memory."""
        self.total += 1 + path_bytes // PATH_UNIT_BYTES

    def add(self, process: TrackedProcess, grown: Sequence[ProcessImage], more: int) -> None:
        """Count `more` mappings, by which images of a process have grown. Beyond the limit, the
        largest images of the party that holds most give way; once they have in this tick, those
        that have grown do, where they are of that party."""
        self.total += more
        party = process.party if self._parties else 0
        if self._parties:
            self._parties[party] += more
        if self.total <= MAX_MAPPINGS_HELD:
            return
        holds_most = bool(self._parties) and self._parties[party] == max(self._parties.values())
        if self._sweeps < _MAX_SWEEPS and not holds_most:
            self._sweeps += 1
            self._sweep(MAX_MAPPINGS_HELD - MAX_MAPPINGS_HELD // 8)
            return
        for image in grown:
            self._parties[party] -= self._drop(image)
        self._has_dropped = True
        process.forget_frames()

    def recount(self) -> int:
        """Begin a tick: count what is held, and drop what is beyond the limit. Returns the bytes of
        queued paths."""
        if self._has_dropped:
            self._forget_dropped()
        self.total, self._sweeps = 0, 0
        queued_bytes = 0
        seen: set[int] = set()
        for process in self._processes():
            for image in images_of(process, seen):
                self.total += image.size
                queued_bytes += image.queued_bytes
                self._counters.mappings_left_out += image.left_out
                image.left_out = 0
        if self.total > MAX_MAPPINGS_HELD:
            self._sweep(MAX_MAPPINGS_HELD)
        self._parties.clear()
        return queued_bytes

    def _sweep(self, goal: int) -> None:
        """Drop images until `goal` mappings are left: each time the largest of the party that holds
        most; of equal ones those of ended processes first.

        Their processes' frames have no names until they execute another program.
        """
        self._parties = Counter()
        by_party: defaultdict[int, list[tuple[int, ProcessImage]]] = defaultdict(list)
        seen: set[int] = set()
        for process in self._processes():
            for image in images_of(process, seen):
                if size := image.size:
                    by_party[process.party].append((size, image))
                    self._parties[process.party] += size
        self.total = self._parties.total()
        for images in by_party.values():
            images.sort(key=lambda it: it[0])
        while self.total > goal:
            most = max(self._parties, key=self._parties.__getitem__)
            self._parties[most] -= self._drop(by_party[most].pop()[1])
        self._forget_dropped()

    def _drop(self, image: ProcessImage) -> int:
        """Drop the mappings of an image. Returns by how much that reduces the total."""
        size = image.size
        self._counters.mappings_left_out += image.count
        self.total -= size
        image.drop()
        return size

    def _forget_dropped(self) -> None:
        """Give processes new images, without mappings, in place of those that refer to dropped
        ones: what these hold themselves is dropped as well, as most is missing."""
        self._has_dropped = False
        for process in self._processes():
            image, previous = process.image, process.previous
            if self._drop_if_in_part(image, process):
                process.image = ProcessImage(process.pid, "exec")
            if previous is not None and self._drop_if_in_part(previous, process):
                process.previous = None

    def _drop_if_in_part(self, image: ProcessImage, process: TrackedProcess) -> bool:
        if not any(it.is_dropped for it in image.with_sources()):
            return False
        for it in list(image.with_sources()):
            if not it.is_dropped:
                self._parties[process.party] -= self._drop(it)
        process.forget_frames()
        return True
