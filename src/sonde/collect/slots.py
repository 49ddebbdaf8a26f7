# SPDX-License-Identifier: Apache-2.0
"""Lists for injected libraries the slots of their program: pointers in its data through which it
calls device libraries.

To search for them in the process would take its processor time, and seconds of it where a framework
has hundreds of megabytes of data. So they are found from outside, by a subprocess at low priority
(`slot_child`), and the library only checks each again (abi/inject.h, INJECT_SLOTS). A slot is
filled when a program first calls through it, so the search (a look) is repeated: more often while
modules are new. Some looks search all data of modules, the others that of modules which look
functions up by name.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sonde import interpreter, procfs
from sonde.collect import inject_abi as abi

CHILD: Final = interpreter.command(Path(__file__).resolve().with_name("slot_child.py"))
FRESH_S: Final = 2.0
"""How long a library counts as new, after it was found or its program's modules changed."""
TURN_S: Final = 0.02
"""How often the state of libraries is read while one of them is new ..."""
SLOW_TURN_S: Final = 0.5
"""... and else."""
FIRST_PAUSE_S: Final = 0.125
LONGEST_PAUSE_S: Final = 60.0
"""Between looks: twice as long each time."""
_MOST_DOUBLED: Final = 16
"""Times; an unchanged program is looked at once a minute for weeks."""
CREDIT_S: Final = 4.0
"""CPU time of looks at a process that new modules may cause at once; more of it comes at SHARE."""
LATE_S: Final = 2.0
"""A look that begins later than this is counted."""
FORGET_S: Final = 10.0
"""What looks at a party's processes took counts half after this time."""
WIDE_LOOKS: Final = frozenset({0, 3, 6})
"""Numbers of the looks that search all data; all later ones do, too."""
SHARE: Final = 0.05
"""Of a CPU that looks at one process may take, but for the first and CREDIT_S."""
DEADLINE_S: Final = 10.0
"""For one look, or LATE_S where a party's took as long lately; a process with a longer one is not
looked at again."""
HANGING_OF_PARTY: Final = 2
"""Subprocesses that cannot end, as a party's process makes the kernel wait, before none is started
for the party ..."""
MAX_HANGING: Final = 8
"""... and for anybody."""
MAX_ANSWER_BYTES: Final = 8 << 20
"""A longer answer of the subprocess counts as one that is late."""
IDLE_S: Final = 5.0
"""The subprocess ends after this long without a request."""
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")

_SLOT: Final = struct.Struct("=QQII")


@dataclass(slots=True)
class _Followed:
    pid: int
    start_ns: int
    fd: int
    party: int
    since_s: float
    """When (monotonic s) it was found, or its modules changed last."""
    looks: int = 0
    """Since then."""
    next_look_s: float = 0.0
    functions: int = -1
    modules: int = -1
    """`functions_seq` and `modules` of its state, as of the last look."""
    sequence: int = 0
    """Number of the last list that was written."""
    is_given_up: bool = False
    """A look at it took too long: there is no other."""
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    """Slots that are not reported yet: (address, value, relocation)."""
    credit_s: float = CREDIT_S
    """CPU time left, as of `credited_s` (monotonic s)."""
    credited_s: float = 0.0

    def credit(self, now_s: float) -> float:
        """CPU time left now."""
        more_s = SHARE * (now_s - self.credited_s)
        self.credit_s, self.credited_s = min(CREDIT_S, self.credit_s + more_s), now_s
        return self.credit_s


