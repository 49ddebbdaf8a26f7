# SPDX-License-Identifier: Apache-2.0
"""What is known of a process whose device time is read, and what finding one may cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from sonde import procfs
from sonde.collect import inject_abi as abi
from sonde.collect.collector import ProcessKey
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.inject_records import Ring
from sonde.collect.mapped_files import FIRST_BYTES, UnreadProcesses
from sonde.collect.overhead_controller import OverheadController
from sonde.collect.ring_budget import Allowance

REQUEST: Final = abi.Request.EVENTS | abi.Request.OPENCL
"""What every library is asked for."""
FIND_SHARE: Final = 0.05
"""Of a CPU, for looking through the mappings of processes: shared by the parties that need it."""
FIND_CREDIT_S: Final = 0.5
"""CPU time for that which a party can save up."""
MAX_PARTIES: Final = 1024
"""Whose credit is known; where all of them have spent some, newcomers share one."""

MOST_AT_ONCE: Final = 128
"""Kernels and copies of one process that devices run at the same time, on average: sixteen on each
of eight. A process chooses what its records claim."""
BEFORE_S: Final = 60.0
"""What it claims for may have begun so long before its first record is read, or since it lives."""
SHORTEST_NS: Final = 1_000
"""A run counts at least so long there: launching one takes a thread longer."""
MAX_LOST_A_SECOND: Final = 100_000
"""Launches and records of one process that can be lost: of MAX_A_SECOND timed launches with twelve
records each, and of what is chosen in bursts."""
MAX_YIELDED_MS_A_SECOND: Final = 1_000
MAX_AWAITED: Final = 1024
"""Processes of one party that are to be looked at soon."""


_BY_ITSELF: Final = abi.Request(0)
"""Without SLOTS: the library finds its slots itself."""


@dataclass(slots=True)
class DeviceProcess:
    """One process with our library in it."""

    memory: InjectMemory
    ring: Ring
    key: ProcessKey
    before: dict[str, int]
    """Counts of the library's state, as read last."""
    same_tids: bool
    """Its threads have the same numbers in its pid namespace and in ours."""
    overhead_controller: OverheadController
    stacks: abi.Request
    """Who takes the stacks of launches: the kernel (SITE), or the library by frame pointers."""
    reported_reason: abi.Reason = abi.Reason.OK
    armed_ns: int = 0
    """Since when its launches are chosen, as last reported."""
    by_slots: abi.Request = _BY_ITSELF
    """SLOTS: its slots are found from outside (`collect.slots`); else by the library."""
    party: int = 0
    allowance: Allowance = field(default_factory=Allowance)
    head: int = 0
    """Of its ring, as read last."""
    lost: int = 0
    """Records that were lost and not reported yet."""
    lost_reported_ns: int = 0
    claimed_ns: float = 0.0
    """Time of devices that its records stand for, in all."""
    claims_since_ns: int = 0
    claimed_lost: dict[str, int] = field(default_factory=dict)
    """Losses that its library counted, by name, as far as they can be true."""

    @property
    def request(self) -> abi.Request:
        """What is asked of its library."""
        return REQUEST | self.stacks | self.by_slots

    def allowed(self, seconds: float) -> int:
        """Records that may be read of it now, `seconds` after the last time."""
        with_stacks = self.stacks == abi.Request.STACKS
        return self.allowance.earn(
            self.overhead_controller.per_second, seconds, with_stacks=with_stacks
        )

    def has_time_for(self, claimed_ns: float, now_ns: int) -> bool:
        """Whether devices can have run so much for it, beside what its records stand for already;
        if so, it is taken down."""
        if self.claimed_ns + claimed_ns > MOST_AT_ONCE * self._claimable_ns(now_ns):
            return False
        self.claimed_ns += claimed_ns
        return True

    def can_have_lost(self, name: str, count: int, now_ns: int) -> int:
        """How much of a loss that its library counted can be true, beside what it counted before;
        that is taken down."""
        a_second = MAX_YIELDED_MS_A_SECOND if name == "yielded_ms" else MAX_LOST_A_SECOND
        known = self.claimed_lost.get(name, 0)
        possible = int(a_second * self._claimable_ns(now_ns) / 1e9) - known
        true = max(0, min(count, possible))
        self.claimed_lost[name] = known + true
        return true

    def _claimable_ns(self, now_ns: int) -> float:
        """The time that its claims can be of."""
        self.claims_since_ns = self.claims_since_ns or now_ns
        before_ns = min(self.claims_since_ns - self.key[1], BEFORE_S * 1e9)
        return now_ns - self.claims_since_ns + max(before_ns, 1e9)


