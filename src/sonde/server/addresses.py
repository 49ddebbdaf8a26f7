# SPDX-License-Identifier: Apache-2.0
"""Where a server listens, and the socket: made here, or inherited from who started the server.

A socket that outlives the server keeps its port: while the server is started again no other process
can take it, and connections wait instead of being refused.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import UsageError

BACKLOG = 2048
"""Connections that the kernel accepts before the server does: listen(2)."""
_FIRST = 3
"""Descriptor of the first socket that systemd hands over: sd_listen_fds(3)."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen; port 0: any free one."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    client_authority: Path | None = None
    """Clients must show a certificate of this authority."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises UsageError."""
    host, mark, port = text.rpartition(":")
    if not mark or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise UsageError(f"{text!r} is no address", "write HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)  # clients that get the URL may connect at once
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another --listen"
        ) from error
    return sock


def handed_over(
    number: int | None, environ: MutableMapping[str, str] = os.environ
) -> socket.socket | None:
    """The listening socket that this process was started with: the descriptor `number`, or the one
    of a socket unit of systemd; None without one. Its environment variables are removed, so that
    child processes do not take it for theirs. Raises UsageError."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if number is None:
        if pid != str(os.getpid()) or count in ("", "0"):
            return None
        if count != "1":
            raise UsageError(f"{count} sockets of systemd", "name one ListenStream= in the unit")
        number = _FIRST
    try:
        sock = socket.socket(fileno=number)
    except OSError as error:
        raise UsageError(f"descriptor {number} is no socket", "start it another way") from error
    inet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not inet or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise UsageError(f"descriptor {number} does not listen for TCP", "name a ListenStream=")
    sock.set_inheritable(False)
    return sock
