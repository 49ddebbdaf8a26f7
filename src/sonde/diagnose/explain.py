# SPDX-License-Identifier: Apache-2.0
"""From a window to a verdict: by where the lost time went, or that the cause is unknown.

Each cause claims a share of the lost time and brings its evidence. The largest claim wins; where
none claims enough, the cause is unknown. Changes that are no fault are known by structure: a
program that does more has more work done, one that is asked for less waits to be asked, and one
that writes a checkpoint waits for its own bytes, for a moment.
"""

from __future__ import annotations

from sonde.diagnose.case import Case
from sonde.diagnose.causes import JUDGES
from sonde.diagnose.causes.device import is_early
from sonde.diagnose.causes.stalled import explain_stall
from sonde.diagnose.incident import BY_DEVICE, BY_KERNEL, Candidate, Change, FaultCause, Verdict
from sonde.diagnose.lost_time import LEAST_PACE, lost_time
from sonde.diagnose.moments import Window
from sonde.diagnose.past import past
from sonde.diagnose.thread_time import Part

LEAST_LOST = 0.06
"""Seconds a second; less lost time is no fault."""
CLAIMED = 0.4
"""Share of the lost time from which on a cause is named."""
LASTS = 0.3
"""Share of the lost time that must still be lost in the last moments."""
LAST_MOMENTS = 2
MORE_WORK = 1.15
"""Pace and CPU time, divided by what they were, of a program that has more to do."""
OWN_BYTES = 2e6
"""Written or read a second more by the program itself."""
UNKNOWN_SLOWDOWN = 1.4
UNKNOWN_LOST = 0.25
"""A slowdown without a cause is reported from this size and this much lost time on."""
TRANSIENT = frozenset(
    (
        *(FaultCause.FSYNC, FaultCause.UNKNOWN, FaultCause.LOCK),
        *(FaultCause.RECOMPILATION, FaultCause.SYNCHRONIZATION, FaultCause.DEVICE_MEMORY),
    )
)
"""Causes that look at first like a checkpoint or a phase: reported at the last look only."""

OF_WAITS = frozenset((FaultCause.LOCK, FaultCause.REMOTE_DEPENDENCY, FaultCause.UNKNOWN))
"""Causes that are known by the victim's waits alone."""
STOPPED = 12.0
"""A program that does less by this factor for no reason but its work has gone on to something else:
it waits for a child, a download, the next command."""
OF_LOAD = frozenset(
    (
        *(FaultCause.UNKNOWN, FaultCause.CPU_CONTENTION, FaultCause.LOCK),
        *(FaultCause.INTERPRETER_LOCK, FaultCause.REMOTE_DEPENDENCY),
    )
)
"""Causes that more work brings with it, if no other process is seen to take anything."""


def explain(window: Window, *, is_last_look: bool) -> Verdict | None:
    """The verdict; None where a later look will show it."""
    if window.job is not None:
        return explain_stall(window.job)
    case = Case(window)
    lost = case.lost
    parts = {str(part): round(seconds, 4) for part, seconds in lost.parts.items()}
    candidates = _candidates(case)
    change, reason = _change(case, candidates)
    verdict = Verdict(tuple(candidates), round(lost.slowdown, 3), parts, change, reason)
    if is_last_look:
        return verdict
    if change is not None or verdict.cause in TRANSIENT:
        return None
    if verdict.cause == FaultCause.DEVICE_CONTENTION and is_early(case):
        return None
    return verdict


def _candidates(case: Case) -> list[Candidate]:
    found = [candidate for judge in JUDGES if (candidate := judge(case)) is not None]
    found.sort(key=lambda it: -it.share)  # stable: of equal ones the more specific first
    if not found or found[0].share < CLAIMED:
        evidence = tuple(
            f"{part}: {seconds:.2f} s more of each second"
            for part, seconds in sorted(case.lost.parts.items(), key=lambda it: -it[1])[:3]
        )
        left = 1.0 - sum(it.share for it in found)
        found.insert(0, Candidate(FaultCause.UNKNOWN, max(0.0, left), evidence))
    return found


def _change(case: Case, candidates: list[Candidate]) -> tuple[Change | None, str]:
    """A change that is no fault, and why it is taken for one; (None, '') for a fault."""
    lost, window = case.lost, case.window
    cause = candidates[0].cause
    stands = cause == FaultCause.FROZEN and candidates[0].share == 1.0
    if not stands and lost.whole < LEAST_LOST:
        return Change.PASSED, "next to no time was lost"
    if not stands and not _lasts(window, lost.whole):
        return Change.PASSED, "it was over before it could be explained"
    by_itself = cause in OF_LOAD and candidates[0].offender is None
    if by_itself and lost.before.pace > LEAST_PACE and lost.after.cpu > MORE_WORK * lost.before.cpu:
        ratio = lost.after.pace / lost.before.pace
        if ratio > MORE_WORK:
            return Change.LOAD, f"it does {ratio:.2f} times as many pieces of work"
    if cause == FaultCause.CPU_CONTENTION and lost.after.cpu - lost.before.cpu > lost.parts.get(
        Part.READY, 0.0
    ):
        return Change.LOAD, "it needs more CPU time itself, more than it lacked"
    if cause not in BY_KERNEL | BY_DEVICE and (reason := _is_usual(case, cause)):
        return Change.OWN_WORK, reason
    if cause != FaultCause.UNKNOWN:
        return None, ""
    if lost.share(Part.DEVICE, Part.STEPS, Part.BUILD, Part.MEMORY) > CLAIMED:
        return Change.OWN_WORK, "its steps take longer, and nothing else took its device"
    largest = max(lost.parts, key=lambda part: lost.parts[part])
    if largest == Part.NETWORK and lost.asks_nobody:
        return Change.LOAD, "it waits to be asked"
    if largest in (Part.NETWORK, Part.ASKED) and case.first_asked:
        return Change.OWN_WORK, "it asks somebody whom it did not ask before"
    moved = case.grew("disk_bytes", case.victim)
    if largest in (Part.DISK, Part.SYNC) and moved > OWN_BYTES:
        return Change.OWN_WORK, f"it moves {moved / 1e6:.1f} MB/s more itself"
    if lost.slowdown < UNKNOWN_SLOWDOWN or lost.whole < UNKNOWN_LOST:
        return Change.PASSED, "a small slowdown that no cause accounts for"
    return None, ""


def _is_usual(case: Case, cause: FaultCause) -> str:
    """Why a slowdown is what the program does anyway; '' where it is not."""
    lost, known = case.lost, past(case)
    if known.is_short:
        return "too little is known of what it did before"
    if not known.waits_longer():
        return "it waited about as long in a second before"
    # A server that is asked as often as before does as much, later.
    if not known.does_less() and not case.last.listens:
        return "it does as much as in a second before"
    if lost.slowdown > STOPPED and cause in OF_WAITS:
        return "it stopped what it did, and waits"
    return ""


def _lasts(window: Window, whole: float) -> bool:
    """Whether enough of the lost time is still lost in the last moments."""
    last = window.after[-LAST_MOMENTS:]
    if len(window.after) <= LAST_MOMENTS:
        return True
    of_end = Window(
        window.victim, window.cpus, window.before, last, window.who, window.places, window.facts
    )
    return lost_time(of_end).whole >= LASTS * whole
