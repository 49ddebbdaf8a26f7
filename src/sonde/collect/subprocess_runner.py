# SPDX-License-Identifier: Apache-2.0
"""A source in a subprocess: `sonde.collect.subprocess_runner MODULE:CLASS PAGE_FD`.

Both ends of it are here. The child polls its source and writes the answers to standard output, a
message a second while there are any:

    u32 length | marshal of (strings, rows, events, left out)

where a row is (time_ns, index of series, index of labels, value) into the strings. It never waits
for the parent: metrics that the pipe does not take are dropped and counted. A page of memory that
both share has the name of the poll that runs, so that a hang has a name, and at its end a count
that grows as long as the child goes on, whether it has answers or not. Each byte on the child's
standard input is a command (MARK_ACTIVE, MARK_IDLE, a digit). The child ends with its parent, or
when its standard input closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import marshal
import math
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable

from sonde import interpreter
from sonde.collect.polling import (
    RETRY_FIRST_S,
    RETRY_LAST_S,
    ContinuousSource,
    Points,
    Schedule,
    Source,
)
from sonde.metrics import MetricRow, labels
from sonde.model.rows import EventRow

PAGE = 4096
"""Bytes of the shared page."""
COUNT_BYTES = 8
"""Of the count at the end of the page."""
PIPE_BYTES = 1 << 20
"""Size of the pipe for answers, where the kernel allows it."""
MESSAGE_MAX_BYTES = 16 << 20
"""A longer message is invalid: its child is replaced."""
REPORT_EVERY_S = 1.0
"""How often a child sends answers, and its count grows at least."""
SILENT_S = 3.0
"""A child whose count stands still for this long hangs."""
MARK_ACTIVE, MARK_IDLE = b"!", b"."
"""Written by the parent when a process is about to use a device, and when all those have exited."""
KEEP_LAST_MAX_S = 9
"""Of the command that is a digit N: only the last value of each N seconds counts; 0: each does."""
STARTS_IN_S = 10.0
"""How long a child may take until its first answer or count: an idle driver wakes up slowly."""
GIVEN_UP_MAX = 3
"""Children that could not even be killed (stuck in the driver) before no more are started."""

_LENGTH = struct.Struct("<I")
_COUNT = struct.Struct("=Q")
_PR_SET_PDEATHSIG = 1


def pack(points: Points, left_out: int) -> bytes:
    """A message, with its length."""
    strings: dict[str, int] = {}

    def index(text: object) -> int:
        return strings.setdefault(str(text), len(strings))

    rows = [(row[0], index(row[1]), index(row[2]), row[3]) for row in points.metrics]
    body = marshal.dumps((list(strings), rows, [tuple(row) for row in points.events], left_out))
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> tuple[Points, int]:
    """Points and the number left out, from a message without its length. Raises ValueError for an
    invalid one."""
    try:
        strings, rows, events, left_out = marshal.loads(body)
        metrics: list[MetricRow] = [
            (time_ns, strings[series], strings[tags], value)
            for time_ns, series, tags, value in rows
        ]
        return Points(metrics, [EventRow._make(row) for row in events]), int(left_out)
    except (EOFError, TypeError, IndexError) as error:
        raise ValueError(f"an invalid message: {error}") from error


class SubprocessRunner:
    """The parent's end: a Runner."""

    def __init__(self, name: str, source: str, present: Callable[[], bool] = lambda: True) -> None:
        """`source` is MODULE:CLASS of a `Source` that is made without arguments; nothing is started
        before `present` is true."""
        self.name = name
        self.lost = 0
        self._source = source
        self._present = present
        self._child: subprocess.Popen[bytes] | None = None
        self._given_up: list[subprocess.Popen[bytes]] = []
        self._buffer = bytearray()
        self._received_s = 0.0
        """When (monotonic s) it showed last that it goes on."""
        self._count = b""
        """As read last from the page."""
        self._silent_since_s = 0.0
        """Since when (monotonic s) it does not answer; 0 while it does."""
        self._pause_s = RETRY_FIRST_S
        self._start_at_s = 0.0
        self._keep_last = b"0"
        self._trouble = ""
        """Why it could not be started, until that is marked."""
        self._page = mmap.mmap(-1, PAGE)
        self._page_fd = -1

    def start(self) -> None:
        """Start the child."""
        self._start(time.monotonic())

    def take(self) -> Points:
        """Its answers; a gap where it is silent, and another child in its place."""
        points = Points()
        now_s = time.monotonic()
        if self._child is None:
            if now_s >= self._start_at_s:
                self._start(now_s)
            if self._trouble:
                self._mark_lost(points, now_s, self._trouble)
                self._trouble = ""
            return points
        try:
            received = self._read(points)
        except ValueError as error:
            self._replace(points, now_s, f"its process sent {error}")
            return points
        ended = self._child.poll()
        if received:
            self._received_s = now_s
            self._pause_s = RETRY_FIRST_S
            self._mark_back(points, now_s)
        elif ended is not None:
            how = f"killed by signal {-ended}" if ended < 0 else f"ended with {ended}"
            self._replace(points, now_s, f"its process was {how}" if ended < 0 else how)
        elif self._goes_on():
            self._received_s = max(self._received_s, now_s)
        elif now_s > self._received_s + SILENT_S:
            self._replace(points, now_s, f"does not answer{self._hanging_poll()}")
        return points

    def set_min_interval(self, seconds: float) -> None:
        """Nothing: how often a device is polled depends on what that device does."""

    def keep_last_only(self, seconds: float) -> None:
        """Have the child query once in `seconds`, and report as often, at least each second."""
        self._keep_last = b"%d" % max(1, min(round(seconds), KEEP_LAST_MAX_S))
        self._send(self._keep_last)

    def mark_active(self) -> None:
        """Have the child poll as if the device were in use."""
        self._send(MARK_ACTIVE)

    def mark_idle(self) -> None:
        """Have the child follow the device's activity again."""
        self._send(MARK_IDLE)

    def _send(self, command: bytes) -> None:
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):  # it ended, or its pipe is full
                os.write(self._child.stdin.fileno(), command)

    def stop(self) -> None:
        """End the child; one that cannot be ended is left behind."""
        if self._child is not None:
            self._end(self._child)
            self._child = None
        if self._page_fd >= 0:
            os.close(self._page_fd)
            self._page_fd = -1

    def _start(self, now_s: float) -> None:
        self._given_up = [child for child in self._given_up if child.poll() is None]
        if len(self._given_up) >= GIVEN_UP_MAX or not self._present():
            self._start_at_s = now_s + RETRY_LAST_S
            return
        try:
            self._child = self._spawn()
        except OSError as error:  # no memory, no descriptors: the agent goes on without
            self._trouble = f"cannot be started: {error.strerror or error}"
            self._start_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, RETRY_LAST_S)
            return
        self._send(self._keep_last)
        self._received_s = now_s + STARTS_IN_S - SILENT_S

    def _spawn(self) -> subprocess.Popen[bytes]:
        if self._page_fd < 0:
            self._page_fd = os.memfd_create("sonde-poll-name", os.MFD_CLOEXEC)
            os.ftruncate(self._page_fd, PAGE)
            self._page = mmap.mmap(self._page_fd, PAGE)
        self._page[:1] = b"\0"
        self._count = self._page[-COUNT_BYTES:]
        self._buffer.clear()
        child = interpreter.start(
            interpreter.command(
                "sonde.collect.subprocess_runner", self._source, str(self._page_fd)
            ),
            pass_fds=[self._page_fd],
            ends_first=True,
        )
        assert child.stdout is not None
        fd = child.stdout.fileno()
        os.set_blocking(fd, False)
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return child

    def _read(self, points: Points) -> bool:
        assert self._child is not None
        assert self._child.stdout is not None
        fd = self._child.stdout.fileno()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(fd, PIPE_BYTES):
                self._buffer += data
        received = False
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MESSAGE_MAX_BYTES:
                raise ValueError("an invalid message")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            more, left_out = unpack(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
            points.metrics += more.metrics
            points.events += more.events
            self.lost += left_out
            received = True
        return received

    def _goes_on(self) -> bool:
        """Whether its count grew since the last call."""
        before, self._count = self._count, self._page[-COUNT_BYTES:]
        return self._count != before

    def _hanging_poll(self) -> str:
        name = self._page[:-COUNT_BYTES].split(b"\0", 1)[0].decode(errors="replace")
        return f": it hangs in {name}" if name else ""

    def _replace(self, points: Points, now_s: float, reason: str) -> None:
        child, self._child = self._child, None
        assert child is not None
        self._end(child)
        self._start_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_LAST_S)
        self._mark_lost(points, now_s, reason)

    def _mark_lost(self, points: Points, now_s: float, reason: str) -> None:
        if not self._silent_since_s:
            self._silent_since_s = now_s
            points.note("signal_lost", 0.0, f"{self.name}: {reason}")
            points.add("sonde.source.up", 0.0, labels(sonde__source=self.name))

    def _mark_back(self, points: Points, now_s: float) -> None:
        if self._silent_since_s:
            seconds = now_s - self._silent_since_s
            self._silent_since_s = 0.0
            points.note("signal_back", seconds, f"{self.name}: back after {seconds:.1f} s")

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            child.wait(0.2)
        except subprocess.TimeoutExpired:
            self._given_up.append(child)  # stuck in the driver: it ends when the driver lets it


