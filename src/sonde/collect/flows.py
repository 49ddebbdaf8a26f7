# SPDX-License-Identifier: Apache-2.0
"""TCP by process and peer: bytes, segments, what was sent again."""

from __future__ import annotations

import socket
import struct
import time

from sonde.collect.attached import Walking
from sonde.collect.collector import Batch
from sonde.collect.kernel import Kernel, expect_fields, refusal
from sonde.procfs import START_UNIT_NS

FIELDS = (
    *("tgid", "family", "port", "start_ns", "address_0", "address_1", "address_2", "address_3"),
    *("sent_bytes", "received_bytes", "retransmitted_bytes", "sent_segments", "received_segments"),
    *("retransmits", "closed", "max_srtt_us", "max_send_queue", "max_receive_queue"),
)
MAX_PEERS = 256
"""Told by name in a tick; bytes to and from the others are one peer, other."""
WALK_SHARE = 0.0002
"""Of one core, for the walk over open files: where there are many, it is done less often."""
WALK_GAP_S = 1.0


class FlowCollector(Walking):
    """Rows of `activity`, kind tcp, named after the peer: op send, receive, retransmit."""

    name = "flows"

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel.load("flows", {}, own_stacks=True))
        self._next_walk_s = 0.0
        expect_fields(self._bpf, "flows", FIELDS)

    def start(self) -> None:
        """Note what was counted before; then follow connections. Raises HostError."""
        try:
            self._begin_walks()
            self._links = [self._bpf.attach("on_state")]
        except OSError as error:
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """What connections moved since the last tick, those that ended included."""
        batch = Batch()
        self._walk_when_due(to_the_end)
        rows = sorted(self._bpf.drain("flows"), key=lambda row: -(row[8] + row[9]))
        for number, row in enumerate(rows):
            pid, family, port, start, *address = row[:8]
            sent, received, again, out, into, retransmits = row[8:14]
            start_ns = start - start % START_UNIT_NS
            who = (pid, start_ns, pid)
            if pid:
                batch.threads.add(who)
            named = family and number < MAX_PEERS
            peer = _peer(family, address, port) if named else "other"
            for op, count, size in (
                ("send", out, sent),
                ("receive", into, received),
                ("retransmit", retransmits, again),
            ):
                if count or size:
                    rest = (count, 0, size, 0, 0, 0)
                    batch.add("activity", (since_ns, "tcp", peer, "", op, "", 0, *who, *rest))
            batch.seen += 1
        return batch

    def _walk_when_due(self, now_at_last: bool) -> None:
        now_s = time.monotonic()
        if self._walk is None or (now_s < self._next_walk_s and not now_at_last):
            return
        began_s = time.thread_time()
        self._bpf.walk(self._walk)
        spent_s = time.thread_time() - began_s
        self._next_walk_s = now_s + max(0.9 * WALK_GAP_S, spent_s / WALK_SHARE)


def _peer(family: int, words: list[int], port: int) -> str:
    raw = struct.pack("=4I", *words)
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(socket.AF_INET, raw[:4])}:{port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{port}"
