# SPDX-License-Identifier: Apache-2.0
"""Probes on the functions of files: where they go, what they may cost, when they come off."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sonde import _native, procfs
from sonde.apis import Api
from sonde.collect.mapped_files import FileKey
from sonde.collect.probe_budget import Budget, Over, Site
from sonde.collect.probe_removal import Removal
from sonde.collect.wanted_functions import Place, WantedFunctions, first_of_each

MAX_SITES = 4096
"""Room in the map `sites` of bpf/device_calls.bpf.c."""

KEPT_ON_S = 10.0
"""How long after an attempt to take probes off the next one comes, where somebody keeps the kernel
waiting."""
INODE = 2
"""Of a file's key."""

CHOOSE_CPU_S = 1.0
"""CPU time to look at the functions of one file: a GPU's driver takes a tenth of it."""
TAKE_OFF_EVERY_S = 10.0
"""At most this often sites over the budget are taken off, as the kernel needs a tenth of a second
for it; until then their calls are only left out."""
MAX_USERS = 2_048
"""Where more processes map a file, it counts as mapped by several parties."""


@dataclass(slots=True)
class TakenOff:
    """A function without its probe, as the calls of one party cost too much and no other maps the
    file."""

    site: Site
    party: int
    until_s: float
    """When it is tried again (monotonic)."""


@dataclass(slots=True)
class ProbedFile:
    """A file with probes on it: a link for its cheap sites, one for its costly ones, and the same
    for those whose return is not probed. There are few links because the kernel needs a tenth of a
    second to remove one."""

    name: str
    fd: int
    """Kept open: it leads to this very file, whatever happens to its paths."""
    links: dict[int, list[Site]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where the kernel finds it."""
        return f"/proc/self/fd/{self.fd}"


@dataclass(frozen=True, slots=True)
class Notice:
    """A message about probes: a row of `event` of kind probe."""

    name: str
    value: float
    text: str


class PutOff(Exception):  # noqa: N818 (nothing is wrong)
    """A file cannot have its probes now; `holder` is why."""

    def __init__(self, holder: procfs.Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


class TooManyPlaces(Exception):  # noqa: N818 (nothing is wrong)
    """A file has more functions to probe than it may have."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} functions")
        self.count = count