class SharedPage:
    """The child's end of the shared page. It is called with the name of the poll that begins, or
    with '' when it ended."""

    def __init__(self, fd: int) -> None:
        self.page = self._page = mmap.mmap(fd, PAGE)
        self._texts: dict[str, bytes] = {}

    def __call__(self, name: str) -> None:
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = name.encode()[: PAGE - COUNT_BYTES - 1] + b"\0"
        self._page[: len(text)] = text

    def count(self) -> None:
        """Show that this process goes on."""
        (before,) = _COUNT.unpack_from(self._page, PAGE - COUNT_BYTES)
        _COUNT.pack_into(self._page, PAGE - COUNT_BYTES, (before + 1) % 2**64)


def serve(source: Source, shared: SharedPage, out: int) -> None:
    """Poll the source until the parent goes away; answers are written to `out`."""
    os.set_blocking(out, False)
    schedule = Schedule(source, on_poll=shared, spent=time.process_time)
    points, left_out, pending = Points(), 0, b""
    parent = sys.stdin.fileno()
    waiting = select.poll()
    waiting.register(parent, select.POLLIN)
    continuous = source if isinstance(source, ContinuousSource) else None
    report_at_s = 0.0
    while True:
        due_ns = schedule.run_due(points)
        shared.count()
        now_s = time.monotonic()
        if points.events or (now_s >= report_at_s and (points.metrics or pending)):
            report_at_s = (now_s // REPORT_EVERY_S + 1) * REPORT_EVERY_S  # with what is due then
            if pending:
                left_out += len(points.metrics)
            else:
                pending, left_out = pack(points, left_out), 0
            points = Points()
            pending = _write(out, pending)
        until_s = min(due_ns / 1e9, report_at_s if points.metrics or pending else math.inf)
        if continuous is not None:
            has_input = continuous.wait(parent, int(until_s * 1e9), shared.page)
        else:
            until_s = min(until_s, now_s + REPORT_EVERY_S)  # so that the count grows
            wait_s = until_s - time.monotonic()
            has_input = bool(waiting.poll(max(1.0, math.ceil(1000 * wait_s))))
        if has_input:
            commands = os.read(parent, PAGE)
            if not commands:
                schedule.close()
                return
            for command in map(bytes, zip(commands)):
                _handle(command, schedule, continuous)


def _handle(command: bytes, schedule: Schedule, continuous: ContinuousSource | None) -> None:
    """Carry out one byte that the parent wrote."""
    if command == MARK_IDLE:
        schedule.mark_idle()
    elif command == MARK_ACTIVE:
        schedule.mark_active()
    elif command.isdigit():
        schedule.set_min_interval(float(command))
        if continuous is not None:
            continuous.keep_last_only(float(command))


def _write(out: int, message: bytes) -> bytes:
    """Write as much as the pipe takes; returns what is left of the message."""
    try:
        return message[os.write(out, message) :]
    except BlockingIOError:
        return message


def main() -> None:
    """The child."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act upon
    # A library may print: not into our messages.
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    spec, fd = sys.argv[1:3]
    module, _, name = spec.partition(":")
    source: Source = getattr(importlib.import_module(module), name)()
    gc.freeze()  # objects made so far live as long as the process
    with contextlib.suppress(BrokenPipeError):
        serve(source, SharedPage(int(fd)), out)


if __name__ == "__main__":
    main()
