# SPDX-License-Identifier: Apache-2.0
"""Finds the files that carry a device API, through the mappings of processes.

All that are mapped at the start; those the dynamic linker knows, before anyone maps them, so that a
process that lives 50 ms is seen whole; and each new one as soon as a process maps it. Every
executable file is looked at once: an API may be linked into a program statically.
"""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from sonde import procfs, system_libraries
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.apis import Api
from sonde.collect.mapped_files import (
    FileKey,
    MappedFile,
    UnreadProcesses,
    identity,
    installed,
    mapped_by,
    mapped_now,
    open_mapped,
    own_devices,
)
from sonde.collect.plain_files import NoPlainFiles, PlainFiles
from sonde.collect.probe_shares import PLACES_OF_PARTY, PlaceShares
from sonde.collect.probes import KEPT_ON_S, MAX_SITES, Probes, PutOff, TooManyPlaces
from sonde.collect.put_off import PutOffFiles
from sonde.collect.waiting_files import FileBudget, Unlimited, WaitingFiles

EXAMINED_FILES = 16_384
"""Files remembered to carry no device API."""
EXAMINED_FOR_S = 300.0
"""After this a file is looked at again: another may have its inode by now."""
EXAMINE_S = 0.2
"""At most this long on new files in one call; the others wait for the next one."""
SCAN_S = 10.0
"""The same at the start, when every file is new: a machine with a thousand programs takes 1 s."""
UNMAPPED_S = 30.0
"""Probes stay this long on a file that no process maps any more."""
DROPPED_AT_ONCE = 16
"""Files whose probes come off together."""

LONG_PATH = 512
"""Of longer paths a hash is remembered: one directory has room for any number of them."""

_Examined = tuple[FileKey, str, int | None]
"""A file, its path (`_short`), and whose processes it is remembered for; None: everybody's."""

_NOBODY = 0
"""Stands for a process that maps the installed files, which are probed whether mapped or not."""


