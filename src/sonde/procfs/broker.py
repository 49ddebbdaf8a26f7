# SPDX-License-Identifier: Apache-2.0
"""Reading what a process can make wait for ever: in a child, with a deadline.

A process decides how long reads of it take. One that closes its own FUSE file in execve() holds
the lock that /proc/PID/{stat,maps,mem,environ,exe,ns,…} take for as long as his server likes; one
that runs from overlayfs above FUSE makes every opening and reading of that file wait, even for
SIGKILL. So all of that is asked of a child (`serve.py`). Where it does not answer in time it is
killed, not waited for, and another one is started; the process is left alone for a while. A child
that cannot die holds nothing of ours: it has a separate session and descriptors.

How long is waited is bounded for each party (parties.py), so that many processes of one cost no
more than one. What a child costs that is started in the place of a lost one is part of it.
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from sonde import interpreter
from sonde.procfs.parties import NOBODY, party_of

SERVER: Final = interpreter.command(Path(__file__).resolve().with_name("serve.py"))
DEADLINE_S: Final = 0.25
"""For an answer. A child that is running, not waiting, has until LATE_S: the machine is busy."""
LATE_S: Final = 3.0
START_S: Final = 10.0
FREE_S: Final = 0.02
"""An answer that comes so soon costs its party nothing."""
PATIENCE_S: Final = 1.0
"""What may be waited for the processes of one party, and what comes back of it in a second."""
PATIENCE_SHARE: Final = 0.02
FEW_HUNG: Final = 4
"""Where more processes of a party are left alone, and its patience is used up, none is asked."""
HUNG_S: Final = 10.0
"""A process that did not answer is left alone for so long, and twice that each time after."""
HUNG_MOST_S: Final = 160.0
MAX_HUNG: Final = 4096
MAX_PARTIES: Final = 1024
"""Whose patience is known; where all of them have used up some, newcomers share one."""
MAX_EACH: Final = 256
"""Files asked for in one request."""
MAX_ABANDONED: Final = 8
"""Children that did not die yet, in all."""
MAX_ABANDONED_OF_PARTY: Final = 2
"""The same over processes of one party. Beyond either, nothing is done that may cost another child;
files that nobody can make wait are opened still."""

_LENGTH: Final = struct.Struct("<I")
_MAX_FDS: Final = 1


class Hung(OSError):  # noqa: N818 (what the process is)
    """The process or file makes its readers wait."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ETIMEDOUT, "it makes readers wait", what)


class _Patience:
    __slots__ = ("left_s", "since_s")

    def __init__(self, now_s: float) -> None:
        self.left_s, self.since_s = PATIENCE_S, now_s

    def left(self, now_s: float) -> float:
        self.left_s = min(PATIENCE_S, self.left_s + (now_s - self.since_s) * PATIENCE_SHARE)
        self.since_s = now_s
        return self.left_s


