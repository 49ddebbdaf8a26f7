# SPDX-License-Identifier: Apache-2.0
"""The node: collectors, resolver and sink joined, on one clock.

    every tick    drain the collectors, resolve the stacks that are new
    every chunk   write the rows with the dictionary entries they need
    paused        no row is made; which processes live and what they map stays known

Between ticks the agent sleeps until process events come, so that a library is seen when a process
maps it, and a process that lives for 50 ms is known before it is gone.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING

from sonde import _native, procfs
from sonde.agent import owner_attributes, selfmetrics
from sonde.agent.adaptive_scheduler import AdaptiveScheduler
from sonde.agent.attaching import Attacher
from sonde.agent.chunk_encoder import ChunkEncoder
from sonde.agent.dictionary import Dictionary
from sonde.agent.draining import drain
from sonde.agent.event_loop import EventLoop
from sonde.agent.group_io import GroupIo
from sonde.agent.kernel_wakers import KernelWakers
from sonde.agent.known_files import KnownFiles
from sonde.agent.losses import Losses
from sonde.agent.null_process_events import NullProcessEvents
from sonde.agent.other_processes import OtherProcesses
from sonde.agent.protocols import Live, Sink
from sonde.agent.registry import collectors_of, kernel_of
from sonde.agent.scheduler import Scheduler
from sonde.agent.scheduling import scheduling_rows
from sonde.agent.scrape_scheduler import ScrapeScheduler
from sonde.agent.stack_rate_limiter import StackRateLimiter
from sonde.agent.unwinding import Unwinding
from sonde.agent.warm_up import warm_up
from sonde.attach.policy import Policy
from sonde.collect.collector import Batch, Collector
from sonde.collect.kernel import Kernel, refusal
from sonde.config import Config
from sonde.model.process import Process
from sonde.model.program_run import ProgramRun
from sonde.model.rows import EventRow
from sonde.resolve import KnownFrame, Resolver
from sonde.resolve.build_id_links import BuildIdLinks
from sonde.sinks.chunk import ChunkBuilder

if TYPE_CHECKING:
    from sonde.agent.exporters import Exporters
    from sonde.resolve.pods import Pods

PODS_S = 2.0
"""At the end: how long to wait at most for the kubelet's answer with the last names of pods."""
LATE_S = 3.0
"""A tick that comes this much later than scheduled counts as a loss (`Losses.stuck_s`)."""
GC_THRESHOLDS = (10_000, 20, 20)
"""Python's garbage collections are to be rare: a tick makes thousands of rows, none of which is
part of a cycle."""
RELEASE_S = 60.0
"""How often freed memory is given back to the kernel: up to 30 MB, which takes some 10 ms."""
REHEARSAL_ROWS = 2_000
"""As many as a chunk has in which a lot happens."""