class Discovery:
    """Hands files to `probes` and takes them back when no process maps them any more."""

    def __init__(
        self,
        apis: Sequence[Api],
        probes: Probes,
        pids: Collection[int] | None = None,
        budget: FileBudget | None = None,
        plain: PlainFiles | None = None,
    ) -> None:
        """`pids`: only what these processes and their descendants map is looked for; what others
        map is looked at as they map it. `budget`: CPU time that it may take; None where nobody else
        waits. `plain`: what is known of files before they are looked at."""
        self._pids = pids
        patterns = {pattern for api in apis for pattern in api.libraries}
        # (?!) matches nothing.
        self._library = re.compile("|".join(map(fnmatch.translate, sorted(patterns))) or "(?!)")
        self._probes = probes
        self._examined: OrderedDict[_Examined, float] = OrderedDict()
        """Files without a device API, and when (monotonic s) they were looked at."""
        self._kept_devices = own_devices()
        self._lasting: dict[tuple[int, int], bool] = {}
        """Whether devices keep their numbers (`_lasts`), since the last look at what waits."""
        self._budget = budget or Unlimited()
        self._plain = plain or NoPlainFiles()
        self._is_starting = True
        """What `_plain` has of files was true a moment ago."""
        self._waiting = WaitingFiles()
        self._parties: dict[int, int] = {}
        """Of processes that mapped something since the last look at what waits."""
        self._users: dict[FileKey, set[int]] = {}
        """Processes that map each probed file."""
        probes.users_of = lambda key: self._users.get(key, ())
        self._files_of: dict[int, set[FileKey]] = {}
        """Probed files that each process maps."""
        self._unmapped: dict[FileKey, float] = {}
        """Since when (monotonic s) no process maps a probed file."""
        self._irrelevant: dict[tuple[FileKey, str], float] | None = None
        """See `irrelevant_files`; None until it is called first."""
        self._put_off = PutOffFiles()
        self._shares = PlaceShares()
        self.unread = UnreadProcesses()
        self.refused = 0
        """Installed libraries that were not loaded, because others can change them."""

    def scan(self) -> None:
        """Look at everything that is installed or mapped now."""
        for path in installed(self._is_library):
            self._examine_installed(path)
        self.resync()
        self._examine_waiting(SCAN_S, in_turn=False)
        self._is_starting = False

    def resync(self) -> None:
        """Take in what is mapped now, whatever events there were."""
        for file in self._mapped_now():
            self._saw(file)

    def look_at(self, pids: Iterable[int]) -> None:
        """Take in what these processes map now, of which events were left out: where a recording is
        of given processes, they are others."""
        for pid in pids if self._pids is None else ():
            for file in mapped_by(pid, self.unread):
                self._saw(file)

    def _mapped_now(self) -> Iterator[MappedFile]:
        if self._pids is None:
            yield from mapped_now(self.unread)
            return
        for pid in procfs.family(self._pids):
            yield from mapped_by(pid, self.unread)

    def on_process_events(self, events: Iterable[ProcessEvent]) -> None:
        """Take in what processes did."""
        for event in events:
            if isinstance(event, MmapEvent):
                key = event.file
                if key[2] and (
                    key in self._probes.files or not self._is_examined(key, event.path, event.pid)
                ):
                    end = event.address + event.length
                    self._saw(MappedFile(event.pid, key, event.path, event.address, end))
            elif not self._files_of:
                continue  # nobody maps what is probed: forks and ends do not matter
            elif isinstance(event, ForkEvent):
                if event.pid != event.parent_pid:
                    for key in self._files_of.get(event.parent_pid, ()):
                        self._used(key, event.pid)
            elif event.pid in self._files_of and _leaves_its_program(event):
                self._left(event.pid)
        self._examine_waiting(EXAMINE_S)

    @property
    def is_used(self) -> bool:
        """Whether some process maps a file with probes on it."""
        return bool(self._files_of)

    @property
    def backlog(self) -> int:
        """Files not looked at yet."""
        return len(self._waiting)

    @property
    def left_out(self) -> int:
        """Files that were not looked at, as too many waited for it."""
        return self._waiting.left_out

    def irrelevant_files(self) -> dict[tuple[FileKey, str], float]:
        """Files that were mapped again since the last call and carry no device API, with the time
        (CLOCK_MONOTONIC, s) until which they are not looked at again; none whose device number may
        go to another file system. The first call has none."""
        found, self._irrelevant = self._irrelevant or {}, {}
        return found

    @property
    def over_share(self) -> int:
        """Files without probes, as their user or container has as many as one may have."""
        return self._shares.refused

    @property
    def put_off(self) -> int:
        """Files that had to wait for their probes, as somebody would keep the kernel waiting."""
        return self._put_off.count

    def tidy(self) -> None:
        """Go on with files that wait; take probes off those that nobody maps any more."""
        self._examine_waiting(EXAMINE_S)
        self._try_again()
        self._drop_unmapped(time.monotonic())

    def _is_library(self, name: str) -> bool:
        return self._library.match(name) is not None

    def _saw(self, file: MappedFile) -> None:
        """A process maps a file: note its user, or queue it to be looked at."""
        if file.key in self._probes.files:
            self._used(file.key, file.pid)
            self._probes.mapped_by(file.key, file.pid)
            return
        if file.key in self._put_off:
            self._put_off.mapped(file)
            return
        if self._is_examined(file.key, file.path, file.pid):
            return
        is_urgent = self._is_library(file.name) or ".so" not in file.name
        self._waiting.add(self._party(file.pid), file, is_urgent)

    def _party(self, pid: int) -> int:
        if (party := self._parties.get(pid)) is None:
            party = self._parties[pid] = procfs.party_of(pid)
        return party

    def _lasts(self, key: FileKey) -> bool:
        """Whether the file system of a file keeps its device number: one without a device (tmpfs,
        overlay, FUSE, btrfs), and one on an image or a removable medium, gives it back when it is
        unmounted, and anybody's next one gets it."""
        device = key[:2]
        if (lasts := self._lasting.get(device)) is None:
            is_kept = device in self._kept_devices
            lasts = is_kept or procfs.keeps_identity(os.makedev(*device))
            self._lasting[device] = lasts
        return lasts

    def _remembered(self, key: FileKey, path: str, party: int) -> _Examined:
        return key, _short(path), None if self._lasts(key) else party

    def _is_examined(self, key: FileKey, path: str, pid: int) -> bool:
        """Whether it was looked at lately and carries no device API."""
        lasts = self._lasts(key)
        file = key, _short(path), None if lasts else self._party(pid)
        looked_s = self._examined.get(file)
        if looked_s is None:
            return False
        if time.monotonic() - looked_s >= EXAMINED_FOR_S:
            del self._examined[file]
            return False
        if lasts and self._irrelevant is not None and len(path) <= LONG_PATH:
            self._irrelevant[key, path] = looked_s + EXAMINED_FOR_S
        return True

    def _examine_waiting(self, limit_s: float, in_turn: bool = True) -> None:
        """Look at files that wait, for at most `limit_s`. `in_turn`: as in FileBudget; False before
        anything is recorded."""
        self._parties.clear()  # a number may be another process's by the next time …
        self._lasting.clear()  # … or another device's
        deadline_s = time.monotonic() + limit_s

        def may_go(party: int) -> bool:
            return not self._budget.is_over(party, in_turn=in_turn)

        while time.monotonic() < deadline_s and (found := self._waiting.take(may_go)):
            party, file = found
            if file.key in self._probes.files:
                self._used(file.key, file.pid)
                continue
            if self._remembered(file.key, file.path, party) in self._examined:
                continue
            if file.key in self._put_off:
                continue
            with self._budget.charged(party, free_s=0.0):
                self._examine(file, party)

    def _examine(self, file: MappedFile, party: int) -> None:
        if self._is_starting and self._plain.has(file, self._probes.wanted):
            self._remember(file, party)
            return
        room = self._shares.room(party)
        if room <= 0:
            self._refuse(party)
            return
        try:
            fd = open_mapped(file)
        except OSError:
            if self._is_library(file.name):
                self._probes.report(
                    "library_gone", file.pid, f"{file.name}: gone before it was read"
                )
            return
        try:
            has_probes = self._examine_open(fd, file.key, file.name, file, max_places=room)
        except TooManyPlaces as error:
            if error.count <= PLACES_OF_PARTY:
                self._refuse(party)
                return
            self._probes.report(
                "probe_refused", error.count, f"{error.count} functions of {file.name}"
            )
            has_probes = False
        if has_probes:
            self._used(file.key, file.pid)
            self._shares.take(file.key, party, self._probes.places(file.key))
            return
        if file.key in self._put_off:
            return
        if self._probes.found_none:
            self._plain.add(file, self._probes.wanted)
        self._remember(file, party)

    def _remember(self, file: MappedFile, party: int) -> None:
        """The file carries no device API: do not look at it again for a while."""
        if party in (procfs.NOBODY, procfs.UNKNOWN_PARTY) and not self._lasts(file.key):
            return  # it may be anybody's
        self._examined[self._remembered(file.key, file.path, party)] = time.monotonic()
        if len(self._examined) > EXAMINED_FILES:
            self._examined.popitem(last=False)

    def _refuse(self, party: int) -> None:
        """Leave a file without probes, but look at it for another party that maps it."""
        if text := self._shares.refuse(party):
            self._probes.report("probe_refused", 1, text)

    def _examine_installed(self, path: str) -> None:
        fd = procfs.open_regular(path, follow=True)
        if fd is None:
            return
        key = identity(fd)
        if key is None or key in self._probes.files:
            os.close(fd)
            return
        name = os.path.basename(path)  # noqa: PTH119
        reason = system_libraries.why_not(path)
        if reason and key not in self._put_off:
            self.refused += 1
            self._probes.report("library_refused", 1, f"{name}: {reason}")
        if self._examine_open(fd, key, name, path, trusted=not reason):
            self._users[key] = {_NOBODY}

    def _try_again(self) -> None:
        """Try again to probe the files that were put off and are due."""
        deadline_s = time.monotonic() + EXAMINE_S
        tried = []
        for key, where in self._put_off.due():
            if isinstance(where, str):
                with self._put_off.attempt(key):
                    self._examine_installed(where)
            elif not self._budget.is_over(party := procfs.party_of(where.pid)):
                tried.append(key)
                with self._put_off.attempt(key), self._budget.charged(party, free_s=0.0):
                    self._examine(where, party)
            if time.monotonic() >= deadline_s:
                break
        if any(key not in self._probes.files and key not in self._put_off for key in tried):
            self.resync()  # the process by which it was opened is gone; others may map it

    def _examine_open(
        self,
        fd: int,
        key: FileKey,
        name: str,
        where: MappedFile | str,
        trusted: bool = False,
        max_places: int = MAX_SITES,
    ) -> bool:
        """Whether it has probes now; then the descriptor is kept. `where`: how to open it again;
        `trusted`, `max_places`: see Probes.examine."""
        kept = False
        try:
            kept = self._probes.examine(fd, key, name, trusted, max_places)
        except PutOff as put_off:
            if self._put_off.add(key, where, put_off.holder):
                self._probes.report("probes_put_off", 1, f"{name}: {put_off}")
        except OSError as error:
            self._probes.report("probe_refused", 0, f"{name}: {error.strerror}")
        finally:
            if not kept:
                os.close(fd)
        return kept

    def _used(self, key: FileKey, pid: int) -> None:
        """A process maps a probed file."""
        self._users.setdefault(key, set()).add(pid)
        self._files_of.setdefault(pid, set()).add(key)
        self._unmapped.pop(key, None)

    def _left(self, pid: int) -> None:
        """A process ended, or runs another program now."""
        for key in self._files_of.pop(pid, ()):
            users = self._users.get(key, set())
            users.discard(pid)
            if not users:
                self._unmapped[key] = time.monotonic()

    def _drop_unmapped(self, now_s: float) -> None:
        due = {key for key, since_s in self._unmapped.items() if now_s - since_s >= UNMAPPED_S}
        if not due:
            return
        # Events can be lost: probes stay on a file that some process maps by /proc.
        for file in mapped_now(self.unread):
            if file.key in due:
                due.discard(file.key)
                self._used(file.key, file.pid)
        some = set(islice(due, DROPPED_AT_ONCE))
        dropped = self._probes.drop(some)
        for key in dropped:
            del self._unmapped[key]
            self._shares.give_back(key)
            self._users.pop(key, None)
        for key in some - dropped:
            self._unmapped[key] = now_s - UNMAPPED_S + KEPT_ON_S


def _short(path: str) -> str:
    """A path, or its hash where it is long."""
    return path if len(path) <= LONG_PATH else str(hash(path))


def _leaves_its_program(event: CommEvent | ExitEvent) -> bool:
    """Whether a process ended, or executed another program."""
    return event.is_exec if isinstance(event, CommEvent) else event.tid == event.pid
