# SPDX-License-Identifier: Apache-2.0
"""What /proc says about a process that is still there. Everything may vanish at any time: None."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass

from sonde.resolve.mappings import MAX_MAPS_BYTES

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""The unit in which /proc tells when a process started: 10 ms."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Of /proc/PID/stat (proc_pid_stat(5)), fields 2, 3, 4 and 22."""

    comm: str
    state: str
    ppid: int
    start_ns: int


@dataclass(frozen=True, slots=True)
class Owner:
    """Of /proc/PID/status: whose process it is, and which pid it has in its own namespace."""

    uids: tuple[int, ...]
    """Real and effective."""
    inner_pid: int


def read_file(path: str, limit: int = 1 << 16) -> bytes | None:
    """A file's content, cut at `limit` bytes; None where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    pieces = []
    try:
        while limit > 0:
            piece = os.read(fd, min(limit, 1 << 18))
            if not piece:
                break
            pieces.append(piece)
            limit -= len(piece)
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(pieces)


def text(raw: bytes) -> str:
    """A name that the kernel or a process gave, printable whatever it holds."""
    shown = raw.decode("utf-8", "replace")
    return shown if shown.isprintable() else "".join(c if c.isprintable() else "?" for c in shown)


def printable(name: str) -> str:
    """The same for a name decoded as file names are."""
    if name.isascii() and name.isprintable():
        return name
    return text(name.encode("utf-8", "surrogateescape"))


def pids() -> list[int]:
    """Every process that /proc shows."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
    except OSError:
        return []


def read_stat(pid: int, tid: int = 0) -> Stat | None:
    """The basics of a process, or of one of its threads."""
    raw = read_file(f"/proc/{pid}/task/{tid}/stat" if tid else f"/proc/{pid}/stat")
    # The name may hold anything, parentheses too.
    before, parenthesis, after = (raw or b"").rpartition(b") ")
    fields = after.split()
    if not parenthesis or len(fields) < 20:
        return None
    comm = text(before.partition(b" (")[2])
    return Stat(comm, fields[0].decode(), int(fields[1]), int(fields[19]) * TICK_NS)


def read_comm(pid: int, tid: int) -> str | None:
    """The name of a thread."""
    raw = read_file(f"/proc/{pid}/task/{tid}/comm")
    return None if raw is None else text(raw.rstrip(b"\n"))


def read_exe(pid: int) -> str:
    """File name of the executable; '' for kernel threads and what may not be looked at."""
    try:
        path = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except OSError:
        return ""
    return printable(path.removesuffix(" (deleted)").rpartition("/")[2])


def read_maps(pid: int) -> bytes | None:
    """The text of /proc/PID/maps; b'' for kernel threads."""
    return read_file(f"/proc/{pid}/maps", MAX_MAPS_BYTES)


def read_owner(pid: int) -> Owner | None:
    """Whose process it is."""
    uids: tuple[int, ...] = ()
    inner = pid
    for line in (read_file(f"/proc/{pid}/status") or b"").split(b"\n"):
        name, _, value = line.partition(b":")
        with suppress(ValueError, IndexError):
            if name == b"Uid":
                uids = tuple(int(word) for word in value.split()[:2])
            elif name == b"NSpid":
                inner = int(value.split()[-1])
    return Owner(uids, inner) if uids else None


def has_threads(pid: int) -> bool:
    """Whether any thread of the process still runs; its first one may have ended before others."""
    try:
        tids = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return False
    states = (read_stat(pid, int(tid)) for tid in tids[:64])
    return any(found and found.state not in "ZXx" for found in states)


def open_regular(path: str) -> int | None:
    """A descriptor of the plain file at `path`, which others may have put there; None otherwise.

    What it is is asked before it is opened: opening a pipe can block, and opening a device can set
    something off. The last component must not be a symbolic link, except one of /proc's own.
    """
    own_link = "/map_files/" in path
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if own_link else os.O_NOFOLLOW))
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    finally:
        os.close(handle)
