# SPDX-License-Identifier: Apache-2.0
"""The memory that the library in a profiled process made: found, locked, read and written.

It is read by pread and never mapped, so that nothing that the process does to it causes more than
an error. The layout and the rules of who writes what are in abi/inject.h.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final, Self

from sonde import procfs
from sonde.collect import inject_abi as abi
from sonde.collect.mapped_files import UnreadProcesses

MAPPED_AS: Final = f"/memfd:{abi.MEMFD} (deleted)"
"""How the memory's mapping, and the link of its descriptor, read in /proc."""
REASON_TEXT: Final = {
    abi.Reason.OK: "",
    abi.Reason.NO_LIBRARY: "no device library is loaded in this process",
    abi.Reason.NO_HOOK: "nothing in this process launches device work in a way that can be seen",
    abi.Reason.DRIVER_OLD: "the driver lacks a function that timing needs; update the driver",
    abi.Reason.NO_EVENTS: "the device context has no room for timing events",
    abi.Reason.CUPTI_MISSING: "this process has no CUPTI beside its CUDA runtime",
    abi.Reason.CUPTI_TAKEN: "another profiler in this process holds CUPTI",
    abi.Reason.CUPTI_DENIED: "profiling is restricted to administrators (the driver's "
    "NVreg_RestrictProfilingToAdminUsers)",
    abi.Reason.CUPTI_FAILED: "CUPTI refused",
    abi.Reason.NO_MEMORY: "no memory for records",
}
_MAX_DESCRIPTORS: Final = 65_536
"""Of one process, that are looked at."""
_MAX_TRIED: Final = 16
"""Descriptors, and mappings, with the memory's name: the library makes one, and one more after a
fork."""
LIBRARY: Final = re.compile(r"sonde-inject-[0-9a-f]+\.so( \(deleted\))?$|^/memfd:sonde-library ")
"""How the library is mapped: from a file, which may have been replaced since, or attached."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The library's state at one moment. Its numbers are whatever the process wrote there."""

    status: abi.Status
    reason: abi.Reason
    counts: dict[str, int]
    """Every field of inject_state by name."""

    @property
    def why(self) -> str:
        """The reason in words; '' where there is none."""
        return REASON_TEXT[self.reason]


class InjectMemory:
    """One process's memory, open. Not locked yet."""

    def __init__(self, fd: int, pid: int, generation: int) -> None:
        self.fd = fd
        self.pid = pid
        """The profiled process's, in the pid namespace of Sonde."""
        self.generation = generation

    @classmethod
    def find(
        cls,
        pid: int,
        max_bytes: int = procfs.MAX_MAPS_BYTES,
        unread: UnreadProcesses | None = None,
    ) -> Self | None:
        """That of process `pid`, open; None where it does not map the library, or no memory that
        fits is found.

        `max_bytes`: read of its mappings; `unread` counts it where there are more. Raises
        PermissionError where it may not be looked for.
        """
        spans = _mapped(pid, MAPPED_AS, max_bytes, unread)
        if spans is None:
            return None
        inner = _inner_pid(pid)
        try:
            return cls._first(pid, inner, _map_files(pid, spans))
        except PermissionError:  # that takes CAP_CHECKPOINT_RESTORE; descriptors do not
            return cls._first(pid, inner, _descriptors(pid, MAPPED_AS))

    @classmethod
    def _first(cls, pid: int, inner_pid: int, links: Iterable[str]) -> Self | None:
        for path in links:
            try:
                fd = procfs.open_memory(path, abi.BYTES)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fd is None:
                continue
            found = _header(fd)
            if found is not None and found.pid == inner_pid:
                return cls(fd, pid, found.generation)
            os.close(fd)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it, which ends the lock, too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def lock(self) -> bool:
        """Be the one agent of this process, until closed; False: another one is."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def seen(self) -> Seen:
        """The library's state now. A status that is none of `inject_abi` counts as REFUSED, such a
        reason as OK: any value may stand there."""
        values = abi.STATE.unpack(_exactly(self.fd, abi.STATE.size, abi.STATE_AT))
        counts: dict[str, int] = dict(zip(abi.State._fields, values, strict=True))
        status, reason = abi.Status.REFUSED, abi.Reason.OK
        with suppress(ValueError):
            status = abi.Status(counts["status"])
        with suppress(ValueError):
            reason = abi.Reason(counts["reason"])
        return Seen(status, reason, counts)

    def control(self) -> dict[str, int]:
        """The last request to the library, of any agent."""
        values = abi.CONTROL.unpack(_exactly(self.fd, abi.CONTROL.size, abi.CONTROL_AT))
        return dict(zip(abi.Control._fields, values, strict=True))

    def ask(self, **fields: int) -> None:
        """Write fields of inject_control, one by one. Raises OSError.

        In a child: the process can hold the lock of the file's inode (i_rwsem; not the flock of
        `lock`) for as long as it likes, by a write(2) whose source is memory that a page fault
        handler (userfaultfd, FUSE) never fills. Reading does not take it.
        """
        pieces = []
        for name, value in fields.items():
            at, code = abi.CONTROL_FIELDS[name]
            pieces.append((abi.CONTROL_AT + at, struct.pack(f"={code}", value)))
        procfs.BROKER.write(self.pid, self.fd, pieces)

    def is_detached(self) -> bool:
        """Whether somebody wants it left alone; `sonde attach` undoes that."""
        return bool(self.control()["request"] & abi.Request.LEAVE)

    def want(self, request: int) -> None:
        """Ask for this work, unless somebody wants the process left alone. Two writes: a detach
        that comes between them is lost."""
        if not self.is_detached():
            self.ask(request=request)

    def heartbeat(self) -> None:
        """Show the library that an agent is alive and reads."""
        self.ask(heartbeat_ns=time.monotonic_ns())

    def wait_for(self, *wanted: abi.Status, timeout_s: float) -> Seen:
        """The library's state once it is in one of these states, or when time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self.seen()
            if seen.status in wanted or time.monotonic() >= deadline:
                return seen
            time.sleep(0.02)


