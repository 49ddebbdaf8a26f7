# SPDX-License-Identifier: Apache-2.0
"""How much a program wants to receive at once from a socket of theirs (socket(7), SO_RCVLOWAT)."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Final

_PIDFD_GETFD: Final = 438
"""Number of the system call, on every architecture; Linux 5.6."""


def low_water_mark(pid: int, number: int, link: str) -> int:
    """The bytes that a call which receives from a process's socket waits for.

    `number`: of its descriptor; `link`: where that leads, as /proc shows it. The socket is open
    here, too, for some microseconds. Raises OSError where the kernel does not let us ask, or where
    the descriptor leads elsewhere by now.
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
    except OSError:
        os.close(found)
        raise
    with socket.socket(fileno=found) as one:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
