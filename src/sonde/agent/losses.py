# SPDX-License-Identifier: Apache-2.0
"""Everything that was lost on the way to a row, by name."""

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
"""Losses of what makes its readers wait: `procfs.broker`."""
LASTING = (*HUNG, "device_calls.probes_put_off", "device_time.probes_put_off")
"""Losses that go on: what is counted before the start is lost after it, too."""
STUCK = "agent.seconds_stuck"
"""Loss of seconds in which nothing was read out: what the kernel keeps is bounded."""
FAILED = "intervals_failed"
"""Loss of a collector's rows by an error in it; the log has it."""


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
        """How long nothing was read out, beyond what was meant."""
        self.failed: Counter[str] = Counter()
        """Intervals whose rows a collector could not give, by its name."""
        self._collectors = collectors
        self._kernel = kernel
        self._unwinding = unwinding
        self._dictionary = dictionary
        self._event_loop = event_loop
        self._resolver = resolver
        self._attacher = attacher
        self._sink = sink
        self._known: dict[str, int] = {}
        self._before_start: dict[str, int] = {}
        """What was lost before anything was kept."""

    @property
    def total(self) -> int:
        """Losses of all names since the start."""
        return sum(self._known.values())

    def begin(self) -> None:
        """From now on rows are kept. What hung while it was looked at for the first time is missing
        from now on."""
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
        now |= {f"targets.{name}": count for name, count in self._kernel.losses().items()}
        now |= {f"unwind.{name}": count for name, count in self._unwinding.losses().items()}
        now["stacks.forgotten"] = self._dictionary.forgotten
        now[LOST_EVENTS] = self._event_loop.lost
        patience = procfs.BROKER.patience
        hung = patience.processes_hung, patience.files_hung
        now |= zip(HUNG, hung, strict=True)
        now[STUCK] = round(self.stuck_s)
        now["processes.mappings"] = self._resolver.counters.mappings_left_out
        now["processes.files_put_off"] = self._resolver.counters.files_put_off
        now["processes.names_put_off"] = self._resolver.counters.names_put_off
        if (it := self._attacher) is not None:
            now |= {"attach.queue_full": it.left_out, "attach.attaches_failed": it.failed}
        if self._sink is not None:
            now |= self._sink.losses()
        return now
