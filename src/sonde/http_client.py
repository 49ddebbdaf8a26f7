# SPDX-License-Identifier: Apache-2.0
"""HTTP client for endpoints that may be hostile, with limits on time, size and destination.

Every outgoing request of Sonde is made here. One deadline covers the whole request: name lookup,
connecting, TLS, sending, and the response, however slowly it arrives. A response beyond its limit
is refused, not buffered. No redirect is followed and no proxy of the environment is used, so
requests and credentials reach only the named host. Responses are never decompressed.

A port of loopback belongs to the user who took it first. Before an unencrypted request with a
credential, or to a server of Sonde, goes to loopback, it is looked up in /proc/net/tcp who listens
there: unless that is root, this user or the user who called sudo, nothing is sent.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import os
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

HEAD_BYTES: Final = 64 << 10
"""Greatest size of status line and headers."""
_PIECE: Final = 64 << 10
"""Bytes read at once."""
_FRAMING: Final = 8
"""Greatest number of bytes on the wire per byte of the body: the overhead of tiny chunks."""
_MAX_RETRY_AFTER_S: Final = 300.0
"""A server that asks for more is tried after this time all the same."""
_ADDRESSES: Final = 4
"""Addresses of a host that are tried."""
_LOOKUPS: Final = 4
"""Name lookups that may hang at the same time."""
_TARGET: Final = re.compile(r"[!-~]+")
_HEADER_VALUE: Final = re.compile(r"[!-~]([ -~]*[!-~])?|")
_LOOPBACK: Final = re.compile(r"127(\.\d{1,3}){3}")
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9-]+")
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


_LISTENERS_BYTES: Final = 32 << 20
"""Read of a list of listening sockets at most."""


class RequestError(OSError):
    """The request could not be sent, or there was no valid response."""


class StrangerListensError(RequestError):
    """Another user's process listens on the port; nothing was sent."""


@dataclass(frozen=True)
class Response:
    """A complete response."""

    status: int
    body: bytes
    retry_after_s: float = 0.0
    """After how long the server wants the next request (Retry-After); 0: it gave no number."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case; as long as the head may be."""


