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
docs/design/device_calls.md. A nop is single-stepped before Linux 6.18: it counts as if it were."""
CHEAP: Final = frozenset({"emulated", "unknown"})
NEAR: Final = 0.25
"""Of the excess that a site may have; from there on its hits are counted by party, too."""
PAUSE_S: Final = 60.0
MAX_PAUSE_S: Final = 960.0
"""How long the calls of a party are left out: at first, and at most; twice as long each time."""
WITHIN_S: Final = 300.0
"""After this long without an excess, hits of a site are no longer counted by party."""

_KEY: Final = struct.Struct("=QII")
_ON: Final = struct.pack("=I", 1)
_OFF: Final = struct.pack("=I", 0)
_MAX_USERS: Final = 1 << 32
"""A party's number in the kernel is a user id below this, or a container's, which is larger."""


@dataclass(frozen=True, slots=True)
class SiteAllowance:
    """What a site may cost: a share of one core, and for `burst_s` more than that: up to the share
    of that time at once."""

    share: float
    burst_s: float

    @property
    def burst_ns(self) -> float:
        """The largest excess that is within the budget."""
        return self.share * self.burst_s * 1e9


@dataclass(slots=True)
class Site:
    """A probed function of a file."""

    index: int
    """Of its entry in the map `sites`."""
    call: Call
    offset: int
    """In the file, of the probed instruction."""
    cost_class: str
    excess_ns: float = 0.0
    """Cost so far, of everybody, less what was allowed meanwhile."""
    pause_s: float = PAUSE_S / 2
    """How long it was taken off last."""

    @property
    def is_cheap(self) -> bool:
        """Whether the kernel emulates the probed instruction, or may (unknown)."""
        return self.cost_class in CHEAP

    @property
    def each_ns(self) -> int:
        """Cost of one call."""
        return COST_NS[self.cost_class]


@dataclass(slots=True)
class Account:
    """What the calls of one party at one site cost."""

    pid: int
    """A process of the party."""
    pause_s: float
    """How long its calls were left out last."""
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

    `share`: of a core that one site may cost. A costly site may take a second's share at once; a
    cheap one has ten times the share, and may take ten seconds of that at once: below that exact
    totals are worth more than the time.
    """

    def __init__(self, bpf: _native.Bpf, share: float) -> None:
        self._bpf = bpf
        self._slow = SiteAllowance(share, 1.0)
        self._cheap = SiteAllowance(share * 10, 10.0)
        self._near: dict[int, dict[int, Account]] = {}
        """Accounts at sites near their budget: by site, then by party as the kernel numbers it."""
        self._within_since_s: dict[int, float] = {}
        """Since when (monotonic s) such a site has had no excess."""

    def charge(
        self, sites: Mapping[int, Site], hits: Mapping[int, int], elapsed_s: float
    ) -> list[Over]:
        """Add what sites cost in an interval. Returns who went over the budget by it."""
        now_s = time.monotonic()
        self._end_pauses(now_s)
        for index, site in sites.items():
            allowed = self._allowance(site)
            self._add_cost(site, hits.get(index, 0) * site.each_ns, allowed, elapsed_s)
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
        """Drop the accounts of a site; its hits are no longer counted by party."""
        accounts = self._near.pop(index, None)
        self._within_since_s.pop(index, None)
        if accounts is None:
            return
        self._bpf.set_array("near_budget", index, _OFF)
        for party in accounts:
            self._delete("paused_parties", party, index)
            self._delete("party_hits", party, index)

    def _allowance(self, site: Site) -> SiteAllowance:
        return self._cheap if site.is_cheap else self._slow

    @staticmethod
    def _add_cost(
        to: Site | Account, cost_ns: float, allowed: SiteAllowance, elapsed_s: float
    ) -> None:
        """Change an excess; it gets no larger than twice the burst, so that it is gone some time
        after the calls end."""
        excess_ns = to.excess_ns + cost_ns - allowed.share * elapsed_s * 1e9
        to.excess_ns = min(max(0.0, excess_ns), 2 * allowed.burst_ns)

    def _charge_party(
        self, account: Account, site: Site, count: int, pid: int, elapsed_s: float
    ) -> bool:
        """Whether it is over the budget now, and was not before."""
        # The kernel's map drops parties without calls for long (LRU); they begin at 0 again.
        new = count - account.hits if count >= account.hits else count
        account.hits, account.pid = count, pid
        account.rate = new / max(elapsed_s, 1e-9)
        if account.paused_until_s:
            return False
        allowed = self._allowance(site)
        self._add_cost(account, new * site.each_ns, allowed, elapsed_s)
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
    """A party as the kernel numbers it (bpf/party.h), one of whose processes is `pid`."""
    return number if number < _MAX_USERS else procfs.party_of(pid)
