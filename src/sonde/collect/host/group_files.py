# SPDX-License-Identifier: Apache-2.0
"""Files of control groups that are read again and again.

A child opens them (`procfs.GROUPS`): who keeps a group's folder locked makes everybody wait who
looks a name up there. To read a file that stays open needs no lookup, and waits for nobody. Some of
each party's stay open; the others are read by the child each time, all in one request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from sonde import procfs
from sonde.procfs.group_folders import FILE_BYTES


@dataclass(frozen=True, slots=True)
class WantedGroup:
    """A group whose files are to be read."""

    path: str
    """Printable."""
    folder: str
    """As the kernel has it."""
    party: str
    names: Mapping[str, str]
    """Of files, by what they hold."""


class GroupFiles:
    """The files of some groups."""

    def __init__(self, max_kept: int, folders: procfs.GroupFolders = procfs.GROUPS) -> None:
        """`max_kept`: groups of one party whose files stay open."""
        self._max_kept = max_kept
        self._folders = folders
        self._groups: list[WantedGroup] = []
        self._paths: set[str] = set()
        self._fds: dict[tuple[str, str], int] = {}
        """By folder and name, of files that stay open."""

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def put(self, wanted: Iterable[WantedGroup]) -> None:
        """Read these from now on, and no others. What is open already stays so."""
        before, self._fds = self._fds, {}
        self._groups = [*wanted]
        self._paths = {group.path for group in self._groups}
        kept: dict[str, set[str]] = {}
        to_open: list[tuple[WantedGroup, list[str]]] = []
        for group in self._groups:
            of_party = kept.setdefault(group.party, set())
            if group.path not in of_party and len(of_party) >= self._max_kept:
                continue
            of_party.add(group.path)
            missing = []
            for name in set(group.names.values()):
                if (fd := before.pop((group.folder, name), -1)) >= 0:
                    self._fds[group.folder, name] = fd
                else:
                    missing.append(name)
            if missing:
                to_open.append((group, missing))
        _close(before)
        opened = self._folders.open_files(
            [group.folder for group, _ in to_open],
            _parties(group for group, _ in to_open),
            [names for _, names in to_open],
        )
        for (group, _), fds in zip(to_open, opened, strict=True):
            self._fds.update(((group.folder, name), fd) for name, fd in fds.items())

    def read(self) -> Iterator[tuple[WantedGroup, str, bytes]]:
        """(group, what it holds, content) of each file that can be read."""
        asked: list[tuple[WantedGroup, list[str]]] = []
        for group in self._groups:
            missing = []
            for what, name in group.names.items():
                if (raw := self._kept(group.folder, name)) is not None:
                    yield group, what, raw
                else:
                    missing.append(what)
            if missing:
                asked.append((group, missing))
        read, _ = self._folders.look(
            [group.folder for group, _ in asked],
            _parties(group for group, _ in asked),
            [[group.names[what] for what in missing] for group, missing in asked],
            limit=FILE_BYTES,
        )
        for (group, missing), found in zip(asked, read, strict=True):
            contents = found.contents if found is not None else {}
            for what in missing:
                if (raw := contents.get(group.names[what])) is not None:
                    yield group, what, raw

    def _kept(self, folder: str, name: str) -> bytes | None:
        """The content of a file that stays open."""
        fd = self._fds.get((folder, name))
        if fd is None:
            return None
        try:
            raw = piece = os.pread(fd, FILE_BYTES, 0)
            while piece and len(raw) < FILE_BYTES:  # a seq_file may return a page at a time
                piece = os.pread(fd, FILE_BYTES - len(raw), len(raw))
                raw += piece
        except OSError:  # the group was removed; it may have been made again
            os.close(self._fds.pop((folder, name)))
            return None
        return raw

    def close(self) -> None:
        """Close every file, and read none."""
        _close(self._fds)
        self._groups, self._paths = [], set()


def _parties(groups: Iterable[WantedGroup]) -> Callable[[str], str]:
    return {group.folder: group.party for group in groups}.__getitem__


def _close(fds: dict[tuple[str, str], int]) -> None:
    while fds:
        with suppress(OSError):
            os.close(fds.popitem()[1])
