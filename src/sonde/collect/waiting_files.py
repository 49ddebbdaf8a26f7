# SPDX-License-Identifier: Apache-2.0
"""Mapped files that wait to be looked at: of each user or container in turn, as its budget
allows."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from sonde.collect.mapped_files import MappedFile

MAX_WAITING: Final = 16_384
"""Device libraries and programs that wait; and the same number of other files."""
PARTS: Final = 4
"""One party has at most this fraction of them: a quarter."""
PATH_UNIT: Final = 256
"""A file counts once more for each of these characters that its path has."""
ROOT: Final = 0
"""The machine's own root may have all."""


class FileBudget(Protocol):
    """CPU time that the files of a party may take."""

    def is_over(self, party: int, *, in_turn: bool = True) -> bool:
        """Whether it has none left, or with `in_turn` has used its part of this turn of the agent's
        loop. Without `in_turn`, for when nobody waits, it may use all that it has at once."""

    def charged(self, party: int, free_s: float = ...) -> AbstractContextManager[None]:
        """Charge the party with this thread's CPU time within the block, if more than `free_s`."""


class Unlimited:
    """A budget without a limit, for where nobody else waits."""

    def is_over(self, party: int, *, in_turn: bool = True) -> bool:
        """Never."""
        return False

    def charged(self, party: int, free_s: float = 0.0) -> AbstractContextManager[None]:
        """Costs nothing."""
        return nullcontext()


class WaitingFiles:
    """Device libraries by their name, and programs, before all others; the parties in turn."""

    def __init__(self) -> None:
        self._urgent: OrderedDict[int, deque[MappedFile]] = OrderedDict()
        """By party, the one that is next first."""
        self._others: OrderedDict[int, deque[MappedFile]] = OrderedDict()
        self._sizes: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        """What the files of each party count for (`_size_of`); by whether they are urgent."""
        self.left_out = 0
        """Files that were not taken, as too many waited."""

    def __len__(self) -> int:
        return sum(map(len, (*self._urgent.values(), *self._others.values())))

    def add(self, party: int, file: MappedFile, is_urgent: bool) -> None:
        """Have a file wait, unless too many do. Long paths count for several."""
        sizes = self._sizes[is_urgent]
        limit = MAX_WAITING if party == ROOT else MAX_WAITING // PARTS
        size = _size_of(file)
        if sizes.total() + size > MAX_WAITING or sizes[party] + size > limit:
            self.left_out += 1
            return
        waiting = self._urgent if is_urgent else self._others
        waiting.setdefault(party, deque()).append(file)
        sizes[party] += size

    def take(self, may_go: Callable[[int], bool]) -> tuple[int, MappedFile] | None:
        """(party, file): the next file of the first party for which `may_go` is true; None where
        there is none."""
        for is_urgent, waiting in ((True, self._urgent), (False, self._others)):
            if (found := _next(waiting, may_go)) is not None:
                party, file = found
                self._sizes[is_urgent][party] -= _size_of(file)
                if party not in waiting:
                    del self._sizes[is_urgent][party]
                return found
        return None


def _size_of(file: MappedFile) -> int:
    return 1 + len(file.path) // PATH_UNIT


def _next(
    waiting: OrderedDict[int, deque[MappedFile]], may_go: Callable[[int], bool]
) -> tuple[int, MappedFile] | None:
    party = next(filter(may_go, waiting), None)
    if party is None:
        return None
    files = waiting[party]
    file = files.popleft()
    if files:
        waiting.move_to_end(party)
    else:
        del waiting[party]
    return party, file
