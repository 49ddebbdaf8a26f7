# SPDX-License-Identifier: Apache-2.0
"""Who else had the CPUs while chosen processes were recorded: by the kernel's counters of every
process, read once at the begin and once at the end.

Processes of the user whose processes are recorded are named, by what they run, without arguments;
those that run the same are one group.
Of other users only the class is known to a reader: root, system accounts, other users.
"""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Final

from sonde import procfs
from sonde.model.process import KTHREADD_PID
from sonde.model.rows import EventRow

EVENT: Final = "other_on_cpu"
"""Name of the rows of `event`, of kind process."""
NAMED: Final = 5
"""Programs of the same user that are named, the busiest ones; processes of one are one group."""
LOOKED_AT: Final = 256
"""Processes whose owner is looked up, the busiest ones."""
MAX_PROCESSES: Final = 20_000
"""On a machine with more of them nothing is counted: a look would take a second."""
LEAST_NS: Final = 50_000_000
"""Of a process that used less, five ticks of the kernel's counters, nobody asks whose it is."""
RECORDER: Final = "this recorder"
MOST_OF_NAME: Final = 100
"""Characters of what a process runs."""
_SYSTEM_UIDS_END: Final = 1000
"""Below it user ids are of system accounts, on distributions with systemd."""

_Look = Mapping[int, procfs.Stat]


class OtherProcesses:
    """What processes outside a recording use of the CPUs, from `begin` on."""

    def __init__(self, pids: Collection[int]) -> None:
        """`pids`: the processes that are recorded, with all that descend from them."""
        self._pids = pids
        self._before: _Look | None = None
        self._uids: set[int] = set()

    def begin(self) -> None:
        """Count from here on."""
        self._before = _look()
        self._uids = {uids[1] for pid in self._pids if (uids := procfs.user_ids(pid))}

    def rows(self, now_ns: int) -> list[EventRow]:
        """Who used the CPUs since the begin: rows of `event`, the most first. `value` is CPU time
        in ns, `text` who used it; `pid` is 0 where that is a class of users."""
        now = _look() if self._before is not None else None
        if now is None or self._before is None:
            return []
        used = _used(self._before, now, set(self._pids))
        busiest = heapq.nlargest(LOOKED_AT, used.items(), key=lambda item: sum(item[1]))
        groups: dict[tuple[str, bool], list[int]] = defaultdict(list)
        classes: dict[str, int] = defaultdict(int)
        same_user: list[int] = []
        for pid, times in busiest:
            ns, stat = sum(times), now[pid]
            if ns < LEAST_NS:
                break
            uids = procfs.user_ids(pid)
            is_kernel = KTHREADD_PID in (pid, stat.ppid)
            if os.getpid() in _line(pid, now):
                classes[RECORDER] += ns
            elif uids and uids[1] in self._uids and not is_kernel:
                same_user.append(pid)
            else:
                classes[_class_of(uids, is_kernel)] += ns
        for pid, name in zip(same_user, procfs.commands_of(same_user), strict=True):
            own_ns, children_ns = used[pid]
            groups[(name or now[pid].comm)[:MOST_OF_NAME], children_ns > own_ns].append(pid)
        sums = {key: sum(sum(used[pid]) for pid in pids) for key, pids in groups.items()}
        ranked = sorted(sums, key=lambda key: -sums[key])
        named = []
        for key in ranked[:NAMED]:
            pids = groups[key]
            pid, start_ns = (pids[0], now[pids[0]].start_ns) if len(pids) == 1 else (0, 0)
            text = _in_words(*key, pids)
            named.append(EventRow(now_ns, "process", EVENT, pid, start_ns, float(sums[key]), text))
        if left := sum(len(groups[key]) for key in ranked[NAMED:]):
            more = f"{left:,} more processes of the same user"
            classes[more] += sum(sums[key] for key in ranked[NAMED:])
        counted_ns = sum(row.value for row in named) + sum(classes.values())
        if left_ns := sum(map(sum, used.values())) - int(counted_ns):
            classes[_class_of((), False)] += left_ns
        rest = [
            EventRow(now_ns, "process", EVENT, 0, 0, float(ns), text)
            for text, ns in classes.items()
        ]
        return sorted([*named, *rest], key=lambda row: -row.value)


def _look() -> _Look | None:
    there = procfs.pids()
    if len(there) > MAX_PROCESSES:
        return None
    stats = zip(there, procfs.read_stats(there), strict=True)
    return {pid: stat for pid, stat in stats if stat is not None}


def _used(before: _Look, now: _Look, left_out: Set[int]) -> dict[int, tuple[int, int]]:
    """By process that is still there: CPU time since then, its own and that of children that it
    has waited for since, in ns; without those that descend from `left_out`."""
    ended: dict[int, int] = defaultdict(int)
    """By process: what children that have ended since had used before."""
    for pid, stat in before.items():
        if _same(now.get(pid), stat):
            continue
        parent = stat.ppid
        for _ in range(procfs.MAX_PARENTS):
            if parent in now or parent not in before:
                break
            parent = before[parent].ppid
        ended[parent] += stat.cpu_ns + stat.children_ns
    found = {}
    for pid, stat in now.items():
        if any(one in left_out for one in _line(pid, now)):
            continue
        first = before.get(pid)
        known = first if _same(first, stat) else None
        own_ns = stat.cpu_ns - (known.cpu_ns if known else 0)
        children_ns = stat.children_ns - (known.children_ns if known else 0) - ended[pid]
        found[pid] = max(0, own_ns), max(0, children_ns)
    return found


def _same(one: procfs.Stat | None, other: procfs.Stat) -> bool:
    return one is not None and one.start_ns == other.start_ns


def _line(pid: int, look: _Look) -> Iterator[int]:
    """A process, its parent, and so on."""
    for _ in range(procfs.MAX_PARENTS):
        yield pid
        if pid not in look or look[pid].ppid < 1:
            return
        pid = look[pid].ppid


def _in_words(name: str, starts: bool, pids: Sequence[int]) -> str:
    """'train.py (31)', 'make (7) and what it started', 'pytest (20 processes)'."""
    if len(pids) > 1:
        return f"{name} ({len(pids):,} processes){' and what they started' * starts}"
    return f"{name} ({pids[0]}){' and what it started' * starts}"


def _class_of(uids: tuple[int, ...], is_kernel: bool) -> str:
    """Whose processes these are, for people."""
    if is_kernel:
        return "threads of the kernel"
    if not uids:
        return "other processes"
    if uids[1] == 0:
        return "processes of root"
    system = uids[1] < _SYSTEM_UIDS_END
    return "processes of system accounts" if system else "processes of other users"