class Slots:
    """Follows libraries by their shared memory, in a separate thread."""

    def __init__(self, child: Sequence[str] = CHILD) -> None:
        self._command = child
        self._followed: dict[int, _Followed] = {}
        self._lock = threading.Lock()
        """Held while a descriptor is used or closed, and while the dictionary changes."""
        self._wake = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._used_s = 0.0
        self._took: dict[int, tuple[float, float]] = {}
        """How long looks at each party's processes took lately, and as of when (monotonic s)."""
        self._hanging: list[tuple[int, subprocess.Popen[bytes]]] = []
        """Killed subprocesses that have not ended, with the party of whom they looked at."""
        self.late = 0
        """Looks that began too late, as others took so long."""
        self.failed = 0
        """Looks without a result: the process could not be read, or that took too long."""
        self.cut = 0
        """Looks that ended before all was read."""
        self.reported = 0
        """Slots reported to libraries."""

    def follow(self, pid: int, start_ns: int, fd: int) -> None:
        """Follow the library of a process, whose memory is open as `fd`; duplicates that. Raises
        OSError."""
        now_s = time.monotonic()
        party = procfs.party_of(pid)
        followed = _Followed(
            pid, start_ns, os.dup(fd), party, now_s, next_look_s=now_s, credited_s=now_s
        )
        # A list that an earlier agent wrote and the library has not taken over yet comes first.
        followed.sequence = _asked(followed.fd)
        self.drop(pid)
        with self._lock:
            self._followed[pid] = followed
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sonde-slots", daemon=True)
            self._thread.start()
        self._wake.set()

    def drop(self, pid: int) -> None:
        """Follow a process no longer."""
        with self._lock:
            followed = self._followed.pop(pid, None)
            if followed is not None:
                os.close(followed.fd)
                followed.fd = -1

    def close(self) -> None:
        """Follow none any more, and end the thread and the subprocess."""
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        for pid in list(self._followed):
            self.drop(pid)

    # ---- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._ending:
            self._wake.clear()
            now_s = time.monotonic()
            due = []
            for followed in list(self._followed.values()):
                with suppress(OSError):
                    if addresses := self._serve(followed):
                        due.append((followed, addresses))
            if due:
                self._take_turn(*self._next(due))
            if len(due) > 1:
                continue  # whose turn it is may be another's by now
            if self._process and time.monotonic() - self._used_s > IDLE_S:
                self._end_child()
            fresh = any(now_s - it.since_s < FRESH_S for it in list(self._followed.values()))
            is_idle = not self._followed and self._process is None
            self._wake.wait(None if is_idle else TURN_S if fresh else SLOW_TURN_S)
        self._end_child()

    def _take_turn(self, followed: _Followed, addresses: list[int]) -> None:
        """One look. Whatever goes wrong with it, those at others go on."""
        try:
            self._look(followed, addresses)
        except Exception as error:
            self.failed += not isinstance(error, OSError)  # else the process has ended
            followed.next_look_s = time.monotonic() + LONGEST_PAUSE_S

    def _next(self, due: list[tuple[_Followed, list[int]]]) -> tuple[_Followed, list[int]]:
        """Whose turn it is: of the party whose looks took least lately, who waits longest. Nobody
        waits for longer than one look of each other party takes."""
        now_s = time.monotonic()
        took_s = {one.party: self._took_lately(one.party, now_s) for one, _ in due}
        return min(due, key=lambda it: (took_s[it[0].party], it[0].next_look_s))

    def _took_lately(self, party: int, now_s: float) -> float:
        took_s, then_s = self._took.get(party, (0.0, 0.0))
        return took_s * math.exp2((then_s - now_s) / FORGET_S)

    def _serve(self, followed: _Followed) -> list[int]:
        """Write the next list where the library has taken over the last one. Returns the addresses
        to look for if it is time."""
        with self._lock:
            if followed.fd < 0:
                return []
            state = _state(followed.fd)
            is_taken_over = state.slots_done == followed.sequence
            reports = followed.waiting and is_taken_over
            if reports:
                self._report(followed)
            addresses = _functions(followed.fd, state) if state.functions_seq else []
        if reports or not addresses or not is_taken_over or followed.is_given_up:
            return []
        now_s = time.monotonic()
        if state.functions_seq != followed.functions or state.modules != followed.modules:
            followed.functions, followed.modules = state.functions_seq, state.modules
            followed.looks = 0
            followed.since_s = now_s
            if followed.credit(now_s) > 0:
                followed.next_look_s = min(followed.next_look_s, now_s + FIRST_PAUSE_S)
        return addresses if now_s >= followed.next_look_s else []

    def _may_look_at(self, party: int) -> bool:
        self._hanging = [(of, child) for of, child in self._hanging if child.poll() is None]
        of_party = sum(of == party for of, _ in self._hanging)
        return of_party < HANGING_OF_PARTY and len(self._hanging) < MAX_HANGING

    def _look(self, followed: _Followed, addresses: list[int]) -> None:
        began_s = time.monotonic()
        if not self._may_look_at(followed.party):
            self.failed += 1
            followed.next_look_s = began_s + LONGEST_PAUSE_S
            return
        self.late += followed.next_look_s < began_s - LATE_S
        is_wide = followed.looks in WIDE_LOOKS or followed.looks > max(WIDE_LOOKS)
        lately_s = self._took_lately(followed.party, began_s)
        answer = self._ask(
            {
                "pid": followed.pid,
                "task": procfs.memory_task(followed.pid),
                "start_ticks": followed.start_ns * CLOCK_TICKS // 1_000_000_000,
                "addresses": addresses,
                "wide": is_wide,
                "party": followed.party,
            },
            followed.party,
            DEADLINE_S if lately_s < DEADLINE_S else LATE_S,
        )
        ended_s = time.monotonic()
        took_s = lately_s + ended_s - began_s
        alive = {it.party for it in list(self._followed.values())}
        self._took = {party: took for party, took in self._took.items() if party in alive}
        self._took[followed.party] = took_s, ended_s
        pause_s = min(FIRST_PAUSE_S * 2 ** min(followed.looks, _MOST_DOUBLED), LONGEST_PAUSE_S)
        followed.looks += 1
        if "slots" not in answer:
            self.failed += procfs.read_stat(followed.pid) is not None
            followed.is_given_up = answer.get("error") == "late"
            followed.next_look_s = ended_s + pause_s
            return
        self.cut += bool(answer["cut"])
        cpu_s = answer["cpu_s"]
        owed_s = -(followed.credit(ended_s) - cpu_s)
        followed.credit_s = -owed_s
        pause_s = max(pause_s, cpu_s / SHARE if followed.looks > 1 else 0.0, owed_s / SHARE)
        followed.next_look_s = ended_s + pause_s
        followed.waiting = [(at, value, relocation) for at, value, relocation in answer["slots"]]
        with self._lock:
            if followed.fd >= 0 and (followed.waiting or not followed.sequence):
                self._report(followed)

    def _report(self, followed: _Followed) -> None:
        now = followed.waiting[: abi.SLOTS_MOST]
        followed.waiting = followed.waiting[abi.SLOTS_MOST :]
        followed.sequence = followed.sequence + 1 & 0xFFFFFFFF or 1
        at, _ = abi.CONTROL_FIELDS["slots_count"]
        content = b"".join(_SLOT.pack(*slot, 0) for slot in now)
        procfs.BROKER.write(
            followed.pid,
            followed.fd,
            [
                (abi.SLOTS_AT, content),
                (abi.CONTROL_AT + at, struct.pack("=I", len(now))),
                (abi.CONTROL_AT + at + 4, struct.pack("=I", followed.sequence)),
            ],
        )
        self.reported += len(now)

    # ---- the subprocess -----------------------------------------------------------------------

    def _ask(self, request: dict[str, Any], party: int, limit_s: float) -> dict[str, Any]:
        """The subprocess's answer on a process of a party; without "slots" where there is none, or
        none in time."""
        self._used_s = time.monotonic()
        try:
            child = self._process or self._start_child()
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            raw = self._receive(child.stdout.fileno(), limit_s)
            answer: dict[str, Any] = json.loads(raw)
        except (OSError, ValueError, EOFError) as error:
            ended = self._process
            self._end_child()
            if ended is not None and ended.poll() is None:
                self._hanging.append((party, ended))
            return {"error": "late" if isinstance(error, TimeoutError) else str(error)}
        self._used_s = time.monotonic()
        return answer

    def _receive(self, fd: int, limit_s: float) -> bytes:
        raw = b""
        deadline_s = time.monotonic() + limit_s
        while not raw.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if self._ending or left_s <= 0 or len(raw) > MAX_ANSWER_BYTES:
                raise TimeoutError
            if interpreter.is_readable(fd, min(left_s, 0.25)):
                more = os.read(fd, 1 << 16)
                if not more:
                    raise EOFError
                raw += more
        return raw

    def _start_child(self) -> subprocess.Popen[bytes]:
        self._process = interpreter.start(self._command, own_session=True, ends_first=True)
        return self._process

    def _end_child(self) -> None:
        child, self._process = self._process, None
        if child is not None:
            interpreter.give_up(child)


