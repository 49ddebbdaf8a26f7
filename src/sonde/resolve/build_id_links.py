# SPDX-License-Identifier: Apache-2.0
"""Symbolic links from build ids to the files that ran, on this machine alone.

A capture names a file by its build id and never by its path. `sonde report --lines` reads source
lines later, and finds the file by its link. A link to a user's file names the file's owner and
identity, too: a file that was changed or replaced since may have other debug data. Where another
user's file with the build id ran, too, a mark has others believe neither.

Who may read a link: everybody, where everybody can reach and read the file and no mark is against
it; else the file's owner and root (link_folders.py).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from sonde import _native, procfs
from sonde.ownership import only_ours
from sonde.resolve import dispute_marks
from sonde.resolve.allowance import Allowance
from sonde.resolve.claims import ANYBODY, Claim
from sonde.resolve.dispute_marks import DisputeMarks
from sonde.resolve.link_folders import LinkFolders

MAX_FILES: Final = 8_192
"""Links kept; the oldest of the user who has most are removed first."""
SHRINK_EVERY: Final = 256
"""New links of this process, after which all are counted again: other recorders make some, too."""
LINKS_AT_ONCE: Final = 1_024
"""Links to files of one user that may be made at once; a training job maps some hundred files."""
LINKS_A_SECOND: Final = 1.0
"""How many more of them may be made each second."""
SHARED: Final = Path("/var/cache/sonde/files")
"""Where root's recorders keep them."""
_BUILD_ID: Final = re.compile(r"[0-9a-f]{8,64}\Z")
_SECOND: Final = ".second"
"""Behind a build id: name of the link to the other file of a dispute (`dispute_marks`)."""
_DEBUG_FILES: Final = Path("/usr/lib/debug/.build-id")