class Probes:
    """All probes of this agent, a file at a time.

    `launches`: whether calls that launch kernels are probed, too. `budget`: share of a core that
    the calls of one site by one user or container may cost; beyond it they are left out for a
    while, and the site is taken off where nobody else maps the file. `locks`: is asked before
    probes are placed or removed.
    """

    def __init__(
        self,
        bpf: _native.Bpf,
        apis: Iterable[Api],
        launches: bool,
        budget: float,
        locks: procfs.MapLocks | None = None,
        *,
        has_multi: bool = False,
    ) -> None:
        """`has_multi`: only programs for links with many probes are loaded."""
        self._bpf = bpf
        self._has_multi = has_multi
        self._locks = locks or procfs.MapLocks()
        self._functions = WantedFunctions(apis, launches)
        self._budget = Budget(bpf, budget)
        self._took_off_s = -TAKE_OFF_EVERY_S
        self._taken_off: dict[FileKey, dict[int, TakenOff]] = {}
        """By file, then by offset."""
        self.users_of: Callable[[FileKey], Collection[int]] = lambda key: ()
        """The processes that map a file."""
        self.wanted = self._functions.digest
        """What is looked for in files."""
        self.found_none = False
        """Whether the file that was examined last defines nothing of that."""
        self._files: dict[FileKey, ProbedFile] = {}
        self._free = deque(range(MAX_SITES))
        """Free indices of sites. The one that was free longest is taken: a call that began before
        its site came off may still name it."""
        self._on: set[int] = set()
        """Indices of sites that have their probes."""
        self.sites: dict[int, Site] = {}
        """By index; those taken off stay until the index is used again."""
        self.notices: list[Notice] = []
        self.in_turns: set[tuple[FileKey, int]] = set()
        """Places (file, offset) that are on for a part of the time (`probe_duty`)."""
        self._kept_on: dict[FileKey, float] = {}
        """Files whose sites over the budget could not be taken off, until when (monotonic s) it is
        not tried again."""

    @property
    def files(self) -> Mapping[FileKey, ProbedFile]:
        """Files with probes on them."""
        return self._files

    def places(self, key: FileKey) -> int:
        """How many probes a file has."""
        return sum(len(sites) for sites in self._files[key].links.values())

    def examine(
        self, fd: int, key: FileKey, name: str, trusted: bool = False, max_places: int = MAX_SITES
    ) -> bool:
        """Probe the functions of device APIs that an open file defines; True, and the descriptor
        kept, where there are any. `trusted`: nobody but root can change the file, so it may be
        loaded (`entry_points`). Raises OSError where the file cannot be read, PutOff where a
        process would keep the kernel waiting, TooManyPlaces where there are more than `max_places`.
        """
        file = ProbedFile(name, fd)
        self.found_none = False
        found = self._functions.defined(file.path)
        self.found_none = not found
        places = first_of_each(found)
        if len(places) < len(found):
            left_out = len(found) - len(places)
            self.report(
                "probe_refused", left_out, f"{left_out} functions of {name}: of the same name"
            )
        if found and trusted:
            places += self._functions.handed_out(file.fd, file.name)
        if not places:
            return False
        if (count := len({it.offset for it in places})) > max_places:
            raise TooManyPlaces(count)
        if holder := self._locks.holder(key[INODE]):
            raise PutOff(holder)
        sites = self._choose(file, key, places)
        if not sites:
            return False
        self._files[key] = file
        self._attach_all(file, sites)
        count = self.places(key)
        self.report("probes_attached", count, f"{count} calls of {name}")
        return True

    def _choose(self, file: ProbedFile, key: FileKey, places: Sequence[Place]) -> list[Site]:
        """A site for each function: several symbols may name one. Forwarders get none, which only
        jump to another library: JAX comes with such stubs of whole APIs, in 20 files."""
        name = file.name
        sites: dict[int, Site] = {}
        forwarders = too_many = 0
        libraries = self._functions.libraries(name)
        asked = [(start, size, call.api not in libraries) for call, start, size in places]
        found = _native.probe_sites(file.path, asked, CHOOSE_CPU_S)
        too_late = len(places) - len(found)
        for (call, _, _), (offset, cost_class, text, is_forwarder) in zip(
            places, found, strict=False
        ):
            if is_forwarder:
                forwarders += 1  # the call is seen in the library that it leads to
                continue
            if offset in sites:
                continue
            if not self._free:
                too_many += 1
                continue
            site = sites[offset] = self._new_site(Site(0, call, offset, cost_class))
            if not site.is_cheap:
                each = site.each_ns / 1000
                self.report(
                    "probe_slow", each, f"{call.function} of {name}: {each:.0f} µs a call ({text})"
                )
        for count, why in ((too_many, "too many probes"), (too_late, "they take too long to read")):
            if count:
                self.report("probe_refused", count, f"{count} functions of {name}: {why}")
        if forwarders:
            self.report(
                "probes_spared", forwarders, f"{forwarders} calls of {name} lead to other libraries"
            )
        return list(sites.values())

    def _attach_all(self, file: ProbedFile, sites: Sequence[Site]) -> None:
        for calls_back in (False, True):
            alike = [site for site in sites if site.call.calls_back == calls_back]
            self._attach(file, [site for site in alike if site.is_cheap])
            self._attach(file, [site for site in alike if not site.is_cheap])

    def _attach(self, file: ProbedFile, sites: list[Site]) -> None:
        """Attach all by one link where the kernel can (6.6), else one by one, leaving out those
        that it refuses. `sites`: all with probed returns, or all without."""
        if not sites:
            return
        has_return = not sites[0].call.calls_back
        places = [(site.offset, site.index) for site in sites]
        try:
            link = self._bpf.attach_uprobes(
                file.path,
                places,
                "on_call_entry_multi",
                "on_call_return_multi" if has_return else None,
                True,
            )
            file.links[link] = sites
            return
        except OSError:
            pass
        kind = "_multi" if self._has_multi else ""
        on_return = f"on_call_return{kind}" if has_return else None
        for site, place in zip(sites, places, strict=True):
            try:
                link = self._bpf.attach_uprobes(
                    file.path, [place], f"on_call_entry{kind}", on_return, self._has_multi
                )
                file.links[link] = [site]
            except OSError as error:
                self._on.discard(site.index)
                self._free.append(site.index)
                self.report(
                    "probe_refused", 1, f"{site.call.function} of {file.name}: {error.strerror}"
                )

    def charge(self, hits: Mapping[int, int], elapsed_s: float) -> None:
        """Add what sites cost in an interval; what exceeds its budget is left out or taken off."""
        where = {
            site.index: (key, site)
            for key, file in self._files.items()
            for on_link in file.links.values()
            for site in on_link
        }
        sites = {index: site for index, (_, site) in where.items()}
        over: dict[FileKey, list[Over]] = {}
        for it in self._budget.charge(sites, hits, elapsed_s):
            over.setdefault(where[it.site.index][0], []).append(it)
        now_s = time.monotonic()
        for key, found in over.items():
            self._report_over(self._files[key].name, found)
        if now_s - self._took_off_s >= TAKE_OFF_EVERY_S:
            self._take_off_lonely(where.values(), now_s)
        for key, taken in list(self._taken_off.items()):
            self._put_back(key, [it for it in taken.values() if now_s >= it.until_s])

    def _report_over(self, name: str, found: Sequence[Over]) -> None:
        """One notice a file: a process may be over the budget in all functions at once."""
        most = max(found, key=lambda it: it.rate)
        text = f"{most.site.call.function} of {name}: {most}; left out for {most.pause_s:.0f} s"
        if len(found) > 1:
            text += f", and {len(found) - 1} more like it"
        self.report("calls_left_out", most.rate, text)

    def _take_off_lonely(self, sites: Iterable[tuple[FileKey, Site]], now_s: float) -> None:
        """Take off sites whose calls are left out, where the party that makes them is the only one
        to map the file: its calls cost nothing then."""
        alone: dict[FileKey, int] = {}
        lonely: dict[FileKey, list[Site]] = {}
        for key, site in sites:
            if (key, site.offset) in self.in_turns:
                continue
            for party in self._budget.paused(site.index):
                if key not in alone:
                    alone[key] = self._only_user(key, party)
                if alone[key] == party != procfs.NOBODY:
                    lonely.setdefault(key, []).append(site)
        for key, found in lonely.items():
            if not self.may_come_off(key):
                continue
            self._took_off_s = now_s
            taken = self._taken_off.setdefault(key, {})
            for site in found:
                site.pause_s = self._budget.pause_s(site.index)
                taken[site.offset] = TakenOff(site, alone[key], now_s + site.pause_s)
            self.take_off(key, *found)
            names = " ".join(sorted({site.call.function for site in found}))
            self.report(
                "probe_taken_off",
                len(found),
                f"{names} of {self._files[key].name}: {procfs.name_of(alone[key])} alone maps it",
            )

    def _only_user(self, key: FileKey, party: int) -> int:
        """`party` where no process of another one maps a file; else NOBODY."""
        users = self.users_of(key)
        if len(users) > MAX_USERS or party == procfs.UNKNOWN_PARTY:
            return procfs.NOBODY
        others = (it for it in map(procfs.party_of, users) if it not in (party, procfs.NOBODY))
        return party if next(others, None) is None else procfs.NOBODY

    def mapped_by(self, key: FileKey, pid: int) -> None:
        """One more process maps a file: what was taken off because of another party comes back."""
        if key in self._taken_off:
            party = procfs.party_of(pid)
            self._put_back(key, [it for it in self._taken_off[key].values() if it.party != party])

    def _put_back(self, key: FileKey, due: Sequence[TakenOff]) -> None:
        if due and self._locks.holder(key[INODE]):
            for it in due:
                it.until_s = time.monotonic() + KEPT_ON_S
            return
        due = due[: len(self._free)]
        if not due:
            return
        sites = [self._new_site(it.site) for it in due]
        for it in due:
            del self._taken_off[key][it.site.offset]
        if not self._taken_off[key]:
            del self._taken_off[key]
        self._attach_all(self._files[key], sites)

    def may_come_off(self, key: FileKey) -> bool:
        """Whether nobody keeps the kernel waiting; reported where somebody does."""
        now_s = time.monotonic()
        if now_s < self._kept_on.get(key, 0.0):
            return False
        holder = self._locks.holder(key[INODE])
        if holder is None:
            self._kept_on.pop(key, None)
            return True
        self._kept_on[key] = now_s + KEPT_ON_S
        self.report("probes_kept_on", 1, f"{self._files[key].name}: {holder}")
        return False

    def take_off(self, key: FileKey, *sites: Site) -> None:
        """Take sites off a file. Others that share a link with them are attached by a new one
        before the old one is removed: the kernel side counts a hit of both once."""
        file = self._files[key]
        gone = {site.index for site in sites}
        old = [link for link, found in file.links.items() if gone & {it.index for it in found}]
        others = [it for link in old for it in file.links[link] if it.index not in gone]
        if len(self._free) < len(others):
            self._detach(file, *old)  # calls are missed until the new link, for want of indices
        renewed = []
        for site in others:
            renewed.append(self._new_site(site, site.excess_ns))
            self._budget.move(site.index, renewed[-1].index)
        self._attach_all(file, renewed)
        self._detach(file, *(link for link in old if link in file.links))

    def take_off_together(self, *groups: Sequence[tuple[FileKey, Site]]) -> float | None:
        """Take sites of several files off, a group after the other. A group shares the kernel's
        grace period where its links have no other sites. Returns when the last group began to come
        off (monotonic s): its calls are not seen from then on, though it takes the kernel longer.
        None, and nothing is done, where a process keeps the kernel waiting."""
        if not all(self.may_come_off(key) for key in {key for it in groups for key, _ in it}):
            return None
        began_s = time.monotonic()
        for group in groups:
            by_file: dict[FileKey, list[Site]] = {}
            for key, site in group:
                by_file.setdefault(key, []).append(site)
            began_s = time.monotonic()
            whole = {key: self._links_of(key, sites) for key, sites in by_file.items()}
            self._bpf.detach_all([link for links in whole.values() for link in links])
            for key, links in whole.items():
                self._forget(self._files[key], *links)
        return began_s

    def _links_of(self, key: FileKey, sites: Sequence[Site]) -> list[int]:
        """The links that have none but sites at these places. Sites on others come off here; they
        may have another index by now (`take_off`)."""
        gone = {site.offset for site in sites}
        links, mixed = [], []
        for link, on_link in self._files[key].links.items():
            if all(site.offset in gone for site in on_link):
                links.append(link)
            else:
                mixed += [site for site in on_link if site.offset in gone]
        if mixed:
            self.take_off(key, *mixed)
        return links

    def put_on(
        self, *groups: Sequence[tuple[FileKey, Site]]
    ) -> tuple[list[tuple[FileKey, Site]], float] | None:
        """Attach sites that were taken off, a group after the other; they have other indices then.
        Also when the first group was on (monotonic s). None where a process keeps the kernel
        waiting, or for want of indices."""
        keys = dict.fromkeys(key for group in groups for key, _ in group)
        if len(self._free) < sum(map(len, groups)) or any(
            self._locks.holder(it[INODE]) for it in keys
        ):
            return None
        renewed: list[tuple[FileKey, Site]] = []
        on_s: list[float] = []
        for group in groups:
            for key in keys:
                sites = [self._new_site(site) for of, site in group if of == key]
                self._attach_all(self._files[key], sites)
                renewed += [(key, site) for site in sites]
            on_s.append(time.monotonic())
        return renewed, on_s[0]

    def is_on(self, index: int) -> bool:
        """Whether the site of this number has its probes."""
        return index in self._on

    def drop(self, keys: Iterable[FileKey]) -> set[FileKey]:
        """Take all probes off files, together: the kernel needs a tenth of a second to remove those
        of one. Returns the files on which they do not have to stay for now."""
        dropped = {key for key in keys if self.may_come_off(key)}
        files = [self._files.pop(key) for key in dropped]
        self._bpf.detach_all([link for file in files for link in file.links])
        for key, file in zip(dropped, files, strict=True):
            self._taken_off.pop(key, None)
            self._forget(file, *file.links)
            os.close(file.fd)
            self.report("probes_detached", 1, f"{file.name}: no process maps it any more")
        return dropped

    def close(self) -> list[str]:
        """Take all probes off; messages about those that stay on for a while."""
        removal = Removal(self._bpf, self._locks)
        for key, file in self._files.items():
            removal.add(key[INODE], file.name, list(file.links))
        messages = removal.finish()
        for file in self._files.values():
            os.close(file.fd)
        self._files = {}
        return messages

    def _new_site(self, like: Site, excess_ns: float = 0.0) -> Site:
        site = replace(like, index=self._free.popleft(), excess_ns=excess_ns)
        call = site.call
        number = self._functions.number_at_entry(call)
        self._bpf.set_array("sites", site.index, call.reading.packed(number))
        self.sites[site.index] = site
        self._on.add(site.index)
        return site

    def _detach(self, file: ProbedFile, *links: int) -> None:
        self._bpf.detach_all(links)
        self._forget(file, *links)

    def _forget(self, file: ProbedFile, *links: int) -> None:
        """These probes of a file are taken off."""
        numbers = [site.index for link in links for site in file.links.pop(link)]
        for number in numbers:
            self._budget.forget(number)
        self._on.difference_update(numbers)
        self._free.extend(numbers)

    def report(self, name: str, value: float, text: str) -> None:
        """Note something for the next drain."""
        self.notices.append(Notice(name, value, text))
