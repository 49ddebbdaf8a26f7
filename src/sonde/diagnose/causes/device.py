# SPDX-License-Identifier: Apache-2.0
"""Causes at a device: others use it, its memory or its link; its memory is full or moves page by
page; the program waits for it too often, or compiles.

Looks like: calls of the device take longer, or steps follow each other more slowly, and the host
lacks nothing. A larger batch looks the same, so each of these needs evidence besides: another
process whose use of that device rose in that very time, memory that is full, bytes over the link
that nobody copied, calls that were not made before.
What to do: see the next step of each.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sonde.diagnose import device_calls
from sonde.diagnose.case import Case
from sonde.diagnose.incident import Candidate, FaultCause, Offender
from sonde.diagnose.moments import DeviceShare, DeviceUse, Moment
from sonde.diagnose.offenders import User
from sonde.diagnose.thread_time import Part

LEAST = 0.05
"""Seconds a second."""
BUSIER, TOGETHER_BUSIER = 0.08, 0.24
"""An offender's share of a device rises by at least this: of one process, of many together."""
DRAM_BUSY, DRAM_ROSE = 0.5, 0.12
"""Memory of a device that moves this part of its most, and this much more than before, is what is
lacking."""
LINK_BYTES = 1e9
"""Bytes a second that a program copies, from which on its link may be what it lacks."""
LINK_FELL = 0.85
"""Part of these that is left."""
LINK_OFFENCE = 0.3
"""An offender copies more by at least this part of them, one process or many together."""
FULL = 0.9
"""Of a device's memory."""
TOOK, TOGETHER_TOOK = 0.03, 0.09
"""Part of a device's memory by which an offender's share rose: of one process, of many together."""
RETRIES = 4.0
"""Calls a second more that take memory, and that give it back."""
MIGRATED_BYTES = 3e8
"""Bytes a second over the link that no call copied."""
SYNCS_ROSE, SYNCS = 1.5, 20.0
"""Times that the host waits for its device, by what it was, and a second."""
SETTLES_NS = 200_000_000
"""What was read this soon after the change is still of both times."""
READ_NS = 1_000_000_000
"""Counters are read this often: what was read sooner after the change is partly of before."""
TOGETHER_NS = 250_000_000
"""What was read of processes within this time is one reading of all of them."""


@dataclass(frozen=True, slots=True)
class _Sides:
    """Means before and after; below 0: not known."""

    before: float
    after: float

    @property
    def rise(self) -> float:
        """0 where either is not known."""
        return self.after - self.before if min(self.before, self.after) >= 0 else 0.0


def contention(case: Case) -> Candidate | None:
    """Another process uses the device."""
    lost = case.lost.parts.get(Part.DEVICE, 0.0)
    offender = _busiest(case)
    if lost < LEAST or offender is None:
        return None
    user, device = offender
    did = f"used {user.more:.0%} of the device more"
    evidence = [
        f"its calls of the device take {lost:.2f} s more of each second",
        case.does(user, did),
    ]
    dram = _device(case, device, "dram_active")
    by_memory = dram.after >= DRAM_BUSY and dram.rise >= DRAM_ROSE
    if by_memory:
        evidence.append(f"the device's memory moves {dram.after:.0%} of its most, {dram.rise:+.0%}")
    who = case.offender_of(user, did, 1.0)
    cause = FaultCause.DRAM_CONTENTION if by_memory else FaultCause.DEVICE_CONTENTION
    step = "Give each of them a device, or a part of one (MIG), or run them in turn."
    share = case.lost.share(Part.DEVICE, Part.STEPS)
    return Candidate(cause, share, tuple(evidence), (), who, step)


def link(case: Case) -> Candidate | None:
    """Another process copies over PCIe."""
    before, after = case.calls
    was, now = device_calls.copied(before), device_calls.copied(after)
    if was < LINK_BYTES or now > LINK_FELL * was or case.lost.parts.get(Part.DEVICE, 0.0) < LEAST:
        return None
    least = LINK_OFFENCE * was
    user = next(iter(case.users(_copied(case.window.before), _copied(case.window.after))), None)
    if user is None or not user.is_enough(least, least):
        return None
    did = f"copied {user.more / 1e9:.1f} GB/s more"
    evidence = (
        f"it copied {now / 1e9:.1f} GB/s between host and device, {was / 1e9:.1f} before",
        case.does(user, did),
    )
    who = case.offender_of(user, did, 1.0)
    share = min(1.0, case.lost.share(Part.DEVICE, Part.STEPS) * 1.05)  # ahead of use of the device
    step = "Place the two on devices behind different links, or copy less."
    return Candidate(FaultCause.PCIE_CONTENTION, share, evidence, (), who, step)


