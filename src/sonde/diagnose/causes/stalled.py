# SPDX-License-Identifier: Apache-2.0
"""A stalled job: its ranks wait for one that does not come.

Looks like: all ranks but some are in a collective, or wait for their device; two looks show them
at the same place; the missing ones are elsewhere: asleep, in a lock, in I/O, stopped, or gone.
Where all wait, but in different collectives, they do not match. NCCL RAS, where it listens, shows
how far each rank is.
What to do: look at the line that the missing rank is in; continue a stopped one; restart the job
from its checkpoint where one has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sonde.diagnose import ras
from sonde.diagnose.incident import Candidate, Change, FaultCause, RankReport, Verdict
from sonde.diagnose.job import JobFacts, JobLook, RankLook, RankThread, StackFrame
from sonde.model.libraries import CodeKind, kind_of_file, kind_of_native

WORKS_CPU: Final = 0.3
"""A rank that uses this many CPUs works, while others wait for it."""
WORKS_BYTES: Final = 2e6
"""So does one that moves this many bytes a second: a checkpoint."""
WORKS_S: Final = 30.0
"""A rank that works alone for longer is reported as a stall."""
UNKNOWN_S: Final = 20.0
"""A stall that no rank of this node shows the cause of is reported after this long."""
NAMED: Final = 4
"""Ranks, or places, that evidence names of each kind."""
EVIDENCE: Final = 8
"""Sentences of evidence."""
STACK: Final = 64
"""Frames of each rank in a report."""
MISMATCH_SHARE: Final = 0.7
"""Less than certain: ranks at different lines may also be stages that wait for a rank elsewhere."""


class Doing(enum.StrEnum):
    """What a rank does, as its report has it."""

    COLLECTIVE = "waits in a collective"
    DEVICE = "waits for its device"
    STOPPED = "stopped by a signal or a debugger"
    FROZEN = "its control group is frozen"
    ENDED = "has ended"
    SLEEPS = "sleeps"
    LOCK = "waits for a lock"
    NETWORK = "waits for a socket"
    PIPE = "waits for a pipe"
    FILE = "waits for a file"
    EVENTS = "waits for events"
    CHILD = "waits for a child process"
    RUNS = "runs"
    WAITS = "waits"
    UNKNOWN = "unknown"


WAITING: Final = frozenset((Doing.COLLECTIVE, Doing.DEVICE))
"""What ranks do that wait for others; a rank that does anything else is missing."""

_KERNEL: Final = (
    # By a part of a kernel function's name, the more specific first.
    ("nanosleep", Doing.SLEEPS),
    ("futex", Doing.LOCK),
    ("fcntl_setlk", Doing.LOCK),
    ("flock", Doing.LOCK),
    ("locks_lock_inode", Doing.LOCK),
    ("do_wait", Doing.CHILD),
    ("kernel_wait4", Doing.CHILD),
    ("pipe_read", Doing.PIPE),
    ("pipe_write", Doing.PIPE),
    ("wait_for_partner", Doing.PIPE),
    ("fifo_open", Doing.PIPE),
    ("fuse_", Doing.FILE),
    ("nfs_", Doing.FILE),
    ("io_schedule", Doing.FILE),
    ("folio_wait", Doing.FILE),
    ("fsync", Doing.FILE),
    ("ep_poll", Doing.EVENTS),
    ("do_epoll_wait", Doing.EVENTS),
    ("inet_csk_accept", Doing.EVENTS),
    ("do_select", Doing.EVENTS),
    ("do_poll", Doing.EVENTS),
    ("do_sys_poll", Doing.EVENTS),
    ("tcp_recvmsg", Doing.NETWORK),
    ("tcp_sendmsg", Doing.NETWORK),
    ("unix_stream_read", Doing.NETWORK),
    ("unix_stream", Doing.NETWORK),
    ("skb_wait_for", Doing.NETWORK),
    ("sock_recvmsg", Doing.NETWORK),
    ("inet_stream_connect", Doing.NETWORK),
)

_STEPS: Final = {
    Doing.STOPPED: "Continue it (SIGCONT), or end the debugger.",
    Doing.FROZEN: "Thaw its control group.",
    Doing.ENDED: "Look for why it ended (its log, the kernel's log), and restart the job.",
    Doing.LOCK: "Look at who holds the lock that it waits for: sonde dump shows all its threads.",
    Doing.FILE: "Look at the file system that it waits for.",
    Doing.PIPE: "Look at the process at the other end of the pipe: a loader, above all.",
    Doing.NETWORK: "Look at the other end of the connection.",
}


@dataclass(frozen=True, slots=True)
class _Rank:
    look: RankLook
    doing: Doing
    line: str
    """As of `own_line`."""
    thread: RankThread | None
    """Its first thread, which shows what it does; None where that is not known."""


def explain_stall(job: JobFacts) -> Verdict | None:
    """The verdict; None where a later look will show it, or the job went on."""
    ranks = _same_in_all(job.looks)
    if ranks is None:
        return None
    missing = [one for one in ranks if one.doing not in WAITING]
    waiting = [one for one in ranks if one.doing in WAITING]
    reports = tuple(_report(one) for one in ranks)
    known_missing = [one for one in missing if one.doing != Doing.UNKNOWN]
    if known_missing and waiting:
        return _missing(job, known_missing, waiting, len(missing), reports)
    if waiting and not missing:
        return _all_wait(job, waiting, reports)
    if job.quiet_s < UNKNOWN_S or not missing:
        return None
    evidence = [_quiet(job)]
    evidence += [f"{_name(one)} {one.doing}{_at(one)}" for one in ranks[:NAMED]]
    against = ("no rank is known to wait in a collective, so none is known to be missing",)
    return _verdict(Candidate(FaultCause.UNKNOWN, 1.0, tuple(evidence), against), reports)


def _missing(
    job: JobFacts, missing: Sequence[_Rank], waiting: Sequence[_Rank], not_there: int,
    reports: tuple[RankReport, ...],
) -> Verdict | None:  # fmt: skip
    """Some ranks are missing, and the others wait for them. `not_there`: how many ranks do not
    wait, those whose stacks are not known included."""
    first = missing[0]
    evidence = [f"{_name(one)} is missing: {one.doing}{_at(one)}" for one in missing[:NAMED]]
    evidence += _of_waiting(waiting)
    evidence.append(_quiet(job))
    against: list[str] = []
    behind = _behind(job)
    by_pid = {pid: text for (_, pid), text in behind.items() if pid}
    by_number = {rank: text for (rank, pid), text in behind.items() if not pid}
    lags = [(one, by_pid.get(one.look.pid) or by_number.get(one.look.rank)) for one in missing]
    evidence += [f"NCCL RAS: {_name(one)} {text}" for one, text in lags[:NAMED] if text]
    named = {one.look.pid for one in missing}, {one.look.rank for one in missing}
    others = [
        (rank, text)
        for (rank, pid), text in behind.items()
        if not (pid in named[0] or rank in named[1])
    ]
    if others:
        rank, text = others[0]
        against.append(f"NCCL RAS: rank {rank} is behind, too: {text}")
    if (last := job.looks[-1].ras) is not None and last.failed:
        against.append(f"NCCL RAS listens and gave no answer: {last.failed}")
    if not_there > len(missing):
        against.append(f"{not_there - len(missing)} more ranks could not be looked at")
    working = [one for one in missing if _works(one)]
    if len(working) == len(missing) and job.quiet_s < WORKS_S:
        reason = f"{_name(first)} works alone{_at(first)}, and the others wait for it"
        step = Candidate(FaultCause.STALLED_JOB, 0.5, tuple(evidence), tuple(against))
        return Verdict((step,), 1.0, {}, Change.OWN_WORK, reason, reports)
    asked = [one for one in missing if one.doing == Doing.EVENTS and one.look.listens]
    if len(asked) == len(missing):
        reason = f"{_name(first)} waits to be asked, and the others for it"
        return Verdict((), 1.0, {}, Change.LOAD, reason, reports)
    if working:
        against.append(f"{_name(working[0])} uses a CPU or moves data: it may go on")
    next_step = _STEPS.get(first.doing, "Look at that line: what does it wait for?")
    share = max(0.5, 1.0 - 0.25 * len(against))  # less certain with each sentence against it
    cause = FaultCause.STALLED_JOB
    return _verdict(
        Candidate(cause, share, tuple(evidence[:EVIDENCE]), tuple(against), None, next_step),
        reports,
    )


def _all_wait(
    job: JobFacts, waiting: Sequence[_Rank], reports: tuple[RankReport, ...]
) -> Verdict | None:
    """Every rank of this node waits: for each other in vain, or for one elsewhere."""
    lines: dict[str, list[_Rank]] = {}
    for one in waiting:
        lines.setdefault(one.line, []).append(one)
    behind = _behind(job)
    of_job = {one.look.pid: one for one in waiting}
    lagging = [(of_job[pid], text) for (_, pid), text in behind.items() if pid in of_job]
    if len(lines) > 1 and "" not in lines:
        evidence = ["the ranks wait for each other in different collectives"]
        for line, its in list(lines.items())[:NAMED]:
            evidence.append(f"{', '.join(_name(one) for one in its[:NAMED])} in {line}")
        evidence += [f"NCCL RAS: {_name(one)} {text}" for one, text in lagging[:NAMED]]
        evidence.append(_quiet(job))
        against = ("stages that wait for a rank of another node look the same",)
        step = "Make all ranks call the same collectives in the same order."
        return _verdict(
            Candidate(
                FaultCause.COLLECTIVE_MISMATCH, MISMATCH_SHARE, tuple(evidence), against, None, step
            ),
            reports,
        )
    if lagging:
        evidence = [f"NCCL RAS: {_name(one)} {text}{_at(one)}" for one, text in lagging[:NAMED]]
        evidence += [*_of_waiting(waiting), _quiet(job)]
        against = ("its threads wait like those of the others",)
        step = "Look at what its device does, and at the line that it is in."
        return _verdict(
            Candidate(FaultCause.STALLED_JOB, 0.6, tuple(evidence), against, None, step), reports
        )
    if job.quiet_s < UNKNOWN_S:
        return None
    evidence = [*_of_waiting(waiting), _quiet(job)]
    against = ("every rank of this node is there: the one that is missing is elsewhere",)
    step = "Ask the other nodes of the job."
    return _verdict(
        Candidate(FaultCause.UNKNOWN, 1.0, tuple(evidence), against, None, step), reports
    )


def victim(job: JobFacts) -> RankLook | None:
    """The rank that a report is about: the first one that is missing, else the first one."""
    look = job.looks[-1]
    ranks = [_of(one) for one in look.ranks]
    missing = [one.look for one in ranks if one.doing not in WAITING]
    return next(iter(missing or look.ranks), None)


def _same_in_all(looks: Sequence[JobLook]) -> list[_Rank] | None:
    """The ranks of the last look, if those that wait waited at the same place in all looks."""
    last = [_of(one) for one in looks[-1].ranks]
    for look in looks[:-1]:
        earlier = {one.pid: _of(one) for one in look.ranks}
        for one in last:
            was = earlier.get(one.look.pid)
            if was is None or one.doing == Doing.ENDED:
                continue
            if (was.doing in WAITING) != (one.doing in WAITING):
                return None
            if one.doing in WAITING and was.line != one.line:
                return None
    return last


def _of(look: RankLook) -> _Rank:
    """A rank with what it does."""
    if not look.state:
        return _Rank(look, Doing.ENDED, "", None)
    main = next(iter(look.threads), None)
    line = own_line(main.frames) if main is not None else ""
    if look.is_frozen:
        return _Rank(look, Doing.FROZEN, line, main)
    if look.state in "Tt":
        return _Rank(look, Doing.STOPPED, line, main)
    if main is None or not main.frames:
        return _Rank(look, Doing.UNKNOWN, line, main)
    doing = _doing(main)
    if doing in (Doing.LOCK, Doing.WAITS) and _waits_for_backward(main, look.threads):
        doing = Doing.DEVICE
    return _Rank(look, doing, line, main)


def _doing(thread: RankThread) -> Doing:
    """What a thread does, by the frames between its leaf and the program's own code."""
    in_kernel = Doing.RUNS if thread.state == "R" else Doing.WAITS
    for frame in thread.frames:
        if frame.kind == "kernel":
            if in_kernel == Doing.WAITS:
                name = frame.function
                in_kernel = next((it for part, it in _KERNEL if part in name), Doing.WAITS)
            continue
        kind = _kind(frame)
        if kind == CodeKind.COMMUNICATION:
            return Doing.COLLECTIVE
        if kind == CodeKind.DEVICE:
            return Doing.COLLECTIVE if "nccl" in frame.where.lower() else Doing.DEVICE
        if kind in (CodeKind.OWN_PYTHON, CodeKind.LOADER, CodeKind.STORAGE):
            break
    if in_kernel == Doing.WAITS and thread.state == "D":
        return Doing.FILE
    return in_kernel


