# SPDX-License-Identifier: Apache-2.0
"""Children that need not import anything: forks of a process that has (fork_server.py)."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from sonde import interpreter

LOG = logging.getLogger("sonde.server")
PACKET_BYTES = 4_096
"""What names a child and its limits, at most."""
STARTED, WHOLE = b"\x01", b"\x00"
"""What comes before and after what a child writes."""
STUCK_S = 60.0
"""A process that was started longer ago and does not fork in the time of a question is killed."""
PAUSE_S = 300.0
"""After one that ended before it forked: there is a reason why it cannot run here."""
END_S = 5.0
"""For a child to end once it has answered."""
POLL_S = 0.5
"""How often it is looked whether a child's time is over sooner than it might be."""
_PIECE_BYTES = 256 << 10


class ForkedChildren:
    """Has a process that children are forked of, from the first of them on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._started_s = self._not_before_s = 0.0
        self._has_forked = False
        self._closed = threading.Event()

    def output_of(
        self,
        module: str,
        arguments: Sequence[str],
        seconds: float,
        most_bytes: int,
        *,
        given: bytes = b"",
        stdin: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> tuple[bytes, bool] | None:
        """As `children.output_of`; None where no child can be forked. `stdin`: a file in place of
        `given`."""
        ends_s = time.monotonic() + seconds
        packet = json.dumps({"module": module, "arguments": arguments}).encode()
        assert len(packet) <= PACKET_BYTES
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                output = theirs.fileno()
                control = self._send(packet, [output if stdin is None else stdin, output])
            if control is None:
                return None
            try:
                pidfd = _started(ours, ends_s)
            except TimeoutError:
                self._give_up_stuck(control)
                return b"", True
            if pidfd is None:
                self._note_failure(control)
                return None
            self._has_forked = True
            try:
                content = _exchanged(ours, pidfd, ends_s, most_bytes, given, is_over)
            except TimeoutError:
                return b"", True
            finally:
                _end(pidfd)
        return content, False

    def close(self) -> None:
        """End the process, and with it its children."""
        self._closed.set()
        with self._lock:
            process = self._process
            self._drop()
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(interpreter.GIVEN_UP_AFTER_S)
            interpreter.give_up(process)

    def _send(self, packet: bytes, fds: Sequence[int]) -> socket.socket | None:
        """The socket that a packet was sent by; None: there is no process that could take it."""
        with self._lock:
            for _ in range(2):
                if self._control is None:
                    self._start()
                if self._control is None:
                    return None
                try:
                    socket.send_fds(self._control, [packet], fds)
                except BlockingIOError:  # it takes no more: it is stopped, or has too much to do
                    return None
                except OSError:  # it has ended, as it does after some time without a question
                    self._drop()
                else:
                    return self._control
        return None

    def _start(self) -> None:
        if time.monotonic() < self._not_before_s:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = interpreter.start(
                    interpreter.command("sonde.server.fork_server"),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    ends_first=True,
                )
            except OSError:
                ours.close()
                return
        ours.setblocking(False)
        self._control, self._started_s, self._has_forked = ours, time.monotonic(), False
        threading.Thread(
            target=_reap, args=(self._process, self._closed), name="sonde-reap", daemon=True
        ).start()

    def _drop(self) -> None:
        """Close the socket, at which the process ends. The caller has the lock."""
        if self._control is not None:
            self._control.close()
        self._control = self._process = None

    def _note_failure(self, control: socket.socket) -> None:
        """There was no fork. Where the process behind this socket has ended, the next packet shows
        it; where it has not, it may have other children."""
        with self._lock:
            if self._control is control and not self._has_forked:
                self._not_before_s = time.monotonic() + PAUSE_S
                LOG.warning("children of questions cannot be forked: each is started")

    def _give_up_stuck(self, control: socket.socket) -> None:
        with self._lock:
            process = self._process
            if self._control is not control or time.monotonic() < self._started_s + STUCK_S:
                return
            self._drop()
        if process is not None:
            LOG.error("the process that children are forked of is stuck: it is killed")
            interpreter.give_up(process)


def _reap(process: subprocess.Popen[bytes], closed: threading.Event) -> None:
    is_asked_to = process.wait() in (0, -signal.SIGTERM) or closed.is_set()
    if not is_asked_to:
        LOG.warning("the process that children are forked of ended with %s", process.returncode)


def _started(ours: socket.socket, ends_s: float) -> int | None:
    """The child's pidfd; None where there is no child. Raises TimeoutError."""
    _wait_until(ours, ends_s)
    try:
        found, fds, _, _ = socket.recv_fds(ours, 1, 1)
    except ConnectionError:
        return None
    if found == STARTED and fds:
        return fds[0]
    for one in fds:
        os.close(one)
    return None


def _exchanged(
    ours: socket.socket,
    pidfd: int,
    ends_s: float,
    most_bytes: int,
    given: bytes,
    is_over: Callable[[], bool],
) -> bytes:
    """What the child writes; b'' where it is too much, or it did not end well. Raises
    TimeoutError."""
    pieces: list[bytes] = []
    size = 0
    with suppress(ConnectionError):  # the child has died
        _wait_until(ours, ends_s)
        ours.sendall(given)
        ours.shutdown(socket.SHUT_WR)
    with suppress(ConnectionError):
        while size <= most_bytes + len(WHOLE):
            piece = _received(ours, ends_s, is_over)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
    if not pieces or not pieces[-1].endswith(WHOLE) or size > most_bytes + len(WHOLE):
        return b""
    left_s = ends_s - time.monotonic()
    if not interpreter.is_readable(pidfd, min(END_S, max(0.0, left_s))):
        if left_s < END_S:
            raise TimeoutError
        return b""
    pieces[-1] = pieces[-1].removesuffix(WHOLE)
    return b"".join(pieces)


def _received(ours: socket.socket, ends_s: float, is_over: Callable[[], bool]) -> bytes:
    """What the child writes next; b'': nothing more. Raises TimeoutError."""
    while True:
        _wait_until(ours, min(ends_s, time.monotonic() + POLL_S))
        try:
            return ours.recv(_PIECE_BYTES)
        except TimeoutError:
            if time.monotonic() >= ends_s or is_over():
                raise


def _wait_until(ours: socket.socket, ends_s: float) -> None:
    """Raises TimeoutError beyond this time, also from the next call of the socket."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    ours.settimeout(left_s)


def _end(pidfd: int) -> None:
    """Kill a child that still runs. It is not waited for where it cannot die; the process that it
    is a fork of reaps it."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    interpreter.is_readable(pidfd, interpreter.GIVEN_UP_AFTER_S)
    os.close(pidfd)