class Agent:
    """Observes this node, and hands what it sees to a sink, to exporters, or to both."""

    def __init__(
        self,
        config: Config,
        sink: Sink | None,
        *,
        privileged: bool = True,
        chooses: bool = False,
        kernel: Kernel | None = None,
    ) -> None:
        """`sink`: None where no chunks are kept; then frames get no names, unless `chooses`.
        `privileged`: False for a user without access to the kernel's events; then device time,
        which the injected library reports, and metrics are all that is observed. `chooses`: stacks
        and waits are those of chosen processes alone (`Kernel.choose`). `kernel`: that of
        `registry.kernel_of` for this configuration, where the caller has it already. Raises
        HostError where this machine cannot, and what `Exporters` raises."""
        self._privileged = privileged
        names_code = sink is not None or chooses
        self._config = config
        self._sink = sink
        self._encoder = ChunkEncoder(config)
        self._started_ns = 0
        self._tick_ns = 0
        self._loop_s = time.monotonic()
        """When the last turn of the main loop began (CLOCK_MONOTONIC)."""
        self._gc_before = gc.get_threshold()
        self.is_stopping = False
        """`stop` was called."""
        self.is_complete = False
        """The last chunk was written, or could not be; probes may still be there."""
        self._pause_asked = False
        self._paused_ns = 0
        """Length of the pause that the current chunk begins after."""
        self._counts: Counter[str] = Counter()
        """Events that each collector has seen, by its name."""
        self._spans = 0
        self._stack_limiter = StackRateLimiter()
        self._chunk = self._new_chunk(0)
        self._released_ns = 0
        self._others = OtherProcesses(config.pids) if config.pids and sink is not None else None
        self._kernel_wakers = KernelWakers() if self._others is not None else None
        self._kernel = kernel or kernel_of(config, privileged=privileged, chooses=chooses)
        events = self._make_events()
        self._attacher = self._make_attacher()
        self._resolver = Resolver(
            grace_ns=_grace_ns(config),
            pods=_pods(config),
            links=BuildIdLinks(),
            resolves_frames=names_code,
        )
        self._group_io = GroupIo(self._resolver.owners.group_path, procfs.GroupParties().of)
        walks = privileged and names_code
        self._unwinding = Unwinding(self._kernel if walks else None, self._resolver)
        self._dictionary = Dictionary(self._kernel, self._resolver, self._unwinding)
        without_tables = self._unwinding.memory_bytes()
        self._prepare_meanwhile()
        self._known_files = KnownFiles(self._resolver) if walks else None
        try:
            self._collectors = collectors_of(
                config,
                self._kernel,
                privileged=privileged,
                files_budget=self._resolver.files_budget,
                plain_files=self._known_files,
                polls_host=not chooses,
            )
        except BaseException:
            self._unwinding.close()
            self._resolver.close()
            raise
        self._map_bytes = self._kernel.memory_bytes() + sum(
            collector.memory_bytes() for collector in self._collectors
        )
        self._scheduler = self._make_scheduler()
        self._event_loop = EventLoop(
            config, events, self._resolver, self._unwinding, self._collectors, self._scheduler,
            names_code=names_code,
        )  # fmt: skip
        self._losses = Losses(
            self._collectors, self._kernel, self._unwinding, self._dictionary, self._event_loop,
            self._resolver, self._attacher, sink,
        )  # fmt: skip
        self._unwinding.limit(self._map_bytes + without_tables)
        self._exporters = self._make_exporters(config)

    def _prepare_meanwhile(self) -> None:
        """Begin what needs no collector, while other threads load BPF programs (`kernel_of`)."""
        self._resolver.start()
        if self._unwinding.walks:
            self._unwinding.expect(procfs.family(self._config.pids or (), is_patient=True))
            self._resolver.load_kernel_symbols()

    def kernel_bytes(self) -> int:
        """Memory of all BPF maps."""
        return self._map_bytes + self._unwinding.memory_bytes()

    def _make_events(self) -> _native.ProcessEvents | NullProcessEvents:
        if not self._privileged:
            return NullProcessEvents()
        try:
            return _native.ProcessEvents(procfs.party_of)
        except OSError as error:
            raise refusal(error) from error

    def _make_attacher(self) -> Attacher | None:
        config = self._config
        if config.device_time == "off":
            return None
        return Attacher(Policy(config.device_time, config.device_time_allow), config.pids)

    def _make_scheduler(self) -> Scheduler:
        if self._sink is None and ScrapeScheduler.suits(self._config):
            return ScrapeScheduler(self._config, self._collectors)
        return AdaptiveScheduler(self._config, self._collectors)

    def reconfigure(self, config: Config) -> None:
        """Go on with another configuration, without a gap: what `reload.LIVE` names may differ.
        Raises UsageError or SinkError for a bad value; then nothing changes."""
        if self._exporters is not None:
            self._exporters.reconfigure(config)
        elif config.otlp:
            self._exporters = self._make_exporters(config)
            if self._exporters is not None:
                self._exporters.start()
        self._config = config
        self._resolver.processes.grace_ns = _grace_ns(config)

    def _make_exporters(self, config: Config) -> Exporters | None:
        if not (config.prometheus or config.otlp):
            return None
        from sonde.agent.exporters import Exporters  # it loads an HTTP server: few need it

        return Exporters(
            config,
            self._owner_of,
            self._scheduler.request_tick,
            self._loop_age_s,
            lambda: self._pause_asked,
        )

    def _loop_age_s(self) -> float:
        """How long ago the last turn of the main loop began."""
        return time.monotonic() - self._loop_s

    def _owner_of(self, pid: int, start_ns: int) -> Mapping[str, str]:
        program, owner, command = self._resolver.program(pid, start_ns)
        return owner_attributes.attributes(program, owner, pid, command)

    @property
    def serves_at(self) -> str:
        """HOST:PORT at which Prometheus can fetch metrics; '' where none are served."""
        server = self._exporters.server if self._exporters is not None else None
        return server.address if server is not None else ""

    def start(self, program: str = "") -> None:
        """Begin to observe. `program`: the file that a given process will execute once this is
        done; '' where all of them run already.

        Raises HostError where this machine cannot.
        """
        family = procfs.family(self._config.pids or (), is_patient=True)
        self._unwinding.get_ready(family, self._event_loop.poll_starting, program)
        # Only now: nothing is observed while unwind tables are made.
        self._begin()
        walkers = [collector for collector in self._collectors if collector.walks_stacks]
        for collector in walkers:
            collector.start()
        self._event_loop.listen(walkers)
        if self._unwinding.walks and not program:  # one that does not run yet needs no warm-up
            batches = warm_up(walkers, self._event_loop.poll_starting, self._unwinding.stops)
            self._begin()
            self._record_warm_up(batches)
        for collector in self._collectors:
            if collector not in walkers:
                collector.start()
        if self._attacher is not None:
            self._attacher.start()
        self._event_loop.listen(self._collectors, [self._attacher] if self._attacher else [])
        if self._exporters is not None:
            self._exporters.start()
        if self._others is not None:
            self._others.begin()
            self._chunk.add("event", scheduling_rows(self._config.pids or (), self._tick_ns))
        _native.release_memory()  # what the start took
        self._released_ns = time.monotonic_ns()
        gc.freeze()  # what is known of processes and files is not worth a collection each second
        gc.set_threshold(*GC_THRESHOLDS)

    def _begin(self) -> None:
        """The recording starts now: with an empty chunk."""
        self._started_ns = self._tick_ns = time.monotonic_ns()
        self._loop_s = time.monotonic()
        self._event_loop.begin()
        self._chunk = self._new_chunk(self._started_ns)

    def _new_chunk(self, start_ns: int) -> ChunkBuilder:
        """An empty one; what crosses a network is packed."""
        return ChunkBuilder(start_ns, packed=bool(self._config.server))

    def run(
        self,
        stop: Callable[[], bool],
        on_tick: Callable[[Live], None],
        until_s: float = math.inf,
    ) -> None:
        """Observe until `stop` returns True; `on_tick` gets the progress. Raises SinkError.

        `stop` is called when a signal or a process event comes, at every tick, and at `until_s`
        (CLOCK_MONOTONIC).
        """
        while not stop():
            self._loop_s = time.monotonic()
            tick_s = self._tick_ns / 1e9 + self._scheduler.tick_s
            self._event_loop.sleep_until(min(tick_s, until_s), lambda: stop() or self._pause_asked)
            if self._pause_asked:
                self._pause_until_resumed(stop)
                continue
            age_s = time.monotonic() - self._chunk.start_ns / 1e9
            chunk_ends = age_s >= self._config.chunk_s - self._config.tick_s / 2
            self._tick(chunk_ends)
            if chunk_ends:
                self._flush(last=False)
            on_tick(self.live())

    def pause(self) -> None:
        """Observe nothing until `resume`. May be called from a signal handler: a signal ends the
        sleep between ticks."""
        self._pause_asked = True

    def resume(self) -> None:
        """Observe again. May be called from a signal handler."""
        self._pause_asked = False

    def _pause_until_resumed(self, stop: Callable[[], bool]) -> None:
        """One pause, from its begin to its end. Raises SinkError, or HostError where collectors
        cannot be attached to the kernel again."""
        self._scheduler.reset()
        for collector in self._collectors:
            collector.pause()
        self._tick(chunk_ends=True)
        self._flush(last=False)
        while self._pause_asked and not stop():
            self._loop_s = time.monotonic()
            self._event_loop.poll_paused()
        if self._pause_asked:
            return  # stopped while paused
        since_ns = self._tick_ns
        for collector in self._collectors:
            collector.resume()
        self._tick_ns = time.monotonic_ns()
        self._event_loop.begin()
        self._paused_ns = self._tick_ns - since_ns
        self._chunk = self._new_chunk(self._tick_ns)

    def stop(self, program: ProgramRun | None = None) -> None:
        """Read what is left, detach and write the last chunk. Raises SinkError.

        `program`: the run that this recording saw from its start to its end.
        """
        self.is_stopping = True
        self._encoder.program = program
        try:
            if self._others is not None:
                self._chunk.add("event", scheduling_rows(self._config.pids or (), self._tick_ns))
                self._chunk.add("event", self._others.rows(self._tick_ns))
            self._tick(chunk_ends=True)
            if self._sink is not None:
                self._resolver.wait_for_pods(PODS_S)
            self._flush(last=True)
        finally:
            self.is_complete = True
            if self._attacher is not None:
                self._attacher.stop()
            for collector in self._collectors:
                collector.stop()
            self._unwinding.close()
            if self._known_files is not None:
                self._known_files.close()
            self._scheduler.close()
            if self._exporters is not None:
                self._exporters.close()
            self._resolver.close()
            if self._sink is not None:
                self._sink.close()
            gc.set_threshold(*self._gc_before)
            gc.unfreeze()

    def frames_of(self, stack_id: int) -> tuple[KnownFrame, ...]:
        """The frames of a stack that recent rows have, leaf first; () where not known."""
        return self._dictionary.frames_of(stack_id)

    def process(self, pid: int, start_ns: int) -> Process:
        """A process that recent rows have, with its owner."""
        return self._resolver.process(pid, start_ns)

    def left_behind(self) -> list[str]:
        """After `stop`: messages about probes that stay on for a while."""
        return [text for collector in self._collectors for text in collector.left_behind]

    def live(self) -> Live:
        """How far the recording is."""
        return Live(
            elapsed_s=(self._tick_ns - self._started_ns) / 1e9,
            samples=self._counts["cpu"],
            waits=self._counts["waits"],
            device_calls=self._counts["device_calls"],
            spans=self._spans,
            lost=self._losses.total,
            processes=self._dictionary.processes,
            written_bytes=self._sink.written_bytes if self._sink is not None else 0,
        )

    def _record_warm_up(self, batches: list[Batch]) -> None:
        """Of what was seen before the start, keep the processes and the events of collectors; all
        counts begin at 0."""
        for batch in batches:
            self._resolver.add_notes(batch.notes, batch.groups)
            self._dictionary.take(batch)
            rows = [row._replace(time_ns=self._started_ns) for row in batch.rows.get("event", ())]
            self._chunk.add("event", rows)
        self._rehearse()
        self._dictionary.begin()
        self._unwinding.begin(self._dictionary.tails_dropped)
        self._losses.begin()

    def _rehearse(self) -> None:
        """Encode a chunk and drop it. The first chunk looks up the owner of every process and
        allocates the encoder's memory: 8 ms that are spent here, before the recording starts."""
        chunk = self._new_chunk(self._started_ns)
        stacks = range(REHEARSAL_ROWS)
        chunk.add("sample", [(0, "cpu", "", 0, 0, 0, stack, 1.0, 1.0, 0.0) for stack in stacks])
        self._dictionary.write(chunk)
        chunk.encode({})

    def _advance(self) -> int:
        """Begin a tick: rows are read up to now. Returns when the last tick did (CLOCK_MONOTONIC,
        ns)."""
        self._event_loop.poll()  # before the clock is read
        since_ns, self._tick_ns = self._tick_ns, time.monotonic_ns()
        late_s = (self._tick_ns - since_ns) / 1e9 - max(self._config.tick_s, self._config.rest_s)
        if late_s > LATE_S:
            self._losses.stuck_s += late_s
        return since_ns

    def _tick(self, chunk_ends: bool) -> None:
        """Drain all collectors, and take in what they gave."""
        since_ns = self._advance()
        batches = []
        for collector in self._collectors:
            batches.append(drain(collector, since_ns, chunk_ends, self._losses.failed))
            # Processes in the rows may have come and gone since: their events are read before
            # their rows. And new programs need unwind tables, while a drain may take tens of ms.
            self._event_loop.poll()
        for batch in batches:
            if batch.notes or batch.groups:
                self._resolver.add_notes(batch.notes, batch.groups)
        for collector, batch in zip(self._collectors, batches, strict=True):
            self._counts[collector.name] += batch.seen
            named_before = self._dictionary.named
            self._take(batch)
            if collector.limits_stacks:
                self._limit_stacks(collector, self._dictionary.named - named_before, since_ns)
        if self._attacher is not None:
            self._chunk.add("event", self._attacher.rows(self._tick_ns))
        self._dictionary.read_names()
        self._scheduler.on_tick(batches, (self._tick_ns - since_ns) / 1e9)
        self._resolver.tick(self._tick_ns)
        self._kernel.read_subordinate_ids()
        self._count_losses()
        if chunk_ends:
            ends = self._unwinding.ends(self._tick_ns, self._dictionary.tails_dropped)
            self._chunk.add("event", list(ends))
            self._count_self()
        else:
            self._chunk.compact()

    def _limit_stacks(self, collector: Collector, named: int, since_ns: int) -> None:
        """`named`: stacks of the collector that were new in this tick."""
        if self._stack_limiter.after(named, (self._tick_ns - since_ns) / 1e9):
            collector.set_stack_divisor(self._stack_limiter.divisor)

    def _take(self, batch: Batch) -> None:
        """Hand the rows of a batch to the exporters and the current chunk."""
        if batch.group_io:
            batch.metrics += self._group_io.rows(batch, self._tick_ns)
        if self._exporters is not None:
            self._exporters.take(batch)
        if self._sink is None:
            self._dictionary.ignore(batch)
            return
        self._chunk.add("metric", batch.metrics)
        for table, rows in batch.by_table():
            self._chunk.add(table, rows)
        if self._kernel_wakers is not None and (waits := batch.rows.get("activity")):
            self._chunk.add("event", self._kernel_wakers.rows(waits, self._tick_ns))
        for table, columns in batch.parts:
            self._chunk.add_part(table, columns)
        for part in batch.spans:
            self._chunk.add_part("span", part)
            tids = part["tid"]
            assert isinstance(tids, Sized)
            self._spans += len(tids)
        self._dictionary.take(batch)

    def _count_losses(self) -> None:
        """Add rows of `event` for what was lost since the last call."""
        for party, count in self._resolver.budget.newly_over():
            text = f"code of {procfs.name_of(party)} takes too long to name"
            notice = EventRow(self._tick_ns, "notice", "names_put_off", 0, 0, float(count), text)
            self._chunk.add("event", [notice])
        self._chunk.add("event", self._event_loop.left_out(self._tick_ns))
        for name, new in self._losses.since_last_call():
            row = EventRow(self._tick_ns, "loss", name, 0, 0, float(new), "")
            self._chunk.add("event", [row])
            if self._exporters is not None:
                self._exporters.take_loss(name, float(new))
            if name.endswith(".stack_map_full"):
                self._dictionary.make_room()

    def _count_self(self) -> None:
        """Add metrics of Sonde itself."""
        rows = selfmetrics.rows(
            self._tick_ns,
            kernel_bytes=self.kernel_bytes(),
            stack_divisor=self._stack_limiter.divisor,
            sink=self._sink,
            resolver=self._resolver,
            unwinding=self._unwinding,
            dictionary=self._dictionary,
        )
        self._chunk.add("metric", rows)
        if self._exporters is not None:
            self._exporters.take_metrics(rows)

    def _flush(self, last: bool) -> None:
        chunk, self._chunk = self._chunk, self._new_chunk(self._tick_ns)
        if self._sink is None:
            return
        self._dictionary.write(chunk)
        self._sink.write(self._encoder.encode(chunk, self._tick_ns, self._paused_ns, last=last))
        self._paused_ns = 0
        del chunk
        gc.collect(0)  # now it is cheap: the rows of the chunk are freed, few objects are young
        if self._tick_ns - self._released_ns > RELEASE_S * 1e9:
            self._released_ns = self._tick_ns
            _native.release_memory()


def _grace_ns(config: Config) -> int:
    """How long names of ended processes are kept: until their rows are certainly written."""
    return int(3 * max(config.chunk_s, config.rest_s) * 1e9)


def _pods(config: Config) -> Pods | None:
    if not config.kubelet:
        return None
    from sonde.resolve.pods import Pods  # it loads an HTTP client, which few need

    token, ca = config.kubelet_token_file, config.kubelet_ca_file
    return Pods(config.kubelet, Path(token) if token else None, Path(ca) if ca else None)