class Finder:
    """Finds the library's memory in processes, some of which have mappings that take long to read.

    Each party (a user, a container) pays for its own: processes with long mappings keep nobody
    else's from being found.
    """

    def __init__(self) -> None:
        self._credit_s: dict[int, float] = {}
        """Of parties that have spent some of it."""
        self._earned_s = time.monotonic()
        self._look_up_s = FIND_CREDIT_S
        """CPU time left for finding the party of processes that events name."""
        self._awaited: dict[int, tuple[float, int]] = {}
        """Processes that map the library, until (monotonic s) they are waited for to use it, and
        their party."""
        self.unread = UnreadProcesses()
        """How often not all of a process's mappings were looked through."""

    def has_credit(self, party: int) -> bool:
        """Whether a party has CPU time left for what can wait."""
        self._earn(time.monotonic())
        return self._credit_s.get(self._payer(party), FIND_CREDIT_S) > 0

    def party_of(self, pid: int) -> int:
        """The party of a process; NOBODY, too, where finding that of others took too long lately:
        it takes 20 ms for a process with 65,536 supplementary groups."""
        self._earn(time.monotonic())
        if self._look_up_s <= 0:
            return procfs.NOBODY
        began_s = time.thread_time()
        party = procfs.party_of(pid)
        self._look_up_s -= time.thread_time() - began_s
        return party

    def find(self, pid: int, party: int) -> InjectMemory | None:
        """See InjectMemory.find. Without credit only the first `FIRST_BYTES` of the mappings are
        looked through, which most processes do not exceed."""
        max_bytes = procfs.MAX_MAPS_BYTES if self.has_credit(party) else FIRST_BYTES
        began_s = time.thread_time()
        try:
            return InjectMemory.find(pid, max_bytes, self.unread)
        finally:
            payer = self._payer(party)
            spent_s = time.thread_time() - began_s
            self._credit_s[payer] = self._credit_s.get(payer, FIND_CREDIT_S) - spent_s

    @property
    def is_waiting(self) -> bool:
        """Whether some process is to be looked at soon."""
        return bool(self._awaited)

    def expect(self, pid: int, until_s: float, party: int) -> None:
        """Look at a process soon, until a time (monotonic s). Beyond MAX_AWAITED of its party it is
        left out, and counted."""
        is_full = (
            pid not in self._awaited
            and len(self._awaited) >= MAX_AWAITED
            and sum(of == party for _, of in self._awaited.values()) >= MAX_AWAITED
        )
        if is_full:
            self.unread.processes += 1
        else:
            self._awaited[pid] = until_s, party

    def awaited(self) -> Iterator[tuple[int, float]]:
        """Those whose party has CPU time left, and until when; they go to the end of the queue."""
        for pid, (until_s, party) in list(self._awaited.items()):
            if self.has_credit(party):
                self._awaited[pid] = self._awaited.pop(pid)
                yield pid, until_s

    def forget(self, pid: int) -> None:
        """It was looked at."""
        del self._awaited[pid]

    def _payer(self, party: int) -> int:
        """Whose credit a party uses: NOBODY's, as a common one, beyond MAX_PARTIES."""
        is_known = party in self._credit_s or len(self._credit_s) < MAX_PARTIES
        return party if is_known else procfs.NOBODY

    def _earn(self, now_s: float) -> None:
        """Share out what was earned since the last time between the parties that have spent some; a
        party whose credit is full again takes no more."""
        earned_s = FIND_SHARE * (now_s - self._earned_s)
        self._earned_s = now_s
        self._look_up_s = min(FIND_CREDIT_S, self._look_up_s + earned_s)
        while earned_s > 0 and self._credit_s:
            part_s, earned_s = earned_s / len(self._credit_s), 0.0
            for party, credit_s in list(self._credit_s.items()):
                over_s = credit_s + part_s - FIND_CREDIT_S
                if over_s < 0:
                    self._credit_s[party] = credit_s + part_s
                else:
                    del self._credit_s[party]
                    earned_s += over_s
