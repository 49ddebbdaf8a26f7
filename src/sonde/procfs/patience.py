# SPDX-License-Identifier: Apache-2.0
"""How long readers wait for processes and files: bounds for each, for each party, and in all.

The time that all processes of one party (parties.py) make readers wait is bounded, and so is the
number of children that were killed over them and cannot die. A process or file that did not answer
is left alone for a while.

Children that cannot die are 32 in all, of which each keeps some 5 MB. A party that has lost one
lately may lose a second only while there are fewer than 8. What it has lost costs the others
nothing: whose processes or files have answered since the first was lost are read as before, until
there are 32. The same holds of parties that have not answered yet, until they have lost 8 more, and
then for one loss a minute. Who has many parties (containers, or subordinate ids that /etc/subuid
does not name; the 65,536 that it does name are their user's) thus needs 12 of them for a minute in
which parties that come up are not read, and 28, all of which have answered or in a quarter of an
hour, until nothing is read any more that could cost another child.
"""

from __future__ import annotations

import errno
import subprocess
import time
from collections import Counter
from typing import Final, TypeVar

from sonde.procfs.parties import NOBODY, party_of

PATIENCE_S: Final = 1.0
"""How long is waited for the processes of one party together, at most."""
PATIENCE_SHARE: Final = 0.02
"""How much of that comes back in a second, in s."""
BRIEF_S: Final = 2.0
"""The same for waits that end before the reader's deadline (`broker.FREE_S`), such as for pages of
a file system of the user's that takes milliseconds for each."""
BRIEF_SHARE: Final = 0.05
FEW_HUNG: Final = 4
"""Where more processes of a party are left alone, and patience with it is used up, none of its
processes is read."""
HUNG_S: Final = 10.0
"""A process that did not answer is left alone for so long, and twice that each time after."""
MAX_HUNG_S: Final = 160.0
MAX_HUNG: Final = 4096
"""Processes and files that are left alone; beyond it the one marked first is read again."""
MAX_PARTIES: Final = 1024
"""Parties whose patience is kept; where all have used up some of it, further ones share one."""
MAX_ABANDONED: Final = 8
"""Children that did not die yet, from which on a party that has lost one may cost no other."""
MAX_ABANDONED_OF_PARTY: Final = 2
"""The same over processes of one party. Beyond either number, nothing is done that may cost another
child over it; files that nobody can make wait are still opened."""
MOST_ABANDONED: Final = 32
"""In all: beyond it no party may cost another."""
FIRST_LOSSES: Final = 8
"""Beyond MAX_ABANDONED: children at once that parties may cost which have not answered yet."""
FIRST_LOSS_S: Final = 60.0
"""In this time they may cost one more."""
BLAMED_S: Final = 600.0
"""A party has lost a child for so long, also where that has died."""
_T = TypeVar("_T")


