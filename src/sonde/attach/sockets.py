# SPDX-License-Identifier: Apache-2.0
"""How much a program wants to receive at once from a socket of theirs (socket(7), SO_RCVLOWAT)."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

CLOSING_S: Final = 0.05
"""How long closing our duplicate may take. Where the program closed its socket meanwhile, ours is
the last: to close it sends what is left, as long as the program chose (SO_LINGER)."""
_PIDFD_GETFD: Final = 438
"""Number of the system call, on every architecture; Linux 5.6."""


def low_water_mark(pid: int, number: int, link: str) -> int:
    """The bytes that a call which receives from a process's socket waits for.

    `number`: of its descriptor; `link`: where that leads, as /proc shows it. The socket is open
    here, too, for some microseconds. Called by a process's main thread, as SIGALRM is used. Raises
    OSError where the kernel does not let us ask, or where the descriptor leads elsewhere by now.
    """
    handle = os.pidfd_open(pid)
    try:
        found = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, number, 0)
        if found < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
    finally:
        os.close(handle)
    try:
        if link != f"socket:[{os.fstat(found).st_ino}]":
            raise OSError(f"descriptor {number} is no longer {link}")
        one = socket.socket(fileno=found)
        try:
            return one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        finally:
            one.detach()
    finally:
        with _alarms():
            os.close(found)


@contextmanager
def _alarms() -> Iterator[None]:
    """A signal every CLOSING_S: a close that lingers ends with it."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    timer = signal.setitimer(signal.ITIMER_REAL, CLOSING_S, CLOSING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
