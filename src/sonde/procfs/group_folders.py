# SPDX-License-Identifier: Apache-2.0
"""Reads folders and files of control groups: in a child, with a deadline.

Who can list the folder of a control group can lock it: getdents64() holds its lock while it copies
to a page, as of a FUSE file, that never arrives, and a mkdir() that is refused anyway queues for
the lock and has everybody else's listing of that folder, and lookup in it, wait. A container can
do so with its group even where that is mounted read-only, and not even SIGKILL ends a lookup's
wait. So no thread that we need looks anything up below the root of a hierarchy: it asks a child
(`serve.py`), another one than for processes (`broker.BROKER`), which a lost child costs nothing.

One request is about many folders, with an answer for each. A folder that does not answer is left
alone for a while, and so is all below it; the others are asked of the next child. Its party
(group_parties.py) pays for the wait. What a party may have readers wait for, and all parties
together, comes back slowly, and the number of children that cannot die is bounded
(`patience.Abandoned`). Files that stay open need no lookup: to read them again waits for nobody.
"""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from sonde.procfs.broker import FREE_S, LATE_S, Broker
from sonde.procfs.parties import NOBODY
from sonde.procfs.patience import HUNG_S, MAX_HUNG, MAX_HUNG_S, MAX_PARTIES, Hung

MAX_ASKED: Final = 128
"""Folders in one request: other threads' requests come in between."""
MAX_BELOW: Final = 16_384
"""Groups below one that are listed."""
FILE_BYTES: Final = 1 << 16
"""Of any file of a group; the longest is memory.stat, with some 5 KB."""
LINE_BYTES: Final = 256
"""Of a file of which a word or a line is wanted."""
PARTY_S: Final = 1.0
"""How long is waited for the groups of one party."""
PARTY_SHARE: Final = 0.02
"""How much of that comes back in a second, in s."""
ALL_S: Final = 1.0
"""The same for all groups together."""
ALL_SHARE: Final = 0.05

PartyOf = Callable[[str], str]
"""The name of the party that pays for waiting for a folder, by the folder. It must not ask for
folders itself: it is called between a request and its answer."""


class Below(NamedTuple):
    """A group right below another one."""

    name: str
    """As os.fsdecode() makes it."""
    inode: int
    uid: int
    """Its owner."""


class GroupFolder(NamedTuple):
    """What was read of the folder of a group."""

    inode: int
    uid: int
    below: list[Below]
    more: int
    """Groups below it that are not in `below`."""
    contents: dict[str, bytes]
    """Of the files that were asked for and are there, by name."""


class _Budget:
    """Seconds that may be waited."""

    __slots__ = ("_most_s", "_share", "_since_s", "left_s")

    def __init__(self, most_s: float, share: float) -> None:
        self._most_s, self._share = most_s, share
        self.left_s, self._since_s = most_s, time.monotonic()

    def left(self, now_s: float) -> float:
        """What is left now; below 0 where more was waited."""
        back_s = (now_s - self._since_s) * self._share
        self.left_s, self._since_s = min(self._most_s, self.left_s + back_s), now_s
        return self.left_s