def _waits_for_backward(main: RankThread, threads: Iterable[RankThread]) -> bool:
    """Whether the thread waits in PyTorch for the one that computes gradients, which waits for the
    device."""
    kinds = []
    for frame in main.frames:
        kinds.append(_kind(frame))
        if kinds[-1] == CodeKind.OWN_PYTHON:
            break
    if CodeKind.FRAMEWORK not in kinds:
        return False
    return any(it.name.startswith("pt_autograd") and _doing(it) in WAITING for it in threads)


def _kind(frame: StackFrame) -> CodeKind:
    if frame.kind == "python":
        return kind_of_file(frame.where, frame.function, frame.origin)
    if frame.kind in ("user", "inlined"):
        return kind_of_native(frame.where, frame.function, frame.origin)
    return CodeKind.NEUTRAL


def own_line(frames: Iterable[StackFrame]) -> str:
    """'function file:line' of the innermost Python frame of the program, else of the innermost
    Python frame; '' without one."""
    first = ""
    for frame in frames:
        if frame.kind != "python":
            continue
        first = first or frame.text
        if _kind(frame) == CodeKind.OWN_PYTHON:
            return frame.text
    return first


def _works(one: _Rank) -> bool:
    """Whether a rank uses a CPU or moves data, as one does that others merely wait for."""
    return one.doing not in (Doing.STOPPED, Doing.FROZEN, Doing.ENDED) and (
        one.look.cpu >= WORKS_CPU or one.look.moved_bytes >= WORKS_BYTES
    )


