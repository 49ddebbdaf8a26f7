# SPDX-License-Identifier: Apache-2.0
"""What probed functions cost, by whose calls they are.

Hits are counted by site. Where a site comes near its budget the kernel side (bpf/call_budget.h)
counts them by party, too, and each user or container is held against a separate budget. Calls
of one beyond it are left out for a while, the calls of others are not.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from sonde import _native, procfs
from sonde.apis import Call

COST_NS: Final = {"emulated": 2_000, "nop": 14_000, "single-step": 14_000, "unknown": 4_000}
"""Of one call, entry and return, by the instruction the entry's probe replaces; measured in
docs/design/device_calls.md. A nop is single-stepped before Linux 6.18: taken at its dearest."""
CHEAP: Final = frozenset({"emulated", "unknown"})
NEAR: Final = 0.25
"""Of what a site may cost in advance; from there on its hits are counted by party."""
PAUSE_S: Final = 60.0
MAX_PAUSE_S: Final = 960.0
"""For which the calls of a party are left out: twice as long each time."""
WITHIN_S: Final = 300.0
"""Within the budget for so long, hits of a site are counted together again."""

_KEY: Final = struct.Struct("=QII")
_ON: Final = struct.pack("=I", 1)
_OFF: Final = struct.pack("=I", 0)
_MAX_USERS: Final = 1 << 32
"""The kernel's numbers of containers are larger."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a site may cost: a share of one core, and how long it may take it in advance."""

    share: float
    burst_s: float

    @property
    def burst_ns(self) -> float:
        """The largest excess."""
        return self.share * self.burst_s * 1e9


@dataclass(slots=True)
class Site:
    """A probed function of a file."""

    index: int
    call: Call
    offset: int
    """In the file, of the probed instruction."""
    cost_class: str
    excess_ns: float = 0.0
    """Cost so far, of everybody, less what was allowed meanwhile."""
    pause_s: float = PAUSE_S / 2
    """For which it was taken off last."""

    @property
    def is_cheap(self) -> bool:
        """Whether the kernel emulates the probed instruction."""
        return self.cost_class in CHEAP

    @property
    def each_ns(self) -> int:
        """Cost of one call."""
        return COST_NS[self.cost_class]


@dataclass(slots=True)
class Account:
    """What one party owes for one site."""

    pid: int
    """A process of it."""
    pause_s: float
    """For which its calls were left out last."""
    hits: int = 0
    """As the kernel counted them last."""
    excess_ns: float = 0.0
    rate: float = 0.0
    """Hits a second, of the last interval."""
    paused_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Over:
    """A party over its budget for a site; its calls are left out now."""

    site: Site
    party: int
    """As procfs.party_of has it; NOBODY where it is not known any more."""
    rate: float
    pause_s: float

    def __str__(self) -> str:
        return (
            f"{self.rate:,.0f} calls/s of {procfs.name_of(self.party)} at"
            f" {self.site.each_ns / 1000:.0f} µs are over the budget"
        )