def split_url(url: str) -> SplitResult:
    """The parts of a valid URL. Raises ValueError with a message that shows no secret."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.port != 0
        good = good and bool(_HOST.fullmatch(parts.hostname or ""))
    except ValueError:
        good = False
    if not good:
        raise ValueError("no address: write http://HOST:PORT or https://HOST:PORT")
    if "@" in parts.netloc:
        raise ValueError("a name and password in a URL are shown in logs and process lists")
    if not _TARGET.fullmatch(url):
        raise ValueError("blanks, control or other characters that a URL must not have")
    return parts


def shown(url: str) -> str:
    """A URL for messages: without credentials, query and unprintable characters."""
    scheme, mark, rest = url.partition("://")
    address = re.split(r"[?#]", rest if mark else scheme, maxsplit=1)[0]
    host, slash, path = address.partition("/")
    text = (f"{scheme}{mark}" if mark else "") + host.rpartition("@")[2] + slash + path
    return "".join(c if "!" <= c <= "~" else "?" for c in text[:200])


def origin(url: str) -> str:
    """Scheme, host and port of a URL for messages: the path and query of a webhook's URL hold its
    secret. "no http:// or https:// address" where it is none."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname or "", parts.port
    except ValueError:
        scheme, host, port = "", "", None
    if scheme not in ("http", "https") or not _HOST.fullmatch(host):
        return "no http:// or https:// address"
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}" + (f":{port}" if port is not None else "")


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host of this name stays on this machine."""
    return host in ("localhost", "::1") or bool(_LOOPBACK.fullmatch(host))


def is_in_the_clear(parts: SplitResult) -> bool:
    """Whether what is sent to a URL crosses the network unencrypted."""
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def request(
    method: str,
    url: str,
    *,
    deadline_s: float,
    max_bytes: int,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    ours: bool = False,
) -> Response:
    """Send one request on a new connection. Raises OSError, or ValueError for a bad URL.

    `tls` is for https only; by default the system's certificate authorities are trusted.
    `ours`: to a server of Sonde, which on loopback no other user may stand for.
    """
    parts = split_url(url)
    secure = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
    connection = Connection(parts.hostname or "", parts.port, secure, ours=ours)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        return connection.request(
            method, target, body, headers or {}, deadline_s=deadline_s, max_bytes=max_bytes
        )
    finally:
        connection.close()


class Connection:
    """A persistent connection. Not thread-safe."""

    def __init__(
        self, host: str, port: int | None, tls: ssl.SSLContext | None, *, ours: bool = False
    ) -> None:
        """`tls` None: without encryption. `ours`: to a server of Sonde, see `request`."""
        self._host, self._tls, self._ours = host, tls, ours
        self._checked = False
        """It was checked who listens where `_sock` is connected to."""
        self._port = port or (443 if tls else 80)
        self._sock: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._sock is not None

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        sock, self._sock, self._checked = self._sock, None, False
        if sock is not None:
            sock.close()

    def request(
        self,
        method: str,
        target: str,
        body: bytes | memoryview = b"",
        headers: Mapping[str, str] | None = None,
        *,
        deadline_s: float,
        max_bytes: int,
    ) -> Response:
        """Send a request and read the response. On OSError the connection is closed.

        ConnectionError where the other side hung up, TimeoutError at the deadline.
        """
        head = self._head(method, target, len(body), headers or {})
        end_s = time.monotonic() + deadline_s
        check = self._tls is None and (self._ours or "Authorization" in (headers or {}))
        if check and not self._checked:
            self.close()
        try:
            if self._sock is None:
                self._sock = self._connect(end_s, check)
                self._checked = check
            _send(self._sock, head, end_s)
            _send(self._sock, body, end_s)
            answer, keep = _read(self._sock, method, end_s, max_bytes)
        except (http.client.HTTPException, ValueError) as error:
            self.close()
            if isinstance(error, OSError):  # disconnected, or a certificate error
                raise
            raise RequestError(f"no HTTP response: {type(error).__name__}") from error
        except TimeoutError as error:
            self.close()
            raise TimeoutError(f"took longer than {deadline_s:g} s") from error
        except BaseException:
            self.close()
            raise
        if not keep:
            self.close()
        return answer

    def _head(self, method: str, target: str, size: int, headers: Mapping[str, str]) -> bytes:
        """Request line and headers. Raises RequestError for line breaks and other bad characters,
        with no value in its text."""
        if not _TARGET.fullmatch(target):
            raise RequestError("a path with characters that a URL must not have")
        name = f"[{self._host}]" if ":" in self._host else self._host
        lines = {
            "Host": f"{name}:{self._port}",
            "User-Agent": "sonde",
            "Accept-Encoding": "identity",
            **headers,
            "Content-Length": str(size),
        }
        for key, value in lines.items():
            if not _HEADER_NAME.fullmatch(key) or not _HEADER_VALUE.fullmatch(value):
                raise RequestError(f"a header {key!r} with characters that a header must not have")
        text = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        return f"{method} {target} HTTP/1.1\r\n{text}\r\n".encode("ascii")

    def _connect(self, end_s: float, check: bool) -> socket.socket:
        addresses = _look_up(self._host, self._port, end_s)[:_ADDRESSES]
        failed: OSError = RequestError(f"no address of {self._host}")
        for number, (family, kind, protocol, _, address) in enumerate(addresses):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_left(end_s) / (len(addresses) - number))
                if check and _is_loopback_address(address[0]):
                    _connect_to_trusted(sock, address)
                else:
                    sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is None:
                    return sock
                sock.settimeout(_left(end_s))
                return self._tls.wrap_socket(sock, server_hostname=self._host)
            except OSError as error:
                sock.close()
                failed = error
            except BaseException:
                sock.close()
                raise
        raise failed


def _is_loopback_address(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _connect_to_trusted(sock: socket.socket, address: Any) -> None:
    """Connect to a socket that a trusted user listens with. Raises OSError.

    It is looked up before and after: else another one could take the connection and go away.
    """
    before = _listener(sock.family, *address[:2])
    _check_owner(before, address[1])
    sock.connect(address)
    if _listener(sock.family, *address[:2]) != before:
        raise RequestError("another socket listens on the port now; nothing was sent")


def _check_owner(listener: tuple[int, int] | None, port: int) -> None:
    """Raises OSError unless root, this user or the user who called sudo made the socket."""
    if listener is None:
        raise ConnectionRefusedError(
            f"no process of this network namespace listens on port {port} of loopback"
        )
    trusted = {0, os.geteuid()}
    caller = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and caller.isascii() and caller.isdigit():
        trusted.add(int(caller))
    if listener[0] not in trusted:
        raise StrangerListensError(
            f"user {listener[0]} listens on port {port} of loopback, not root or this user: "
            "nothing was sent; run the server as root or this user, by a socket unit of systemd, "
            "or with https"
        )


def _listener(family: int, host: str, port: int) -> tuple[int, int] | None:
    """(user id, inode) of the socket that takes connections to an address; None: there is none.

    As the kernel chooses: a socket bound to the address before one bound to all addresses, and of
    those an IPv4 one before an IPv6 one that takes IPv4, too.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address, family = address.ipv4_mapped, socket.AF_INET
    six = _listening("/proc/thread-self/net/tcp6", port)
    if family == socket.AF_INET6:
        return six.get(_hex(address.packed)) or six.get(_hex(bytes(16)))
    four = _listening("/proc/thread-self/net/tcp", port)
    mapped = bytes(10) + b"\xff\xff" + address.packed
    exact = four.get(_hex(address.packed)) or six.get(_hex(mapped))
    return exact or four.get(_hex(bytes(4))) or six.get(_hex(bytes(16)))