def slots_asked(pid: int) -> abi.Request:
    """SLOTS, where this process may read that one's memory, and need not wait for it; else 0: its
    library has to find its slots itself."""
    try:
        procfs.HeldFile(f"/proc/{pid}/pagemap").close()
    except OSError:
        return abi.Request(0)
    return abi.Request.SLOTS


def _asked(fd: int) -> int:
    """The number of the last list, as an agent wrote it."""
    at, _ = abi.CONTROL_FIELDS["slots_seq"]
    (sequence,) = struct.unpack("=I", os.pread(fd, 4, abi.CONTROL_AT + at).ljust(4, b"\0"))
    return int(sequence)


def _state(fd: int) -> abi.State:
    raw = os.pread(fd, abi.STATE.size, abi.STATE_AT)
    if len(raw) != abi.STATE.size:
        raise OSError("the process cut its memory short")
    return abi.State._make(abi.STATE.unpack(raw))


def _functions(fd: int, state: abi.State) -> list[int]:
    """Addresses of the functions that slots may hold, as the library published them; the process
    may have written anything there."""
    count = min(state.functions_count, abi.FUNCTIONS)
    raw = os.pread(fd, count * abi.FUNCTION.size, abi.FUNCTIONS_AT)
    found = [abi.Function._make(it).address for it in abi.FUNCTION.iter_unpack(raw)]
    return [address for address in found if address]
