# SPDX-License-Identifier: Apache-2.0
"""TCP by process and peer: bytes, segments, what was sent again."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from typing import NamedTuple

from sonde.collect.attached import Scanning
from sonde.collect.collector import Batch
from sonde.collect.kernel import BpfObject, Kernel, expect_fields, refusal
from sonde.errors import PermissionDenied
from sonde.procfs import START_UNIT_NS


class Flow(NamedTuple):
    """One connection of one process: a row of the map `flows` (struct flow_key and flow_value of
    abi/events.h)."""

    tgid: int
    family: int
    """AF_INET or AF_INET6; 0: all connections for which there was no room."""
    port: int
    """The lower port number of the two ends, which is most often the service's: for a server the
    program's own port, beside the client's address."""
    start_ns: int
    address_0: int
    """The other end's address, as on the wire, in four words; an IPv4 address is the first."""
    address_1: int
    address_2: int
    address_3: int
    sent_bytes: int
    received_bytes: int
    retransmitted_bytes: int
    sent_segments: int
    received_segments: int
    retransmits: int
    closed: int
    max_srtt_us: int
    max_send_queue: int
    max_receive_queue: int


FIELDS = Flow._fields
MAX_PEERS = 256
"""Flows of a drain that keep the peer's name, those with most bytes; the peer of others is
other."""
SCAN_SHARE = 0.0002
"""Of one core, for the scan of open files: where there are many, it is done less often."""
SCAN_GAP_S = 1.0
"""Between two scans, but for 10 %: a tick may come early."""
MAX_CONNECTIONS = 65_536
"""Followed at a time, which take some 30 MB: three quarters are first come, first served, then a
user or container gets no more than a sixteenth (bpf/storage_share.h)."""
RECOUNT_SHARE = 0.001
"""Of one core, for counting them."""


class FlowCollector(Scanning):
    """Rows of `activity`, kind tcp, named after the peer: op send, receive, retransmit."""

    name = "flows"

    @staticmethod
    def bpf_object(scans_recount: bool = False) -> BpfObject:
        """What is loaded into the kernel for it. `scans_recount`: for a kernel without iterators
        over the storages of sockets."""
        constants = {"most_storages": MAX_CONNECTIONS, "scans_recount": int(scans_recount)}
        skip = ("on_recount",) if scans_recount else ()
        return BpfObject("flows", constants, skip, takes_stacks=False)

    def __init__(self, kernel: Kernel) -> None:
        """Raises HostError."""
        self.scans_recount = False
        """Scans of open files count connections: the kernel refuses to show all of them. Those of
        no open file are not counted, and have no bound."""
        try:
            bpf = kernel.load(self.bpf_object())
        except PermissionDenied:
            # Some kernels refuse iterators over the elements of a map (EPERM), root's, too.
            bpf = kernel.load(self.bpf_object(scans_recount=True))
            self.scans_recount = True
        super().__init__(bpf)
        self._next_scan_s = self._next_recount_s = 0.0
        self._recount: int | None = None
        expect_fields(self._bpf, "flows", FIELDS)

    def start(self) -> None:
        """Note what was counted before; then follow connections. Raises HostError."""
        try:
            if self._recount is None and not self.scans_recount:
                self._recount = self._bpf.attach_map_iterator("on_recount", "sockets")
            self._begin_scans()
            self._links = [self._bpf.attach("on_state")]
        except OSError as error:
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """What connections moved since the last tick, those that ended included."""
        batch = Batch()
        self._recount_when_due()
        self._scan_when_due(to_the_end)
        rows = self._bpf.drain("flows")
        flows: Iterable[Flow] = map(Flow._make, rows)
        if len(rows) > MAX_PEERS:
            flows = sorted(flows, key=_moved_bytes, reverse=True)
        for number, flow in enumerate(flows):
            start_ns = flow.start_ns - flow.start_ns % START_UNIT_NS
            who = (flow.tgid, start_ns, flow.tgid)
            if flow.tgid:
                batch.threads.add(who)
            peer = _peer(flow) if flow.family and number < MAX_PEERS else "other"
            for op, count, size in (
                ("send", flow.sent_segments, flow.sent_bytes),
                ("receive", flow.received_segments, flow.received_bytes),
                ("retransmit", flow.retransmits, flow.retransmitted_bytes),
            ):
                if count or size:
                    totals = (count, 0, size, 1000 * flow.max_srtt_us, 0, 0)
                    batch.add("activity", (since_ns, "tcp", peer, "", op, "", 0, *who, *totals))
            batch.seen += 1
        return batch

    def _recount_when_due(self) -> None:
        now_s = time.monotonic()
        if self._recount is None or now_s < self._next_recount_s:
            return
        began_s = time.thread_time()
        self._iterators.run(self._recount)
        spent_s = time.thread_time() - began_s
        self._next_recount_s = now_s + max(0.9 * SCAN_GAP_S, spent_s / RECOUNT_SHARE)

    def _scan_when_due(self, to_the_end: bool) -> None:
        now_s = time.monotonic()
        if self._scan is None or (now_s < self._next_scan_s and not to_the_end):
            return
        began_s = time.thread_time()
        self._run_scan()
        spent_s = time.thread_time() - began_s
        self._next_scan_s = now_s + max(0.9 * SCAN_GAP_S, spent_s / SCAN_SHARE)


def _moved_bytes(flow: Flow) -> int:
    return flow.sent_bytes + flow.received_bytes


def _peer(flow: Flow) -> str:
    """The other end's address and the service's port (`Flow.port`): 10.0.0.7:443."""
    words = (flow.address_0, flow.address_1, flow.address_2, flow.address_3)
    raw = struct.pack("=4I", *words)
    if flow.family == socket.AF_INET:
        return f"{socket.inet_ntop(socket.AF_INET, raw[:4])}:{flow.port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{flow.port}"
