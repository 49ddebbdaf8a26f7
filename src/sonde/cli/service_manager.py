# SPDX-License-Identifier: Apache-2.0
"""What a daemon reports to systemd: that it is ready, that it still works, that it ends.

Protocol: sd_notify(3): datagrams to the socket in $NOTIFY_SOCKET; a daemon with $WATCHDOG_USEC that
reports nothing for so long is restarted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

WATCHDOG_SHARE = 0.25
"""Of the time after which the service manager gives up."""


class ServiceManager:
    """Where reports go; nowhere, where no service manager started this process."""

    def __init__(self) -> None:
        # Children must not report for us.
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
        """The start is over, or a reload."""
        self._send(b"READY=1")

    def reloading(self) -> None:
        """The configuration is read again; `ready` ends that."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1_000
        self._send(b"RELOADING=1\nMONOTONIC_USEC=%d" % now_us)

    def working(self) -> None:
        """The main loop turns; as often as it likes."""
        if self._every_s and (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + self._every_s
            self._send(b"WATCHDOG=1")

    def stopping(self) -> None:
        """The end began."""
        self._send(b"STOPPING=1")

    def _send(self, state: bytes) -> None:
        if self._socket is not None:
            # A manager that is gone or busy must not hold up who observes.
            with contextlib.suppress(OSError):
                self._socket.sendto(state, self._address)


class HangUps:
    """SIGHUP asks for the configuration to be read again, instead of ending the process.

    It is blocked, in children too, and taken when the main loop turns: so it interrupts nothing,
    and no child dies of the end of a terminal.
    """

    def __init__(self) -> None:
        """To be made before any other thread starts."""
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # one that is ignored is never pending
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

    def came(self) -> bool:
        """Whether one came since this was asked last."""
        return signal.sigtimedwait({signal.SIGHUP}, 0) is not None
