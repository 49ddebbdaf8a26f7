# SPDX-License-Identifier: Apache-2.0
"""Reads what a process can make wait for ever: in a child, with a deadline.

A process decides how long reads of it take. One that closes a FUSE file of its user in execve()
holds the lock that /proc/PID/{stat,maps,mem,environ,exe,ns,…} take for as long as the FUSE server
likes; one that runs from overlayfs above FUSE makes every opening and reading of that file wait,
and not even SIGKILL ends the wait. So all of that is asked of a child (`serve.py`). Where it does
not answer in time it is killed, not waited for, and another one is started; the process is left
alone for a while. A child that cannot die has nothing that we need: neither our session nor our
descriptors.

How long is waited is bounded for each party (patience.py), so that many processes of one cost no
more than one process. The start of a child in place of a lost one is charged to the party, too.
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
from sonde.procfs import lookups
from sonde.procfs.looks import (
    LOOK_DEADLINE_S,
    MAX_EACH,
    PATIENT_OF_PARTY_S,
    PATIENT_S,
    SLICE_S,
    Look,
    Looks,
)
from sonde.procfs.parties import NOBODY
from sonde.procfs.patience import Abandoned, Hung, Patience, payer_of

SERVER: Final = interpreter.command(Path(__file__).resolve().with_name("serve.py"))
DEADLINE_S: Final = 0.25
"""For an answer. A child that is running, not waiting, has until LATE_S: the machine is busy."""
LATE_S: Final = 3.0
START_S: Final = 10.0
"""For a child's start."""
FREE_S: Final = 0.02
"""Waits up to this are brief: they meet no deadline, and have a separate allowance."""
_LENGTH: Final = struct.Struct("<I")
_MAX_FDS: Final = 1


