# SPDX-License-Identifier: Apache-2.0
"""Everything that was observed and is in no row, or could not be observed: counts by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from sonde import procfs
from sonde.agent.attaching import Attacher
from sonde.agent.dictionary import Dictionary
from sonde.agent.event_loop import EventLoop
from sonde.agent.protocols import Sink
from sonde.agent.unwinding import Unwinding
from sonde.collect.collector import Collector
from sonde.collect.kernel import Kernel
from sonde.resolve import Resolver

LOST_EVENTS = "processes.events"
HUNG = ("processes.hung", "files.hung")
"""Processes and files that were not read, because a read of them does not return, or that is
not known (`procfs.broker`)."""
PUT_OFF = "processes.put_off"
"""Processes that a look at many did not read, as others made it wait too long (`procfs.looks`)."""
GROUPS_HUNG = "groups.folders_hung"
"""Control groups that were not read for the same reason (`procfs.group_folders`)."""
LASTING = (*HUNG, GROUPS_HUNG, PUT_OFF, "device_calls.probes_put_off", "device_time.probes_put_off")
"""Losses that last: what was counted during the warm-up is missing from the recording, too."""
STUCK = "agent.seconds_stuck"
"""Seconds in which nothing was drained, beyond the interval: the kernel's buffers are bounded."""
FAILED = "intervals_failed"
"""Intervals of which a collector's rows are lost by an error in it, which the log has."""


class Losses:
    """Sums up the losses of all parts of the agent."""

    def __init__(
        self,
        collectors: Sequence[Collector],
        kernel: Kernel,
        unwinding: Unwinding,
        dictionary: Dictionary,
        event_loop: EventLoop,
        resolver: Resolver,
        attacher: Attacher | None,
        sink: Sink | None,
    ) -> None:
        self.stuck_s = 0.0
        """How long nothing was drained, beyond the interval."""
        self.failed: Counter[str] = Counter()
        """Intervals in which a collector failed, by its name."""
        self._collectors = collectors
        self._kernel = kernel
        self._unwinding = unwinding
        self._dictionary = dictionary
        self._event_loop = event_loop
        self._resolver = resolver
        self._attacher = attacher
        self._sink = sink
        self._known: dict[str, int] = {}
        """What was reported so far."""
        self._before_start: dict[str, int] = {}
        """What was lost during the warm-up, when no rows are kept."""

    @property
    def total(self) -> int:
        """The sum of all counts that were reported since the start: of events, processes, intervals
        and seconds alike. It shows that something is missing, not how much."""
        return sum(self._known.values())

    def begin(self) -> None:
        """From now on rows are kept: losses count from here, `LASTING` ones from the beginning."""
        self._before_start = {n: lost for n, lost in self._now().items() if n not in LASTING}

    def since_last_call(self) -> Iterator[tuple[str, int]]:
        """(name, new losses) of those that grew."""
        for name, so_far in self._now().items():
            count = so_far - self._before_start.get(name, 0)
            new = count - self._known.get(name, 0)
            if new > 0:
                self._known[name] = count
                yield name, new

    def _now(self) -> dict[str, int]:
        """What was lost so far, by name."""
        now = {
            f"{collector.name}.{name}": count
            for collector in self._collectors
            for name, count in collector.losses().items()
        }
        now |= {f"{name}.{FAILED}": count for name, count in self.failed.items()}
        # Named after the BPF object that has the watched processes (bpf/targets.bpf.c).
        now |= {f"targets.{name}": count for name, count in self._kernel.losses().items()}
        now |= {f"unwind.{name}": count for name, count in self._unwinding.losses().items()}
        now["stacks.forgotten"] = self._dictionary.forgotten
        now["stacks.too_large"] = self._dictionary.left_out
        now["thread_names.caches_emptied"] = self._dictionary.thread_names.memory.emptied
        now["frames.texts_cut"] = self._dictionary.names_cut
        now["frames.without_offset"] = self._resolver.counters.frames_without_offset
        now[LOST_EVENTS] = self._event_loop.lost
        patience = procfs.BROKER.patience
        hung = patience.processes_hung, patience.files_hung
        now |= zip(HUNG, hung, strict=True)
        now[GROUPS_HUNG] = procfs.GROUPS.hung
        now[PUT_OFF] = patience.processes_put_off
        now[STUCK] = round(self.stuck_s)
        now["processes.mappings"] = self._resolver.counters.mappings_left_out
        now["processes.files_put_off"] = self._resolver.counters.files_put_off
        now["processes.names_put_off"] = self._resolver.counters.names_put_off
        if (it := self._attacher) is not None:
            now |= {"attach.queue_full": it.left_out, "attach.attaches_failed": it.failed}
        if self._sink is not None:
            now |= self._sink.losses()
        return now
