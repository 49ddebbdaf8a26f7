# SPDX-License-Identifier: Apache-2.0
"""Which socket of this machine a socket of a process is connected to: TCP of the process's network
namespace by its tables in /proc, UNIX sockets of ours by the kernel's socket diagnosis
(sock_diag(7))."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sonde.procfs import lookups
from sonde.procfs.files import read_file, read_link
from sonde.procfs.names import text
from sonde.procfs.processes import pids

MAX_TABLE_BYTES: Final = 1 << 20
"""Of /proc/PID/net/tcp, and of tcp6, that are read: some 7,000 sockets."""
_LISTENING: Final = b"0A"
_MAPPED: Final = b"0000000000000000FFFF0000"
"""An IPv4 address within IPv6 begins with it, as /proc/net/tcp6 shows it."""
_NETLINK_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_SHOW_NAME_AND_PEER: Final = 1 | 4
_NAME: Final = 0
_PEER: Final = 2
_DIAG_S: Final = 0.05
_MAX_PATH: Final = 108


@dataclass(frozen=True, slots=True)
class OtherEnd:
    """What a socket is connected to."""

    protocol: str
    """tcp or unix."""
    address: str
    """127.0.0.1:9301, [::1]:443, /run/postgres.sock, @abstract; '' of a pair without a name."""
    inode: int
    """Of the socket at the other end; 0: it is not in this network namespace."""
    user: int
    """Who owns that socket; -1 not known."""
    asked: bool
    """The process connected to it, or both are of one pair; else the process was connected to."""


class TcpTables:
    """The TCP sockets of a process's network namespace, as they are now."""

    def __init__(self, pid: int) -> None:
        names = ("tcp", "tcp6")
        read = [read_file(f"/proc/{pid}/net/{name}", MAX_TABLE_BYTES) or b"" for name in names]
        self._text = b"\n".join(read)
        self.is_cut = any(len(one) >= MAX_TABLE_BYTES for one in read)
        """There are more than were read."""
        self._by_inode: dict[bytes, int] = {}
        self._by_ends: dict[tuple[bytes, bytes], int] = {}
        """By local and remote address."""
        self._listening: set[bytes] = set()
        """Ports."""
        self._index()

    def has(self, inode: int) -> bool:
        """Whether this is one of them, connected or not."""
        return b"%d" % inode in self._by_inode

    def of(self, inode: int) -> OtherEnd | None:
        """What a socket is connected to; None: it is no TCP socket, or is not connected."""
        words = self._line(self._by_inode.get(b"%d" % inode))
        if words is None or words[3] == _LISTENING:
            return None
        local, remote = words[1], words[2]
        port = remote.rpartition(b":")[2]
        if port == b"0000":
            return None
        back = None
        for mine in _forms(local):
            for other in _forms(remote):
                back = back or self._line(self._by_ends.get((other, mine)))
        return OtherEnd(
            "tcp",
            address_of(_forms(remote)[-1 if remote.startswith(_MAPPED) else 0].decode("ascii")),
            int(back[9]) if back else 0,
            int(back[7]) if back else -1,
            local.rpartition(b":")[2] not in self._listening,
        )

    def _line(self, at: int | None) -> list[bytes] | None:
        """The words of the line at an offset; None without one."""
        if at is None:
            return None
        end = self._text.find(b"\n", at)
        words = self._text[at : end if end >= 0 else None].split()
        return words if words[7].isdigit() else None

    def _index(self) -> None:
        """Note where the lines begin: one look may be for many sockets."""
        at = 0
        for line in self._text.split(b"\n"):
            words = line.split(None, 10)
            if len(words) >= 10 and words[9].isdigit():
                _, local, remote, state, *_ = words
                self._by_ends.setdefault((local, remote), at)
                self._by_inode.setdefault(words[9], at)
                if state == _LISTENING:
                    self._listening.add(local.rpartition(b":")[2])
            at += len(line) + 1


def _forms(address: bytes) -> tuple[bytes, ...]:
    """An address and port as tcp and as tcp6 have it."""
    number, _, port = address.partition(b":")
    if len(number) == 8:
        return address, b"%s%s:%s" % (_MAPPED, number, port)
    if number.startswith(_MAPPED):
        return address, b"%s:%s" % (number[24:], port)
    return (address,)


def address_of(words: str) -> str:
    """'0100007F:1F90' of /proc/net/tcp as '127.0.0.1:8080', the form of the table activity."""
    address, _, port = words.partition(":")
    raw = b"".join(
        struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)
    )
    if len(raw) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, raw)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{int(port, 16)}"


def shares_our_network(pid: int) -> bool:
    """Whether a process is in our network namespace."""
    try:
        return read_link(f"/proc/{pid}/ns/net") == read_link("/proc/self/ns/net")
    except OSError:
        return False


def unix_end(inode: int) -> OtherEnd | None:
    """What a UNIX socket of our network namespace is connected to; None: it is not, or is none."""
    mine = _diagnosed(inode)
    if mine is None or not mine[1]:
        return None
    other = _diagnosed(mine[1])
    if other is None:
        return None
    # A connection that was accepted has the name of the socket that listened.
    return OtherEnd("unix", other[0], mine[1], -1, not mine[0] or bool(other[0]))


def _diagnosed(inode: int) -> tuple[str, int] | None:
    """(name, inode of its peer) of a UNIX socket of ours: '' and 0 for none."""
    request = struct.pack(
        "=IHHIIBBHIIIII",
        *(40, _BY_FAMILY, 1, 0, 0),
        *(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, inode & 0xFFFFFFFF, _SHOW_NAME_AND_PEER),
        *(0xFFFFFFFF, 0xFFFFFFFF),
    )
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with suppress(OSError, struct.error):
        with socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(_DIAG_S)
            link.send(request)
            answer = link.recv(4096)
        if len(answer) < 32 or struct.unpack_from("=H", answer, 4)[0] != _BY_FAMILY:
            return None
        name, peer, at = "", 0, 32
        while at + 4 <= len(answer):
            size, what = struct.unpack_from("=HH", answer, at)
            value = answer[at + 4 : at + size]
            if size < 4:
                break
            if what == _PEER and len(value) == 4:
                peer = struct.unpack("=I", value)[0]
            elif what == _NAME:
                name = _path(value)
            at += (size + 3) & ~3
        return name, peer
    return None


def _path(raw: bytes) -> str:
    """A name that the process chose, as text: an abstract one begins with a zero byte."""
    raw = raw[:_MAX_PATH]
    if raw[:1] == b"\0":
        return "@" + text(raw[1:].replace(b"\0", b"@"))
    return text(os.path.basename(raw.partition(b"\0")[0])) if raw else ""  # noqa: PTH119


def may_hold(user: int) -> list[int]:
    """Every process, those of a user first; -1: of no one in particular."""
    there = pids()
    if user < 0:
        return there
    return sorted(there, key=lambda pid: _user(pid) != user)


def _user(pid: int) -> int:
    try:
        return lookups.owner_of(pid)
    except OSError:
        return -1