def find_memory(pid: int, name: str, size: int) -> int | None:
    """A descriptor of other memory that the library made, a sealed memfd of this name and size;
    None where there is none. Its content is not to be trusted. Raises PermissionError."""
    mapped_as = f"/memfd:{name} (deleted)"
    spans = _mapped(pid, mapped_as, procfs.MAX_MAPS_BYTES, None) or []
    try:
        return _first_sealed(_map_files(pid, spans), size)
    except PermissionError:
        return _first_sealed(_descriptors(pid, mapped_as), size)


def _first_sealed(links: Iterable[str], size: int) -> int | None:
    for path in links:
        try:
            fd = procfs.open_memory(path, size)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fd is not None:
            if _is_sealed(fd):
                return fd
            os.close(fd)
    return None


def _is_sealed(fd: int) -> bool:
    sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & sealed == sealed


def _map_files(pid: int, spans: Iterable[str]) -> Iterator[str]:
    return (f"/proc/{pid}/map_files/{span}" for span in spans)


def _exactly(fd: int, size: int, at: int) -> bytes:
    data = os.pread(fd, size, at)
    if len(data) != size:
        raise OSError("the process cut its memory short")
    return data


def _header(fd: int) -> abi.Header | None:
    """The header of what may be such memory; None if it is none, or of another version."""
    try:
        raw = _exactly(fd, abi.HEADER.size, abi.HEADER_AT)
        header = abi.Header._make(abi.HEADER.unpack(raw))
        if not _is_sealed(fd):
            return None
    except OSError:
        return None
    fits = header.magic == abi.MAGIC and header.abi == abi.ABI
    return header if fits and header.bytes == abi.BYTES else None


def _descriptors(pid: int, mapped_as: str) -> Iterator[str]:
    """Descriptors of a process that lead to such memory by their names."""
    folder = f"/proc/{procfs.memory_task(pid)}/fd"
    with suppress(FileNotFoundError, ProcessLookupError), os.scandir(folder) as entries:
        tried = 0
        for entry in islice(entries, _MAX_DESCRIPTORS):
            with suppress(OSError):
                if tried < _MAX_TRIED and procfs.read_link(entry.path) == mapped_as:
                    tried += 1
                    yield entry.path


def _mapped(
    pid: int, name: str, max_bytes: int, unread: UnreadProcesses | None
) -> list[str] | None:
    """Ranges of addresses that map memory of this name; None where no code of the library is
    mapped.

    Raises PermissionError.
    """
    spans: list[str] = []
    has_library = False
    mapped_as = name.encode()
    try:
        with procfs.MapsReader(pid, max_bytes) as reader:
            for line in reader.lines():
                if line.endswith(mapped_as):
                    if len(spans) < _MAX_TRIED:
                        spans.append(line.partition(b" ")[0].decode())
                elif not has_library and line[line.find(b" ") + 3 : line.find(b" ") + 4] == b"x":
                    parts = line.split(None, 5)
                    has_library = len(parts) == 6 and bool(LIBRARY.search(os.fsdecode(parts[5])))
            if reader.is_cut and unread is not None:
                unread.processes += 1
    except (FileNotFoundError, ProcessLookupError):
        return None
    return spans if has_library else None


def _inner_pid(pid: int) -> int:
    """Its number in its innermost pid namespace."""
    credentials = procfs.read_credentials(pid)
    return pid if credentials is None else credentials.inner_pid