class Broker:
    """One child at a time, which reads for all threads of this process."""

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
        self.patience: Final = Patience()
        """Which processes and files are left alone, and how often that happened."""
        self.abandoned = Abandoned()
        self.looks = Looks()
        """How long looks at many processes waited lately."""
        self._lost_over: int | None = None
        """The party that pays for the start of the child that is there; None: nobody does."""
        self._pid = os.getpid()
        self._generation = 0
        self._is_asking = False
        """An answer is waited for, or it is found out whose process a look-up would be for."""

    def ask(
        self,
        who: int | None,
        request: tuple[Any, ...],
        *,
        is_deadly: bool = False,
        deadline_s: float | None = None,
    ) -> Any:
        """Send a request to the child; the content of its answer. `is_deadly`: a child that waits
        for this cannot be killed. `deadline_s`: another one than usual. Raises OSError; Hung, which
        is one, without an answer."""
        with self._exchange():
            self._check(who)
            if is_deadly and self.abandoned.is_crowded(who):
                raise Hung(str(who))
            self._send(request)
            return self._next(who, deadline_s=deadline_s)

    def cpu_s(self) -> float:
        """CPU time that the child has taken so far; 0 without one."""
        child = self._child
        return 0.0 if child is None else interpreter.cpu_s(child)

    def ask_of_file(self, who: int | None, request: tuple[Any, ...]) -> Any:
        """`ask` about a file that the process chose or maps: if that hangs, its files are left
        alone, not the process. Raises OSError, Hung."""
        with self._exchange():
            self._check_file(who)
            if self.abandoned.is_crowded(who):
                self.patience.files_hung += 1
                raise Hung(str(who))
            self._send(request)
            return self._next(who, is_file=True)

    def open(
        self, who: int | None, request: tuple[Any, ...], crowded: tuple[Any, ...] | None = None
    ) -> tuple[Any, int]:
        """An answer and the descriptor that came with it. Raises OSError, Hung.

        `crowded`: a request that cannot hang, asked instead where no other child may be lost over
        this process.
        """
        with self._exchange():
            self._check_file(who)
            if self.abandoned.is_crowded(who):
                if crowded is None:
                    self.patience.files_hung += 1
                    raise Hung(str(who))
                request = crowded
            self._send(request)
            try:
                content = self._next(who, is_file=True)
            except Hung:
                raise
            except OSError as error:  # EBUSY: the list of mounts changes too often to be read
                self.patience.files_hung += request is crowded or error.errno == errno.EBUSY
                raise
            if not self._fds:  # the table of descriptors is full: the kernel left it out
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return content, self._fds.pop()

    def look_up(self, who: int | None, path: str, flags: int) -> int:
        """A descriptor of a file of /proc, which the child opens. Raises OSError; Hung also where
        it is asked by what waits for an answer: who pays for that is then found out by less."""
        with self._looking_up(who, path):
            self._send(("look up", path, flags))
            self._next(who)
            if not self._fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return self._fds.pop()

    def names_in(self, who: int | None, path: str, most: int) -> list[str]:
        """The first names in a folder of /proc. Raises OSError; Hung as `look_up` does."""
        with self._looking_up(who, path):
            self._send(("names", path, most))
            names: list[str] = self._next(who)
            return names

    def write(self, who: int, fd: int, pieces: Sequence[tuple[int, bytes]]) -> None:
        """Write pieces, (offset, bytes), to a file whose inode a process can keep locked. Raises
        OSError, Hung."""
        with self._exchange():
            self._check(who)
            if self.abandoned.is_crowded(who):
                raise Hung(str(who))
            self._send(("write", list(pieces)), fd)
            self._next(who)

    def each(
        self, whos: Sequence[int], paths: Sequence[str], limit: int, *, is_patient: bool = False
    ) -> list[bytes | None]:
        """The content of many files, each of one process, cut at `limit` bytes; None where it could
        not be read, or not in the time that such looks may take (looks.py).

        `is_patient`: that is longer, as somebody asked to find a process, and no loop waits.
        """
        found: list[bytes | None] = [None] * len(paths)
        looks = Looks(PATIENT_S, PATIENT_OF_PARTY_S) if is_patient else self.looks
        deadline_s = self._deadline_s if is_patient else min(self._deadline_s, LOOK_DEADLINE_S)
        with self._exchange():
            look = Look(whos, looks, self.patience, self.abandoned)
            with suppress(OSError):  # the child ended
                while asked := look.next():
                    self._send(("each", [paths[number] for number in asked], limit, SLICE_S))
                    for number, content in look.answers(asked, self._answer, deadline_s):
                        found[number] = content
        return found

    def first_locked(self, whos: Sequence[int]) -> int | None:
        """The first of these processes whose map lock cannot be taken in time (`map_costs`). It is
        not left alone for that: other reads of it may work. Raises OSError."""
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
        """((process, times that it maps a file privately, wait for its map lock in s) of those that
        do, the process that did not answer). Of those after the latter nothing is known; it is
        not left alone for that. Raises OSError."""
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
        """Whether a process that keeps its map lock has a file mapped privately; True, too, where
        that cannot be read, False where it is gone. None where it has nothing mapped yet, as it
        executes a program. Raises OSError."""
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
        """Have the child hold a descriptor of a probe on this file, until `outlive`. Returns the
        child's pid. Raises OSError."""
        with self._exchange():
            self._send(("keep", inode), fd)
            self._next(None)
            assert self._child is not None
            return self._child.pid

    def outlive(self) -> None:
        """Part with the child. One that holds descriptors of probes closes them once no process
        keeps the kernel waiting for its map lock, and ends; it is not waited for."""
        with self._lock:
            self._child = None
            if self._link is not None:
                self._link.close()
                self._link = None

    def left_alone(self) -> tuple[int, int]:
        """How many processes are left alone now, and of how many processes files are."""
        with self._lock:
            return self.patience.left_alone()

    def put_off(self, count: int) -> None:
        """Count processes that were not read as others made a look wait too long."""
        with self._lock:
            self.patience.processes_put_off += count

    def charge_look(self, party: int, waited_s: float) -> None:
        """Count a wait for a process of this party as one of a look at many."""
        with self._lock:
            self.looks.charge(party, waited_s)

    def late(self) -> set[int]:
        """The parties whose processes made looks wait lately: others come first."""
        with self._lock:
            return self.looks.late()

    def leave_alone(self, who: int) -> None:
        """Leave a process alone that made another part of this program wait."""
        with self._lock:
            self.patience.mark(who, is_file=False)

    def notify(self, request: tuple[Any, ...], generation: int) -> None:
        """Send a request without an answer, if the child is still that of `generation`."""
        with suppress(OSError), self._exchange():
            if self._link is not None and generation == self.generation:
                self._send(request)

    @property
    def generation(self) -> int:
        """Number of the child: files that one holds open are closed in the next."""
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
        """Around a request and its answer. Where an exception of a signal handler comes in between,
        the child is given up: its answer would be taken for that to the next request."""
        with self._lock:
            was_asking = self._is_asking
            try:
                yield
            except OSError:
                raise
            except BaseException:
                self._give_up()
                raise
            finally:
                self._is_asking = was_asking

    @contextmanager
    def _looking_up(self, who: int | None, path: str) -> Iterator[None]:
        with self._exchange():
            if self._is_asking:
                raise Hung(path)
            self._is_asking = True
            self._check(who)
            yield

    def _check(self, who: int | None) -> None:
        if who is not None and (self.patience.is_hung(who) or self.patience.is_exhausted(who)):
            raise Hung(str(who))

    def _check_file(self, who: int | None) -> None:
        self._check(who)
        if who is not None and self.patience.is_hung(who, is_file=True):
            raise Hung(str(who))

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
                if self._lost_over is not None:
                    now_s = time.monotonic()
                    self.patience.of(self._lost_over, now_s).left_s -= now_s - began_s
                    self.looks.charge(self._lost_over, now_s - began_s, of_all=False)
            self._is_greeted, self._lost_over = True, None
        return link

    def _start(self) -> socket.socket:
        if self._pid != os.getpid():  # forked: the child is the parent's
            self._pid, self._child, self.abandoned = os.getpid(), None, Abandoned()
            if self._link is not None:
                self._link.close()
                self._link = None
        if self._link is not None:
            return self._link
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                own = lookups.own_procfs()
                child = interpreter.start(
                    (*self._server, *([str(own)] if own >= 0 else ())),
                    stdin=theirs.fileno(),
                    pass_fds=(own,) if own >= 0 else (),
                    own_session=True,
                )
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
        self._is_asking = True
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

    def _next(
        self,
        who: int | None,
        is_file: bool = False,
        *,
        marks: bool = True,
        deadline_s: float | None = None,
    ) -> Any:
        """The content of the next answer; as `_answer`. Raises OSError, Hung."""
        number, content, _ = self._answer(who, is_file, marks=marks, deadline_s=deadline_s)
        if who is not None and len(self.abandoned):
            self.abandoned.note_answer(payer_of(who))
        if number:
            raise OSError(number, os.strerror(number))
        return content

    def _answer(
        self,
        who: int | None,
        is_file: bool = False,
        *,
        marks: bool = True,
        deadline_s: float | None = None,
    ) -> tuple[int, Any, float]:
        """The next answer, as `_receive` has it, waited for as long as the patience with that party
        lasts. `marks`: a process that does not answer is left alone for a while."""
        if deadline_s is None:
            deadline_s = self._deadline_s
        try:
            number, content, waited_s = self._receive_of(who, time.monotonic(), deadline_s)
        except Hung:
            if marks:
                self.patience.mark(who, is_file=is_file)
            raise
        if waited_s > 0 and who is not None and marks:  # beyond FREE_S it is charged already
            self.patience.charge_brief(who, min(waited_s, FREE_S), is_file=is_file)
        return number, content, waited_s

    def _receive_of(
        self, who: int | None, began_s: float, deadline_s: float
    ) -> tuple[int, Any, float]:
        try:
            return self._receive(began_s + FREE_S)
        except TimeoutError:
            pass
        now_s, party = time.monotonic(), payer_of(who)
        patience = self.patience.of(party, now_s)
        until_s = min(began_s + deadline_s, now_s + max(0.0, patience.left(now_s)))
        try:
            while True:
                try:
                    return self._receive(until_s)
                except TimeoutError:
                    now_s = time.monotonic()
                    if now_s < began_s + LATE_S and self._is_running():
                        until_s = now_s + 0.05
                        continue
                    self._lost_over = party  # by now it may be gone
                    self._give_up(party)
                    with suppress(OSError):
                        self._start()  # it comes up while we do something else
                    raise Hung(str(who)) from None
        finally:
            patience.left_s -= min(time.monotonic() - now_s, deadline_s)

    def _receive(self, until_s: float) -> tuple[int, Any, float]:
        """(error number, content, how long the child waited for it in s, if that is noteworthy)."""
        link = self._link
        if link is None:
            raise OSError(errno.EPIPE, "the reading child ended")
        while True:
            if len(self._received) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._received)
                end = _LENGTH.size + length
                if len(self._received) >= end:
                    raw, self._received = self._received[_LENGTH.size : end], self._received[end:]
                    answer: tuple[int, Any, float] = marshal.loads(raw)
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
        """Whether the child runs or could: then the machine is slow, it does not wait."""
        child = self._child
        if child is None:
            return False
        with suppress(OSError):  # a child looks the name up itself, when it starts
            fd = lookups.open_known(f"/proc/{child.pid}/stat")
            try:
                return os.read(fd, 512).rpartition(b") ")[2][:1] == b"R"
            finally:
                os.close(fd)
        return False

    def _give_up(self, party: int = NOBODY) -> None:
        """Kill the child and do not wait for it. `party`: of the process that it waits for."""
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
        self.abandoned.add(child, party)


def _wait(link: socket.socket, what: int, timeout_s: float) -> bool:
    if timeout_s <= 0:
        timeout_s = 0
    poll = select.poll()
    poll.register(link, what)
    return bool(poll.poll(timeout_s * 1000))


BROKER: Final = Broker()
"""The one of this process."""
lookups.ask(BROKER)
