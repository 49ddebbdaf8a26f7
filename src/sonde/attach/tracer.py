# SPDX-License-Identifier: Apache-2.0
"""The process that does one attach: `sonde.attach.tracer PID FILE NAME SECONDS [PROGRAM]`.

A separate process, with one thread: ptrace belongs to a thread, a guardian is forked, and where the
agent ends meanwhile (kill -9, out of memory), this process still restores the borrowed thread. The
answer is one line of JSON on standard output.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from sonde import _native
from sonde.attach import glibc, process, seccomp, threads
from sonde.attach.image import ProcessMemory
from sonde.errors import SondeError, TargetRefused
from sonde.procfs import opening

WAIT_S: Final = 5.0
"""How long the process is watched for a thread that sleeps where it may be borrowed."""
BOUND_S: Final = 4.0
"""How long a thread is borrowed at most; then it is let go, to finish the load by itself."""
MAX_STOPS: Final = 12
"""Stops for nothing of one thread in one attach, as each disturbs it."""
MAX_STOPS_IN_ALL: Final = 128
_GAP_S: Final = 0.002
"""Between two looks at the threads."""
_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 1.0
"""A thread that was stopped for nothing is left alone for 10, 20, 40 ms and so on up to this."""


@dataclass(slots=True)
class Answer:
    """What came of it."""

    outcome: str
    """loaded, refused, failed, gone"""
    why: str = ""
    tid: int = 0
    call: str = ""
    stop_us: float = 0.0
    """How long the thread was borrowed."""
    busy: int = 0
    """Times that it was put back because a lock was held."""
    passed_over: dict[str, int] = field(default_factory=dict)
    """Why threads were not borrowed, and how often."""
    stops: int = 0
    """Times that a thread was stopped, also for its seccomp filters alone."""


@dataclass(slots=True)
class _Disturbed:
    """A thread that was stopped for nothing."""

    stops: int = 0
    not_before_s: float = 0.0
    """It is not stopped again before this time (time.monotonic)."""


def attach(pid: int, library: Path, name: str, wait_s: float = WAIT_S, program: str = "") -> Answer:
    """Load a library into the process. Raises SondeError for what stands in the way.

    `name`: of the memfd that it is loaded from, as the process's mappings will show it; `program`:
    as for `remote.load`.
    """
    content = library.read_bytes()
    began = process.start_time(pid)
    auxv = Path(f"/proc/{pid}/auxv").read_bytes()  # before the memory: see ThreadBorrower
    # From here on a thread that has executed a program has another auxv, and is passed over.
    if program and process.program_of(pid) != program:
        raise TargetRefused(
            f"process {pid} has executed another program meanwhile", "It is looked at again."
        )
    with ProcessMemory(pid) as memory:
        landmarks = glibc.landmarks(memory, glibc.mappings_of(pid))
    if not _sees_proc(pid):
        raise TargetRefused(
            f"process {pid} sees no /proc, from which a library could be loaded",
            "Mount /proc in its container, or start it with: sonde record -- CMD",
        )
    borrower = _native.ThreadBorrower(pid, landmarks, auxv)
    try:
        return _Attach(pid, began, borrower, content, name).run(wait_s)
    finally:
        borrower.close()


def _sees_proc(pid: int) -> bool:
    """Whether a process has a /proc in its root directory, by that directory's links."""
    try:
        handle = opening.hold(
            f"/proc/{pid}/root/proc/self", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except OSError:
        return False
    try:
        return stat.S_ISLNK(os.fstat(handle).st_mode)
    finally:
        os.close(handle)


class _Attach:
    """One attach: tries threads until one has loaded the library."""

    def __init__(
        self,
        pid: int,
        began: int,
        borrower: _native.ThreadBorrower,
        library: bytes,
        name: str,
    ) -> None:
        self._pid = pid
        self._began = began
        self._borrower = borrower
        self._library = library
        self._name = name
        self._verdicts: dict[int, tuple[int, str | None]] = {}
        """(number of seccomp filters, why a load is not possible under them) by thread."""
        self._disturbed: dict[int, _Disturbed] = {}
        self._answer = Answer("refused")

    def run(self, wait_s: float) -> Answer:
        """Try one thread after the other, again and again, until it worked or time is up."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self._answer.stops < MAX_STOPS_IN_ALL:
            for sleeper in self._sleepers(deadline):
                if self._try(sleeper):
                    return self._answer
                if time.monotonic() >= deadline or self._answer.stops >= MAX_STOPS_IN_ALL:
                    break
            time.sleep(_GAP_S)
            self._borrower.settle()
        process.require(self._pid)
        reasons = sorted(self._answer.passed_over.items(), key=lambda item: -item[1])
        seen = f" ({'; '.join(reason for reason, _ in reasons[:2])})" if reasons else ""
        self._answer.why = (
            f"no thread of process {self._pid} slept where it could be borrowed, "
            f"in {wait_s:g} s{seen}"
        )
        return self._answer

    def _sleepers(self, deadline_s: float) -> list[threads.Sleeper]:
        """Those that may be tried now, first those that a stop disturbs least, and that were
        stopped least often. What half of the time until `deadline_s` does not suffice for is left
        out: a process decides how many threads there are, and how long reading of one takes."""
        if process.start_time(self._pid) != self._began:
            raise process.gone(self._pid)
        try:
            until_s = (time.monotonic() + deadline_s) / 2
            mappings = glibc.mappings_of(self._pid)
            seen = list(threads.sleepers(self._pid, mappings, until_s=until_s))
        except OSError as error:
            raise process.gone(self._pid) from error
        now_s, fresh = time.monotonic(), _Disturbed()
        of = {sleeper.tid: self._disturbed.get(sleeper.tid, fresh) for sleeper in seen}
        free = [
            sleeper
            for sleeper in seen
            if of[sleeper.tid].stops < MAX_STOPS and of[sleeper.tid].not_before_s <= now_s
        ]
        # The sort is stable: of equal ones the main thread is the last.
        return sorted(free, key=lambda it: (it.starts_over, of[it.tid].stops))

    def _disturb(self, tid: int) -> None:
        self._answer.stops += 1
        it = self._disturbed.setdefault(tid, _Disturbed())
        pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**it.stops)
        it.stops += 1
        it.not_before_s = time.monotonic() + pause_s

    def _try(self, sleeper: threads.Sleeper) -> bool:
        """True: the attach is over, and the answer has its outcome."""
        answer = self._answer
        filters = self._judged(sleeper)
        if filters is None:
            return False
        attempt = self._borrower.load(
            sleeper.tid,
            self._library,
            self._name,
            inner_tid=sleeper.inner_tid,
            call=sleeper.call,
            sp=sleeper.sp,
            stack=sleeper.stack,
            is_main=sleeper.is_main,
            filters=filters,
            path_seed=random.getrandbits(28),
            bound_s=BOUND_S,
        )
        if attempt.stopped:
            self._disturb(sleeper.tid)
        if attempt.outcome in ("passed-over", "busy"):
            self._skip(attempt.why)
            answer.busy += attempt.outcome == "busy"
            return False
        answer.tid, answer.call = sleeper.tid, threads.SAFE_CALLS[sleeper.call]
        answer.stop_us = attempt.stop_us
        answer.outcome, answer.why = self._meaning(attempt)
        return True

    def _meaning(self, attempt: _native.Attempt) -> tuple[str, str]:
        """(outcome, why) of the answer, of an attempt that ended the attach."""
        pid = self._pid
        match attempt.outcome:
            case "put-back":
                return "refused", attempt.why
            case "let-go":
                return "failed", attempt.why
            case "executed":
                return "refused", f"the borrowed thread of process {pid}: {attempt.why}"
            case "gone":
                process.start_time(pid)
                return "failed", f"the borrowed thread ended in the stage {attempt.stage}"
        try:
            inodes = glibc.library_inodes(glibc.mappings_of(pid), self._name)
        except OSError as error:
            raise process.gone(pid) from error
        if attempt.inode in inodes:
            return "loaded", ""
        if inodes:
            return "refused", f"process {pid} loaded another file than the one that was written"
        return "refused", f"the loader of process {pid} refused the library"

    def _judged(self, sleeper: threads.Sleeper) -> int | None:
        """How many seccomp filters were read that allow a load; None: the thread is passed over."""
        if not sleeper.filters:
            return 0
        known = self._verdicts.get(sleeper.tid)
        if known is None or 0 < sleeper.filters != known[0]:
            self._answer.stops += 1
            try:
                programs = self._borrower.filters(sleeper.tid)
            except OSError as error:
                if error.errno == errno.EBUSY:  # not now
                    self._skip("it did not stop")
                    return None
                why: str | None = f"its seccomp filter cannot be read: {error.strerror}"
                known = (sleeper.filters, why)
            else:
                known = (len(programs), seccomp.verdict(programs))
            self._verdicts[sleeper.tid] = known
        count, why = known
        if why is not None:
            self._skip(why)
            return None
        return count

    def _skip(self, why: str) -> None:
        seen = self._answer.passed_over
        seen[why] = seen.get(why, 0) + 1


def main(arguments: list[str]) -> None:
    """Attach as requested, and write the answer."""
    # Neither Ctrl-C in the terminal nor the end of our parent may interrupt an attach.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    pid, library, name, wait_s, *program = arguments
    try:
        outcome = asdict(attach(int(pid), Path(library), name, float(wait_s), *program))
    except SondeError as error:
        outcome = {"error": type(error).__name__, "cause": error.cause, "remedy": error.remedy}
    except OSError as error:
        outcome = {"error": "AttachFailed", "cause": str(error), "remedy": ""}
        if process.read_status(int(pid)) is None:
            missing = process.gone(int(pid))
            outcome |= {"error": "ProcessGone", "cause": missing.cause}
    except Exception as error:
        # The target's memory may hold anything: an error over it is no fault of the tracer.
        cause = f"process {pid} could not be read: {type(error).__name__}: {error}"
        outcome = {"error": "AttachFailed", "cause": cause, "remedy": "Report it as a bug."}
    os.write(1, json.dumps(outcome).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
