# SPDX-License-Identifier: Apache-2.0
"""Reports to systemd that a daemon is ready, works, reloads, or stops; and takes SIGHUP.

Protocol: sd_notify(3), datagrams to the socket in $NOTIFY_SOCKET. systemd restarts a daemon that
reports nothing for $WATCHDOG_USEC.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

WATCHDOG_SHARE = 0.25
"""Share of $WATCHDOG_USEC after which the daemon reports again."""


class ServiceManager:
    """Sends the reports; does nothing where no service manager started this process."""

    def __init__(self) -> None:
        # Removed from the environment: children must not report in this daemon's name.
        address = os.environ.pop("NOTIFY_SOCKET", "")
        watchdog_us = os.environ.pop("WATCHDOG_USEC", "")
        for_pid = os.environ.pop("WATCHDOG_PID", "")
        self._socket: socket.socket | None = None
        self._every_s = 0.0
        self._next_s = 0.0
        if not address.startswith(("/", "@")):
            return
        if watchdog_us.isascii() and watchdog_us.isdigit() and for_pid in ("", str(os.getpid())):
            self._every_s = WATCHDOG_SHARE * int(watchdog_us) / 1e6
        self._address = "\0" + address[1:] if address[0] == "@" else address
        with contextlib.suppress(OSError):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self) -> None:
        """Report that the start, or a reload, is done."""
        self._send(b"READY=1")

    def reloading(self) -> None:
        """Report that the configuration is being read again; `ready` ends that."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
        self._send(b"RELOADING=1\nMONOTONIC_USEC=%d" % now_us)

    def working(self) -> None:
        """To be called at each turn of the main loop; reports as often as the watchdog needs."""
        if self._every_s and (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + self._every_s
            self._send(b"WATCHDOG=1")

    def stopping(self) -> None:
        """Report that the daemon has begun to stop."""
        self._send(b"STOPPING=1")

    def _send(self, state: bytes) -> None:
        if self._socket is not None:
            # A manager that is gone or busy must not hold up the daemon.
            with contextlib.suppress(OSError):
                self._socket.sendto(state, self._address)


class HangUps:
    """SIGHUP asks for the configuration to be read again, instead of ending the process.

    The signal is blocked, in children too, and taken at each turn of the main loop. So it
    interrupts no system call, and does not kill children when a terminal is closed.
    """

    def __init__(self) -> None:
        """To be made before any other thread starts."""
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # one that is ignored is never pending
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

    def came(self) -> bool:
        """Whether a SIGHUP came since the last call."""
        return signal.sigtimedwait({signal.SIGHUP}, 0) is not None