class Hung(OSError):  # noqa: N818 (a word of the package's Terms)
    """The process or file makes its readers wait."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ETIMEDOUT, "it makes readers wait", what)


def payer_of(who: int | None) -> int:
    """The party that pays for waiting for a process; NOBODY where it is about none."""
    return NOBODY if who is None else party_of(who)


class PartyPatience:
    """How long may still be waited for the processes of one party, in s."""

    __slots__ = ("brief_s", "left_s", "since_s")

    def __init__(self, now_s: float) -> None:
        self.left_s, self.brief_s, self.since_s = PATIENCE_S, BRIEF_S, now_s

    def left(self, now_s: float) -> float:
        """What is left now, in seconds; below 0 where more was spent."""
        passed_s, self.since_s = now_s - self.since_s, now_s
        self.left_s = min(PATIENCE_S, self.left_s + passed_s * PATIENCE_SHARE)
        self.brief_s = min(BRIEF_S, self.brief_s + passed_s * BRIEF_SHARE)
        return self.left_s

    def is_spent(self, now_s: float) -> bool:
        """Whether nothing is left, for long waits or for brief ones."""
        return self.left(now_s) <= 0 or self.brief_s <= 0

    def is_whole(self, now_s: float) -> bool:
        """Whether it is as good as new."""
        return self.left(now_s) >= PATIENCE_S and self.brief_s >= BRIEF_S


class Patience:
    """Which processes and files are left alone, and how long each party's may be waited for.

    Not locked: its owner is (`broker.Broker`).
    """

    def __init__(self) -> None:
        self._hung: dict[object, tuple[float, float, int]] = {}
        """(until when, time.monotonic; how long; party) by pid, or by (pid, "file") of files."""
        self._parties: dict[int, PartyPatience] = {}
        self.processes_hung = 0
        """How often a process was left alone."""
        self.processes_put_off = 0
        """How often a process was not read as others of its party, or of all parties together, made
        a look wait too long (looks.py)."""
        self.files_hung = 0
        """Files that did not open in time, or were not opened as too many had not, or it was not
        known whether they would."""

    def is_hung(self, who: object, *, is_file: bool = False) -> bool:
        """Whether the process, or a file of it, is left alone now."""
        known = self._hung.get((who, "file") if is_file else who)
        return known is not None and time.monotonic() < known[0]

    def is_exhausted(self, who: int) -> bool:
        """Whether many processes of its party hang, and patience with it is used up. Counts the
        process as left alone then."""
        now_s = time.monotonic()
        if sum(now_s < until_s for until_s, _, _ in self._hung.values()) <= FEW_HUNG:
            return False
        party = payer_of(who)
        of_party = sum(now_s < until_s and of == party for until_s, _, of in self._hung.values())
        if of_party <= FEW_HUNG or not self.of(party, now_s).is_spent(now_s):
            return False
        self.processes_hung += 1
        return True

    def exhausted(self) -> set[int]:
        """The parties of which `is_exhausted` holds."""
        now_s = time.monotonic()
        hung = Counter(of for until_s, _, of in self._hung.values() if now_s < until_s)
        return {
            party
            for party, count in hung.items()
            if count > FEW_HUNG and self.of(party, now_s).is_spent(now_s)
        }

    def charge_brief(self, who: int, waited_s: float, *, is_file: bool) -> None:
        """An answer about a process came after such a wait. Where its party has used up what such
        waits may cost, this process or its files are left alone for a while."""
        now_s = time.monotonic()
        of_party = self.of(payer_of(who), now_s)
        of_party.left(now_s)
        of_party.brief_s -= waited_s
        if of_party.brief_s <= 0:
            self.mark(who, is_file=is_file)

    def mark(self, who: int | None, *, is_file: bool) -> None:
        """A process, or a file of it, did not answer: leave it alone for a while."""
        if is_file:
            self.files_hung += 1
        else:
            self.processes_hung += 1
        if who is None:
            return
        key: object = (who, "file") if is_file else who
        _, before_s, _ = self._hung.pop(key, (0.0, HUNG_S / 2, NOBODY))
        held_s = min(2 * before_s, MAX_HUNG_S)
        self._hung[key] = time.monotonic() + held_s, held_s, payer_of(who)
        while len(self._hung) > MAX_HUNG:
            del self._hung[next(iter(self._hung))]

    def of(self, party: int, now_s: float) -> PartyPatience:
        """The patience with a party."""
        if len(self._parties) > MAX_PARTIES and party not in self._parties:
            for known, of_known in list(self._parties.items()):
                if of_known.is_whole(now_s):
                    del self._parties[known]
            if len(self._parties) > MAX_PARTIES:
                party = NOBODY
        return self._parties.setdefault(party, PartyPatience(now_s))

    def left_alone(self) -> tuple[int, int]:
        """How many processes are left alone now, and of how many processes files are."""
        now_s = time.monotonic()
        keys = [key for key, (until_s, _, _) in self._hung.items() if now_s < until_s]
        files = sum(isinstance(key, tuple) for key in keys)
        return len(keys) - files, files

    def ask_again(self) -> None:
        """Leave nobody alone any more."""
        self._hung.clear()

    def reset(self) -> None:
        """As new: nobody made a reader wait, and nothing is counted."""
        self._hung.clear()
        self._parties.clear()
        self.processes_hung = self.files_hung = self.processes_put_off = 0


class Abandoned:
    """Children that were killed and have not died yet, with the party that each waited for."""

    def __init__(self) -> None:
        self._children: list[tuple[subprocess.Popen[bytes], int]] = []
        self._blamed: dict[int, float] = {}
        """Until when a party counts as one that has lost a child (time.monotonic)."""
        self._answered: dict[int, None] = {}
        """Parties that have answered while there were such children, and have lost none since."""
        self._first_losses = float(FIRST_LOSSES)
        self._first_losses_at_s = 0.0

    def __len__(self) -> int:
        return len(self._children)

    def add(self, child: subprocess.Popen[bytes], party: int) -> None:
        """One more; those that have died are forgotten."""
        self._reap()
        if party != NOBODY:
            now_s = time.monotonic()
            if len(self._children) >= MAX_ABANDONED:
                self._first_losses = max(0.0, self._first_losses_left(now_s) - 1)
            self._answered.pop(party, None)
            _put_last(self._blamed, party, now_s + BLAMED_S)
        self._children.append((child, party))
        self._reap()

    def note_answer(self, party: int) -> None:
        """A process of this party, or a file of it, has answered."""
        if self._children and party != NOBODY and not self._is_blamed(party):
            _put_last(self._answered, party, None)

    def is_crowded(self, who: int | None) -> bool:
        """Whether there are too many, in all or of this process's party: then none may be added."""
        return self.may_refuse() and self.refuses(payer_of(who))

    def may_refuse(self) -> bool:
        """Whether there are enough that some party may cost no other. Forgets those that died."""
        if not self._children:
            return False
        self._reap()
        return len(self._children) >= min(MAX_ABANDONED, MAX_ABANDONED_OF_PARTY)

    def refuses(self, party: int) -> bool:
        """Whether this party may cost none now, as of the last look at who died."""
        count = len(self._children)
        of_party = sum(of == party for _, of in self._children)
        if of_party >= MAX_ABANDONED_OF_PARTY or count < MAX_ABANDONED:
            return of_party >= MAX_ABANDONED_OF_PARTY
        if count >= MOST_ABANDONED or of_party or self._is_blamed(party):
            return True
        return party not in self._answered and self._first_losses_left(time.monotonic()) < 1

    def _is_blamed(self, party: int) -> bool:
        return time.monotonic() < self._blamed.get(party, 0.0)

    def _first_losses_left(self, now_s: float) -> float:
        """Children that parties which have not answered may cost now."""
        more = (now_s - self._first_losses_at_s) / FIRST_LOSS_S
        self._first_losses = min(FIRST_LOSSES, self._first_losses + more)
        self._first_losses_at_s = now_s
        return self._first_losses

    def _reap(self) -> None:
        self._children = [lost for lost in self._children if lost[0].poll() is None]


def _put_last(parties: dict[int, _T], party: int, value: _T) -> None:
    """Of more than MAX_PARTIES the one that was put first is forgotten."""
    parties.pop(party, None)
    parties[party] = value
    while len(parties) > MAX_PARTIES:
        del parties[next(iter(parties))]
