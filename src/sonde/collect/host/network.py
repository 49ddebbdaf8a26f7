# SPDX-License-Identifier: Apache-2.0
"""Network: interfaces, protocols, the kernel's own queues.

Only the kernel's counters are read; no BPF program runs at packets. Every network namespace has
separate counters, those of containers too; they are read through a process in it.

Any user may make namespaces, and thousands of interfaces in them, with a frame through each at any
time. So what is read of others' namespaces has one bound, which parties share. It is far below
what `Counters` remember, and no more than the registry has room for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sonde import procfs
from sonde.collect.host.files import Counters, KernelFile, UnchangedLines, labels
from sonde.collect.host.queues import queue_stats
from sonde.collect.host.shares import share_out
from sonde.collect.polling import NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable

MAX_NAMESPACES = 32
"""Namespaces that are read; how many more there are is reported."""
MAX_INTERFACES = 256
"""Of the agent's own namespace, those that come first in the file; only root adds to it."""
MAX_OTHERS = 448
"""Interfaces of all other namespaces together, eight series each: with those of the protocols, what
`sonde.sinks.plain_series` has room for."""
MAX_OF_PARTY = 64
"""Of these, interfaces of one party, unless it is root: a container has a few."""
FEW_INTERFACES = 4
"""For which a namespace has room if its party's share allows, also before they are there."""
MAX_COUNTED = 512
"""Interfaces of one namespace that are counted; how many exceed what is read is reported."""
LINE_BYTES = 384
"""No line of /proc/net/dev is longer: a name of 15 bytes, 16 numbers of 64 bits."""
HEAD_LINES = 2
"""Before the first interface."""
ROOT = 0
"""The party of root, whose namespaces are the machine's own: of routers, of virtual machines."""
ALL_AGAIN_S = 60.0
"""How often the namespace of every process is read again."""

_DEV = (
    ("system.network.io", 0, "receive"),
    ("system.network.packet.count", 1, "receive"),
    ("system.network.errors", 2, "receive"),
    ("system.network.packet.dropped", 3, "receive"),
    ("system.network.io", 8, "transmit"),
    ("system.network.packet.count", 9, "transmit"),
    ("system.network.errors", 10, "transmit"),
    ("system.network.packet.dropped", 11, "transmit"),
)
_PROTOCOLS = {
    "Tcp.InSegs": ("sonde.host.tcp.segments", "receive"),
    "Tcp.OutSegs": ("sonde.host.tcp.segments", "transmit"),
    "Tcp.RetransSegs": ("sonde.host.tcp.retransmits", ""),
    "Tcp.InErrs": ("sonde.host.tcp.errors", ""),
    "Tcp.OutRsts": ("sonde.host.tcp.resets", ""),
    "TcpExt.ListenDrops": ("sonde.host.tcp.listen_drops", ""),
    "TcpExt.TCPLostRetransmit": ("sonde.host.tcp.lost_retransmits", ""),
    "TcpExt.TCPTimeouts": ("sonde.host.tcp.timeouts", ""),
    "Udp.InDatagrams": ("sonde.host.udp.datagrams", "receive"),
    "Udp.OutDatagrams": ("sonde.host.udp.datagrams", "transmit"),
    "Udp.RcvbufErrors": ("sonde.host.udp.dropped", "receive"),
    "Udp.SndbufErrors": ("sonde.host.udp.dropped", "transmit"),
}
_REPORTED = frozenset(name.partition(".")[0].encode() for name in _PROTOCOLS)
"""Protocols; the names of their counters are always the same, unlike those of IcmpMsg, of which a
packet adds one."""


class _Namespace:
    """Files of one network namespace; 'host' is the one that the agent is in."""

    def __init__(self, label: str, proc: str) -> None:
        self.label = label
        self.dev = KernelFile(f"{proc}/net/dev")
        self.snmp, self.netstat = KernelFile(f"{proc}/net/snmp"), KernelFile(f"{proc}/net/netstat")
        self.room = MAX_INTERFACES
        """How many interfaces are read."""
        self.lines = UnchangedLines()
        """Lines of `dev` that did not change."""
        self.reported: dict[bytes, list[tuple[int, str, str]]] = {}
        """By a line of names in `snmp` or `netstat`: column, series and labels of each counter."""

    def interfaces(self, limit: int) -> list[bytes]:
        """The lines of `limit` interfaces, those that come first in the file; no more of it is
        generated. Raises SourceUnavailable."""
        if not limit:
            return []
        lines = self.dev.read((HEAD_LINES + limit) * LINE_BYTES).split(b"\n")
        return [line for line in lines[HEAD_LINES : HEAD_LINES + limit] if line]

    def count(self) -> int:
        """How many interfaces it has, MAX_COUNTED at most."""
        with suppress(SourceUnavailable):
            return len(self.interfaces(MAX_COUNTED))
        return 0

    def close(self) -> None:
        for file in (self.dev, self.snmp, self.netstat):
            file.close()


