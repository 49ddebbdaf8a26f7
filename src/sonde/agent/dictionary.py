# SPDX-License-Identifier: Apache-2.0
"""What rows refer to by ids: stacks, frames, processes, threads. Each chunk gets the entries that
its rows need."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from itertools import dropwhile
from operator import attrgetter
from typing import NamedTuple

from sonde import _native
from sonde.agent import frame_texts
from sonde.agent.commands import Commands
from sonde.agent.stacks import NOT_WALKED, StackReader, is_whole
from sonde.agent.thread_names import ThreadNames
from sonde.agent.unwinding import Unwinding
from sonde.collect.collector import Batch, ProcessKey, TableRow
from sonde.collect.kernel import Kernel
from sonde.collect.launch_sites import FRAMES_OF
from sonde.model.owner import OWNER_COLUMNS
from sonde.resolve import KnownFrame, Resolver
from sonde.resolve.frame_fields import frame_bytes
from sonde.resolve.tracked_process import TrackedProcess
from sonde.sinks.chunk import ChunkBuilder, columns_of
from sonde.unwind.stop_reasons import TAIL_DROPPED

KEPT_IN_KERNEL = 3 / 8
"""Share of the kernel's room for stacks that may hold ones that were read already; beyond it those
are dropped there."""
MAX_COUNTED_PROCESSES = 65_536
"""Processes that are remembered so that each counts once in `Dictionary.processes`."""
_OWNER = attrgetter(*OWNER_COLUMNS)
MAX_STACKS = 16_384
"""Stacks whose frames are remembered from chunk to chunk."""
MAX_BYTES = 40 << 20
"""Memory of these stacks, of their frames and of the frames' texts, each frame once: a program may
have a new one at each address, and a hundred in a stack."""
_STACK_BYTES = 400
"""Memory of a stack beside its frames, and of the entry that it has in a dictionary ..."""
_PLACE_BYTES = 8
"""... and of one place in it."""


class _Stack(NamedTuple):
    frames: tuple[KnownFrame, ...]
    """Leaf first."""
    complete: bool
    """It reaches the thread's entry (`stacks.is_whole`)."""
    is_long: bool
    """The kernel keeps it in several pieces."""
    party: int
    """Whose process had it first (`procfs.party_of`)."""

    @property
    def bytes(self) -> int:
        """Memory that it takes beside its frames, about."""
        return _STACK_BYTES + _PLACE_BYTES * len(self.frames)


