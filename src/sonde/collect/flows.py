# SPDX-License-Identifier: Apache-2.0
"""TCP by process and peer: bytes, segments, what was sent again."""

from __future__ import annotations

import errno
import functools
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from sonde.collect.attached import Attached
from sonde.collect.collector import Batch
from sonde.collect.kernel import MAX_TYPE_BYTES, BpfObject, Kernel, expect_fields, refusal
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
END_SHARE = 0.01
"""Of one core, for the scans at the end of a chunk, which do not wait for `SCAN_SHARE`."""
END_CREDIT_S = 0.05
"""CPU time for these that can be saved up."""
SCAN_GAP_S = 1.0
"""Between two scans, but for 10 %: a tick may come early."""
MOST_SCAN_S: Final = 0.05
"""CPU time of one scan. Where it is not enough for all open files, processes are scanned in turns:
anybody can have more files than any time is enough for."""
ALL_AGAIN_S: Final = 60.0
"""After which a scan of all open files is tried again."""
COUNTS_KNOWN, COUNTS_NEW, RECOUNTS = 1, 2, 4
"""How a scan counts (bpf/flows.bpf.c): where it counts no connections that are known, or new, what
they did so far is only noted."""
FILE_TABLE: Final = struct.Struct("=QQQ")
"""struct file_table of bpf/flows.bpf.c: its address, the party, the pid."""
MAX_CONNECTIONS = 65_536
"""Followed at a time, which take some 30 MB: three quarters are first come, first served, then a
user or container gets no more than a sixteenth (bpf/storage_share.h)."""
RECOUNT_SHARE = 0.001
"""Of one core, for counting them."""


@functools.cache
def has_iterators_of_threads(types: Path = Path("/sys/kernel/btf/vmlinux")) -> bool:
    """Whether an iterator may pass the files of one thread alone (Linux 6.1), as the kernel's BTF
    shows."""
    try:
        with types.open("rb") as file:
            return b"\0BPF_TASK_ITER_TID\0" in file.read(MAX_TYPE_BYTES)
    except OSError:
        return False


@dataclass(slots=True)
class Turn:
    """How far the scans of a party's processes are."""

    last: int = 0
    """The process that was scanned last."""
    has_met_all: bool = False
    """Each of its processes was scanned once: what is new now began after the recording did."""