class Network:
    """What went over the network, and what was dropped, lost or refused."""

    name = "network"

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._softnet = KernelFile(proc / "net/softnet_stat")
        self._counters = Counters()
        self._namespaces: dict[int, _Namespace] = {}
        self._processes = _ProcessNamespaces()

    def open(self) -> None:
        """Look for namespaces. Raises SourceUnavailable."""
        if not self._softnet.read():
            raise SourceUnavailable("this kernel has no network", whole=True)
        self._look(Points())

    def polls(self) -> Sequence[Poll]:
        """Counters every second; new namespaces are looked for less often."""
        return [
            Poll("counters", NORMAL_S, self._read),
            Poll("softnet", NORMAL_S, self._read_softnet),
            Poll("queues", NORMAL_S, self._read_queues),
            Poll("namespaces", SLOW_S, self._look),
            Poll("netstat", SLOW_S, self._read_netstat),
        ]

    def close(self) -> None:
        """Close every file."""
        self._softnet.close()
        for namespace in self._namespaces.values():
            namespace.close()
        self._namespaces = {}

    def _look(self, points: Points) -> None:
        """Find the namespaces of all processes, with one process for each."""
        found: dict[int, _Namespace] = {}
        there = [
            (procfs.party_of(pid) if pid else ROOT, inode, pid)
            for inode, pid in self._processes.namespaces()
        ]
        chosen = _shared(there, self._namespaces)
        points.add("sonde.network.namespaces_left_out", len(there) - len(chosen))
        for _, inode, pid in chosen:
            known = self._namespaces.pop(inode, None)
            if known is None:
                label = "" if not pid else str(inode)
                known = _Namespace(label, f"{self._proc}/{pid or 'self'}")
            found[inode] = known
        for gone in self._namespaces.values():
            gone.close()
        self._namespaces = found
        left_out = self._share_interfaces({inode: party for party, inode, pid in chosen if pid})
        points.add("sonde.network.interfaces_left_out", left_out)

    def _share_interfaces(self, party_of: Mapping[int, int]) -> int:
        """Give the namespaces room for their interfaces; `party_of`: the party of each that is not
        the agent's own. Returns how many interfaces find none."""
        counts = {inode: namespace.count() for inode, namespace in self._namespaces.items()}
        wanted = {inode: max(counts[inode], FEW_INTERFACES) for inode in party_of}
        for inode, room in share_interfaces(party_of, wanted).items():
            self._namespaces[inode].room = room
        return sum(max(0, count - self._namespaces[inode].room) for inode, count in counts.items())

    def _read(self, points: Points) -> None:
        for namespace in self._namespaces.values():
            # The process through which it was found may have ended; an open file can still be read.
            with suppress(SourceUnavailable):
                self._read_dev(points, namespace)
                self._read_protocols(points, namespace, namespace.snmp.read())

    def _read_netstat(self, points: Points) -> None:
        for namespace in self._namespaces.values():
            with suppress(SourceUnavailable):
                self._read_protocols(points, namespace, namespace.netstat.read())

    def _read_dev(self, points: Points, namespace: _Namespace) -> None:
        for line in namespace.lines.changed(namespace.interfaces(namespace.room)):
            name, colon, rest = line.partition(b":")
            values = rest.split()
            if not colon or len(values) < 12:
                continue
            interface = procfs.text(name.strip())
            for series, column, direction in _DEV:
                label = labels(
                    network__interface__name=interface,
                    network__io__direction=direction,
                    sonde__network__namespace=namespace.label,
                )
                self._counters.report(points, series, int(values[column]), label)

    def _read_protocols(self, points: Points, namespace: _Namespace, raw: bytes) -> None:
        lines = raw.split(b"\n")
        for names, values in zip(lines[::2], lines[1::2], strict=False):
            if names.partition(b":")[0] not in _REPORTED:
                continue
            reported = namespace.reported.get(names)
            if reported is None:
                reported = namespace.reported[names] = list(_wanted(names, namespace.label))
            numbers = values.split()
            for column, series, label in reported:
                if column < len(numbers):
                    self._counters.report(points, series, int(numbers[column]), label)

    def _read_softnet(self, points: Points) -> None:
        """Of each CPU: packets processed, packets dropped as its backlog was full, and rounds that
        ended by their budget (squeezed)."""
        for number, line in enumerate(self._softnet.read().split(b"\n")):
            words = line.split()
            if len(words) < 3:
                continue
            cpu = int(words[12], 16) if len(words) > 12 else number
            label = labels(cpu__logical_number=cpu)
            for series, word in zip(("processed", "dropped", "squeezed"), words, strict=False):
                name = f"sonde.host.softnet.{series}"
                self._counters.report(points, name, int(word, 16), label)

    def _read_queues(self, points: Points) -> None:
        for stat in queue_stats():
            label = labels(network__interface__name=stat.interface, sonde__queue=stat.kind)
            for series, value in (
                ("drops", stat.drops),
                ("requeues", stat.requeues),
                ("overlimits", stat.overlimits),
                ("backlog", stat.backlog_bytes),
            ):
                self._counters.report(points, f"sonde.host.queue.{series}", value, label)


