# SPDX-License-Identifier: Apache-2.0
"""Where a server listens, and the socket: made here, or inherited from who started the server.

A socket that outlives the server keeps its port: while the server is started again no other process
can take it, and connections wait instead of being refused.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from sonde.errors import UsageError
from sonde.ownership import only_ours

BACKLOG = 2048
"""Connections that the kernel accepts before the server does: listen(2)."""
_UNIX = "unix:"
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
    def socket_path(self) -> Path | None:
        """The Unix socket that `host` names (unix:PATH); None: it is a host."""
        return Path(self.host[len(_UNIX) :]) if self.host.startswith(_UNIX) else None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.socket_path:
            return True
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


def for_grpc(text: str, http: Address) -> Address:
    """Where OTLP is received over gRPC: unix:PATH, or HOST:PORT for clients with a certificate.
    gRPC's library lets anybody who reaches it hold all its connections, or end it by a malformed
    call, so all who can reach it must be trusted. Raises UsageError."""
    if text.startswith(_UNIX):
        path = Path(text[len(_UNIX) :])
        if not path.is_absolute():
            raise UsageError(f"{text!r} is no address", "write unix:/FOLDER/NAME")
        return Address(text, 0)
    if http.client_authority is None or http.certificate is None:
        raise UsageError(
            "--otlp-grpc on a port is for clients with a certificate alone",
            "name a Unix socket (unix:/run/sonde/otlp.sock), give --certificate, --key and "
            "--client-authority, or let an OpenTelemetry collector send on over HTTP",
        )
    host, port = parse(text)
    return replace(http, host=host, port=port)


def own_socket_path(path: Path) -> None:
    """Make a path free for a socket that nobody else can replace. Raises UsageError."""
    if not only_ours(path.parent):
        raise UsageError(
            f"others can change {path.parent}", "choose a folder that this user alone can write to"
        )
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"{path} is no socket", "choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
            tried.settimeout(1)
            if tried.connect_ex(str(path)) == 0:
                raise UsageError(f"another process listens on {path}", "choose another path")
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(
            f"{path} cannot be used: {error.strerror}", "choose another path"
        ) from error


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
