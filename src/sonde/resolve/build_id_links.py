# SPDX-License-Identifier: Apache-2.0
"""Symbolic links from build ids to the files that ran, on this machine alone.

A capture names a file by its build id and never by its path. `sonde report --lines` reads source
lines later, and finds the file by its link. A link to a user's file names the file's owner and
identity, too: a file that was changed or replaced since may have other debug data. Where another
user's file with the build id ran, too, a mark beside it has others believe neither.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde import _native, procfs
from sonde.ownership import only_ours
from sonde.resolve import dispute_marks
from sonde.resolve.allowance import Allowance
from sonde.resolve.dispute_marks import DisputeMarks, put_link

MAX_FILES: Final = 8_192
"""Links kept; the oldest of the user who has most are removed first."""
SHRINK_EVERY: Final = 256
"""New links of this process, after which all are counted again: other recorders make some, too."""
LINKS_AT_ONCE: Final = 1_024
"""Links to files of one user that may be made at once; a training job maps some hundred files."""
LINKS_A_SECOND: Final = 1.0
"""How many more of them may be made each second."""
FOLDER_MODE: Final = 0o711
"""A user who knows a build id, from their capture, finds its file; only root can list them."""
_ANYBODY: Final = 65_534
"""Stands for the owner of a file on an image or a removable medium (the user id of nobody): who
made that chose the owners of its files."""
_BUILD_ID: Final = re.compile(r"[0-9a-f]{8,64}\Z")
_SECOND: Final = ".second"
"""Behind a build id: name of the link to the other file of a dispute (`dispute_marks`)."""
_OWNED: Final = re.compile(r"@(\d+):(\d+):(\d+):(\d+):(/.*)", re.DOTALL)
"""Target for a user's file: its owner, device, inode, ctime in ns and path."""
_MAX_TARGET: Final = 1_023
"""Bytes of a link's target, on XFS; other file systems hold 4,095."""
_DEBUG_FILES: Final = Path("/usr/lib/debug/.build-id")


def default_folder() -> Path:
    """Where the links are kept: /var/cache where we may write, else the user's cache folder.

    The folder may not exist yet.
    """
    shared = Path("/var/cache/sonde")
    if os.access(shared if shared.exists() else shared.parent, os.W_OK):
        return shared / "files"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonde" / "files"