def _wanted(line: bytes, namespace: str) -> Iterator[tuple[int, str, str]]:
    """Of a line of names: the column of each counter that is reported, its series and labels."""
    protocol, *names = line.decode("ascii", "replace").split() or [""]
    for column, name in enumerate(names, 1):
        known = _PROTOCOLS.get(f"{protocol[:-1]}.{name}")
        if known is not None:
            series, direction = known
            yield (
                column,
                series,
                labels(network__io__direction=direction, sonde__network__namespace=namespace),
            )


def _shared(
    there: Sequence[tuple[int, int, int]], known: Container[int]
) -> list[tuple[int, int, int]]:
    """MAX_NAMESPACES of (party, inode, pid), the agent's own first: any user may make
    namespaces."""
    own = [one for one in there if not one[2]]
    others = ((one[0], one) for one in there if one[2])
    return own + share_out(others, MAX_NAMESPACES - len(own), lambda one: one[1] in known)


def share_interfaces(party_of: Mapping[int, int], wanted: Mapping[int, int]) -> dict[int, int]:
    """How many interfaces of each namespace are read: MAX_OTHERS of all, which parties share, with
    at most MAX_OF_PARTY each; a party's are shared by its namespaces.

    `party_of`: the party of each namespace, `wanted`: how many of its interfaces are to be read.
    """
    of_party: dict[int, list[int]] = {}
    for inode, party in party_of.items():
        of_party.setdefault(party, []).append(inode)
    everybody = []
    for party, inodes in of_party.items():
        limit = MAX_OTHERS if party == ROOT else MAX_OF_PARTY
        turns = share_out(
            ((inode, inode) for inode in inodes for _ in range(wanted[inode])), limit, _alike
        )
        everybody += [(party, inode) for inode in turns]
    shares = Counter(share_out(everybody, MAX_OTHERS, _alike))
    return {inode: shares[inode] for inode in party_of}


def _alike(_inode: int) -> bool:
    return True


class _ProcessNamespaces:
    """The network namespace of each process. It is not read again, once it was the same at two
    looks, until all are (ALL_AGAIN_S): few processes change it, and those before they start the
    program that is to run there."""

    def __init__(self) -> None:
        self._inodes: dict[str, tuple[int, bool]] = {}
        """By pid: the namespace, and whether it was seen twice."""
        self._all_s = float("-inf")

    def namespaces(self) -> Iterator[tuple[int, int]]:
        """(inode, pid of a process in it) of each namespace, the agent's own first with pid 0."""
        before, self._inodes = self._inodes, {}
        if time.monotonic() - self._all_s >= ALL_AGAIN_S:
            self._all_s = time.monotonic()
            before = {}
        seen: set[int] = set()
        for pid in ("self", *map(str, procfs.pids())):
            inode, is_old = before.get(pid, (0, False))
            if not is_old:
                try:
                    now = procfs.read_inode(f"/proc/{pid}/ns/net")
                except OSError:
                    continue
                inode, is_old = now, now == inode
            self._inodes[pid] = inode, is_old
            if inode not in seen:
                seen.add(inode)
                yield inode, 0 if pid == "self" else int(pid)
