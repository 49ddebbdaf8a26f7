# SPDX-License-Identifier: Apache-2.0
"""Which files are remembered for processes that are not loaded: being loaded, or ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator


class IdleFiles:
    """Files by index, as many as may be; each of the parties that looked one up has it.

    Where there are too many, the party that has most gives up the one that it looked up least
    recently. A file is forgotten once no party has it.
    """

    def __init__(self) -> None:
        self._of_party: dict[int, dict[int, None]] = {}
        """The least recently looked up first."""
        self._parties: defaultdict[int, set[int]] = defaultdict(set)
        """By index."""
        self._count = 0
        """Of all parties together: a file counts for each that has it."""

    def __contains__(self, index: int) -> bool:
        return index in self._parties

    def use(self, index: int, party: int) -> None:
        """A party has it, now as the one that it looked up most recently."""
        its = self._of_party.setdefault(party, {})
        if index in its:
            del its[index]
        else:
            self._parties[index].add(party)
            self._count += 1
        its[index] = None

    def drop(self, index: int, party: int | None = None) -> None:
        """A party has it no more; None: none has."""
        parties = self._parties.get(index, set())
        for one in [it for it in parties if party in (None, it)]:
            self._remove(index, one)

    def forget_beyond(self, most: int) -> Iterator[int]:
        """Forget files until `most` are left. Returns the index of each that no party has now."""
        while self._count > most:
            party = max(self._of_party, key=lambda it: len(self._of_party[it]))
            index = next(iter(self._of_party[party]))
            self._remove(index, party)
            if index not in self:
                yield index

    def _remove(self, index: int, party: int) -> None:
        its, parties = self._of_party[party], self._parties[index]
        del its[index]
        parties.remove(party)
        self._count -= 1
        if not its:
            del self._of_party[party]
        if not parties:
            del self._parties[index]
