# SPDX-License-Identifier: Apache-2.0
"""The memory that the library in a profiled process made: found, locked, read and written.

Never mapped: whatever the process does to it, nothing but an error can come back. The layout and
the rules of who writes what are in abi/inject.h.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from sonde import procfs
from sonde.collect import inject_abi as abi

_CONTROL_AT: Final = {
    name: abi.CONTROL_AT + at
    for name, at in zip(abi.CONTROL_FIELDS, (0, 8, 12, 16, 24, 28, 32, 40, 44), strict=True)
}
_U32: Final = struct.Struct("=I")
_U64: Final = struct.Struct("=Q")
_MOST_DESCRIPTORS: Final = 65_536


@dataclass(frozen=True, slots=True)
class Seen:
    """What the library says of itself, checked no further than its types."""

    status: abi.Status
    reason: abi.Reason
    counts: dict[str, int]
    """Every field of inject_state by name."""

    @property
    def why(self) -> str:
        """The reason in words; '' where there is none."""
        return abi.REASON_TEXT[self.reason]


class InjectMemory:
    """One process's memory, open. Not locked yet."""

    def __init__(self, fd: int, pid: int, generation: int) -> None:
        self.fd = fd
        self.pid = pid
        """As this process numbers it."""
        self.generation = generation

    @classmethod
    def find(cls, pid: int) -> Self | None:
        """That of process `pid`; None where it has none.

        Raises PermissionError where it may not be looked for.
        """
        inner = _inner_pid(pid)
        for path in _links(pid):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            except (FileNotFoundError, ProcessLookupError):
                continue
            found = _header(fd)
            if found is not None and found["pid"] == inner:
                return cls(fd, pid, found["generation"])
            os.close(fd)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give it up, and the lock with it."""
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
        """What the library says now."""
        values = abi.STATE.unpack(_exactly(self.fd, abi.STATE.size, abi.STATE_AT))
        counts: dict[str, int] = dict(zip(abi.STATE_FIELDS, values, strict=True))
        status, reason = abi.Status.REFUSED, abi.Reason.OK
        with suppress(ValueError):
            status = abi.Status(counts["status"])
        with suppress(ValueError):
            reason = abi.Reason(counts["reason"])
        return Seen(status, reason, counts)

    def control(self) -> dict[str, int]:
        """What was asked of the library last, by whoever did."""
        values = abi.CONTROL.unpack(_exactly(self.fd, abi.CONTROL.size, abi.CONTROL_AT))
        return dict(zip(abi.CONTROL_FIELDS, values, strict=True))

    def ask(self, **fields: int) -> None:
        """Write fields of inject_control, one by one."""
        for name, value in fields.items():
            at = _CONTROL_AT[name]
            wide = name in ("heartbeat_ns", "tail", "seed")
            os.pwrite(self.fd, (_U64 if wide else _U32).pack(value), at)

    def is_detached(self) -> bool:
        """Whether somebody wants it left alone; `sonde attach` undoes that."""
        return bool(self.control()["request"] & abi.Request.LEAVE)

    def want(self, request: int) -> None:
        """Ask for this work, unless somebody wants the process left alone."""
        if not self.is_detached():
            self.ask(request=request)

    def beat(self) -> None:
        """An agent is alive and reads."""
        self.ask(heartbeat_ns=time.monotonic_ns())

    def wait_for(self, *wanted: abi.Status, timeout_s: float) -> Seen:
        """What the library says once it is in one of these states, or when time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self.seen()
            if seen.status in wanted or time.monotonic() >= deadline:
                return seen
            time.sleep(0.02)


def _exactly(fd: int, size: int, at: int) -> bytes:
    data = os.pread(fd, size, at)
    if len(data) != size:
        raise OSError("the process cut its memory short")
    return data


def _header(fd: int) -> dict[str, int] | None:
    """The header of what may be such memory; None if it is none, or of another version."""
    try:
        raw = _exactly(fd, abi.HEADER.size, abi.HEADER_AT)
        header = dict(zip(abi.HEADER_FIELDS, abi.HEADER.unpack(raw), strict=True))
        sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & sealed != sealed:
            return None
    except OSError:
        return None
    fits = header["magic"] == abi.MAGIC and header["abi"] == abi.ABI
    return header if fits and header["bytes"] == abi.BYTES else None


def _links(pid: int) -> Iterator[Path]:
    """Ways to it: descriptors of the process, else its mappings."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        names = os.listdir(folder)[:_MOST_DESCRIPTORS]  # noqa: PTH208
    except (FileNotFoundError, ProcessLookupError):
        return
    for name in names:
        with suppress(OSError):
            if os.readlink(folder / name) == abi.MAPPED_AS:  # noqa: PTH115
                yield folder / name
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if line.endswith(abi.MAPPED_AS):
                yield Path(f"/proc/{pid}/map_files") / line.split(maxsplit=1)[0]


def _inner_pid(pid: int) -> int:
    owner = procfs.read_owner(pid)
    return pid if owner is None else owner.inner_pid
