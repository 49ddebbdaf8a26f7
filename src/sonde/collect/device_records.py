# SPDX-License-Identifier: Apache-2.0
"""Turns the records in libraries' rings into rows: runs, weighted samples, losses.

One launch of each block is chosen, so that a run stands for `weight` launches like it. One that was
chosen and could not be timed is a loss, and its weight is added to that of the next run of its
kind: sums of weights stay true. How much is read in a turn is bounded (`ring_budget`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from sonde import procfs
from sonde.collect import inject_abi as abi
from sonde.collect.collector import Batch, ProcessKey
from sonde.collect.device_process import SHORTEST_NS, DeviceProcess
from sonde.collect.device_rows import name_of, row_of
from sonde.collect.inject_memory import Seen
from sonde.collect.inject_records import Run
from sonde.collect.ring_budget import MAX_SPARE_S, Turn, shares
from sonde.collect.slowdown import estimate
from sonde.metrics import labels
from sonde.model.digests import blake2b
from sonde.model.rows import EventRow

STACKS_KNOWN: Final = 16_384
"""Stacks that were in a batch lately, whose ids are kept."""
MAX_NOTICES: Final = 256
"""Rows about losses in one batch."""
REPLACED_S: Final = 1.0
"""What is in the rings of programs that an exec replaced is read with the budget of a turn of this
length, all together."""
REPORT_S: Final = 10.0
"""How often the cost of timing, and whose rings were left out, is reported."""
MAX_PARTIES: Final = 64
"""Parties whose rings left out are counted separately; those of others are one number."""

_LOST: Final = ("lost_ring", "lost_pool", "lost_order")
"""Counts of launches that were chosen and not timed."""


class RunReader:
    """Reads the rings of processes. Losses are counted here, and reported by process or party."""

    def __init__(self) -> None:
        self.losses: dict[str, int] = {}
        """What was lost so far, by name."""
        self._notices: list[EventRow] = []
        self._turn_ns = time.monotonic_ns()
        """When rings were read last."""
        self._spare_s = MAX_SPARE_S
        """Budget that earlier turns did not use, in seconds of a turn."""
        self._known_stacks: OrderedDict[int, None] = OrderedDict()
        """Ids of stacks that were in a batch lately: one of them costs no new resolving."""
        self._rings_left_out: Counter[int] = Counter()
        """By party (`procfs.party_of`), since the last report."""
        self._slowdown_s = self._left_out_s = 0.0
        """When to report next (CLOCK_MONOTONIC)."""

    def count(self, name: str, number: int) -> None:
        """Count a loss."""
        if number:
            self.losses[name] = self.losses.get(name, 0) + number

    def leave_out(self, party: int) -> None:
        """Count a process of a party that is not read, as there are too many."""
        self.count("rings_left_out", 1)
        known = self._rings_left_out
        self._rings_left_out[
            party if party in known or len(known) < MAX_PARTIES else procfs.NOBODY
        ] += 1

    def note(self, key: ProcessKey, name: str, text: str) -> None:
        """Report something about a process in the next batch."""
        if len(self._notices) < MAX_NOTICES:
            row = EventRow(time.monotonic_ns(), "notice", name, *key, 1.0, text)
            self._notices.append(row)

    def add_notices(self, now_ns: int, batch: Batch) -> None:
        """Rows about losses, by process and by party."""
        for notice in self._notices:
            batch.add("event", notice)
            batch.threads.add((notice.pid, notice.start_ns, notice.pid))
        self._notices.clear()
        if not self._rings_left_out or now_ns < self._left_out_s * 1e9:
            return
        self._left_out_s = now_ns / 1e9 + REPORT_S
        for party, count in self._rings_left_out.most_common():
            text = f"processes of {procfs.name_of(party)} whose device time is left out: too many"
            row = EventRow(now_ns, "notice", "rings_left_out", 0, 0, float(count), text)
            batch.add("event", row)
        self._rings_left_out.clear()

    def drain_all(
        self,
        processes: Mapping[int, DeviceProcess],
        seen: Mapping[int, Seen],
        since_ns: int,
        now_ns: int,
        batch: Batch,
    ) -> list[int]:
        """Read every ring as far as its part of the budget goes, those with the smallest part
        first.

        Returns the processes whose memory cannot be read any more.
        """
        elapsed_s = (now_ns - self._turn_ns) / 1e9
        self._turn_ns = now_ns
        turn = Turn.of(elapsed_s + self._spare_s)
        gone = self._drain_fairly(processes, seen, elapsed_s, since_ns, now_ns, batch, turn)
        self._spare_s = turn.spare_s
        return gone

    def drain_replaced(
        self, replaced: Sequence[DeviceProcess], since_ns: int, now_ns: int, batch: Batch
    ) -> None:
        """Read what is left in the rings of programs that an exec replaced, of all together as much
        as in a turn: any number of programs may end so at once."""
        processes, seen = dict(enumerate(replaced)), {}
        for number, process in processes.items():
            with suppress(OSError):
                seen[number] = process.memory.seen()
        turn = Turn.of(REPLACED_S)
        self._drain_fairly(processes, seen, REPLACED_S, since_ns, now_ns, batch, turn)
        for process in replaced:
            self.count("records_unread", process.ring.waiting(process.head))

    def _drain_fairly(
        self,
        processes: Mapping[int, DeviceProcess],
        seen: Mapping[int, Seen],
        elapsed_s: float,
        since_ns: int,
        now_ns: int,
        batch: Batch,
        turn: Turn,
    ) -> list[int]:
        """Read the rings of those that are in `seen`; see `drain_all`."""
        gone = []
        waiting = {
            number: min(process.ring.waiting(one.counts["head"]), process.allowed(elapsed_s))
            for number, one in seen.items()
            if (process := processes[number])
        }
        parties = {number: processes[number].party for number in seen}
        parts = shares(waiting, parties, turn.records)
        began_s = now_s = time.thread_time()
        of_party_s = turn.cpu_s / max(1, len({*parties.values()}))
        used_s: dict[int, float] = defaultdict(float)
        order = sorted(parts, key=lambda it: (parts[it], random.random()))
        behind: list[int] = []
        """Of parties that have used their part of the time: read with what the others leave, or
        many rings of one user would keep those of another from being read."""
        for is_again, numbers in ((False, order), (True, behind)):
            for number in numbers:
                party = parties[number]
                if not is_again and used_s[party] > of_party_s:
                    behind.append(number)
                    continue
                limit = parts[number] if now_s <= began_s + turn.cpu_s else 0
                try:
                    self._drain(
                        processes[number], seen[number], since_ns, now_ns, batch, limit, turn
                    )
                except OSError:
                    gone.append(number)
                before_s, now_s = now_s, time.thread_time()
                used_s[party] += now_s - before_s
        turn.cpu_s -= now_s - began_s
        return gone

    def _drain(
        self,
        process: DeviceProcess,
        seen: Seen,
        since_ns: int,
        now_ns: int,
        batch: Batch,
        limit: int,
        turn: Turn,
    ) -> None:
        """Read at most `limit` records of one ring, and what its library counted."""
        before = process.ring.tail
        names, stacks = turn.names_left_out, turn.stacks_left_out
        process.head = seen.counts["head"]
        taken = process.ring.take(process.head, now_ns, limit, turn)
        read = max(0, process.ring.tail - before - taken.skipped)
        process.allowance.records -= read
        turn.records -= read
        process.memory.ask(tail=process.ring.tail)
        self.count("records_wrong", taken.wrong)
        self._lose(process, "records_overwritten", taken.skipped, now_ns)
        self._lose(process, "names_left_out", turn.names_left_out - names, now_ns)
        self._lose(process, "stacks_dropped", taken.stacks_dropped, now_ns)
        if process.overhead_controller.look(now_ns / 1e9, seen.counts, process.before):
            process.memory.ask(per_second=process.overhead_controller.per_second)
        self._count_lost(process, seen.counts, now_ns)
        if seen.reason != process.reported_reason:
            process.reported_reason = seen.reason
            if seen.reason != abi.Reason.OK:
                self._report(batch, process, "device_time_refused", seen.why)
        armed_ns = seen.counts["armed_ns"]
        if process.armed_ns < armed_ns <= now_ns:
            process.armed_ns = armed_ns
            batch.add("event", EventRow(armed_ns, "timing", "began", *process.key, 1.0, ""))
        weights: dict[tuple[str, int, int], list[float]] = {}
        for run in taken.runs:
            on_device = run.type != abi.Type.SYNC  # else a thread's time, of which there is any
            run_ns = max(run.end_ns - run.start_ns, SHORTEST_NS)
            claimed_ns = run.weight * run_ns if on_device else 0.0
            if process.has_time_for(claimed_ns, now_ns):
                self.add_run(process, run, batch, weights, turn)
            else:
                self.count("records_wrong", 1)
        self._lose(process, "stacks_left_out", turn.stacks_left_out - stacks, now_ns)
        pid, start_ns = process.key
        for (name, tid, stack_id), (count, ns, moved) in weights.items():
            batch.add(
                "sample",
                (since_ns, "kernel", name, pid, start_ns, tid, stack_id, count, ns, moved),
            )
        batch.seen += len(taken.runs)

    def _lose(self, process: DeviceProcess, name: str, count: int, now_ns: int) -> None:
        """Count a loss, and report every REPORT_S of which process it is."""
        self.count(name, count)
        if not count:
            return
        process.lost += count
        if (
            now_ns >= process.lost_reported_ns + int(REPORT_S * 1e9)
            and len(self._notices) < MAX_NOTICES
        ):
            process.lost_reported_ns = now_ns
            lost, process.lost = process.lost, 0
            text = "records of its device time, names or stacks beyond what is read in a turn"
            name = "device_time_lost"
            row = EventRow(now_ns, "notice", name, *process.key, float(lost), text)
            self._notices.append(row)

    def add_run(
        self,
        process: DeviceProcess,
        run: Run,
        batch: Batch,
        weights: dict[tuple[str, int, int], list[float]],
        turn: Turn,
    ) -> None:
        """Add the row of a run, and its weight, time (ns) and bytes to the sums of its sample."""
        pid, start_ns = process.key
        stack_id = process.ring.stack_id(run.correlation)
        if stack_id:
            batch.launch_stacks[stack_id] = process.key
        else:
            stack_id = self._stack(process.key, run.stack, batch, turn)
        tid = run.tid if process.same_tids else pid
        name, weight = name_of(run), run.weight
        batch.threads.add((pid, start_ns, tid))
        stream = process.ring.stream(run.stream)
        batch.add("device_run", row_of(run, process.key, tid, stack_id, stream))
        if run.type == abi.Type.SYNC:
            return  # time of the host, not of a device
        sums = weights.setdefault((name, tid, stack_id), [0.0, 0.0, 0.0])
        sums[0] += weight
        sums[1] += weight * (run.end_ns - run.start_ns)
        sums[2] += weight * run.bytes

    def _stack(self, key: ProcessKey, addresses: tuple[int, ...], batch: Batch, turn: Turn) -> int:
        if not addresses:
            return 0
        packed = b"".join(word.to_bytes(8, "little") for word in (*key, *addresses))
        stack_id = int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") or 1
        if stack_id in self._known_stacks:
            self._known_stacks.move_to_end(stack_id)
        elif turn.stacks <= 0:
            turn.stacks_left_out += 1
            return 0
        else:
            turn.stacks -= 1
            self._known_stacks[stack_id] = None
            if len(self._known_stacks) > STACKS_KNOWN:
                self._known_stacks.popitem(last=False)
        batch.own_stacks[stack_id] = (key, addresses)
        return stack_id

    def _count_lost(self, process: DeviceProcess, counts: dict[str, int], now_ns: int) -> None:
        before, process.before = process.before, counts
        for name in (*_LOST, "lost_names", "yielded_ms", "looks_cut"):
            claimed = max(0, counts[name] - before[name])
            count = process.can_have_lost(name, claimed, now_ns)
            self.count("losses_wrong", claimed > count)
            if name == "lost_ring":
                self._lose(process, name, count, now_ns)
            else:
                self.count(name, count)

    def add_slowdown(self, processes: Iterable[DeviceProcess], now_ns: int, batch: Batch) -> None:
        """Metrics: how much slower programs are for it, by the trials of all of them."""
        if now_ns < self._slowdown_s * 1e9:
            return
        self._slowdown_s = now_ns / 1e9 + REPORT_S
        found = (process.overhead_controller.trials.found for process in processes)
        now = estimate(itertools.chain.from_iterable(found))
        if now is None:
            return
        for bound, value in (("median", now.value), ("low", now.low), ("high", now.high)):
            batch.metrics.append(
                (now_ns, "sonde.device_time.slowdown", labels(sonde__bound=bound), value)
            )

    @staticmethod
    def _report(batch: Batch, process: DeviceProcess, name: str, text: str) -> None:
        pid, start_ns = process.key
        now_ns = time.monotonic_ns()
        batch.add("event", EventRow(now_ns, "notice", name, pid, start_ns, 1.0, text))
        batch.threads.add((pid, start_ns, pid))
