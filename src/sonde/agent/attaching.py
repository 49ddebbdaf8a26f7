# SPDX-License-Identifier: Apache-2.0
"""Loads the injected library into processes that the policy allows, while the recording goes on.

A process is a candidate once it maps a device's library. Attaches happen one at a time, in a thread
of the attacher. A process is attached to at most once; only one that was stopped (SIGSTOP, ptrace)
is tried again. A failure pauses attaches to processes of that party, a failure of Sonde's tracer
all attaches, longer each time (`attach_queue`). The kill switch is read before each attach: a
process whose turn comes while it is set is reported as refused, and not tried again.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from sonde import procfs
from sonde._native import MmapEvent, ProcessEvent
from sonde.agent.attach_queue import (
    MAX_WAITING,
    MAX_WAITING_OF_PARTY,
    AttachQueue,
    Backoff,
    Identity,
)
from sonde.attach import kill_switch, process, remote
from sonde.attach.policy import Policy, ProcessFacts
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.mapped_files import UnreadProcesses, mapped_now
from sonde.errors import AttachFailed, ProcessGone, SondeError, TargetStopped, TracerFailed
from sonde.model.rows import EventRow

DEVICE_LIBRARY: Final = re.compile(r"(libcuda\.so|libOpenCL[-.\w]*\.so)(\.[\d.]+)?$")
SETTLE_S: Final = 1.0
"""How long to wait after a process maps a device's library: it is still in the dynamic linker."""
STOPPED_PAUSE_S: Final = 60.0
"""A process that stays stopped is tried again after 1, 2, 4 s and so on up to this."""
POLL_S: Final = 0.25
"""How often the thread looks for processes that are due."""
_MAX_KNOWN: Final = 65_536
"""Processes that were considered; beyond that all are forgotten, and considered again when they map
a library again."""


class Attacher:
    """Decides which processes to attach to, does so, and reports the outcome in rows of `event`."""

    def __init__(
        self,
        policy: Policy,
        roots: frozenset[int] | None = None,
        load: Callable[[int, str], object] = remote.load_injected_library,
    ) -> None:
        """`roots`: attach only to these processes and their descendants; None: to any. `load` loads
        the library into a process by its pid, while `process.program_of` it is the same."""
        self._policy = policy
        self._roots = roots
        self._load = load
        self._known: set[Identity] = set()
        self._waiting = AttachQueue()
        self._stopped: dict[Identity, tuple[int, float, float]] = {}
        """Processes that were stopped: party, when to try again (CLOCK_MONOTONIC, s), and how long
        to wait (s) after that."""
        self._reports: queue.Queue[tuple[str, int, str]] = queue.Queue(MAX_WAITING)
        self._ending = threading.Event()
        self._backoff = Backoff()
        self._thread = threading.Thread(target=self._work, name="sonde-attach", daemon=True)
        self.left_out = 0
        """Candidates for which there was no room in the queue, for their party or at all, and
        processes with too many mappings to see whether they are candidates."""
        self.failed = 0
        """Attaches that failed, or were not tried because too many killed tracers hang."""

    def start(self) -> None:
        """Consider the processes that run now, and start the thread."""
        if self._policy.mode == "off":
            return
        unread = UnreadProcesses()
        for file in mapped_now(unread):
            if DEVICE_LIBRARY.match(file.name):
                self.consider(file.pid)
        self.left_out += unread.processes
        self._thread.start()

    def on_process_events(self, events: Sequence[ProcessEvent]) -> None:
        """Consider processes that map a device's library."""
        if self._policy.mode == "off":
            return
        for event in events:
            if isinstance(event, MmapEvent) and DEVICE_LIBRARY.match(event.path.rpartition("/")[2]):
                self.consider(event.pid)

    def on_events_lost(self) -> None:
        """Nothing: a process whose mapping was missed is considered when it maps another one."""

    def on_processes_unseen(self, pids: Sequence[int]) -> None:
        """Nothing, as there."""

    def consider(self, pid: int) -> None:
        """Queue a process that uses a device, once, if the policy allows it."""
        try:
            identity = (pid, process.start_time(pid))
        except ProcessGone:
            return
        if identity in self._known:
            return
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(identity)
        if not (self._is_watched(pid) and self._policy.allows(ProcessFacts.of(pid))):
            return
        party = procfs.party_of(pid)
        if party != procfs.NOBODY and not self._waiting.put(
            identity, party, time.monotonic() + SETTLE_S
        ):
            self.left_out += 1

    def rows(self, now_ns: int) -> list[EventRow]:
        """Rows of the table event: the outcomes of attaches since the last call."""
        rows: list[EventRow] = []
        with suppress(queue.Empty):
            while True:
                name, pid, text = self._reports.get_nowait()
                rows.append(EventRow(now_ns, "notice", name, pid, 0, 1.0, text))
        return rows

    def stop(self) -> None:
        """Begin no more attaches; wait for `remote.WAIT_S` at most for one that has begun."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(timeout=remote.WAIT_S)

    def _is_watched(self, pid: int) -> bool:
        return self._roots is None or procfs.descends(pid, self._roots)

    def _work(self) -> None:
        while not self._ending.is_set():
            self._try_stopped(time.monotonic())
            taken = self._waiting.take(time.monotonic(), self._backoff)
            if taken is None:
                self._ending.wait(POLL_S)
            else:
                self._attach(*taken)

    def _try_stopped(self, now_s: float) -> None:
        for identity, (party, due_s, pause_s) in list(self._stopped.items()):
            paused = now_s < due_s or self._backoff.is_paused(party, now_s)
            if paused or self._ending.is_set():
                continue
            self._stopped[identity] = (party, now_s + pause_s, min(2 * pause_s, STOPPED_PAUSE_S))
            self._attach(identity, party)

    def _attach(self, identity: Identity, party: int) -> None:
        """Try one process, and report the outcome. Raises nothing that an attach may raise."""
        pid, start_ns = identity
        try:
            if process.start_time(pid) == start_ns:
                kill_switch.require_allowed()
                self._load_into(pid, party)
        except TargetStopped as error:
            if identity in self._stopped:
                return
            of_party = sum(of == party for of, *_ in self._stopped.values())
            if len(self._stopped) >= MAX_WAITING or of_party >= MAX_WAITING_OF_PARTY:
                self.left_out += 1
                return
            self._stopped[identity] = (party, time.monotonic() + SETTLE_S, 2 * SETTLE_S)
            self._report("attach_waits", pid, str(error))
            return
        except ProcessGone:
            pass
        except AttachFailed as error:
            self.failed += 1
            is_tracer = isinstance(error, TracerFailed)
            pause_s = self._backoff.failed(None if is_tracer else party, time.monotonic())
            whose = "" if is_tracer else f" to a process of {procfs.name_of(party)}"
            text = f"{error.cause}; the next attach{whose} in {pause_s:.0f} s"
            self._report("attach_failed", pid, text)
        except (SondeError, OSError) as error:
            self._report("attach_refused", pid, str(error))
        self._stopped.pop(identity, None)

    def _load_into(self, pid: int, party: int) -> None:
        # Checked again: since it was queued it may have executed a program with other rights, and
        # it may do so after this: the tracer refuses another program than this one.
        program = process.program_of(pid)
        if not self._policy.allows(ProcessFacts.of(pid)):
            return
        memory = InjectMemory.find(pid)
        if memory is not None:  # it has the library already
            memory.close()
            return
        self._load(pid, program)
        self._backoff.worked(party)
        self._report("attached", pid, "")

    def _report(self, name: str, pid: int, text: str) -> None:
        with suppress(queue.Full):
            self._reports.put_nowait((name, pid, text))