class Dictionary:
    """Resolves stacks when they are first seen, and remembers what the current chunk refers to."""

    def __init__(self, kernel: Kernel, resolver: Resolver, unwinding: Unwinding) -> None:
        self._kernel = kernel
        self._resolver = resolver
        self.stacks = StackReader(resolver, unwinding)
        self.thread_names = ThreadNames(resolver, unwinding)
        self.commands = Commands(resolver)
        self._stacks: dict[int, _Stack] = {}
        self._held = _native.HeldFrames(frame_bytes)
        """The frames of these stacks."""
        self._stack_bytes = 0
        """Of the stacks without their frames."""
        self._new_bytes: Counter[int] = Counter()
        """Memory of stacks that are new since the last chunk, by party."""
        self._searched_bytes = 0
        """Where there is more than this, stacks that may be forgotten are looked for again."""
        self._put_off: dict[int, TrackedProcess] = {}
        """Stacks with frames that have no name yet, with their process: the CPU time for names of
        its party was used up (`Resolver.is_put_off`)."""
        self._in_kernel: set[int] = set()
        """Stacks that were read and may still be in the kernel's map."""
        self._max_in_kernel = int(KEPT_IN_KERNEL * kernel.max_stacks)
        self._used_stacks: set[int] = set()
        self._used_threads: set[tuple[int, int, int]] = set()
        self._counted_now: set[tuple[int, int, int]] = set()
        """Threads of rows that are not kept, since `read_names`."""
        self._threads_now: set[tuple[int, int, int]] = set()
        """Threads of rows since `read_names`."""
        self._processes: set[ProcessKey] = set()
        self._processes_before = 0
        """How many were in `_processes` when it was emptied."""
        self._podless: set[ProcessKey] = set()
        """Processes whose pod had no name yet when they were written last."""
        self.forgotten = 0
        """Stacks that the kernel dropped before a row referred to them: some waits last long."""
        self.named = 0
        """Stacks resolved so far."""
        self.tails_dropped = 0
        """Long stacks of which the outer part was dropped before they were read."""
        self.left_out = 0
        """Stacks that were not kept: those of a party that are new in a chunk took too much."""
        self.names_cut = 0
        """Frames whose texts were cut, because those of a chunk were too long (`frame_texts`)."""

    def take(self, batch: Batch) -> None:
        """Note what a batch refers to, and resolve the stacks that are new, while their processes
        are remembered and the kernel still has their addresses."""
        self._used_threads |= batch.threads
        self._threads_now |= batch.threads
        self._processes.update([(pid, start_ns) for pid, start_ns, _ in batch.threads])
        self._used_stacks.update(batch.stacks, batch.launch_stacks)
        self._resolve(batch.stacks)
        self._resolve(batch.launch_stacks, in_library=True)
        self._resolve_own(batch.own_stacks)
        self.stacks.python.close()

    def read_names(self) -> None:
        """Read what interpreters run, and the names that Python gives its threads, while they run:
        once a tick."""
        threads, self._threads_now = self._threads_now, set()
        counted, self._counted_now = self._counted_now, set()
        self.commands.update(threads | counted)
        self.thread_names.update(threads)

    def name(self, stacks: Mapping[int, ProcessKey]) -> None:
        """Resolve stacks, by id, of processes. For an agent without chunks; above `MAX_STACKS` the
        oldest are forgotten."""
        self._resolve(stacks)
        self.stacks.python.close()
        self._forget_old()

    @property
    def bytes(self) -> int:
        """Memory of the stacks that are remembered, about."""
        return self._held.bytes + self._stack_bytes

    def _forget_old(self) -> None:
        while len(self._stacks) > MAX_STACKS or self.bytes > MAX_BYTES:
            self._forget(next(iter(self._stacks)))
        self._new_bytes.clear()
        self._searched_bytes = 0

    def _forget(self, stack_id: int) -> None:
        known = self._stacks.pop(stack_id)
        self._stack_bytes -= known.bytes
        self._held.drop(known.frames)
        self._put_off.pop(stack_id, None)

    def _has_room(self, party: int) -> bool:
        """Whether one more stack of a party may be kept for the current chunk. What the chunk does
        not need goes first; then each party has an equal part."""
        if self.bytes > MAX_BYTES and self.bytes > self._searched_bytes:
            for stack_id in [it for it in self._stacks if it not in self._used_stacks]:
                self._forget(stack_id)
                if self.bytes <= MAX_BYTES * 3 // 4:
                    break
            self._searched_bytes = self.bytes + MAX_BYTES // 8
        return self.bytes <= MAX_BYTES or (
            self._new_bytes[party] <= MAX_BYTES // (1 + len(self._new_bytes))
        )

    def ignore(self, batch: Batch) -> None:
        """Resolve nothing of a batch whose rows are not kept, but what its processes run, which
        metrics have; drop its stacks in the kernel before they fill its map."""
        self._counted_now |= batch.threads
        self._forget_when_full(batch.stacks.keys() | batch.launch_stacks.keys())

    def begin(self) -> None:
        """The recording starts: no chunk needs what rows had up to now. Resolved stacks stay."""
        self._used_stacks.clear()
        self._used_threads.clear()
        self._processes.clear()

    @property
    def processes(self) -> int:
        """Processes that rows had so far; one seen again after `MAX_COUNTED_PROCESSES` others may
        count twice."""
        return self._processes_before + len(self._processes)

    def frames_of(self, stack_id: int) -> tuple[KnownFrame, ...]:
        """The frames of a stack, leaf first; () where it is not known."""
        known = self._stacks.get(stack_id)
        return known.frames if known is not None else ()

    def make_room(self) -> None:
        """The kernel had no room for a stack: drop all there, also those whose rows were lost."""
        self._kernel.clear_stacks()
        self._in_kernel.clear()

    def write(self, chunk: ChunkBuilder) -> None:
        """Add the entries that the rows since the last call need."""
        stacks, self._used_stacks = self._used_stacks, set()
        threads, self._used_threads = self._used_threads, set()
        self._write_stacks(chunk, [it for it in stacks if it in self._stacks])
        chunk.add("process", self._process_rows(threads))
        chunk.add("thread", self._thread_rows(threads))
        self._forget_old()
        if len(self._processes) > MAX_COUNTED_PROCESSES:
            self._processes_before += len(self._processes)
            self._processes.clear()

    def _resolve(self, owners: Mapping[int, ProcessKey], in_library: bool = False) -> None:
        """`owners`: the process of each stack id. `in_library`: they begin with frames of the
        injected library, which are removed."""
        if not owners:
            return
        unknown = [stack_id for stack_id in owners if stack_id and stack_id not in self._stacks]
        again = [it for it in self._put_off.keys() & owners.keys() if self._has_names_now(it)]
        found = self._kernel.walks(unknown)
        self.forgotten += len(unknown) - len(found)
        found += self._kernel.walks(again) if again else []
        of_processes: dict[ProcessKey, list[_native.RawStack]] = {}
        for walk in found:
            of_processes.setdefault(owners[walk.id], []).append(walk)
        for owner, walks in of_processes.items():
            process = self._resolver.processes.find(*owner)
            for walk, frames in self.stacks.named(process, walks):
                self.tails_dropped += walk.stop == TAIL_DROPPED
                self._keep(process, walk.id, frames, walk.stop, in_library, walk.is_long)
                if walk.id in self._stacks and self._resolver.is_put_off(process):
                    self._put_off[walk.id] = process
        # All of them, resolved before or not: the kernel stores a dropped stack again when it
        # occurs again.
        self._forget_when_full(owners.keys())

    def _has_names_now(self, stack_id: int) -> bool:
        """Whether a stack that was put off is to be resolved again now."""
        if self._resolver.is_put_off(self._put_off[stack_id]):
            return False
        del self._put_off[stack_id]
        return stack_id in self._stacks

    def _forget_when_full(self, stacks: Set[int]) -> None:
        """Note stacks as read; drop all that were read where they fill their share of the map."""
        self._in_kernel.update(stacks)
        if len(self._in_kernel) > self._max_in_kernel:
            kept = self._stacks.get
            short = {it for it in self._in_kernel if (at := kept(it)) and not at.is_long}
            self._kernel.forget_stacks(list(self._in_kernel - short), list(short))
            self._in_kernel.clear()

    def _resolve_own(self, stacks: Mapping[int, tuple[ProcessKey, tuple[int, ...]]]) -> None:
        """Resolve stacks that the injected library took itself: (process, addresses) of each."""
        self._used_stacks |= stacks.keys()
        for stack_id, (owner, addresses) in stacks.items():
            if stack_id not in self._stacks:
                process = self._resolver.processes.find(*owner)
                frames = tuple(self.stacks.frames(process, [], addresses))
                self._keep(process, stack_id, frames, NOT_WALKED)

    def _keep(
        self,
        process: TrackedProcess,
        stack_id: int,
        frames: tuple[KnownFrame, ...],
        stop: int,
        in_library: bool = False,
        is_long: bool = False,
    ) -> None:
        """Remember a resolved stack; `stop`: why its walk ended (unwind.stop_reasons)."""
        self.named += 1
        if in_library:
            frames = tuple(dropwhile(_is_of_library, frames))
        party = process.party
        if (before := self._stacks.get(stack_id)) is not None:
            self._stack_bytes -= before.bytes
            self._held.drop(before.frames)
            del self._stacks[stack_id]
        if not self._has_room(party):
            self.left_out += 1
            return
        bytes_before = self.bytes
        frames = self._held.add(frames)
        whole = is_whole(frames, stop)
        known = self._stacks[stack_id] = _Stack(frames, whole, is_long, party)
        self._stack_bytes += known.bytes
        self._new_bytes[party] += self.bytes - bytes_before

    def _write_stacks(self, chunk: ChunkBuilder, stacks: list[int]) -> None:
        known = [self._stacks[stack_id] for stack_id in stacks]
        ids, frames = _native.stack_columns([it.frames for it in known])
        if sum(column.text_bytes() for column in frames) > frame_texts.MOST_BYTES:
            short = frame_texts.shortened((it.party, it.frames) for it in known)
            self.names_cut += len(short)
            ids, frames = _native.stack_columns(
                [tuple(short.get(one, one) for one in it.frames) for it in known]
            )
        complete = [it.complete for it in known]
        columns = (stacks, ids, complete)
        chunk.add_part("stack", dict(zip(columns_of("stack"), columns, strict=True)))
        chunk.add("frame", ())
        if len(frames[0]):
            chunk.add_part("frame", dict(zip(columns_of("frame"), frames, strict=True)))

    def _process_rows(self, threads: Iterable[tuple[int, int, int]]) -> Iterable[TableRow]:
        again, self._podless = self._podless, set()
        for pid, start_ns in again | {(pid, start_ns) for pid, start_ns, _ in threads}:
            known = self._resolver.process(pid, start_ns)
            if known.owner.pod_uid and not known.owner.pod and (pid, start_ns) not in again:
                self._podless.add((pid, start_ns))  # the name may come: write it once more
            names = known.comm, known.exe
            yield pid, start_ns, known.ppid, *names, *_OWNER(known.owner), known.command

    def _thread_rows(self, threads: Iterable[tuple[int, int, int]]) -> Iterable[TableRow]:
        processes = self._resolver.processes
        of_processes: defaultdict[ProcessKey, list[int]] = defaultdict(list)
        for pid, start_ns, tid in threads:
            of_processes[pid, start_ns].append(tid)
        for (pid, start_ns), tids in of_processes.items():
            names = processes.thread_names(processes.find(pid, start_ns), tids)
            for tid, name in zip(tids, names, strict=True):
                yield pid, start_ns, tid, name


def _is_of_library(known: KnownFrame) -> bool:
    return bool(FRAMES_OF.search(known.frame.binary))
