# SPDX-License-Identifier: Apache-2.0
"""User ids and pids of a process, at a cost that the process cannot raise.

/proc/PID/status has them all, but the kernel writes that file whole for each look at it, and a
process with 65,536 supplementary groups makes it take 10 ms. A handle of the process (pidfd) has
the same in microseconds since Linux 6.13. Before that `status` is read, unless long ones have been
read lately: then the handle gives the pids (Linux 5.5), and the owner of /proc/PID the effective
user id, which is taken for the real one: they differ in programs that have their file's user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from contextlib import suppress
from typing import Final, NamedTuple

from sonde.procfs import lookups

_FIRST_BYTES: Final = 8192
"""Of a status file that are read at first: it is shorter as a rule."""
_MAX_STATUS_BYTES: Final = 1 << 20
"""65,536 groups, the most that a process can have, take 0.7 MB ahead of its pid namespaces."""
_LONG_BYTES: Final = 4 << 20
"""Of status files that do not fit in _FIRST_BYTES, all processes together; 1 MB takes 14 ms."""
_LONG_BYTES_PER_S: Final = 1 << 20
"""Of these bytes that come back in a second."""

_GET_INFO: Final = 0xC040FF0B
"""PIDFD_GET_INFO with the first version of struct pidfd_info (linux/pidfd.h)."""
_INFO: Final = struct.Struct("=QQ11Ii")
"""mask, control group, pid, tgid, ppid, real and effective user and group id, six that follow."""
_INFO_FIELDS: Final = 14
_INFO_IDS: Final = 3
"""PIDFD_INFO_PID | PIDFD_INFO_CREDS: what is asked for, and whether it was answered."""
_UNKNOWN: Final = -1
"""In place of a user id."""
_NOT_THERE: Final = (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
"""Errors of a kernel without it."""


class Ids(NamedTuple):
    """What the kernel knows of whose a process is."""

    uid: int
    """The real user id."""
    effective: int
    parent: int
    pids: tuple[int, ...]
    """Its pids, from our namespace down to its innermost; empty: not known."""

    @property
    def levels(self) -> int:
        """Pid namespaces that it is in, from ours down; 0: that is not known."""
        return len(self.pids)

    @property
    def is_first(self) -> bool:
        """Whether it is the first process of the innermost of these."""
        return self.pids[-1:] == (1,)


class _Allowance:
    """Bytes of long status files that may be read."""

    def __init__(self) -> None:
        self._left = float(_LONG_BYTES)
        self._at_s = time.monotonic()

    def is_over(self) -> bool:
        """Whether none may be read now."""
        if self._left > 0:
            return False
        now_s = time.monotonic()
        self._left += (now_s - self._at_s) * _LONG_BYTES_PER_S
        self._at_s = now_s
        return self._left <= 0

    def charge(self, size: int) -> None:
        """Take off what was read."""
        now_s = time.monotonic()
        back = self._left + (now_s - self._at_s) * _LONG_BYTES_PER_S
        self._left, self._at_s = min(back, _LONG_BYTES) - size, now_s


class _Kernel:
    """What this kernel's handles of processes can do, found out at the first use."""

    def __init__(self) -> None:
        self.has_handles = hasattr(os, "pidfd_open")
        """pidfd_open(2)."""
        with suppress(OSError, ValueError):
            # Handles have the numbers of our own pid namespace; /proc may be another's.
            if int(os.readlink("/proc/self")) != os.getpid():  # noqa: PTH115
                self.has_handles = False
        self.has_info = self.has_handles
        """PIDFD_GET_INFO."""


_allowance: Final = _Allowance()
_kernel: Final = _Kernel()


def ids_of(pid: int) -> Ids | None:
    """The ids of a process; None where it is gone. Takes none of its locks."""
    if _kernel.has_info and (found := _by_handle(pid)) is not None:
        return found
    if not _allowance.is_over() and (found := _by_status(pid)) is not None and found.pids:
        return found
    return _by_parts(pid)


def is_gone(pid: int) -> bool:
    """Whether no process or thread has this number any more, as far as that can be found out
    without a look-up: at little cost where many processes are short-lived."""
    if pid <= 0 or not _kernel.has_handles:
        return pid <= 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def user_ids(pid: int) -> tuple[int, ...]:
    """Its real, effective, saved and file system user id; empty where they are not known, or not
    at that cost."""
    if _kernel.has_info and len(info := _info_of(pid)) == _INFO_FIELDS:
        return info[5], info[7], info[9], info[11]
    if _allowance.is_over():
        return ()
    with suppress(ValueError):
        return tuple(map(int, _line(read_status(pid), b"Uid")))
    return ()


