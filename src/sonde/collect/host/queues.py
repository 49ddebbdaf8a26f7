# SPDX-License-Identifier: Apache-2.0
"""Queueing disciplines of the agent's network namespace, by rtnetlink (rtnetlink(7), tc-stats(8)).

A dump of RTM_GETQDISC; of each answer the interface, the kind, and the queue part of TCA_STATS2
(linux/gen_stats.h).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from sonde import procfs
from sonde.collect.polling import SourceUnavailable

_RTM_GETQDISC, _RTM_NEWQDISC = 38, 36
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_TCA_KIND, _TCA_STATS2 = 1, 7
_TCA_STATS_QUEUE = 3
# struct nlmsghdr, tcmsg, rtattr, gnet_stats_queue
_HEADER = struct.Struct("=IHHII")
_TCMSG = struct.Struct("=BBHiIII")
_ATTRIBUTE = struct.Struct("=HH")
_QUEUE = struct.Struct("=IIIII")
MAX_QUEUES = 1_024
"""After this many no further answer is read."""


@dataclass(frozen=True, slots=True)
class QueueStat:
    """Counters of a queueing discipline since it was made, and its backlog now."""

    interface: str
    kind: str
    backlog_bytes: int
    drops: int
    requeues: int
    overlimits: int


def queue_stats() -> list[QueueStat]:
    """Those of every interface. Raises SourceUnavailable."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as netlink:
            netlink.settimeout(1.0)
            request = _TCMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0, 0, 0)
            size = _HEADER.size + len(request)
            flags = _NLM_F_REQUEST | _NLM_F_DUMP
            netlink.send(_HEADER.pack(size, _RTM_GETQDISC, flags, 1, 0) + request)
            return list(_answers(netlink))
    except OSError as error:
        raise SourceUnavailable(f"rtnetlink: {error.strerror or error}") from error


def _answers(netlink: socket.socket) -> Iterator[QueueStat]:
    found = 0
    while found < MAX_QUEUES:
        raw = netlink.recv(1 << 16)
        at = 0
        while at + _HEADER.size <= len(raw):
            size, kind, _, _, _ = _HEADER.unpack_from(raw, at)
            if kind in (_NLMSG_DONE, _NLMSG_ERROR) or size < _HEADER.size:
                return
            if kind == _RTM_NEWQDISC:
                found += 1
                with suppress(struct.error, OSError):  # an interface that went meanwhile
                    yield _stat(raw[at + _HEADER.size : at + size])
            at += (size + 3) & ~3


def _stat(message: bytes) -> QueueStat:
    index = _TCMSG.unpack_from(message)[3]
    kind = ""
    backlog = drops = requeues = overlimits = 0
    for name, value in _attributes(message[_TCMSG.size :]):
        if name == _TCA_KIND:
            kind = procfs.text(value.rstrip(b"\0"))
        elif name == _TCA_STATS2:
            for part, content in _attributes(value):
                if part == _TCA_STATS_QUEUE:
                    _, backlog, drops, requeues, overlimits = _QUEUE.unpack_from(content)
    interface = procfs.printable(socket.if_indextoname(index))
    return QueueStat(interface, kind, backlog, drops, requeues, overlimits)


def _attributes(raw: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(raw):
        size, name = _ATTRIBUTE.unpack_from(raw, at)
        if size < _ATTRIBUTE.size:
            return
        yield name & 0x3FFF, raw[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3