def memory(case: Case) -> Candidate | None:
    """The device's memory is full: what takes some has to give some back first."""
    before, after = case.calls
    more = [
        device_calls.calls(after, frozenset((op,))) - device_calls.calls(before, frozenset((op,)))
        for op in ("alloc", "free")
    ]
    unmapped = device_calls.calls(after, frozenset(("unmap",))) - device_calls.calls(
        before, frozenset(("unmap",))
    )
    if more[0] < RETRIES and more[1] + unmapped < RETRIES:
        return None
    full = [
        (use.memory_used / use.memory_total, use.device)
        for use in _after(case, _devices_of(case))
        if use.memory_total > 0 and use.memory_used >= 0
    ]
    used, device = max(full, default=(0.0, ""))
    if used < FULL or case.lost.parts.get(Part.MEMORY, 0.0) < LEAST / 2:
        return None
    evidence = [
        f"it took device memory {more[0]:.0f} times a second more, and gave some back "
        f"{more[1]:.0f} times",
        f"{used:.0%} of the device's memory is in use",
    ]
    total = max(use.memory_total for use in _after(case, {device}))
    user = next(iter(_users(case, device, "memory_bytes")), None)
    who: Offender | None = None
    if user is not None and user.is_enough(TOOK * total, TOGETHER_TOOK * total):
        took = f"took {user.more / 1e9:.1f} GB"
        who = case.offender_of(user, f"{took} of the device's memory", 1.0, since="")
        evidence.append(case.does(user, f"{took} of it"))
    share = case.lost.share(Part.MEMORY, Part.DEVICE, Part.STEPS)
    step = "Make room on the device, or have the program's allocator keep what it takes."
    return Candidate(FaultCause.DEVICE_MEMORY, share, tuple(evidence), (), who, step)


def migration(case: Case) -> Candidate | None:
    """Pages of managed memory move between host and device."""
    if not _goes_on(case):
        return None
    best = (0.0, 0.0)
    for device in _devices_of(case):
        sides = []
        for moments, late in ((case.window.before, False), (case.window.after, True)):
            uses = _uses(case, moments, device, late=late)
            if late:
                uses = [use for use in uses if use.time_ns > _began_ns(case) + READ_NS]
            moved = [
                _mean(getattr(use, name) for use in uses) for name in ("bytes_in", "bytes_out")
            ]
            there = [case.victim, *_on_device(case, device)]
            by_calls = sum(device_calls.copied(device_calls.rates(moments, pid)) for pid in there)
            sides.append(sum(moved) - by_calls if min(moved) >= 0 else -1.0)
        best = max(best, (sides[1] - max(0.0, sides[0]), sides[1]))
    rise, now = best
    if rise < MIGRATED_BYTES or case.lost.share(Part.DEVICE, Part.STEPS) <= 0:
        return None
    evidence = (
        f"{now / 1e9:.1f} GB/s cross the device's link that no call copied, {rise / 1e9:.1f} more",
    )
    step = "Prefetch managed memory, or keep what the host writes apart from what the device reads."
    share = case.lost.share(Part.DEVICE, Part.STEPS)
    return Candidate(FaultCause.PAGE_MIGRATION, share, evidence, next_step=step)


def synchronization(case: Case) -> Candidate | None:
    """The program waits for its device more often than before."""
    before, after = case.calls
    was, now = device_calls.waits_for_device(before), device_calls.waits_for_device(after)
    if now < SYNCS_ROSE * was or now - was < SYNCS:
        return None
    if case.lost.parts.get(Part.STEPS, 0.0) + case.lost.parts.get(Part.DEVICE, 0.0) < LEAST:
        return None
    evidence = [f"it waits for its device {now:.0f} times a second, {was:.0f} before"]
    evidence += [f"mostly in {text}" for text, _ in case.places("")[:1]]
    step = "Read results of the device less often, and several at once."
    share = 0.95 * case.lost.share(Part.STEPS, Part.DEVICE)
    return Candidate(FaultCause.SYNCHRONIZATION, share, tuple(evidence), next_step=step)


def compilation(case: Case) -> Candidate | None:
    """The program compiles or loads code for its device in its steps."""
    lost = case.lost.parts.get(Part.BUILD, 0.0)
    if lost < LEAST:
        return None
    before, after = case.calls
    more = device_calls.calls(after, device_calls.BUILDS) - device_calls.calls(
        before, device_calls.BUILDS
    )
    evidence = [
        f"building code for its device takes {lost:.2f} s more of each second "
        f"({more:.1f} calls a second more)"
    ]
    evidence += [f"mostly in {text}" for text, _ in case.places("")[:1]]
    step = "Keep what was compiled, and let shapes change less often."
    share = case.lost.share(Part.BUILD, Part.STEPS, Part.DEVICE)
    return Candidate(FaultCause.RECOMPILATION, share, tuple(evidence), next_step=step)