def _behind(job: JobFacts) -> dict[tuple[int, int], str]:
    """By (rank, pid or 0): what NCCL RAS reports of ranks that are behind or missing, in its last
    answer."""
    answers = [look.ras for look in job.looks if look.ras is not None and not look.ras.failed]
    found: dict[tuple[int, int], str] = {}
    for comm in answers[-1].communicators if answers else ():
        pids = {one.rank: one.pid for one in comm.ranks}
        for rank, text in ras.behind(comm).items():
            found.setdefault((rank, pids.get(rank, 0)), text)
    return found


def _of_waiting(waiting: Sequence[_Rank]) -> list[str]:
    """Evidence on the ranks that wait, by place."""
    places: dict[tuple[Doing, str], list[int]] = {}
    for one in waiting:
        places.setdefault((one.doing, one.line), []).append(one.look.rank)
    found = []
    for (doing, line), ranks in sorted(places.items(), key=lambda it: -len(it[1]))[:NAMED]:
        numbers = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
        at = f", in {line}" if line else ""
        if len(ranks) == 1:
            found.append(f"rank {numbers} {doing}{at}")
        else:
            doing_all = str(doing).replace("waits", "wait").replace("its", "their")
            found.append(f"ranks {numbers} {doing_all}{at}")
    return found


def _quiet(job: JobFacts) -> str:
    """For how long the job has made no progress, as evidence."""
    before = (
        f"; it paused for {job.longest_pause_s:.1f} s at most before" if job.longest_pause_s else ""
    )
    symptoms = f" ({', '.join(job.symptoms[:2])})" if job.symptoms else ""
    return f"no progress for {job.quiet_s:.1f} s{symptoms}{before}"


def _name(one: _Rank) -> str:
    return f"rank {one.look.rank} ({one.look.pid})"


def _at(one: _Rank) -> str:
    return f", in {one.line}" if one.line else ""


def _report(one: _Rank) -> RankReport:
    frames = one.thread.frames if one.thread is not None else ()
    look = one.look
    is_missing = one.doing not in WAITING
    stack = tuple(frame.text for frame in frames[:STACK])
    return RankReport(look.rank, look.pid, is_missing, str(one.doing), one.line, stack, look.failed)


def _verdict(candidate: Candidate, reports: tuple[RankReport, ...]) -> Verdict:
    return Verdict((candidate,), 1.0, {}, None, "", reports)