class Broker:
    """One child at a time, for all threads of this process."""

    def __init__(self, server: Sequence[str] = SERVER, deadline_s: float = DEADLINE_S) -> None:
        self._server = server
        self._deadline_s = deadline_s
        self._lock = threading.RLock()
        self._child: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._is_greeted = False
        """The child has reported that it started."""
        self._received = b""
        self._fds: list[int] = []
        self._abandoned: list[tuple[subprocess.Popen[bytes], int]] = []
        """With the party over whose process it was."""
        self._hung: dict[object, tuple[float, float, int]] = {}
        """Until when, how long in all, and of which party."""
        self._lost_over = NOBODY
        """The party that pays for the start of the child that is there."""
        self._patience: dict[int, _Patience] = {}
        self._pid = os.getpid()
        self._generation = 0
        self.processes_hung = 0
        """Processes left alone for a while, each time."""
        self.files_hung = 0
        """Files that did not open in time, and those not opened because too many did not."""

    def ask(self, who: int | None, request: tuple[Any, ...], *, is_deadly: bool = False) -> Any:
        """An answer's content. `who`: the process it is about; `is_deadly`: a child that waits for
        it cannot be killed. Raises OSError, of it Hung."""
        with self._exchange():
            self._check(who)
            if is_deadly and self._is_crowded(who):
                raise Hung(str(who))
            self._send(request)
            return self._next(who)

    def ask_of_file(self, who: int | None, request: tuple[Any, ...]) -> Any:
        """The same of a file. Raises OSError, of it Hung."""
        with self._exchange():
            self._check_file(who)
            if self._is_crowded(who):
                self.files_hung += 1
                raise Hung(str(who))
            self._send(request)
            return self._next(who, is_file=True)

    def open(
        self, who: int | None, request: tuple[Any, ...], crowded: tuple[Any, ...] | None = None
    ) -> tuple[Any, int]:
        """An answer and the descriptor that came with it. Raises OSError, of it Hung.

        `crowded`: what to ask instead where no other child may be lost, which loses none.
        """
        with self._exchange():
            self._check_file(who)
            if self._is_crowded(who):
                if crowded is None:
                    self.files_hung += 1
                    raise Hung(str(who))
                request = crowded
            self._send(request)
            try:
                content = self._next(who, is_file=True)
            except Hung:
                raise
            except OSError:
                self.files_hung += request is crowded
                raise
            if not self._fds:  # the table of descriptors is full: the kernel left it out
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return content, self._fds.pop()

    def write(self, who: int, fd: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        """Write (place, bytes) to a file that a process can keep locked. Raises OSError."""
        with self._exchange():
            self._check(who)
            if self._is_crowded(who):
                raise Hung(str(who))
            self._send(("write", list(pieces)), fd)
            self._next(who)

    def each(self, whos: Sequence[int], paths: Sequence[str], limit: int) -> list[bytes | None]:
        """The content of many files, of a process each; None where there is none to be had."""
        found: list[bytes | None] = [None] * len(paths)
        with self._exchange():
            waiting = [number for number in range(len(paths)) if not self._is_hung(whos[number])]
            while waiting:
                asked, waiting = waiting[:MAX_EACH], waiting[MAX_EACH:]
                try:
                    self._send(("each", [paths[number] for number in asked], limit))
                except OSError:
                    return found
                for at, number in enumerate(asked):
                    try:
                        found[number] = self._next(whos[number])
                    except Hung:
                        waiting = asked[at + 1 :] + waiting
                        break
                    except OSError:
                        if self._link is None:
                            return found
        return found

    def first_locked(self, whos: Sequence[int]) -> int | None:
        """The first of these processes whose map lock cannot be had (`map_costs`). None is left
        alone for it: what else is to be known of it may be had. Raises OSError."""
        with self._exchange():
            for at in range(0, len(whos), MAX_EACH):
                asked = whos[at : at + MAX_EACH]
                self._send(("locks", list(asked)))
                for who in asked:
                    try:
                        self._next(who, marks=False)
                    except Hung:
                        return who
                    except OSError:
                        if self._link is None:
                            raise
        return None

    def map_costs(
        self, whos: Sequence[int], inode: int
    ) -> tuple[list[tuple[int, int, float]], int | None]:
        """(process, times, wait in s) of those that have a file mapped privately (`map_costs`), and
        the process that did not answer, if any: of those after it nothing is known. It is not
        left alone for it. Raises OSError."""
        found: list[tuple[int, int, float]] = []
        with self._exchange():
            for at in range(0, len(whos), MAX_EACH):
                asked = whos[at : at + MAX_EACH]
                self._send(("costs", list(asked), inode))
                for who in asked:
                    try:
                        times, wait_s = self._next(who, marks=False)
                    except Hung:
                        return found, who
                    except OSError:
                        if self._link is None:
                            raise
                        continue
                    if times:
                        found.append((who, times, wait_s))
        return found, None

    def maps(self, who: int, inode: int) -> bool | None:
        """Whether such a process has a file mapped privately; True where it does not let us know,
        False where it is gone, None where it has nothing mapped yet: it executes a program. Raises
        OSError."""
        with self._exchange():
            self._send(("maps", who, inode))
            try:
                self._next(who, marks=False)
            except Hung:
                return None  # for another lock, which execve() holds before it maps anything
            try:
                found: bool = self._next(who, marks=False)
            except Hung:
                return True
            except OSError:
                if self._link is None:
                    raise
                return False
            return found

    def keep(self, fd: int, inode: int) -> int:
        """Have the child keep a descriptor, of a probe on this file; `outlive` ends that. Its pid.
        Raises OSError."""
        with self._exchange():
            self._send(("keep", inode), fd)
            self._next(None)
            assert self._child is not None
            return self._child.pid

    def outlive(self) -> None:
        """Let the child go. One that keeps descriptors closes them once no process keeps the kernel
        waiting; nobody waits for it."""
        with self._lock:
            self._child = None
            if self._link is not None:
                self._link.close()
                self._link = None

    def left_alone(self) -> tuple[int, int]:
        """How many processes are left alone now, and of how many files are."""
        with self._lock:
            now_s = time.monotonic()
            keys = [key for key, (until_s, _, _) in self._hung.items() if now_s < until_s]
        files = sum(isinstance(key, tuple) for key in keys)
        return len(keys) - files, files

    def leave_alone(self, who: int) -> None:
        """A process made somebody else of ours wait."""
        with self._lock:
            self._mark(who, False)

    def notify(self, request: tuple[Any, ...], generation: int) -> None:
        """What has no answer."""
        with self._lock, suppress(OSError):
            if self._link is not None and generation == self.generation:
                self._send(request)

    @property
    def generation(self) -> int:
        """Which child it is: what one holds open another does not."""
        return self._generation

    def warm_up(self) -> None:
        """Start the child ahead of its first request, and do not wait for it."""
        with self._lock, suppress(OSError):
            self._start()

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._give_up()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """A question and its answer. Where a signal's handler breaks in between, the child is given
        up: its answer would be taken for that to the next question."""
        with self._lock:
            try:
                yield
            except OSError:
                raise
            except BaseException:
                self._give_up()
                raise

    # Who is left alone.

    def _is_hung(self, who: object) -> bool:
        known = self._hung.get(who)
        return known is not None and time.monotonic() < known[0]

    def _check(self, who: int | None) -> None:
        if who is not None and (self._is_hung(who) or self._is_exhausted(who)):
            raise Hung(str(who))

    def _is_exhausted(self, who: int) -> bool:
        """Whether its party has many processes that hang, and no patience left for one more."""
        now_s = time.monotonic()
        if sum(now_s < until_s for until_s, _, _ in self._hung.values()) <= FEW_HUNG:
            return False
        party = _party_of(who)
        of_party = sum(now_s < until_s and of == party for until_s, _, of in self._hung.values())
        if of_party <= FEW_HUNG or self._patience_of(party, now_s).left(now_s) > 0:
            return False
        self.processes_hung += 1
        return True

    def _check_file(self, who: int | None) -> None:
        self._check(who)
        if who is not None and self._is_hung((who, "file")):
            raise Hung(str(who))

    def _is_crowded(self, who: int | None) -> bool:
        """Whether too many children do not die: then none may be lost over this process."""
        if not self._abandoned:
            return False
        self._reap()
        if len(self._abandoned) < min(MAX_ABANDONED, MAX_ABANDONED_OF_PARTY):
            return False
        party = _party_of(who)
        of_party = sum(of == party for _, of in self._abandoned)
        return len(self._abandoned) >= MAX_ABANDONED or of_party >= MAX_ABANDONED_OF_PARTY

    def _mark(self, who: int | None, is_file: bool) -> None:
        if is_file:
            self.files_hung += 1
        else:
            self.processes_hung += 1
        if who is None:
            return
        key: object = (who, "file") if is_file else who
        _, before_s, _ = self._hung.pop(key, (0.0, HUNG_S / 2, NOBODY))
        held_s = min(2 * before_s, HUNG_MOST_S)
        self._hung[key] = time.monotonic() + held_s, held_s, _party_of(who)
        while len(self._hung) > MAX_HUNG:
            del self._hung[next(iter(self._hung))]

    def _patience_of(self, party: int, now_s: float) -> _Patience:
        if len(self._patience) > MAX_PARTIES and party not in self._patience:
            for known, of_known in list(self._patience.items()):
                if of_known.left(now_s) >= PATIENCE_S:  # as good as new
                    del self._patience[known]
            if len(self._patience) > MAX_PARTIES:
                party = NOBODY
        return self._patience.setdefault(party, _Patience(now_s))

    # The child.

    def _ready(self) -> socket.socket:
        link = self._start()
        if not self._is_greeted:
            began_s = time.monotonic()
            try:
                self._receive(began_s + START_S)
            except TimeoutError:
                self._give_up()
                raise
            finally:
                now_s = time.monotonic()
                self._patience_of(self._lost_over, now_s).left_s -= now_s - began_s
            self._is_greeted, self._lost_over = True, NOBODY
        return link

    def _start(self) -> socket.socket:
        if self._pid != os.getpid():  # forked: the child is the parent's
            self._pid, self._child, self._abandoned = os.getpid(), None, []
            if self._link is not None:
                self._link.close()
                self._link = None
        if self._link is not None:
            return self._link
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = interpreter.start(self._server, stdin=theirs.fileno(), own_session=True)
            except OSError:
                ours.close()
                raise
        assert child.stdout is not None
        child.stdout.close()
        ours.setblocking(False)
        self._child, self._link, self._received = child, ours, b""
        self._generation += 1
        self._is_greeted = False
        return ours

    def _send(self, request: tuple[Any, ...], fd: int | None = None) -> None:
        link = self._ready()
        raw = marshal.dumps(request)
        left = memoryview(_LENGTH.pack(len(raw)) + raw)
        until_s = time.monotonic() + LATE_S
        while left:
            try:
                sent = link.send(left) if fd is None else socket.send_fds(link, [left], [fd])
                left, fd = left[sent:], None
            except BlockingIOError:
                if not _wait(link, select.POLLOUT, until_s - time.monotonic()):
                    self._give_up()
                    raise
            except OSError:
                self._give_up()
                raise

    def _next(self, who: int | None, is_file: bool = False, *, marks: bool = True) -> Any:
        """The next answer, waited for as long as that party's processes have left. `marks`: who
        does not answer is left alone for a while."""
        began_s = time.monotonic()
        try:
            number, content = self._receive_of(who, began_s)
        except Hung:
            if marks:
                self._mark(who, is_file)
            raise
        if number:
            raise OSError(number, os.strerror(number))
        return content

    def _receive_of(self, who: int | None, began_s: float) -> tuple[int, Any]:
        try:
            return self._receive(began_s + FREE_S)
        except TimeoutError:
            pass
        now_s = time.monotonic()
        patience = self._patience_of(_party_of(who), now_s)
        until_s = min(began_s + self._deadline_s, now_s + max(0.0, patience.left(now_s)))
        try:
            while True:
                try:
                    return self._receive(until_s)
                except TimeoutError:
                    now_s = time.monotonic()
                    if now_s < began_s + LATE_S and self._is_running():
                        until_s = now_s + 0.05
                        continue
                    self._lost_over = _party_of(who)
                    self._give_up(self._lost_over)
                    with suppress(OSError):
                        self._start()  # it comes up while we do something else
                    raise Hung(str(who)) from None
        finally:
            patience.left_s -= min(time.monotonic() - now_s, self._deadline_s)

    def _receive(self, until_s: float) -> tuple[int, Any]:
        link = self._link
        if link is None:
            raise OSError(errno.EPIPE, "the reading child ended")
        while True:
            if len(self._received) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._received)
                end = _LENGTH.size + length
                if len(self._received) >= end:
                    raw, self._received = self._received[_LENGTH.size : end], self._received[end:]
                    answer: tuple[int, Any] = marshal.loads(raw)
                    return answer
            try:
                more, fds, _, _ = socket.recv_fds(link, 1 << 18, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                if not _wait(link, select.POLLIN, until_s - time.monotonic()):
                    raise TimeoutError from None
                continue
            except OSError:
                self._give_up()
                raise
            self._fds += fds
            if not more:
                self._give_up()
                raise OSError(errno.EPIPE, "the reading child ended")
            self._received += more

    def _is_running(self) -> bool:
        """Whether the child has work on a processor: then the machine is slow, not the process."""
        child = self._child
        if child is None:
            return False
        with suppress(OSError), open(f"/proc/{child.pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read(512).rpartition(b") ")[2][:1] == b"R"
        return False

    def _give_up(self, party: int = NOBODY) -> None:
        """Kill the child and do not wait for it. `party`: over whose process it is lost."""
        child, self._child = self._child, None
        if self._link is not None:
            self._link.close()
            self._link = None
        self._received = b""
        while self._fds:
            os.close(self._fds.pop())
        if child is None:
            return
        with suppress(OSError):
            child.send_signal(signal.SIGKILL)
        self._abandoned.append((child, party))
        self._reap()

    def _reap(self) -> None:
        self._abandoned = [lost for lost in self._abandoned if lost[0].poll() is None]


def _party_of(who: int | None) -> int:
    return NOBODY if who is None else party_of(who)


def _wait(link: socket.socket, what: int, timeout_s: float) -> bool:
    if timeout_s <= 0:
        timeout_s = 0
    poll = select.poll()
    poll.register(link, what)
    return bool(poll.poll(timeout_s * 1000))


BROKER: Final = Broker()
"""That of this process."""