def _goes_on(case: Case) -> bool:
    """Whether it still calls its devices in the last moments."""
    last = (moment.processes.get(case.victim) for moment in case.window.after[-2:])
    return any(it is not None and it.calls for it in last)


def _busiest(case: Case) -> tuple[User, str] | None:
    """Whose use of a device of the victim rose most, and which device that is."""
    found = [
        (user, device)
        for device in sorted(_devices_of(case))
        for user in _users(case, device, "busy")[:1]
        if user.is_enough(BUSIER, TOGETHER_BUSIER)
    ]
    return max(found, key=lambda it: it[0].more, default=None)


def _devices_of(case: Case) -> set[str]:
    """Those that the victim's family uses."""
    return {
        share.device
        for moment in (*case.window.before, *case.window.after)
        for pid, one in moment.processes.items()
        if pid in case.own
        for share in one.devices
    }


def _on_device(case: Case, device: str) -> set[int]:
    """Other processes on a device."""
    return {
        pid
        for moment in (*case.window.before, *case.window.after)
        for pid, one in moment.processes.items()
        if pid not in case.own and any(share.device == device for share in one.devices)
    }


def _users(case: Case, device: str, name: str) -> list[User]:
    """Others by how much more they use of a device: `name` is a field of `DeviceShare`, and has the
    unit. After: in the reading in which they use most together. Before: on average; of those that
    have ended over all readings, as another may have come where one went."""
    began_ns = _began_ns(case)
    earlier: dict[int, dict[int, float]] = defaultdict(dict)
    later: dict[int, dict[int, float]] = defaultdict(dict)
    for pid, share in _shares(case, device):
        value = getattr(share, name)
        is_later = share.time_ns > began_ns + SETTLES_NS
        if value >= 0 and (is_later or share.time_ns <= began_ns):
            reading = (later if is_later else earlier)[share.time_ns // TOGETHER_NS]
            reading[pid] = max(value, reading.get(pid, 0.0))
    if not later:
        return []
    most = max(later.values(), key=lambda reading: sum(reading.values()))
    there: dict[int, list[float]] = defaultdict(list)
    for reading in earlier.values():
        for pid, value in reading.items():
            there[pid].append(value)
    before = {
        pid: sum(values) / (len(values) if pid in case.after else len(earlier))
        for pid, values in there.items()
    }
    return case.users(before, most)


def _shares(case: Case, device: str) -> Iterator[tuple[int, DeviceShare]]:
    """What others use of a device, with their pids."""
    for moment in (*case.window.before, *case.window.after):
        for pid, one in moment.processes.items():
            if pid not in case.own:
                yield from ((pid, it) for it in one.devices if it.device == device)


def _copied(moments: Sequence[Moment]) -> dict[int, float]:
    """Bytes a second between host and device, by pid."""
    pids = {pid for moment in moments for pid, one in moment.processes.items() if one.calls}
    return {pid: device_calls.copied(device_calls.rates(moments, pid)) for pid in pids}


def _device(case: Case, device: str, name: str) -> _Sides:
    """The same of a device."""
    window = case.window
    return _Sides(
        _mean(getattr(it, name) for it in _uses(case, window.before, device, late=False)),
        _mean(
            getattr(it, name) for it in _ripe(case, _uses(case, window.after, device, late=True))
        ),
    )


def is_early(case: Case) -> bool:
    """Whether what the counters of its devices show is still partly of before: a later look shows
    more."""
    uses = _after(case, _devices_of(case))
    counted = any(use.dram_active >= 0 for it in case.window.before for use in it.devices)
    return counted and not any(it.time_ns > _began_ns(case) + READ_NS for it in uses)


def _ripe(case: Case, uses: list[DeviceUse]) -> list[DeviceUse]:
    """Those that are of the time after alone; all of them where there are none yet."""
    return [it for it in uses if it.time_ns > _began_ns(case) + READ_NS] or uses


def _uses(case: Case, moments: Iterable[Moment], device: str, *, late: bool) -> list[DeviceUse]:
    """Records of a device that were read before the change, or after it (`late`)."""
    began_ns = _began_ns(case)
    found = (use for moment in moments for use in moment.devices if use.device == device)
    return [
        use for use in found
        if (use.time_ns > began_ns + SETTLES_NS if late else use.time_ns <= began_ns)
    ]  # fmt: skip


def _after(case: Case, devices: set[str]) -> list[DeviceUse]:
    return [use for device in devices for use in _uses(case, case.window.after, device, late=True)]


def _began_ns(case: Case) -> int:
    after = case.window.after
    return after[0].start_ns if after else 0


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if value >= 0]
    return statistics.fmean(known) if known else -1.0
