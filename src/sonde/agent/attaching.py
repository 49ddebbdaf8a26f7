# SPDX-License-Identifier: Apache-2.0
"""Brings the library for device time into processes that the policy allows, beside the recording.

A process is a candidate once it maps a device's library. Attaches happen one at a time, in a thread
of their own, each at most once for a process, unless it was stopped just then; a failure of ours
makes the next ones wait, longer each time. The kill switch is looked at before each.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from sonde import procfs
from sonde.attach import process, remote, switch
from sonde.attach.policy import Facts, Policy
from sonde.collect.collector import TableRow
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.libraries import mapped_now
from sonde.errors import AttachFailed, ProcessGone, SondeError, TargetStopped

DEVICE_LIBRARY: Final = re.compile(r"(libcuda\.so|libOpenCL[-.\w]*\.so)(\.[\d.]+)?$")
SETTLE_S: Final = 1.0
"""A process that has just mapped a device's library is busy in the loader."""
STOPPED_PAUSE_S: Final = 60.0
"""A process that stays stopped is tried after 1, 2, 4 s and so on up to this."""
WAITING: Final = 256
FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 3600.0
_REMEMBERED: Final = 65_536

Identity = tuple[int, int]
"""(pid, start in ns since boot)"""


class Attacher:
    """Decides, attaches, and tells what came of it in rows of the table event."""

    def __init__(
        self,
        policy: Policy,
        roots: frozenset[int] | None = None,
        load: Callable[[int], object] = remote.load_product,
    ) -> None:
        """`roots`: only these processes and their descendants; `load`: brings the library in."""
        self._policy = policy
        self._roots = roots
        self._load = load
        self._known: set[Identity] = set()
        self._waiting: queue.Queue[tuple[float, Identity]] = queue.Queue(WAITING)
        self._stopped: dict[Identity, tuple[float, float]] = {}
        """Processes that were stopped: when to try again (monotonic s), and the next pause."""
        self._told: queue.Queue[tuple[str, int, str]] = queue.Queue(WAITING)
        self._ending = threading.Event()
        self._failures = 0
        self._not_before_s = 0.0
        self._thread = threading.Thread(target=self._work, name="sonde-attach", daemon=True)
        self.left_out = 0
        """Candidates for which there was no room in the queue."""

    def start(self) -> None:
        """Consider what runs now, and begin."""
        if self._policy.mode == "off":
            return
        for file in mapped_now():
            if DEVICE_LIBRARY.match(file.name):
                self.consider(file.pid)
        self._thread.start()

    def hear(self, events: Iterable[tuple[object, ...]]) -> None:
        """Take in what processes did, as `sonde._native.ProcessEvents` tells it."""
        if self._policy.mode == "off":
            return
        for event in events:
            match event:
                case ("mmap", _, int(pid), *_, str(path)) if DEVICE_LIBRARY.match(
                    path.rpartition("/")[2]
                ):
                    self.consider(pid)

    def consider(self, pid: int) -> None:
        """Queue a process that uses a device, once, if the policy allows it."""
        try:
            identity = (pid, process.start_time(pid))
        except ProcessGone:
            return
        if identity in self._known:
            return
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known.add(identity)
        if not (self._is_watched(pid) and self._policy.allows(Facts.of(pid))):
            return
        try:
            self._waiting.put_nowait((time.monotonic() + SETTLE_S, identity))
        except queue.Full:
            self.left_out += 1

    def rows(self, now_ns: int) -> list[TableRow]:
        """Rows of the table event: what came of attaches since the last call."""
        rows: list[TableRow] = []
        with suppress(queue.Empty):
            while True:
                name, pid, text = self._told.get_nowait()
                rows.append((now_ns, "notice", name, pid, 0, 1.0, text))
        return rows

    def stop(self) -> None:
        """No more attaches; one that has begun comes to its end."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(timeout=remote.WAIT_S)

    def _is_watched(self, pid: int) -> bool:
        return self._roots is None or procfs.descends(pid, self._roots)

    def _work(self) -> None:
        while not self._ending.is_set():
            self._try_stopped(time.monotonic())
            try:
                due_s, identity = self._waiting.get(timeout=0.25)
            except queue.Empty:
                continue
            pause_s = max(due_s, self._not_before_s) - time.monotonic()
            if self._ending.wait(max(0.0, pause_s)):
                return
            self._attach(identity)

    def _try_stopped(self, now_s: float) -> None:
        for identity, (due_s, pause_s) in list(self._stopped.items()):
            if now_s < max(due_s, self._not_before_s) or self._ending.is_set():
                continue
            self._stopped[identity] = (now_s + pause_s, min(2 * pause_s, STOPPED_PAUSE_S))
            self._attach(identity)

    def _attach(self, identity: Identity) -> None:
        pid, began = identity
        try:
            if process.start_time(pid) == began and switch.thrown() is None:
                self._load_into(pid)
        except TargetStopped as error:
            if identity in self._stopped:
                return
            if len(self._stopped) >= WAITING:
                self.left_out += 1
                return
            self._stopped[identity] = (time.monotonic() + SETTLE_S, 2 * SETTLE_S)
            self._tell("attach_waits", pid, str(error))
            return
        except ProcessGone:
            pass
        except AttachFailed as error:
            self._failures += 1
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1))
            self._not_before_s = time.monotonic() + pause_s
            self._tell("attach_failed", pid, f"{error.cause}; the next attach in {pause_s:.0f} s")
        except (SondeError, OSError) as error:
            self._tell("attach_refused", pid, str(error))
        self._stopped.pop(identity, None)

    def _load_into(self, pid: int) -> None:
        memory = InjectMemory.find(pid)
        if memory is not None:
            memory.close()
            return
        self._load(pid)
        self._failures = 0
        self._tell("attached", pid, "")

    def _tell(self, name: str, pid: int, text: str) -> None:
        with suppress(queue.Full):
            self._told.put_nowait((name, pid, text))
