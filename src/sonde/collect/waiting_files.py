# SPDX-License-Identifier: Apache-2.0
"""Mapped files that wait to be looked at: of each user or container in turn, as its time allows."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from sonde.collect.mapped_files import MappedFile

MAX_WAITING: Final = 16_384
"""Files that wait to be looked at, device libraries and programs; as many others."""
PARTS: Final = 4
"""A party has at most one of this number of equal parts of them."""
PATH_UNIT: Final = 256
"""A file counts once more for each of these characters that its path has."""
ROOT: Final = 0
"""The machine's own root may have all."""


class FileBudget(Protocol):
    """CPU time that the files of a party may take."""

    def is_over(self, party: int, *, in_turn: bool = True) -> bool:
        """Whether it has none left: for now, or without `in_turn` for a while."""

    def charged(self, party: int, free_s: float = ...) -> AbstractContextManager[None]:
        """What is done within costs the party this thread's CPU time, if more than `free_s`."""


class Unlimited:
    """Where nobody else waits."""

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
        """Of those of each party; by whether they are urgent."""
        self.left_out = 0
        """Files that were not taken, as too many waited."""

    def __len__(self) -> int:
        return sum(map(len, (*self._urgent.values(), *self._others.values())))

    def add(self, party: int, file: MappedFile, is_urgent: bool) -> None:
        """Have a file wait, unless too many do. Long paths count for several."""
        sizes = self._sizes[is_urgent]
        most = MAX_WAITING if party == ROOT else MAX_WAITING // PARTS
        size = _size_of(file)
        if sizes.total() + size > MAX_WAITING or sizes[party] + size > most:
            self.left_out += 1
            return
        waiting = self._urgent if is_urgent else self._others
        waiting.setdefault(party, deque()).append(file)
        sizes[party] += size

    def take(self, may_go: Callable[[int], bool]) -> tuple[int, MappedFile] | None:
        """(party, file) of the next one of a party that may go on; None without one."""
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
