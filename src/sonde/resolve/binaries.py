# SPDX-License-Identifier: Apache-2.0
"""Opens the files behind mappings, also deleted ones and those of other mount namespaces.

While a file is held open here, its device and inode identify it: the kernel does not reuse the
inode. After it was closed, its identity (size, times of change) is compared when it is opened
again.

All processes that map a file share its `Binary`. The key is the device and inode of the file that
was opened, never those of the mapping. On btrfs and, before Linux 6.18, on overlayfs, mappings may
show another file's numbers: there the file is opened once for each process, and shared by its real
device.

On devices that do not keep identities (`procfs.devices`) a user can give a file the identity of
somebody else's, on an image that is mounted under the same number before that one's. So there the
processes of a party share a `Binary`, as long as the same disk is in the device, and what others
keep by identity (symbols, unwind tables) is kept by the number of the `Binary`, too.

A copy in memory does not hold its file's device: it has no key, and is shared as copies.py has it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sonde import procfs
from sonde.resolve.binary import Binary, FileIdentity, FileKey
from sonde.resolve.build_id_links import BuildIdLinks
from sonde.resolve.copies import Copies
from sonde.resolve.counters import Counters
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.mappings import Mapping
from sonde.resolve.tracked_process import TrackedProcess

MAX_FILES: Final = 4_096
"""Files known by device and inode."""
MAX_OPEN: Final = 96
"""Files held open."""
IDLE_NS: Final = 30_000_000_000
"""Files are closed this long after their last use; deleted ones only once the process that used
them is gone, as its own mapping keeps them on the disk."""
UNMOUNT_NS: Final = 3_000_000_000
"""Files on devices that users may want to unmount are closed this long after the process that used
them has ended, when its last samples are resolved."""
RETRY_NS: Final = 10_000_000_000
"""A file that could not be opened is looked for again after this: what failed may have passed."""


_ShareKey = tuple[FileKey, int, int] | FileKey
"""By what processes find a file: (file, party, number of the disk), or the file alone."""


@dataclass(frozen=True, slots=True)
class _LastUse:
    process: TrackedProcess
    time_ns: int
    """CLOCK_MONOTONIC."""


class _Missed(Binary):
    """A file that could not be opened: nothing is known of it."""

    __slots__ = ("retry_ns",)

    def __init__(self) -> None:
        super().__init__()
        self.retry_ns = time.monotonic_ns() + RETRY_NS
        """When it is looked for again; CLOCK_MONOTONIC."""


class Binaries:
    """All files of all processes. The number of open ones is bounded."""

    def __init__(
        self, counters: Counters, max_open: int = MAX_OPEN, links: BuildIdLinks | None = None
    ) -> None:
        """`links` records where each file with a build id was."""
        self._counters = counters
        self._links = links
        self._max_open = max_open
        self._known: LruCache[_ShareKey, Binary] = LruCache(MAX_FILES)
        self._open: dict[Binary, _LastUse] = {}
        """The most recently used at the end."""
        self._copies = Copies()
        self._vdso: Binary | None = None
        self._retries: dict[TrackedProcess, int] = {}
        """When a process has files that are looked for again; CLOCK_MONOTONIC."""

    @property
    def copied_bytes(self) -> int:
        """Memory that copies of files take."""
        return self._copies.held_bytes

    @property
    def held_open(self) -> int:
        """Descriptors in use."""
        return len(self._open)

    def of(self, process: TrackedProcess, mapping: Mapping) -> Binary | None:
        """The file behind a mapping; None where there is none.

        One that cannot be opened is a `Binary` without content, until it is looked for again.
        """
        binary = mapping.binary
        if self.is_to_find(mapping):
            if mapping.has_file:
                binary = self._find(process, mapping)
            elif mapping.path == "[vdso]":
                binary = self._own_vdso(mapping)
            mapping.binary = binary
        return binary

    @staticmethod
    def is_to_find(mapping: Mapping) -> bool:
        """Whether a file is still to be looked for, or again."""
        binary = mapping.binary
        if isinstance(binary, _Missed):
            return binary.retry_ns <= time.monotonic_ns()
        return binary is None

    def open(self, binary: Binary, process: TrackedProcess, mapping: Mapping) -> bool:
        """Open the file for reading. False where it cannot be reached, now or any more."""
        use = _LastUse(process, time.monotonic_ns())
        if isinstance(binary, _Missed):
            self._retries.setdefault(process, binary.retry_ns)
            return False
        if binary.fd < 0:
            is_open = self._reopen(binary, process, mapping, use)
            if not is_open:
                self._retries.setdefault(process, use.time_ns + RETRY_NS)
            return is_open
        if binary in self._open:
            if not binary.is_copy:
                try:
                    binary.use_descriptor(binary.fd)
                except OSError:
                    self._counters.files_unopened += 1
                    self._release(binary)
                    self._retries.setdefault(process, use.time_ns + RETRY_NS)
                    return False
            del self._open[binary]
            self._open[binary] = use
            self._copies.use(binary)
        return True

    def note_link(self, binary: Binary, process: TrackedProcess, mapping: Mapping) -> None:
        """Record where an open file is, once: one of its frames is being named. A program maps
        hundreds of files, and a dozen of them have frames."""
        if self._links is None or binary.linked == binary.index:
            return
        binary.linked = binary.index
        if not binary.build_id:
            return
        if binary.is_copy:
            self._links.note_elsewhere(binary.build_id, process.party)
        else:
            with suppress(OSError):
                status = os.fstat(binary.fd)
                self._links.record(
                    binary.build_id, mapping.path, status, process.pid, process.party
                )
        self._counters.links_left_out = self._links.left_out

    def _reopen(
        self, binary: Binary, process: TrackedProcess, mapping: Mapping, use: _LastUse
    ) -> bool:
        found = self._open_mapped(process, mapping)
        if found is None:
            return False
        if _key_of(found) != binary.key:
            os.close(found.fd)
            return False
        return self._hold(binary, found, use)

    def to_retry(self, now_ns: int) -> list[TrackedProcess]:
        """Processes some of whose files could not be opened, and may be now: their frames without
        names are to be looked up again. Each is returned once."""
        due = [it for it, at_ns in self._retries.items() if at_ns <= now_ns or not it.is_alive]
        for process in due:
            del self._retries[process]
        return due

    def expire(self, now_ns: int) -> None:
        """Close files that were not used lately, except deleted ones of living processes; and
        copies in any case, as they are made again when they are needed."""
        for binary, use in list(self._open.items()):
            is_alive = use.process.is_alive
            if use.time_ns + IDLE_NS > now_ns:
                may_stay = is_alive or use.process.dead_ns + UNMOUNT_NS > now_ns
                if binary.is_everybodys or binary.is_copy or may_stay:
                    continue
            if binary.is_copy or not is_alive or _has_name(binary.fd):
                self._release(binary)

    def close(self) -> None:
        """Close every file."""
        for binary in list(self._open):
            self._release(binary)
        if self._vdso is not None and self._vdso.fd >= 0:
            os.close(self._vdso.fd)
            self._vdso.fd = -1

    def _find(self, process: TrackedProcess, mapping: Mapping) -> Binary:
        known = self._known.get(mapping.file)
        if known is None:
            known = self._known.get(_share_key(mapping.file, process))
        if known is not None and known.fd >= 0:
            return known
        copy = self._copies.find(process, mapping)
        if copy is not None:
            return copy
        found = self._open_mapped(process, mapping)
        if found is None:
            # It may be the known file or another one: without a name it cannot have a wrong one.
            self._counters.files_unopened += not isinstance(mapping.binary, _Missed)
            return _Missed()
        key = _key_of(found)
        share = None if key is None else _share_key(key, process)
        known = None if share is None else self._known.get(share)
        if known is not None and known.fd >= 0:
            os.close(found.fd)
            return known
        binary = known or Binary()
        binary.key = key
        binary.is_everybodys = share == key
        if not self._hold(binary, found, _LastUse(process, time.monotonic_ns())):
            return _Missed()
        if found.is_copy:
            self._copies.share(binary, process, mapping)
        if share is not None:
            self._known.put(share, binary)
        self._counters.files_evicted = self._known.evicted
        return binary

    def _hold(self, binary: Binary, found: procfs.Opened, use: _LastUse) -> bool:
        """Keep an opened file. False where it cannot be read."""
        try:
            original = FileIdentity(*found.which) if found.is_copy else None
            binary.use_descriptor(found.fd, original)
        except OSError:
            self._counters.files_unopened += 1
            os.close(found.fd)
            return False
        self._counters.files_copied += found.is_copy
        self._counters.files_opened += 1
        if found.is_copy:
            for other in self._copies.add(binary, use.process.party):
                self._release(other)
        while len(self._open) >= self._max_open:
            # A deleted file cannot be opened again once its process is gone: close those last.
            with_name = (it for it in self._open if it.is_copy or _has_name(it.fd))
            self._release(next(with_name, next(iter(self._open))))
        self._open[binary] = use
        return True

    def _release(self, binary: Binary) -> None:
        del self._open[binary]
        self._copies.drop(binary)
        os.close(binary.fd)
        binary.fd = -1

    def _open_mapped(self, process: TrackedProcess, mapping: Mapping) -> procfs.Opened | None:
        """The mapped file itself, or a copy of it.

        While the process lives, /proc/PID/map_files leads to it even if the path does not. After
        that, the path is tried in the root directory of the process, of its parent, and here.
        The path may lead to another file by then, and another user may have put it there, so
        the result counts only where it is the same file. For a process that may have meant another
        file by it, nothing is looked up here that is not in memory (procfs/opening.py).
        """
        pid, path, inode = process.pid, mapping.path, mapping.file[2]
        room = self._copies.room_for(process.party)
        if process.is_alive:
            span = f"{mapping.start:x}-{mapping.end:x}"
            found = procfs.open_stable(f"/proc/{pid}/map_files/{span}", copy_bytes=room)
            if found is not None:
                if found.is_strange or found.which[1] == inode:
                    return found
                os.close(found.fd)
        for root in (f"/proc/{pid}/root", f"/proc/{process.ppid}/root", ""):
            found = procfs.open_stable(root + path, inode=inode, who=pid, copy_bytes=room)
            if found is not None:
                # On btrfs and overlayfs the key cannot match: there a mount of the machine's own
                # counts (no copy was needed), not one of a user.
                is_like = found.is_strange and not found.is_copy
                if found.key == mapping.file or (is_like and (root or _is_of(found, process))):
                    return found
                os.close(found.fd)
        return None

    def _own_vdso(self, mapping: Mapping) -> Binary | None:
        """The vDSO, read from this process: all 64-bit processes map the same image."""
        if self._vdso is None:
            self._vdso = _dump_vdso()
        same = self._vdso is not None and self._vdso.identity.size == mapping.end - mapping.start
        return self._vdso if same else None


def _is_of(found: procfs.Opened, process: TrackedProcess) -> bool:
    """Whether a file belongs to the machine's root or to the user of a process. Where a container
    had a path, any user of the machine may have it, too, with an inode that they choose."""
    try:
        owner = os.fstat(found.fd).st_uid
    except OSError:
        return False
    return owner == 0 or procfs.party_of_user(owner) == process.party


def _key_of(found: procfs.Opened) -> FileKey | None:
    """The key by which processes share an opened file while it is held open; None for a copy."""
    return None if found.is_copy else found.key


def _share_key(key: FileKey, process: TrackedProcess) -> _ShareKey:
    """By what other processes find a file that one maps."""
    device = os.makedev(*key[:2])
    if procfs.keeps_identity(device):
        return key
    return key, process.party, procfs.disk_number(device)


def _has_name(fd: int) -> bool:
    """Whether the file still has a directory entry; True where that is unknown."""
    try:
        return os.fstat(fd).st_nlink > 0
    except OSError:
        return True


def _dump_vdso() -> Binary | None:
    """A copy of this process's vDSO in memory; None where it has none or cannot be read."""
    for line in (procfs.read_maps(os.getpid()) or b"").split(b"\n"):
        if line.endswith(b"[vdso]"):
            start, _, end = line.partition(b" ")[0].partition(b"-")
            binary = Binary("vdso")
            try:
                with open(procfs.open_file("/proc/self/mem"), "rb", buffering=0) as memory:  # noqa: PTH123
                    image = os.pread(memory.fileno(), int(end, 16) - int(start, 16), int(start, 16))
                fd = os.memfd_create("vdso", os.MFD_CLOEXEC)
            except OSError:
                return None
            try:
                os.write(fd, image)
                binary.use_descriptor(fd)
            except OSError:
                os.close(fd)
                return None
            return binary
    return None