def _is_private(folder: Path) -> bool:
    """Whether only root and we can write there; for a missing folder, where it will be made."""
    while not folder.exists():
        folder = folder.parent
    return only_ours(folder, {0, os.geteuid()})


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file with a wanted build id, open for reading."""

    fd: int
    """The caller closes it."""
    path: str
    """Where it is: files that it refers to may lie beside it."""


class BuildIdLinks:
    """Links by build id. A link whose target is gone or has another build id by now is ignored."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._is_private = _is_private(self._folder)
        """Else nothing is recorded: another user could have us write through a link of theirs."""
        self._made = 0
        """Links since they were counted last."""
        self._is_ready = False
        self._allowance = Allowance(LINKS_AT_ONCE, LINKS_A_SECOND)
        self._marks = DisputeMarks(self._folder)
        self.left_out = 0
        """Files without a link or mark, as their user had too many new ones, or as there are as
        many marks as may be."""

    def record(
        self,
        build_id: str,
        path: str,
        opened: os.stat_result,
        pid: int | None = None,
        party: int | None = None,
    ) -> None:
        """Link a build id to `path`, if `path` leads to the opened file for this process too;
        where it leads elsewhere (as in a container), files of others with the build id are marked
        as disputed.

        `opened`: status of the file. `pid`: the process that had it mapped; `party`: its party,
        by default the file's owner. Errors are ignored: reports then have no source lines of the
        file.
        """
        if not (self._is_private and _BUILD_ID.match(build_id)):
            return
        with suppress(OSError):
            self._prepare()
            claim = _Claim.of(path, opened)
            if _leads_to(path, opened, pid) and claim.fits:
                self._link(build_id, claim, pid)
            else:
                self._note_elsewhere(build_id, claim.owner, party)

    def note_elsewhere(self, build_id: str, party: int) -> None:
        """A party's file with a build id ran that is read as a copy in memory: it has no link, as
        it may be another one each time. Errors are ignored."""
        if self._is_private and _BUILD_ID.match(build_id):
            with suppress(OSError):
                self._prepare()
                self._note_elsewhere(build_id, _ANYBODY, party)

    def _link(self, build_id: str, claim: _Claim, pid: int | None) -> None:
        """Any user can make a file with any build id: so a user's file never replaces root's, and
        where files of two users have the same one, neither is used until one is gone. Alike ones
        are no exception, as either user may change theirs when the other's was compared."""
        names = (build_id, build_id + _SECOND)
        known = {name: it for name in names if (it := self._claim(name)) is not None}
        mark = self._marks.of(build_id)
        if mark == dispute_marks.OF_LINKED and (len(known) < 2 or claim.owner == 0):
            # One of the two links is or will be gone, so its file could not be seen to be gone.
            self._marks.put(build_id, dispute_marks.OF_ALL, ())
        if claim.owner == 0:
            if known.get(build_id) == claim or self._make(build_id, claim):
                self._drop(build_id + _SECOND)
            return
        others = {name: it for name, it in known.items() if not it.is_of_same(claim)}
        standing = [name for name, it in others.items() if _stands(it, build_id, pid)]
        if any(known[name].owner == 0 for name in standing):
            return
        if not standing:
            if len(known) == 2 and mark == dispute_marks.OF_LINKED:
                self._marks.remove(build_id)
            if known.get(build_id) == claim or self._make(build_id, claim):
                self._drop(build_id + _SECOND)
            return
        users = (claim.owner, *(known[name].owner for name in standing))
        if len(standing) == 2:
            self._dispute(build_id, dispute_marks.OF_ALL, users)
        elif self._dispute(build_id, dispute_marks.OF_LINKED, users):
            (place,) = set(names) - set(standing)
            if known.get(place) != claim:
                self._make(place, claim)

    def _dispute(self, build_id: str, mark: str, users: tuple[int, ...]) -> bool:
        """Have others believe none of the users' files. Returns whether their links may stay."""
        with suppress(OSError):
            if self._marks.put(build_id, mark, map(procfs.party_of_user, users)):
                return True
        self.left_out += 1
        self._drop_both(build_id)
        return False

    def _note_elsewhere(self, build_id: str, owner: int, party: int | None) -> None:
        """A file with this build id ran, to which no path leads here."""
        user = procfs.party_of_user(owner)
        party = user if party is None else party
        # Who owns a file in a container is for its maker to choose.
        is_users = party == user and owner != _ANYBODY
        mark = dispute_marks.of_user(owner) if is_users else dispute_marks.OF_ALL
        try:
            self.left_out += not self._marks.put(build_id, mark, (party,))
        except OSError:
            self.left_out += 1
            first = self._claim(build_id)
            if first is not None and first.owner != 0:
                self._drop_both(build_id)

    def _link_of(self, name: str) -> str:
        """Where a link is. No Path: it interns each part, and users choose the build ids of theirs;
        on CPython 3.12 these would be kept for ever."""
        return f"{self._folder}/{name}"

    def _claim(self, name: str) -> _Claim | None:
        """What a link leads to."""
        try:
            return _Claim.parsed(os.readlink(self._link_of(name)))  # noqa: PTH115
        except OSError:
            return None

    def find(self, build_id: str) -> Path | None:
        """The path of what `open` opens."""
        found = self.open(build_id)
        if found is None:
            return None
        os.close(found.fd)
        return Path(found.path)

    def open(self, build_id: str) -> FoundFile | None:
        """A readable file with that build id: the one that ran, else its separate debug file."""
        if not _BUILD_ID.match(build_id):
            return None
        for claim in filter(None, map(self._claim, (build_id, build_id + _SECOND))):
            is_disputed = dispute_marks.is_against(self._marks.of(build_id), claim.owner)
            fd = _open_file(claim.path, build_id, claim, is_disputed)
            if fd is not None:
                return FoundFile(fd, claim.path)
        debug = f"{_DEBUG_FILES}/{build_id[:2]}/{build_id[2:]}.debug"
        fd = _open_file(debug, build_id)
        return None if fd is None else FoundFile(fd, os.path.realpath(debug))

    def _prepare(self) -> None:
        """Make the folder, and count what is in it. Raises OSError."""
        if not self._is_ready:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(FOLDER_MODE)
            self._shrink()
            self._is_ready = True

    def _make(self, name: str, claim: _Claim) -> bool:
        """Make a link, or replace it. It belongs to the user whose file it leads to. Returns
        whether they may have one more. Raises OSError."""
        party = procfs.party_of_user(claim.owner)
        if self._allowance.left(party) < 1 or (claim.owner != 0 and self._marks.is_full):
            self.left_out += 1
            return False
        self._allowance.take(party, 1)
        put_link(self._link_of(name), claim.target, claim.owner)
        self._made += 1
        if self._made >= SHRINK_EVERY:
            self._shrink()
        return True

    def _drop_both(self, build_id: str) -> None:
        self._drop(build_id)
        self._drop(build_id + _SECOND)

    def _drop(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._link_of(name))  # noqa: PTH108 (Path interns the name)

    def _shrink(self) -> None:
        """Remove links beyond MAX_FILES, each time the oldest of the party that has most; count
        the marks."""
        self._made = marks = 0
        links: dict[int, list[tuple[float, str]]] = defaultdict(list)
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(dispute_marks.SUFFIX):
                    marks += 1
                    continue
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    links[procfs.party_of_user(found.st_uid)].append((found.st_mtime, entry.path))
        self._marks.count = marks
        for of_party in links.values():
            of_party.sort(reverse=True)
        for _ in range(sum(map(len, links.values())) - MAX_FILES):
            _, oldest = max(links.values(), key=len).pop()
            with suppress(FileNotFoundError):
                os.unlink(oldest)  # noqa: PTH108