class LeftAlone:
    """Folders that did not answer, until when they are left alone, and who pays for waiting.

    Not locked: its owner is (`GroupFolders`)."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}
        """(when, time.monotonic; how long) by folder."""
        self._waiting: list[tuple[subprocess.Popen[bytes], str]] = []
        """Children that cannot die, and the folder that each waits for."""
        self._parties: dict[str, _Budget] = {}
        self._numbers: dict[str, int] = {}
        self.all = _Budget(ALL_S, ALL_SHARE)

    def mark(self, folder: str, child: subprocess.Popen[bytes] | None = None) -> None:
        """A folder did not answer: leave it alone, each time twice as long, and in any case as long
        as the child that waits for it."""
        _, before_s = self._until.pop(folder, (0.0, HUNG_S / 2))
        held_s = min(2 * before_s, MAX_HUNG_S)
        self._until[folder] = time.monotonic() + held_s, held_s
        while len(self._until) > MAX_HUNG:
            del self._until[next(iter(self._until))]
        if child is not None:
            self._waiting.append((child, folder))

    def now(self) -> set[str]:
        """The folders that are left alone now."""
        if not self._until:
            return set()
        self._waiting = [it for it in self._waiting if it[0].poll() is None]
        now_s = time.monotonic()
        found = {folder for folder, (until_s, _) in self._until.items() if now_s < until_s}
        return found | {folder for _, folder in self._waiting}

    def left(self, party: str) -> float:
        """How long may still be waited for a party, in s; 0 or below: not at all."""
        now_s = time.monotonic()
        known = self._parties.get(party)
        return min(self.all.left(now_s), PARTY_S if known is None else known.left(now_s))

    def charge(self, party: str, waited_s: float) -> None:
        """A folder of this party was waited for."""
        now_s = time.monotonic()
        known = self._parties.pop(party, None) or _Budget(PARTY_S, PARTY_SHARE)
        for budget in (known, self.all):
            budget.left(now_s)
            budget.left_s -= waited_s
        self._parties[party] = known
        while len(self._parties) > MAX_PARTIES:
            del self._parties[next(iter(self._parties))]

    def number_of(self, party: str) -> int:
        """A number for a party (`patience.Abandoned`); beyond MAX_PARTIES the rest share one."""
        if party not in self._numbers and len(self._numbers) >= MAX_PARTIES:
            return NOBODY
        return self._numbers.setdefault(party, len(self._numbers) + 1)


class GroupFolders(Broker):
    """A child that reads of control groups, for all threads of this process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.alone: Final = LeftAlone()
        self.hung = 0
        """Folders that did not answer in time, or were not asked as too many had not."""
        self._start_of: str | None = None
        """The party that pays for the start of the child that is there; None: nobody does."""

    def look(
        self,
        folders: Sequence[str],
        party_of: PartyOf,
        names: Sequence[Sequence[str]] = (),
        *,
        limit: int = LINE_BYTES,
        most_below: int = 0,
    ) -> tuple[list[GroupFolder | None], int]:
        """What was read of each of these folders: `most_below` groups below it, and files of
        these names (of each folder, or () for none), cut at `limit` bytes. None where it is not
        there, or did not answer; and of how many the latter holds. Raises nothing."""
        found: list[GroupFolder | None] = [None] * len(folders)

        def take(number: int, content: Any) -> None:
            inode, uid, below, more, contents = content
            pairs = zip(names[number] if names else (), contents, strict=True)
            known = {name: raw for name, raw in pairs if raw is not None}
            found[number] = GroupFolder(inode, uid, [Below(*it) for it in below], more, known)

        unread = self._each(folders, party_of, names, (limit, most_below, False), take)
        return found, unread

    def open_files(
        self, folders: Sequence[str], party_of: PartyOf, names: Sequence[Sequence[str]]
    ) -> list[dict[str, int]]:
        """Descriptors of files in each of these folders, by name, as far as they could be opened.
        Raises nothing."""
        found: list[dict[str, int]] = [{} for _ in folders]

        def take(number: int, content: Any) -> None:
            *_, contents = content
            for name, is_open in zip(names[number], contents, strict=True):
                if is_open:
                    self._receive(time.monotonic() + LATE_S)
                    if self._fds:  # else the table of descriptors is full
                        found[number][name] = self._fds.pop(0)

        self._each(folders, party_of, names, (0, 0, True), take)
        return found

    def _each(
        self,
        folders: Sequence[str],
        party_of: PartyOf,
        names: Sequence[Sequence[str]],
        how: tuple[int, int, bool],
        take: Callable[[int, Any], None],
    ) -> int:
        """Ask for folders, and `take` the number and the content of each that was read. Returns how
        many did not answer, or were not asked as they, or too many others, had not."""
        queue = deque(range(len(folders)))
        unread = failed = 0
        while queue:
            with self._exchange():
                before = len(queue)
                asked = self._taken(queue, folders, party_of)
                unread += before - len(queue) - len(asked)
                request = [(folders[it], list(names[it]) if names else []) for it in asked]
                left = deque(asked)
                try:
                    if asked:
                        self._ask(("groups", request, *how))
                    while left:
                        number = left.popleft()
                        folder = folders[number]
                        error, content, waited_s = self._wait(folder, party_of)
                        if waited_s > FREE_S:
                            self._charge(folder, party_of(folder), waited_s)
                        if len(self.abandoned):
                            number_of_party = self.alone.number_of(party_of(folder))
                            self.abandoned.note_answer(number_of_party)
                        if not error:
                            take(number, content)
                except Hung:
                    unread += 1
                except OSError:  # the child ended, or none can be started
                    self._give_up()
                    self.hung += 1
                    unread += 1
                    failed += 1
                    if failed > 1:
                        return unread + len(left) + len(queue)
                queue.extendleft(reversed(left))
        return unread

    def _taken(self, queue: deque[int], folders: Sequence[str], party_of: PartyOf) -> list[int]:
        """The next folders that may be asked for; the others of them are counted."""
        alone = self.alone.now()
        is_crowded = self.abandoned.may_refuse()
        may_refuse = is_crowded or self.alone.all.left_s < ALL_S
        asked: list[int] = []
        while queue and len(asked) < MAX_ASKED:
            number = queue.popleft()
            folder = folders[number]
            if alone and _is_below(folder, alone):
                continue  # counted when it did not answer
            if may_refuse and self._is_refused(party_of(folder), is_crowded):
                self.hung += 1
            else:
                asked.append(number)
        return asked

    def _is_refused(self, party: str, is_crowded: bool) -> bool:
        """Whether nothing may be waited for it, or no child be lost over it."""
        if is_crowded and self.abandoned.refuses(self.alone.number_of(party)):
            return True
        return self.alone.left(party) <= 0

    def _ask(self, request: tuple[Any, ...]) -> None:
        began_s = time.monotonic()
        try:
            self._send(request)
        finally:
            if self._start_of is not None:
                self.alone.charge(self._start_of, time.monotonic() - began_s)
                self._start_of = None

    def _wait(self, folder: str, party_of: PartyOf) -> tuple[int, Any, float]:
        """The next answer, as `Broker._receive` has it. Raises OSError, Hung."""
        began_s = time.monotonic()
        with suppress(TimeoutError):
            return self._receive(began_s + FREE_S)
        party = party_of(folder)
        most_s = max(FREE_S, min(self._deadline_s, self.alone.left(party)))
        until_s = began_s + most_s
        while True:
            try:
                return self._receive(until_s)
            except TimeoutError:
                now_s = time.monotonic()
                if now_s < began_s + LATE_S and self._is_running():
                    until_s = now_s + 0.05
                    continue
                break
        self.alone.charge(party, time.monotonic() - began_s)
        self.hung += 1
        self.alone.mark(folder, self._child)
        self._give_up(self.alone.number_of(party))
        self._start_of = party
        with suppress(OSError):
            self._start()  # it comes up while we do something else
        raise Hung(folder)

    def _charge(self, folder: str, party: str, waited_s: float) -> None:
        """An answer came late. Where its party has used up what that may cost, the folder is left
        alone for a while."""
        self.alone.charge(party, waited_s)
        if self.alone.left(party) <= 0:
            self.alone.mark(folder)


def _is_below(folder: str, folders: set[str]) -> bool:
    """Whether a folder is one of these, or below one."""
    while folder:
        if folder in folders:
            return True
        folder = folder.rpartition("/")[0]
    return False


GROUPS: Final = GroupFolders()
"""The one of this process."""