def default_folder() -> Path:
    """Where the links are kept: /var/cache where we may write, else the user's cache folder.

    The folder may not exist yet.
    """
    folder = SHARED.parent
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        return SHARED
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
        self._links = LinkFolders(self._folder)
        self._marks = DisputeMarks(self._links.private)
        is_ours = folder is not None or self._folder == SHARED
        self._roots = None if is_ours or not only_ours(SHARED, {0}) else BuildIdLinks(SHARED)
        """Where root has recorded files, to be read, too."""
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
            claim = Claim.of(path, opened)
            leads, is_for_all = _leads_to(path, opened, pid)
            if leads and claim.fits:
                self._link(build_id, claim, pid, is_for_all and os.geteuid() == 0)
            else:
                self._note_elsewhere(build_id, claim.owner, party)

    def note_elsewhere(self, build_id: str, party: int) -> None:
        """A party's file with a build id ran that is read as a copy in memory: it has no link, as
        it may be another one each time. Errors are ignored."""
        if self._is_private and _BUILD_ID.match(build_id):
            with suppress(OSError):
                self._prepare()
                self._note_elsewhere(build_id, ANYBODY, party)

    def _link(self, build_id: str, claim: Claim, pid: int | None, is_for_all: bool) -> None:
        """Any user can make a file with any build id: so a user's file never replaces root's, and
        where files of two users have the same one, neither is used until one is gone. Alike ones
        are no exception, as either user may change theirs when the other's was compared."""
        names = (build_id, build_id + _SECOND)
        known = {name: it for name in names if (it := self._links.held(name)) is not None}
        mark = self._marks.of(build_id)
        if mark == dispute_marks.OF_LINKED and (len(known) < 2 or claim.owner == 0):
            # One of the two links is or will be gone, so its file could not be seen to be gone.
            self._mark(build_id, dispute_marks.OF_ALL, ())
        if claim.owner == 0:
            if self._keep(build_id, claim, is_for_all):
                self._links.drop(build_id + _SECOND)
            return
        others = {name: it for name, it in known.items() if not it.is_of_same(claim)}
        standing = [name for name, it in others.items() if _stands(it, build_id, pid)]
        if any(known[name].owner == 0 for name in standing):
            return
        if not standing:
            if len(known) == 2 and mark == dispute_marks.OF_LINKED:
                self._marks.remove(build_id)
            if self._keep(build_id, claim, is_for_all):
                self._links.drop(build_id + _SECOND)
            return
        users = (claim.owner, *(known[name].owner for name in standing))
        if len(standing) == 2:
            self._dispute(build_id, dispute_marks.OF_ALL, users)
        elif self._dispute(build_id, dispute_marks.OF_LINKED, users):
            (place,) = set(names) - set(standing)
            self._keep(place, claim, is_for_all)

    def _keep(self, name: str, claim: Claim, is_for_all: bool) -> bool:
        """Have a link lead to a file, for everybody where everybody can read the file and it is in
        no dispute. Returns whether it does. Raises OSError."""
        is_public = is_for_all and not self._is_disputed(name.removesuffix(_SECOND), claim)
        held = self._links.held(name)
        if held is not None and not is_public:
            self._links.hide(name)
        if held != claim:
            return self._make(name, claim, is_public)
        if is_public:
            self._links.publish(name)
        return True

    def _dispute(self, build_id: str, mark: str, users: tuple[int, ...]) -> bool:
        """Have others believe none of the users' files. Returns whether their links may stay."""
        with suppress(OSError):
            if self._mark(build_id, mark, map(procfs.party_of_user, users)):
                return True
        self.left_out += 1
        self._drop_both(build_id)
        return False

    def _mark(self, build_id: str, mark: str, parties: Iterable[int]) -> bool:
        """`DisputeMarks.put`; nobody but their owners and root has a use for links to disputed
        files, and others cannot read the mark. Raises OSError."""
        is_marked = self._marks.put(build_id, mark, parties)
        for name in (build_id, build_id + _SECOND):
            claim = self._links.held(name)
            if claim is not None and self._is_disputed(build_id, claim):
                self._links.hide(name)
        return is_marked

    def _is_disputed(self, build_id: str, claim: Claim) -> bool:
        """Whether a mark is against a file; none is against root's."""
        return claim.owner != 0 and dispute_marks.is_against(self._marks.of(build_id), claim.owner)

    def _note_elsewhere(self, build_id: str, owner: int, party: int | None) -> None:
        """A file with this build id ran, to which no path leads here."""
        user = procfs.party_of_user(owner)
        party = user if party is None else party
        # Who owns a file in a container is for its maker to choose.
        is_users = party == user and owner != ANYBODY
        mark = dispute_marks.of_user(owner) if is_users else dispute_marks.OF_ALL
        try:
            self.left_out += not self._mark(build_id, mark, (party,))
        except OSError:
            self.left_out += 1
            first = self._links.held(build_id)
            if first is not None and first.owner != 0:
                self._drop_both(build_id)

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
        found = self._open_claimed(build_id)
        if found is None and self._roots is not None:
            found = self._roots._open_claimed(build_id)
        if found is not None:
            return found
        debug = f"{_DEBUG_FILES}/{build_id[:2]}/{build_id[2:]}.debug"
        fd = _open_file(debug, build_id)
        return None if fd is None else FoundFile(fd, os.path.realpath(debug))

    def _open_claimed(self, build_id: str) -> FoundFile | None:
        if self._is_private and os.access(self._folder, os.W_OK):
            with suppress(OSError):
                self._links.make()  # also what an earlier version recorded is found
        for claim in chain(*map(self._links.for_us, (build_id, build_id + _SECOND))):
            fd = _open_file(claim.path, build_id, claim, self._is_disputed(build_id, claim))
            if fd is not None:
                return FoundFile(fd, claim.path)
        return None

    def _prepare(self) -> None:
        """Make the folders, and count what is in them. Raises OSError."""
        if not self._is_ready:
            self._links.make()
            self._shrink()
            self._is_ready = True

    def _make(self, name: str, claim: Claim, is_public: bool) -> bool:
        """Make a link, or replace it. Returns whether its user may have one more. Raises
        OSError."""
        party = procfs.party_of_user(claim.owner)
        if self._allowance.left(party) < 1 or (claim.owner != 0 and self._marks.is_full):
            self.left_out += 1
            return False
        self._allowance.take(party, 1)
        self._links.put(name, claim, is_public)
        self._made += 1
        if self._made >= SHRINK_EVERY:
            self._shrink()
        return True

    def _drop_both(self, build_id: str) -> None:
        self._links.drop(build_id)
        self._links.drop(build_id + _SECOND)

    def _shrink(self) -> None:
        """Remove links beyond MAX_FILES, each time the oldest of the party that has most; count
        the marks. Raises OSError."""
        self._made = marks = 0
        links: dict[int, list[tuple[float, str]]] = defaultdict(list)
        for entry in self._links.entries():
            if entry.name.endswith(dispute_marks.SUFFIX):
                marks += 1
            else:
                party = procfs.party_of_user(entry.uid)
                links[party].append((entry.time_s, entry.name))
        self._marks.count = marks
        for of_party in links.values():
            of_party.sort(reverse=True)
        for _ in range(sum(map(len, links.values())) - MAX_FILES):
            _, oldest = max(links.values(), key=len).pop()
            self._links.drop(oldest)
        self._links.drop_stale_copies()


def _leads_to(path: str, opened: os.stat_result, pid: int | None) -> tuple[bool, bool]:
    """Whether a path that another user may control leads to the opened file here, and whether every
    user of the machine can reach it there and read it. Of a process that may see other files by its
    paths, what the kernel has in memory is looked at, which has a file that runs: no disk or server
    is asked, nor an automounter (procfs/opening.py). Raises Hung."""
    try:
        *found, is_for_all = procfs.BROKER.ask_of_file(pid, ("which", path, pid or 0))
        return tuple(found[:2]) == (opened.st_dev, opened.st_ino), is_for_all
    except procfs.Hung:
        raise  # it is not known: no reason for a dispute
    except (OSError, ValueError):
        return False, False


def _stands(claim: Claim, build_id: str, pid: int | None) -> bool:
    """Whether the file of a link is still there, or of a user's another one with the build id."""
    if claim.is_there(pid):
        return True
    fd = None if claim.owner == 0 else _open_file(claim.path, build_id)
    if fd is not None:
        os.close(fd)
    return fd is not None


def _open_file(
    path: str, build_id: str, claim: Claim | None = None, is_disputed: bool = False
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