class FlowCollector(Attached):
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
        self._credit_s = END_CREDIT_S
        self._credited_s = time.monotonic()
        self._recount: int | None = None
        self._scan: int | None = None
        self._is_first = True
        """No scan of all open files has come to its end: what is new may have begun before."""
        self._most_scan_s: float | None = MOST_SCAN_S
        """CPU time of a scan of all open files. None: a second of any time, as the kernel has no
        others."""
        self._tables: int | None = None
        self._turns: dict[int, Turn] = {}
        """By party."""
        self._all_again_s = 0.0
        """Processes are scanned in turns until then."""
        self._unread = 0
        """Times that the open files of a process were not, or not all, looked at."""
        expect_fields(self._bpf, "flows", FIELDS)

    def start(self) -> None:
        """Note what was counted before; then follow connections. Raises HostError."""
        try:
            if self._recount is None and not self.scans_recount:
                self._recount = self._bpf.attach_map_iterator("on_recount", "sockets")
            if self._scan is None:
                self._scan = self._bpf.attach("on_scan")
            self._is_first, self._turns, self._all_again_s = True, {}, 0.0
            self._run_scan(self._scan)
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
        earned_s = END_SHARE * (now_s - self._credited_s)
        self._credit_s = min(END_CREDIT_S, self._credit_s + earned_s)
        self._credited_s = now_s
        is_due = now_s >= self._next_scan_s or (to_the_end and self._credit_s > 0)
        if self._scan is None or not is_due:
            return
        began_s = time.thread_time()
        self._run_scan(self._scan)
        spent_s = time.thread_time() - began_s
        self._credit_s -= spent_s
        self._next_scan_s = now_s + max(0.9 * SCAN_GAP_S, spent_s / SCAN_SHARE)

    def _run_scan(self, scan: int) -> None:
        """Count since the scan before. Raises OSError."""
        now_s = time.monotonic()
        if now_s >= self._all_again_s:
            if self._scan_all(scan):
                return
            self._all_again_s = now_s + ALL_AGAIN_S
        self._scan_in_turns()

    def _scan_all(self, scan: int) -> bool:
        """Scan all open files; False: they are too many, and can be scanned in turns. Raises
        OSError."""
        how = COUNTS_KNOWN | COUNTS_NEW
        if self._is_first:  # in turns some were scanned before
            how = COUNTS_KNOWN if self._turns else 0
        self._count(how | RECOUNTS)
        try:
            self._bpf.walk(scan, self._most_scan_s)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                if has_iterators_of_threads():
                    return False
                self._most_scan_s = None
            self._skip(error)
        else:
            self._is_first, self._turns, self._all_again_s = False, {}, 0.0
        return True

    def _scan_in_turns(self) -> None:
        """Scan processes one by one, each table of open files once. Parties have the same part of
        the time, and what those with few processes leave is for the others; who is not reached
        is the next one of its party. Raises OSError."""
        if self._tables is None:
            self._tables = self._bpf.attach("on_tables")
        try:
            written = self._bpf.walk_written(self._tables)
        except OSError as error:
            self._skip(error)
            return
        seen: set[int] = set()
        of_parties: defaultdict[int, list[int]] = defaultdict(list)
        for files, party, pid in FILE_TABLE.iter_unpack(written):
            if files not in seen:
                seen.add(files)
                of_parties[party].append(pid)
        has_begun = bool(self._turns)
        how = COUNTS_KNOWN if has_begun else 0
        self._turns = {
            party: self._turns.get(party) or Turn(has_met_all=has_begun) for party in of_parties
        }
        now_s = time.thread_time()
        until_s, left = now_s + MOST_SCAN_S, len(of_parties)
        for party, pids in sorted(of_parties.items(), key=lambda it: len(it[1])):
            self._scan_party(self._turns[party], pids, how, now_s + (until_s - now_s) / left)
            now_s, left = time.thread_time(), left - 1

    def _scan_party(self, turn: Turn, pids: Sequence[int], how: int, until_s: float) -> None:
        """Scan some of a party's processes, up to this CPU time of this thread. `how`: where not
        all of them have been met yet. Raises OSError."""
        later = [pid for pid in pids if pid > turn.last]
        earlier = pids[: len(pids) - len(later)]
        left = len(pids)
        for some in (later, earlier):
            counts_all = turn.has_met_all or not self._is_first
            self._count(COUNTS_KNOWN | COUNTS_NEW if counts_all else how)
            for pid in some:
                left_s = until_s - time.thread_time()
                if left_s <= 0:
                    self._unread += left
                    return
                try:
                    self._bpf.walk_thread("on_scan", pid, left_s)
                except OSError as error:
                    if error.errno != errno.EAGAIN:
                        self._skip(error)
                    self._unread += 1
                turn.last = pid
                left -= 1
            turn.has_met_all = True

    def _count(self, how: int) -> None:
        self._bpf.set_array("scan_counts", 0, struct.pack("=Q", how))

    def _skip(self, error: OSError) -> None:
        """Count a scan for which there was no descriptor, memory or time. Raises other errors."""
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
            raise error
        self._iterators.skipped += 1

    def losses(self) -> Mapping[str, int]:
        """Losses so far by name."""
        unread = {"files_unread": self._unread} if self._unread else {}
        return {**super().losses(), **unread}


def _moved_bytes(flow: Flow) -> int:
    return flow.sent_bytes + flow.received_bytes


def _peer(flow: Flow) -> str:
    """The other end's address and the service's port (`Flow.port`): 10.0.0.7:443."""
    words = (flow.address_0, flow.address_1, flow.address_2, flow.address_3)
    raw = struct.pack("=4I", *words)
    if flow.family == socket.AF_INET:
        return f"{socket.inet_ntop(socket.AF_INET, raw[:4])}:{flow.port}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{flow.port}"
