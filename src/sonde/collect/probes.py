# SPDX-License-Identifier: Apache-2.0
"""Probes on the functions of files: where they go, what they may cost, when they come off."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sonde import _native, procfs
from sonde.apis import Api, Call
from sonde.collect.entry_points import entry_points
from sonde.collect.libraries import FileKey
from sonde.collect.probe_removal import Removal

MAX_SITES = 4096
"""Room in the map `sites` of bpf/device_calls.bpf.c."""

COST_NS = {"emulated": 2_000, "nop": 14_000, "single-step": 14_000, "unknown": 4_000}
"""Of one call, entry and return, by the instruction the entry's probe replaces; measured in
docs/design/device_calls.md. A nop is single-stepped before Linux 6.18: taken at its dearest."""

KEPT_ON_S = 10.0
"""How long after an attempt to take probes off the next one comes, where somebody keeps the kernel
waiting."""
INODE = 2
"""Of a file's key."""

SITES_OF_A_CALL = 16
"""Functions of a file that are probed for one call: its names and versions. A file may define as
many as it likes."""
CHOOSE_CPU_S = 1.0
"""Of one file, to look at its functions: a GPU's driver takes a tenth of it."""

CHEAP = frozenset({"emulated", "unknown"})


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a site may cost: a share of one core, and how long it may take it in advance."""

    share: float
    burst_s: float


@dataclass(slots=True)
class Site:
    """A probed function of a file."""

    index: int
    call: Call
    offset: int
    """In the file, of the probed instruction."""
    cost_class: str
    debt_ns: float = 0.0
    """Cost so far, less what was allowed meanwhile."""


@dataclass(slots=True)
class ProbedFile:
    """A file with probes on it: a link for its cheap sites, one for its costly ones, and the same
    for those whose return is not probed. To take a link off takes the kernel a tenth of a second,
    so there are few."""

    name: str
    fd: int
    """Kept open: the way to this very file, whatever becomes of its paths."""
    links: dict[int, list[Site]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where the kernel finds it."""
        return f"/proc/self/fd/{self.fd}"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to tell about probes: a row of `event` of kind probe."""

    name: str
    value: float
    text: str


class PutOff(Exception):  # noqa: N818 (nothing is wrong)
    """A file cannot have its probes now; `holder` is why."""

    def __init__(self, holder: procfs.Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


class Probes:
    """All probes of this agent, a file at a time.

    `budget`: share of a core that one site may cost. A site that is single-stepped has a second of
    it in advance; a cheap one ten times the share, over ten seconds: below that exact totals are
    worth more than the time. What exceeds it is taken off and told.
    `locks`: who is asked before probes are placed or removed.
    """

    def __init__(
        self,
        bpf: _native.Bpf,
        apis: Iterable[Api],
        launches: bool,
        budget: float,
        locks: procfs.MapLocks | None = None,
    ) -> None:
        self._bpf = bpf
        self._locks = locks or procfs.MapLocks()
        self._apis = tuple(apis)
        self._calls = {
            (api.name, call.function): call
            for api in self._apis
            for call in api.calls
            if launches or call.op != "launch"
        }
        seen = [name for name, call in self._calls.items() if call.calls_back]
        self._at_entry = {name: number for number, name in enumerate(seen, 1)}
        """Functions whose return is not probed, with a number."""
        self._symbols = {symbol: call for call in self._calls.values() for symbol in call.symbols}
        self._slow = Allowance(budget, 1.0)
        self._cheap = Allowance(budget * 10, 10.0)
        self._files: dict[FileKey, ProbedFile] = {}
        self._free = deque(range(MAX_SITES))
        """Used in turn: a call that began before its site came off may still name it."""
        self._on: set[int] = set()
        self._refused: set[tuple[FileKey, int]] = set()
        self.sites: dict[int, Site] = {}
        """By index; those taken off stay until the index is used again."""
        self.notices: list[Notice] = []
        self._kept_on: dict[FileKey, float] = {}
        """Files whose sites over the budget could not be taken off, until when (monotonic s) it is
        not tried again."""

    @property
    def files(self) -> Mapping[FileKey, ProbedFile]:
        """Files with probes on them."""
        return self._files

    def examine(self, fd: int, key: FileKey, name: str, trusted: bool = False) -> bool:
        """Probe whatever an open file defines; True, and the descriptor kept, where that is any
        call. `trusted`: the system's own, it may be loaded and asked. Raises OSError where the file
        cannot be read, PutOff where somebody would keep the kernel waiting.
        """
        file = ProbedFile(name, fd)
        found = _native.find_functions(file.path, list(self._symbols))
        places = _first_of_each(
            [(self._symbols[it.name], it.offset, it.size) for it in found], SITES_OF_A_CALL
        )
        if len(places) < len(found):
            left_out = len(found) - len(places)
            self.tell(
                "probe_refused", left_out, f"{left_out} functions of {name}: of the same name"
            )
        if found and trusted:
            places += self._handed_out(file)
        if not places:
            return False
        if holder := self._locks.holder(key[INODE]):
            raise PutOff(holder)
        sites = self._choose(file, key, places)
        if not sites:
            return False
        self._files[key] = file
        for calls_back in (False, True):
            alike = [site for site in sites if site.call.calls_back == calls_back]
            self._attach(file, [site for site in alike if site.cost_class in CHEAP])
            self._attach(file, [site for site in alike if site.cost_class not in CHEAP])
        count = sum(len(group) for group in file.links.values())
        self.tell("probes_attached", count, f"{count} calls of {name}")
        return True

    def _handed_out(self, file: ProbedFile) -> list[tuple[Call, int, int]]:
        """(call, offset, size unknown) of functions that the library hands out by name."""
        places = []
        for api in self._apis:
            if api.hands_out and api.is_library(file.name):
                wanted = {name: call for (of, name), call in self._calls.items() if of == api.name}
                places += [
                    (wanted[name], offset, 0) for name, offset in entry_points(file.fd, wanted)
                ]
        return places

    def _choose(
        self, file: ProbedFile, key: FileKey, places: Sequence[tuple[Call, int, int]]
    ) -> list[Site]:
        """A site for each function: several symbols may name one. None for those that only hand on
        to another library: JAX comes with such stubs of whole APIs, in 20 files."""
        name = file.name
        sites: dict[int, Site] = {}
        passed = too_many = too_late = 0
        until_s = time.thread_time() + CHOOSE_CPU_S
        libraries = {api.name for api in self._apis if api.is_library(name)}
        for call, start, size in places:
            if time.thread_time() > until_s:
                too_late += 1
                continue
            if call.api not in libraries and _native.is_forwarder(file.path, start):
                passed += 1  # seen where it leads to, and only there
                continue
            offset, cost_class, text = _native.probe_site(file.path, start, size)
            if offset in sites or (key, offset) in self._refused:
                continue
            if not self._free:
                too_many += 1
                continue
            if cost_class not in CHEAP:
                each = COST_NS[cost_class] / 1000
                self.tell(
                    "probe_slow", each, f"{call.function} of {name}: {each:.0f} µs a call ({text})"
                )
            sites[offset] = self._new_site(call, offset, cost_class)
        for count, why in ((too_many, "too many probes"), (too_late, "they take too long to read")):
            if count:
                self.tell("probe_refused", count, f"{count} functions of {name}: {why}")
        if passed:
            self.tell("probes_spared", passed, f"{passed} calls of {name} lead to other libraries")
        return list(sites.values())

    def _attach(self, file: ProbedFile, sites: list[Site]) -> None:
        """All at once where the kernel can (6.6), else one by one, leaving out what it refuses.
        All of them have their returns probed, or none."""
        if not sites:
            return
        ends = not sites[0].call.calls_back
        places = [(site.offset, site.index) for site in sites]
        try:
            link = self._bpf.attach_uprobes(
                file.path,
                places,
                "on_call_entry_multi",
                "on_call_return_multi" if ends else None,
                True,
            )
            file.links[link] = sites
            return
        except OSError:
            pass
        for site, place in zip(sites, places, strict=True):
            try:
                link = self._bpf.attach_uprobes(
                    file.path, [place], "on_call_entry", "on_call_return" if ends else None, False
                )
                file.links[link] = [site]
            except OSError as error:
                self._on.discard(site.index)
                self._free.append(site.index)
                self.tell(
                    "probe_refused", 1, f"{site.call.function} of {file.name}: {error.strerror}"
                )

    def charge(self, hits: Mapping[int, int], elapsed_s: float) -> None:
        """Add what sites cost in an interval; take off those whose allowance is used up."""
        for key, file in self._files.items():
            for site in [site for group in file.links.values() for site in group]:
                cheap = site.cost_class in CHEAP
                allowed = self._cheap if cheap else self._slow
                count, each_ns = hits.get(site.index, 0), COST_NS[site.cost_class]
                cost_ns = count * each_ns - allowed.share * elapsed_s * 1e9
                site.debt_ns = max(0.0, site.debt_ns + cost_ns)
                if site.debt_ns > allowed.share * allowed.burst_s * 1e9:
                    if not self._may_come_off(key):
                        break
                    self.take_off(key, site)
                    rate = count / max(elapsed_s, 1e-9)
                    self.tell(
                        "probe_taken_off",
                        rate,
                        f"{site.call.function} of {file.name}: {rate:,.0f} calls/s at "
                        f"{each_ns / 1000:.0f} µs are over the budget; not counted from here on",
                    )

    def _may_come_off(self, key: FileKey) -> bool:
        """Whether nobody keeps the kernel waiting; said where somebody does."""
        now_s = time.monotonic()
        if now_s < self._kept_on.get(key, 0.0):
            return False
        holder = self._locks.holder(key[INODE])
        if holder is None:
            self._kept_on.pop(key, None)
            return True
        self._kept_on[key] = now_s + KEPT_ON_S
        self.tell("probes_kept_on", 1, f"{self._files[key].name}: {holder}")
        return False

    def take_off(self, key: FileKey, site: Site) -> None:
        """Take one site off a file for good. Others that share its link are attached anew, first
        the new, then off with the old: the kernel side counts a hit of both once."""
        file = self._files[key]
        self._refused.add((key, site.offset))
        for link, group in list(file.links.items()):
            if site in group:
                rest = [other for other in group if other is not site]
                if len(self._free) < len(rest):
                    self._detach(file, link)  # a gap in what is counted, for want of numbers
                self._attach(
                    file,
                    [self._new_site(o.call, o.offset, o.cost_class, o.debt_ns) for o in rest],
                )
                if link in file.links:
                    self._detach(file, link)
                return

    def is_on(self, index: int) -> bool:
        """Whether the site of this number has its probes."""
        return index in self._on

    def drop(self, key: FileKey) -> bool:
        """Take all probes off a file; False where they have to stay for now."""
        if not self._may_come_off(key):
            return False
        file = self._files.pop(key)
        self._detach(file, *file.links)
        os.close(file.fd)
        self.tell("probes_detached", 1, f"{file.name}: no process maps it any more")
        return True

    def close(self) -> list[str]:
        """Take all probes off; what has to be said of those that stay on for a while."""
        left = Removal(self._bpf, self._locks)
        for key, file in self._files.items():
            left.add(key[INODE], file.name, list(file.links))
        said = left.finish()
        for file in self._files.values():
            os.close(file.fd)
        self._files = {}
        return said

    def _new_site(self, call: Call, offset: int, cost_class: str, debt_ns: float = 0.0) -> Site:
        site = Site(self._free.popleft(), call, offset, cost_class, debt_ns)
        number = self._at_entry.get((call.api, call.function), 0)
        self._bpf.set_array("sites", site.index, call.reading.packed(number))
        self.sites[site.index] = site
        self._on.add(site.index)
        return site

    def _detach(self, file: ProbedFile, *links: int) -> None:
        self._bpf.detach_all(links)
        numbers = [site.index for link in links for site in file.links.pop(link)]
        self._on.difference_update(numbers)
        self._free.extend(numbers)

    def tell(self, name: str, value: float, text: str) -> None:
        """Note something for the next drain."""
        self.notices.append(Notice(name, value, text))


def _first_of_each(
    places: Sequence[tuple[Call, int, int]], most: int
) -> list[tuple[Call, int, int]]:
    """The first `most` places of each call, in their order."""
    seen: Counter[str] = Counter()
    kept = []
    for place in places:
        name = place[0].function
        seen[name] += 1
        if seen[name] <= most:
            kept.append(place)
    return kept