class Budget:
    """Accounts of sites, and of parties at those sites that are near their budget.

    `share`: of a core that one site may cost. A site that is single-stepped has a second of it in
    advance; a cheap one ten times the share, over ten seconds: below that exact totals are worth
    more than the time.
    """

    def __init__(self, bpf: _native.Bpf, share: float) -> None:
        self._bpf = bpf
        self._slow = Allowance(share, 1.0)
        self._cheap = Allowance(share * 10, 10.0)
        self._near: dict[int, dict[int, Account]] = {}
        """By site, then by party as the kernel numbers it."""
        self._within_since_s: dict[int, float] = {}

    def charge(
        self, sites: Mapping[int, Site], hits: Mapping[int, int], elapsed_s: float
    ) -> list[Over]:
        """Add what sites cost in an interval. Returns who went over the budget by it."""
        now_s = time.monotonic()
        self._end_pauses(now_s)
        for index, site in sites.items():
            allowed = self._allowance(site)
            self._owe(site, hits.get(index, 0) * site.each_ns, allowed, elapsed_s)
            if index not in self._near and site.excess_ns > NEAR * allowed.burst_ns:
                self._count_by_party(index)
        over = []
        if self._near:
            for party, index, count, pid in self._bpf.entries("party_hits"):
                if index not in self._near or index not in sites:
                    continue
                site = sites[index]
                account = self._near[index].setdefault(party, Account(pid, site.pause_s))
                if self._charge_party(account, site, count, pid, elapsed_s):
                    over.append(self._pause(account, party, site, now_s))
            self._drop_within_budget(sites, now_s)
        return over

    def paused(self, index: int) -> list[int]:
        """The parties whose calls of a site are left out now, as procfs.party_of has them."""
        accounts = self._near.get(index, {}).items()
        return [_party_of(number, it.pid) for number, it in accounts if it.paused_until_s]

    def pause_s(self, index: int) -> float:
        """For how long calls of a site are left out."""
        return max((it.pause_s for it in self._near.get(index, {}).values()), default=PAUSE_S)

    def move(self, old: int, new: int) -> None:
        """A site has another number from now on."""
        if old not in self._near:
            return
        self._count_by_party(new)
        for party, account in self._near[old].items():
            self._near[new][party] = replace(account, hits=0)
            if account.paused_until_s:
                self._leave_out(party, new)

    def forget(self, index: int) -> None:
        """A site is no more."""
        accounts = self._near.pop(index, None)
        self._within_since_s.pop(index, None)
        if accounts is None:
            return
        self._bpf.set_array("near_budget", index, _OFF)
        for party in accounts:
            self._delete("paused_parties", party, index)
            self._delete("party_hits", party, index)

    def _allowance(self, site: Site) -> Allowance:
        return self._cheap if site.is_cheap else self._slow

    @staticmethod
    def _owe(of: Site | Account, cost_ns: float, allowed: Allowance, elapsed_s: float) -> None:
        """No more than twice what may be owed: an excess ends some time after the calls."""
        excess_ns = of.excess_ns + cost_ns - allowed.share * elapsed_s * 1e9
        of.excess_ns = min(max(0.0, excess_ns), 2 * allowed.burst_ns)

    def _charge_party(
        self, account: Account, site: Site, count: int, pid: int, elapsed_s: float
    ) -> bool:
        """Whether it is over the budget now, and was not before."""
        # The kernel forgets who made no calls for long, and begins to count again.
        new = count - account.hits if count >= account.hits else count
        account.hits, account.pid = count, pid
        account.rate = new / max(elapsed_s, 1e-9)
        if account.paused_until_s:
            return False
        allowed = self._allowance(site)
        self._owe(account, new * site.each_ns, allowed, elapsed_s)
        return account.excess_ns > allowed.burst_ns

    def _count_by_party(self, index: int) -> None:
        self._near[index] = {}
        self._bpf.set_array("near_budget", index, _ON)

    def _pause(self, account: Account, number: int, site: Site, now_s: float) -> Over:
        account.pause_s = min(2 * account.pause_s, MAX_PAUSE_S)
        account.paused_until_s = now_s + account.pause_s
        account.excess_ns = 0.0
        self._leave_out(number, site.index)
        return Over(site, _party_of(number, account.pid), account.rate, account.pause_s)

    def _leave_out(self, number: int, index: int) -> None:
        with suppress(OSError):  # there is no room for more: it goes on being counted
            self._bpf.set_hash("paused_parties", _KEY.pack(number, index, 0), bytes(8))

    def _delete(self, entries: str, number: int, index: int) -> None:
        with suppress(OSError):  # it is not there
            self._bpf.delete_hash(entries, _KEY.pack(number, index, 0))

    def _end_pauses(self, now_s: float) -> None:
        for index, accounts in self._near.items():
            for party, account in accounts.items():
                if account.paused_until_s and now_s >= account.paused_until_s:
                    account.paused_until_s = 0.0
                    self._delete("paused_parties", party, index)

    def _drop_within_budget(self, sites: Mapping[int, Site], now_s: float) -> None:
        for index in list(self._near):
            site = sites.get(index)
            is_busy = site is not None and (
                site.excess_ns > 0
                or any(it.excess_ns > 0 or it.paused_until_s for it in self._near[index].values())
            )
            if is_busy:
                self._within_since_s.pop(index, None)
            elif now_s - self._within_since_s.setdefault(index, now_s) >= WITHIN_S:
                self.forget(index)
                if site is not None:
                    site.pause_s = PAUSE_S / 2


def _party_of(number: int, pid: int) -> int:
    """A party as the kernel numbers it (bpf/share.h), one of whose processes is `pid`."""
    return number if number < _MAX_USERS else procfs.party_of(pid)