def read_status(pid: int) -> bytes:
    """/proc/PID/status, whole; empty where the process is gone. Takes none of its locks."""
    try:
        fd = lookups.open_file(f"/proc/{pid}/status")
    except OSError:
        return b""
    with suppress(OSError), open(fd, "rb", buffering=0) as file:  # noqa: PTH123
        raw = file.read(_FIRST_BYTES)
        if len(raw) < _FIRST_BYTES:
            return raw
        while len(raw) < _MAX_STATUS_BYTES and (more := file.read(_MAX_STATUS_BYTES - len(raw))):
            raw += more
        _allowance.charge(len(raw))
        return raw
    return b""


def _by_handle(pid: int) -> Ids | None:
    """By a handle alone; None where the kernel has it not, or the process is gone."""
    if not (info := _info_of(pid, with_pids=True)):
        return None
    _, _, _, _, parent, uid, _, effective, *_ = info[:_INFO_FIELDS]
    return Ids(uid, effective, parent, info[_INFO_FIELDS:])


def _info_of(pid: int, with_pids: bool = False) -> tuple[int, ...]:
    """The fields of _INFO, and behind them its pids (`with_pids`); empty where the kernel has them
    not, or the process is gone."""
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):  # a seccomp filter
            _kernel.has_handles = _kernel.has_info = False
        return ()
    try:
        raw = fcntl.ioctl(handle, _GET_INFO, _INFO.pack(_INFO_IDS, *[0] * 13))
        info: tuple[int, ...] = _INFO.unpack(raw)
        pids = _pids_of(handle, pid) if with_pids else ()
        if info[0] & _INFO_IDS == _INFO_IDS and (pids or not with_pids):
            return info + pids
    except OSError as error:
        if error.errno in _NOT_THERE:
            _kernel.has_info = False
    finally:
        os.close(handle)
    return ()


def _by_status(pid: int) -> Ids | None:
    """By its status file, as the owner of the other files is root where it is not dumpable."""
    raw = read_status(pid)
    with suppress(ValueError, IndexError):
        uid, effective = map(int, _line(raw, b"Uid")[:2])
        pids = tuple(map(int, _line(raw, b"NSpid")))
        return Ids(uid, effective, int(_line(raw, b"PPid")[0]), pids)
    return None


def _by_parts(pid: int) -> Ids | None:
    """By short files: the owner of the folder itself is the effective user, dumpable or not.
    Nothing is known of a process whose folder is kept locked."""
    with suppress(OSError, ValueError, IndexError):
        try:
            uid = lookups.owner_of(pid)
        except OSError as error:
            if error.errno != errno.ETIMEDOUT:
                raise
            return Ids(_UNKNOWN, _UNKNOWN, 0, ())
        # Of the thread: the process's own file has times that are summed over all threads.
        raw = lookups.read(f"/proc/{pid}/task/{pid}/stat", 1024)
        parent = int(raw.rpartition(b") ")[2].split(None, 2)[1])
        pids: tuple[int, ...] = ()
        if _kernel.has_handles:
            with suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    pids = _pids_of(handle, pid)
                finally:
                    os.close(handle)
        return Ids(uid, uid, parent, pids)
    return None


def _pids_of(handle: int, pid: int) -> tuple[int, ...]:
    """The pids of a process by its handle; empty where that does not show them, or shows that
    `pid` is another process's in /proc. Raises OSError."""
    with suppress(ValueError):
        raw = _about_ours(handle)
        pids = tuple(map(int, _line(raw, b"NSpid")))
        return pids if pids[:1] == (pid,) else ()
    return ()


def _about_ours(fd: int) -> bytes:
    """What the kernel knows of a descriptor of ours. Raises OSError."""
    if lookups.own_procfs() >= 0:
        return lookups.read(f"/proc/self/fdinfo/{fd}", 1024)
    # A child would look up its descriptor. Nobody but us can list this folder, and so lock it.
    with open(f"/proc/self/fdinfo/{fd}", "rb", buffering=0) as file:  # noqa: PTH123
        return file.read(1024)


def _line(raw: bytes, name: bytes) -> list[bytes]:
    return raw.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()