def _owner_of(device: int, uid: int) -> int:
    """Whose a file is that lies on a device and has this user id."""
    is_users = os.major(device) and not procfs.keeps_identity(device)
    return _ANYBODY if is_users else uid


def _leads_to(path: str, opened: os.stat_result, pid: int | None) -> bool:
    """Whether a path that another user may control leads to the opened file here. Of a process that
    may see other files by its paths, what the kernel has in memory is looked at, which has a file
    that runs: no disk or server is asked, nor an automounter (procfs/opening.py)."""
    try:
        found = procfs.BROKER.ask_of_file(pid, ("which", path, pid or 0))
        return bool(found[:2] == (opened.st_dev, opened.st_ino))
    except (OSError, ValueError):
        return False


def _stands(claim: _Claim, build_id: str, pid: int | None) -> bool:
    """Whether the file of a link is still there, or of a user's another one with the build id."""
    if claim.is_there(pid):
        return True
    fd = None if claim.owner == 0 else _open_file(claim.path, build_id)
    if fd is not None:
        os.close(fd)
    return fd is not None


def _open_file(
    path: str, build_id: str, claim: _Claim | None = None, is_disputed: bool = False
) -> int | None:
    """A descriptor of a file that others may have put there; None where there is none or it has
    another build id, or where the file is not to be believed: one that is neither root's nor ours
    has to be the one that ran."""
    opened = procfs.open_stable(path, follow=True)
    if opened is None:
        return None
    is_it = False
    try:
        if claim is None or claim.is_believed(os.fstat(opened.fd), is_disputed):
            is_it = _native.build_id(f"/proc/self/fd/{opened.fd}") == build_id
    except OSError:
        return None
    finally:
        if not is_it:
            os.close(opened.fd)
    return opened.fd if is_it else None


@dataclass(frozen=True, slots=True)
class _Claim:
    """A file that has a build id, as it was when it ran."""

    path: str
    owner: int = 0
    identity: tuple[int, int, int] | None = None
    """Device, inode, ctime in ns; None of root's files, and of links that an earlier version
    made."""

    @classmethod
    def of(cls, path: str, opened: os.stat_result) -> _Claim:
        """Of an open file."""
        owner = _owner_of(opened.st_dev, opened.st_uid)
        return cls(path, owner, _identity_of(opened) if owner else None)

    @classmethod
    def parsed(cls, target: str) -> _Claim:
        """Of a link's target."""
        found = _OWNED.fullmatch(target)
        if found is None:
            return cls(target)
        owner, device, inode, ctime_ns = map(int, found.groups()[:4])
        return cls(found[5], owner, (device, inode, ctime_ns))

    @property
    def target(self) -> str:
        """Of the link."""
        if self.identity is None:
            return self.path
        return f"@{self.owner}:{':'.join(map(str, self.identity))}:{self.path}"

    @property
    def fits(self) -> bool:
        """Whether a link can hold it on every file system."""
        return len(os.fsencode(self.target)) <= _MAX_TARGET

    def is_of_same(self, claim: _Claim) -> bool:
        """Whether another one takes the place of this one: it is the same user's, or has the path
        by now."""
        return self.path == claim.path or claim.owner == self.owner != _ANYBODY

    def is_there(self, pid: int | None) -> bool:
        """Whether the path still leads to that file: of root's, to any of root's. True, too, where
        it cannot be found out: `pid` may be a process that has readers wait."""
        try:
            device, inode, uid = procfs.identity_of(self.path, pid)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        if self.identity is not None and self.identity[:2] != (device, inode):
            return False
        return _owner_of(device, uid) == self.owner

    def is_believed(self, status: os.stat_result, is_disputed: bool) -> bool:
        """Whether to read debug data of the file that the path leads to now."""
        owner = _owner_of(status.st_dev, status.st_uid)
        if owner == os.geteuid() or (owner == 0 and (self.owner == 0 or not is_disputed)):
            return True
        return not is_disputed and self.identity == _identity_of(status)


def _identity_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_ctime_ns
