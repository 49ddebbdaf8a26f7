# SPDX-License-Identifier: Apache-2.0
"""How long one look at many processes (`Broker.each`) waits for them: bounds for each party and for
all together, much tighter than patience.py, as a look is on the loop that drains the kernel.

What is used of them comes back within a second, so a tick's looks have one bound together: LOOK_S
and one answer that does not come (LOOK_DEADLINE_S), 0.3 s, beside the start of a child in place of
each that was lost, two at most. Its party pays for it, the others go on with the new one.
Processes of a party that made looks wait lately are read last, so others are there by then. What is
left out is counted (`Patience.processes_put_off`), and read at another look.

Also many short waits count, each too short to be noted: the child sums them up, and returns the
rest of a request unread from SLICE_S on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from sonde.procfs.patience import Abandoned, Hung, Patience, payer_of

LOOK_S: Final = 0.18
"""How long looks may wait for all processes, in a second."""
LOOK_OF_PARTY_S: Final = 0.05
"""The same for the processes of one party."""
LOOK_DEADLINE_S: Final = 0.12
"""For one answer."""
PATIENT_S: Final = 3.0
"""How long a look may wait that is on no loop, by which processes are found that somebody asked
for."""
PATIENT_OF_PARTY_S: Final = 1.0
SLICE_S: Final = 0.02
"""How long one request may wait."""
MOST_USED: Final = 1.5
"""In times of what there is in a second: so that a wait longer than meant, such as for a child's
start on a busy machine, costs no more than the next half second."""
NOTED_S: Final = 0.01
"""A party that made looks wait for so long in a second is late ..."""
LATE_S: Final = 60.0
"""... for this time: its processes are read last."""
MAX_EACH: Final = 256
"""Files asked for in one request."""
MAX_LATE: Final = 1024
"""Parties that are remembered; beyond it the one that was charged first is forgotten."""


PUT_OFF: Final = -1
"""In place of an error's number: the file was not read, as the ones before it took so long."""


class Answer(Protocol):
    """The next answer about a process: (error number, content, wait in s). Raises OSError; Hung,
    which is one, where it does not come."""

    def __call__(self, who: int, /, *, deadline_s: float) -> tuple[int, Any, float]: ...


class _Waited:
    """For one party, or for all together."""

    __slots__ = ("_at_s", "_used_s", "late_until_s")

    def __init__(self) -> None:
        self._used_s = self._at_s = self.late_until_s = 0.0

    def used(self, most_s: float, now_s: float) -> float:
        """What is used of `most_s`, which comes back in a second."""
        self._used_s = max(0.0, self._used_s - (now_s - self._at_s) * most_s)
        self._at_s = now_s
        return self._used_s

    def add(self, waited_s: float, most_s: float, now_s: float) -> None:
        self._used_s = min(self.used(most_s, now_s) + waited_s, MOST_USED * most_s)
        if self._used_s >= NOTED_S:
            self.late_until_s = now_s + LATE_S


class Looks:
    """How long looks waited lately. Not locked: its owner is (`broker.Broker`)."""

    def __init__(self, most_s: float = LOOK_S, of_party_s: float = LOOK_OF_PARTY_S) -> None:
        self._most_s, self._of_party_s = most_s, of_party_s
        self._all = _Waited()
        self._parties: dict[int, _Waited] = {}

    def charge(self, party: int, waited_s: float, *, of_all: bool = True) -> None:
        """A look has waited for a process of this party. `of_all`: False of a child's start in
        place of one that was lost over it, which keeps nothing from the others."""
        now_s = time.monotonic()
        if of_all:
            self._all.add(waited_s, self._most_s, now_s)
        waited = self._parties.pop(party, None) or _Waited()
        waited.add(waited_s, self._of_party_s, now_s)
        self._parties[party] = waited
        while len(self._parties) > MAX_LATE:
            del self._parties[next(iter(self._parties))]

    def is_spent(self) -> bool:
        """Whether no look may wait any longer now, for anybody."""
        return self._all.used(self._most_s, time.monotonic()) >= self._most_s

    def is_over(self, party: int) -> bool:
        """Whether none may wait for this party."""
        known = self._parties.get(party)
        used_s = known.used(self._of_party_s, time.monotonic()) if known is not None else 0.0
        return used_s >= self._of_party_s

    def late(self) -> set[int]:
        """The parties that made looks wait lately."""
        now_s = time.monotonic()
        return {party for party, it in self._parties.items() if now_s < it.late_until_s}


class Look:
    """One look: which files are to be asked for next, and what waiting for them has cost."""

    def __init__(
        self, whos: Sequence[int], looks: Looks, patience: Patience, abandoned: Abandoned
    ) -> None:
        """`whos`: the process of each file."""
        self._whos = whos
        self._looks = looks
        self._patience = patience
        self._abandoned = abandoned
        self._first = deque(range(len(whos)))
        self._last: deque[int] = deque()
        """Of parties that are late."""
        self._parties: dict[int, int] = {}

    def next(self) -> list[int]:
        """Files to be asked for in one request, by number; [] where there are none, or no time is
        left for them. What is not asked for is counted."""
        while (self._first or self._last) and not self._looks.is_spent():
            if asked := self._taken():
                return asked
        self._patience.processes_put_off += len(self._first) + len(self._last)
        self._first.clear()
        self._last.clear()
        return []

    def _taken(self) -> list[int]:
        exhausted = self._patience.exhausted()
        may_refuse = self._abandoned.may_refuse()
        late = self._looks.late()
        over = {party for party in late if self._looks.is_over(party)}
        asked: list[int] = []
        queue = self._first or self._last
        while queue and len(asked) < MAX_EACH:
            number = queue.popleft()
            if self._patience.is_hung(self._whos[number]):
                continue  # counted when it did not answer
            if (exhausted and self._party(number) in exhausted) or (
                may_refuse and self._abandoned.refuses(self._party(number))
            ):
                self._patience.processes_hung += 1
            elif over and self._party(number) in over:
                self._patience.processes_put_off += 1
            elif late and queue is self._first and self._party(number) in late:
                self._last.append(number)
            else:
                asked.append(number)
        return asked

    def answers(
        self, asked: Sequence[int], answer: Answer, deadline_s: float
    ) -> Iterator[tuple[int, bytes]]:
        """Take the answers to a request for these files: (number, content) of those that were read.
        Raises OSError where the child ended."""
        noted_s = 0.0
        answered: list[int] = []
        put_off: list[int] = []
        for at, number in enumerate(asked):
            began_s = time.monotonic()
            try:
                error, content, waited_s = answer(self._whos[number], deadline_s=deadline_s)
            except Hung:
                self.charge(number, time.monotonic() - began_s)
                put_off += asked[at + 1 :]
                break
            if error == PUT_OFF:
                put_off.append(number)
                continue
            answered.append(number)
            if (party := self._parties.get(self._whos[number])) is not None:
                self._abandoned.note_answer(party)
            if waited_s > 0:
                self.charge(number, waited_s)
                noted_s += waited_s
            if not error:
                yield number, content
        else:
            if put_off:  # by many short waits: whose is not known
                for number in answered:
                    self.charge(number, max(0.0, SLICE_S - noted_s) / len(answered))
        self._first.extendleft(reversed(put_off))

    def charge(self, number: int, waited_s: float) -> None:
        """The answer about a file, or that there was none, came after such a wait."""
        self._looks.charge(self._party(number), waited_s)

    def _party(self, number: int) -> int:
        who = self._whos[number]
        party = self._parties.get(who)
        if party is None:
            party = self._parties[who] = payer_of(who)
        return party