def _hex(packed: bytes) -> str:
    """An address as /proc/net/tcp has it: words of 4 bytes in the byte order of the machine."""
    words = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def _listening(path: str, port: int) -> dict[str, tuple[int, int]]:
    """(user id, inode) of the sockets that listen on a port, by address as `_hex` has it. Raises
    RequestError."""
    found: dict[str, tuple[int, int]] = {}
    left = _LISTENERS_BYTES
    try:
        with Path(path).open("rb") as file:
            file.readline()
            while line := file.readline(400):
                words = line.decode("ascii", "replace").split()
                if words[3] != "0A":
                    break  # listening sockets come first
                left -= len(line)
                if left < 0:
                    raise RequestError("it is not known who listens on loopback: too many sockets")
                host, _, number = words[1].partition(":")
                if int(number, 16) == port:
                    found[host] = max(found.get(host, (0, 0)), (int(words[7]), int(words[9])))
    except FileNotFoundError as error:
        if path.endswith("6"):
            return {}  # a kernel without IPv6
        raise RequestError("it is not known who listens on loopback: no /proc/net/tcp") from error
    except (OSError, ValueError, IndexError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"it is not known who listens on loopback: {error}") from error
    return found


def _left(end_s: float) -> float:
    """Seconds until then. Raises TimeoutError."""
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("took too long")
    return left_s


_running_lookups: list[threading.Thread] = []
_lookups_lock = threading.Lock()


def _look_up(host: str, port: int, end_s: float) -> list[Any]:
    """Addresses of a host, within a deadline.

    getaddrinfo() has no timeout, so names are resolved in a thread, which may be abandoned; at most
    `_LOOKUPS` threads may hang.
    """
    kind = socket.SOCK_STREAM
    try:
        return socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    found: list[list[Any]] = []
    failed: list[Exception] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=kind))
        except (OSError, ValueError) as error:
            failed.append(error)

    thread = threading.Thread(target=look_up, name="sonde-lookup", daemon=True)
    with _lookups_lock:
        _running_lookups[:] = [one for one in _running_lookups if one.is_alive()]
        if len(_running_lookups) >= _LOOKUPS:
            raise RequestError("name lookups hang")
        _running_lookups.append(thread)
        thread.start()
    thread.join(_left(end_s))
    if failed:
        raise RequestError(f"no address of {host}: {failed[0]}") from failed[0]
    if not found:
        raise TimeoutError(f"the lookup of {host} took too long")
    return found[0]


def _send(sock: socket.socket, data: bytes | memoryview, end_s: float) -> None:
    view = memoryview(data)
    while view:
        sock.settimeout(_left(end_s))
        view = view[sock.send(view) :]


class _Wire(io.RawIOBase):
    """Reads from a socket until a deadline, at most `remaining_bytes`."""

    def __init__(self, sock: socket.socket, end_s: float, remaining_bytes: int) -> None:
        self._sock, self._end_s, self.remaining_bytes = sock, end_s, remaining_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.remaining_bytes <= 0:
            raise RequestError("the response is too long")
        self._sock.settimeout(_left(self._end_s))
        count = self._sock.recv_into(memoryview(buffer)[: self.remaining_bytes])
        self.remaining_bytes -= count
        return count


class _Source:
    """What `http.client.HTTPResponse` takes for a socket, of which it only makes a file."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def makefile(self, _mode: str) -> io.BufferedIOBase:
        return io.BufferedReader(self._wire, _PIECE)


def _read(sock: socket.socket, method: str, end_s: float, max_bytes: int) -> tuple[Response, bool]:
    """(response, whether the connection can be reused)."""
    wire = _Wire(sock, end_s, HEAD_BYTES)
    source: Any = _Source(wire)
    response = http.client.HTTPResponse(source, method=method)
    response.begin()
    length = response.length
    if (length or 0) > max_bytes:
        raise RequestError("the response is too long")
    if response.getheader("Content-Encoding", "identity").strip().lower() != "identity":
        raise RequestError("the response is compressed, which was not requested")
    wire.remaining_bytes = _FRAMING * max_bytes + HEAD_BYTES
    parts, size = [], 0
    while part := response.read(min(_PIECE, max_bytes - size + 1)):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise RequestError("the response is too long")
    if length is not None and size < length:
        raise RequestError("the response is truncated")
    seconds = response.getheader("Retry-After", "").strip()
    retry_after_s = float(seconds) if seconds.isascii() and seconds.isdigit() else 0.0
    headers = {name.lower(): value for name, value in response.getheaders()}
    retry_after_s = min(retry_after_s, _MAX_RETRY_AFTER_S)
    found = Response(response.status, b"".join(parts), retry_after_s, headers)
    return found, not response.will_close
