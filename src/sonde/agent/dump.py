# SPDX-License-Identifier: Apache-2.0
"""The stacks of all threads of a process, once: walked and named as the agent does it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sonde import procfs
from sonde.agent.stacks import StackReader, is_whole
from sonde.agent.thread_names import ThreadNames
from sonde.agent.unwinding import Unwinding
from sonde.collect.cpu import CpuSampler
from sonde.collect.dump import HZ, ThreadDump, stacks
from sonde.collect.kernel import Kernel
from sonde.errors import HostError, ProcessGone
from sonde.model.thread_stack import ProcessStacks, ThreadStack
from sonde.resolve import Resolver
from sonde.unwind import STOP_REASONS

GRACE_NS = 60_000_000_000
"""How long names of a process are kept after its end."""
NAMING_S = 10.0
"""How long all frames of one dump may take to be named, in wall time: the process may have any
number of functions, and memory that makes readers wait. 5,000 different frames of Python take a
second."""


def dump(pid: int) -> ProcessStacks:
    """Every thread of a process with its stack. Raises HostError, ProcessGone.

    The process is not stopped: its threads are walked one after the other, within milliseconds.
    """
    dumper = Dumper([pid])
    try:
        return dumper.take(pid)
    finally:
        dumper.close()


class Dumper:
    """Takes the stacks of a few processes repeatedly: unwind tables and BPF programs are made
    once."""

    def __init__(self, pids: Sequence[int]) -> None:
        """`pids`: the processes whose stacks can be taken. Raises HostError."""
        self._kernel = Kernel(pids)
        self._resolver = Resolver(grace_ns=GRACE_NS, has_budget=False)
        self._unwinding = Unwinding(self._kernel, self._resolver)
        self._thread_names = ThreadNames(self._resolver, self._unwinding)
        self._lacks_names = False
        """Frames of the last dump lack names, as there was no time for them."""
        try:
            self._sampler = CpuSampler(self._kernel, HZ)
            self._takers: dict[int, ThreadDump] = {}
            self._resolver.start()
            self._unwinding.get_ready(pids, _sleep)
        except BaseException:
            self.close()
            raise

    def take(self, pid: int) -> ProcessStacks:
        """Every thread of one of the processes. Raises HostError, ProcessGone."""
        if (taker := self._takers.get(pid)) is None:
            taker = self._takers[pid] = ThreadDump(self._kernel, pid, self._sampler)
        resolver = self._resolver
        threads = taker.take()
        if not threads and procfs.is_there(f"/proc/{pid}/stat"):
            raise HostError(
                f"the kernel shows no threads of process {pid}",
                "Run sonde where processes have the numbers that the kernel knows them by: on the "
                "host, or in a container with --pid=host.",
            )
        if not threads:
            raise ProcessGone(f"process {pid} ended before its stacks were taken")
        if self._lacks_names:
            resolver.tick(time.monotonic_ns())  # frames without a name are looked up again
        resolver.name_until(time.monotonic() + NAMING_S)
        lacked = resolver.budget.left_out.total()
        reader = StackReader(resolver, self._unwinding)
        found = stacks(self._kernel, threads)
        self._thread_names.update((pid, it.start_ns, it.tid) for it in threads)
        named = []
        for it in threads:
            process = resolver.processes.find(pid, it.start_ns)
            walk = found.get(it.stack_id)
            walks = [walk] if walk is not None else []
            known = next((frames for _, frames in reader.named(process, walks)), ())
            stop = walk.stop if walk is not None else 0
            whole = is_whole(known, stop)
            why = ""
            if not whole and walk is not None and walk.user:
                why = STOP_REASONS[stop].text
            elif not whole:
                why = "its stack could not be taken"
            name = resolver.processes.thread_name(process, it.tid)
            frames = tuple(one.frame for one in known)
            named.append(ThreadStack(it.tid, name, it.state, frames, whole, why))
        lacking = resolver.budget.left_out.total() - lacked
        self._lacks_names = lacking > 0
        return ProcessStacks(named, taker.left_out, lacking)

    def close(self) -> None:
        """Free unwind tables and names."""
        self._unwinding.close()
        self._resolver.close()


def _sleep(timeout_ms: int) -> None:
    """In place of reading process events: nobody listens to them here."""
    time.sleep(timeout_ms / 1000)
