# SPDX-License-Identifier: Apache-2.0
"""Resolves addresses to frames, with a cache at each level.

```
address ──▶ cache of the process ──▶ cache of (file, offset) ──▶ symbol index of the file
            native; for whole         shared by all processes     native; for the files
            stacks at once            that map the file           used last
```
No address is dropped: without a symbol the frame keeps binary and offset, without a mapping it is
[unknown].
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from sonde import _native
from sonde.model.code import Frame, KnownFrame
from sonde.model.owner import GroupNote, Owner, ProcessNote
from sonde.model.process import Process
from sonde.resolve.binaries import Binaries
from sonde.resolve.binary import Binary, FileKey
from sonde.resolve.build_id_links import BuildIdLinks
from sonde.resolve.counters import Counters
from sonde.resolve.frame_fields import Label, frame_bytes, frame_id, label_of
from sonde.resolve.frames_without_file import FramesWithoutFile
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.mappings import Mapping
from sonde.resolve.naming_budget import (
    FILES_BURST_S,
    PYTHON_BURST_S,
    PYTHON_SHARE,
    SHARE,
    NamingBudget,
)
from sonde.resolve.new_files import in_turn
from sonde.resolve.owners import OwnerResolver
from sonde.resolve.processes import GRACE_NS, ProcessTable
from sonde.resolve.shared_texts import shared
from sonde.resolve.tracked_process import TrackedProcess

if TYPE_CHECKING:
    from sonde.resolve.pods import Pods

MAX_FRAMES: Final = 32_768
"""Frames kept by (file, offset)."""
MAX_FRAME_BYTES: Final = 16 << 20
"""Of those frames."""
MAX_PROCESS_FRAMES: Final = 65_536
"""Addresses in the caches of all processes together."""
MAX_PROCESS_FRAME_BYTES: Final = 24 << 20
"""Of their frames, where one that several processes have counts for each."""
CACHE_BYTES: Final = 16 << 20
"""Symbol indices of files: enough for jaxlib (the largest known) and half a dozen large libraries,
or for twenty large ones. Indices of the party that holds most are evicted first."""
MAX_NEW_FILES: Final = 32
"""Newly mapped files opened at one tick, in case the process ends before it is sampled."""
MAX_KERNEL_FRAMES: Final = 16_384
"""Frames of the kernel that are cached; beyond, all are dropped."""

EVAL_FUNCTION: Final = "_PyEval_EvalFrameDefault"
"""CPython's evaluation loop, which runs the Python frames of a stack."""
_KERNEL: Final = "[kernel]"


CodeAddress = tuple[int, int]
"""(address, 1): the instruction of a leaf frame. (address, 0): a return address, which stands for
the call before it."""


class _FileLocation(NamedTuple):
    """Where an address lies in a file."""

    position: int
    """Of the address in the list that is resolved."""
    offset: int
    """In the file."""
    mapping: Mapping


def _is_place(known: KnownFrame | None) -> bool:
    """Whether a frame is no code location, but a whole mapping, or memory outside all of them."""
    if known is None or known is _UNMAPPED:
        return known is _UNMAPPED
    return known.frame.kind == "unknown" and not known.frame.offset


def _frame_in(binary: Binary, function: str, at: _FileLocation) -> Frame:
    """The frame of code at an offset of a file.

    The name and origin shown are those of the mapping: other processes may have the file at another
    path.
    """
    label = label_of(at.mapping)
    named = (binary.kind, function, label.name, binary.build_id, at.offset)
    return Frame(*named, origin=label.origin)


def _code_addresses(addresses: Sequence[int], has_leaf: bool) -> list[CodeAddress]:
    """The kernel or user part of a stack, leaf first. `has_leaf`: the first one is a leaf."""
    found = [(address, 0) for address in addresses]
    if has_leaf:
        found[0] = (addresses[0], 1)
    return found


_UNKNOWN: Final = Frame("unknown", "", "[unknown]")
_UNMAPPED: Final = KnownFrame(frame_id(_UNKNOWN), _UNKNOWN)
"""The frame of all addresses outside mappings: the address itself carries no information."""


class Resolver:
    """The public interface of this package: processes, owners and frames.

    Stacks come as lists of addresses, leaf first.
    """

    def __init__(
        self,
        cache_bytes: int = CACHE_BYTES,
        grace_ns: int = GRACE_NS,
        pods: Pods | None = None,
        links: BuildIdLinks | None = None,
        resolves_frames: bool = True,
        has_budget: bool = True,
    ) -> None:
        """`cache_bytes`: for the symbol indices of files. `grace_ns`: how long the names of ended
        processes are kept; it must exceed the time until they are written. `links`: where to
        record the paths of files, for source lines later. `resolves_frames`: False where no frames
        will be resolved; then newly mapped files are not opened in advance. `has_budget`: False
        where nobody else waits while names are looked up; see `name_until`.
        """
        self._resolves_frames = resolves_frames
        self.counters = Counters()
        self.processes = ProcessTable(self.counters, grace_ns=grace_ns)
        self.owners = OwnerResolver(pods)
        self._symbols = _native.Symbolizer(cache_bytes)
        self._binaries = Binaries(self.counters, links=links)
        self.budget = NamingBudget(has_budget)
        """For names, but those of Python code."""
        self.python_budget = NamingBudget(has_budget, PYTHON_BURST_S, PYTHON_SHARE)
        """For names of Python code. What is left out for it is counted in `budget.left_out`."""
        self.files_budget = NamingBudget(has_budget, FILES_BURST_S, SHARE)
        """For reading which files processes map, and what these are."""
        self._put_off: set[TrackedProcess] = set()
        """Processes with frames that have no name yet."""
        self._by_offset: LruCache[tuple[int, int, Label], KnownFrame] = LruCache(
            MAX_FRAMES, MAX_FRAME_BYTES, frame_bytes
        )
        """Frames by the file's index, offset, and what is shown of its path."""
        self._without_file = FramesWithoutFile(self.counters, self.budget, MAX_FRAMES // 4)
        self.kernel_frames = _native.FrameCache()
        """Frames by (kernel address, 1 for a leaf)."""
        self._kernel_build_id = _native.kernel_build_id()
        self._with_frames: set[TrackedProcess] = set()
        """Processes with cached frames."""
        self._cached_addresses = 0
        """Addresses in the caches of processes, at most: those that a process dropped still
        count."""
        self._cached_bytes = 0
        """Memory of their frames, likewise."""
        self._dropped_frames = 0
        """Frames dropped from the caches of processes and of the kernel, as these were full."""

    def name_until(self, end_s: float) -> None:
        """Without a budget: look up no names from `end_s` (time.monotonic) on. Frames that lack one
        for it are counted in `budget.left_out`."""
        for budget in (self.budget, self.python_budget, self.files_budget):
            budget.until_s = end_s

    def start(self) -> None:
        """Read the processes and control groups that exist."""
        self.owners.start()
        self.processes.scan()

    def on_process_events(self, events: Iterable[_native.ProcessEvent]) -> None:
        """Apply process events, in order of time."""
        self.processes.feed(events)
        for process, daemon in self.processes.new_steps:
            self.owners.on_step_started(process, daemon)
        self.processes.new_steps.clear()
        new_files = self.processes.new_files
        if new_files:
            if self._resolves_frames:
                for process, file in in_turn(new_files, MAX_NEW_FILES):
                    self._open_ahead(process, file)
            new_files.clear()

    def _open_ahead(self, process: TrackedProcess, file: FileKey) -> None:
        """Open a newly mapped file, in case its process ends before it is sampled."""
        if self.files_budget.is_over(process.party):
            self.counters.files_put_off += 1
            return
        with self.files_budget.charged(process.party, free_s=0.0):
            if mapping := process.image.pending_mapping(file):
                self._binaries.of(process, mapping)

    def add_notes(self, notes: Iterable[ProcessNote], groups: Iterable[GroupNote]) -> None:
        """Take in notes of the kernel programs on processes and control groups, by time."""
        self.owners.add_notes(notes, groups)

    def wait_for_pods(self, timeout_s: float) -> None:
        """Wait until the names of all requested pods are known, or for `timeout_s`."""
        self.owners.wait_for_pods(timeout_s)

    def process(self, pid: int, start_ns: int) -> Process:
        """The row of the process table, with its owner."""
        process = self.processes.find(pid, start_ns)
        self.owners.of(process, self.processes.parent, time.monotonic_ns())
        return process.record()

    def program(self, pid: int, start_ns: int) -> tuple[str, Owner, str]:
        """(executable or command name, owner, what it runs as an interpreter) of a process:
        `process` in short, for metrics that need it of every process in every tick."""
        process = self.processes.find(pid, start_ns)
        owner = self.owners.of(process, self.processes.parent, time.monotonic_ns())
        return process.exe or process.comm, owner, process.command or ""

    def on_events_lost(self) -> None:
        """Read /proc again."""
        self.processes.resync()

    def on_processes_unseen(self, pids: Iterable[int]) -> None:
        """Read these processes in /proc again."""
        self.processes.reread(pids)

    def tick(self, now_ns: int) -> None:
        """End a tick: drop what is no longer needed. `now_ns`: CLOCK_MONOTONIC."""
        self.processes.expire(now_ns)
        self._binaries.expire(now_ns)
        for process in self._binaries.to_retry(now_ns):
            process.forget_frames()
        self._without_file.expire()
        self.budget.tick()
        self.python_budget.tick()
        self.files_budget.tick()
        for process in list(self._put_off):
            party = process.party
            is_over = self.budget.is_over(party) or self.files_budget.is_over(party)
            if not process.is_alive or not is_over:
                self._put_off.remove(process)
                process.forget_frames()  # to be looked up again
        self._with_frames = {it for it in self._with_frames if it.frames}
        evicted = self._by_offset.evicted + self._without_file.evicted
        self.counters.frames_evicted = evicted + self._dropped_frames

    def usage(self) -> dict[str, int]:
        """Sizes of caches now, by name; each is a metric `sonde.resolve.NAME`."""
        files, file_bytes, _, functions, kernel_bytes = self._symbols.usage()
        return {
            "processes": len(self.processes),
            "frames": len(self._by_offset) + len(self._without_file) + len(self.kernel_frames),
            "files_open": self._binaries.held_open,
            "files_indexed": files,
            "file_index_bytes": file_bytes,
            "kernel_functions": functions,
            "kernel_functions_left_out": self._symbols.kernel_functions_left_out(),
            "kernel_table_bytes": kernel_bytes,
        }

    def close(self) -> None:
        """Close all files, and stop requests for pods."""
        self._binaries.close()
        self.owners.close()

    def file_of(self, process: TrackedProcess, mapping: Mapping) -> Binary | None:
        """The file behind a mapping, opened; None where no ELF file can be opened."""
        binary = self._binaries.of(process, mapping)
        if binary is None or binary.holds_no_code:
            return None
        if not self._binaries.open(binary, process, mapping) or not binary.is_elf:
            return None
        return binary

    def resolve(
        self,
        process: TrackedProcess,
        kernel: Sequence[int],
        user: Sequence[int],
        has_leaf: bool = True,
    ) -> list[KnownFrame]:
        """The frames of a stack, leaf first, kernel before user: one for each address, in order.

        The first address of each part is that of the executing instruction; the others are return
        addresses. Without `has_leaf`, all of the user part are. Adjacent addresses outside all
        mappings, where a stack walk went wrong, become a single frame, [unknown].
        """
        found: list[KnownFrame | None] = []
        if kernel:
            addresses = _code_addresses(kernel, True)
            found = [self.kernel_frames.get(*it) for it in addresses]
            if not all(found):
                self._look_up_kernel(addresses, found)
        if user:
            self.update_mappings(process)
            addresses = _code_addresses(user, has_leaf)
            frames = [process.frames.get(*it) for it in addresses]
            found += frames if all(frames) else self._look_up(process, addresses, frames)
        return found  # type: ignore[return-value]  # every None was replaced

    def load_kernel_symbols(self) -> None:
        """Read the kernel's symbols now, some 70 ms of work, rather than at the first look-up."""
        self._symbols.kernel([0])

    def prepare(
        self, process: TrackedProcess, kernel: Sequence[CodeAddress], user: Sequence[CodeAddress]
    ) -> None:
        """Resolve addresses that are not cached yet, with one query for each file, and cache them.

        Addresses outside all mappings are not cached.
        """
        if kernel:
            self._look_up_kernel(kernel, [None] * len(kernel))
        if user:
            self._look_up(process, user, [None] * len(user), is_stack=False)

    def _look_up_kernel(
        self, addresses: Sequence[CodeAddress], frames: list[KnownFrame | None]
    ) -> None:
        missing = [i for i, frame in enumerate(frames) if frame is None]
        lookups = [max(addresses[i][0] - (not addresses[i][1]), 0) for i in missing]
        found = self._symbols.kernel(lookups)
        if len(self.kernel_frames) > MAX_KERNEL_FRAMES:
            self._dropped_frames += len(self.kernel_frames)
            self.kernel_frames.clear()
        for i, symbol in zip(missing, found, strict=True):
            if symbol is None:
                frame = Frame("kernel", "", _KERNEL)
                self.counters.frames_unnamed += 1
            else:
                name, _, module, offset = symbol
                build_id = "" if module else self._kernel_build_id
                binary = f"[{module}]" if module else _KERNEL
                frame = Frame("kernel", shared(name), shared(binary), build_id, offset)
            known = KnownFrame(frame_id(frame), frame)
            self.counters.frames_new += 1
            self.kernel_frames.put(*addresses[i], known)
            frames[i] = known

    def _look_up(
        self,
        process: TrackedProcess,
        addresses: Sequence[CodeAddress],
        frames: list[KnownFrame | None],
        is_stack: bool = True,
    ) -> list[KnownFrame | None]:
        """Fill in the frames that are None; in a stack, adjacent unmapped ones become one, and
        those of one mapping without an offset."""
        by_file: dict[Binary, list[_FileLocation]] = {}
        generated: list[tuple[int, Mapping, int]] = []
        missing = [i for i, known in enumerate(frames) if known is None]
        lookups = [addresses[i][0] - (not addresses[i][1]) for i in missing]
        unmapped = 0
        mappings = self._mappings(process, lookups)
        for i, address, mapping in zip(missing, lookups, mappings, strict=True):
            if mapping is None:
                frames[i] = _UNMAPPED
                unmapped += 1
                continue  # not cached: it may be mapped soon, and such an address seldom recurs
            if self._must_wait(process, mapping):
                frames[i] = self._put_file_off(process, mapping, address)
                continue
            binary = self._binary_of(process, mapping)
            if binary is None or binary.holds_no_code:
                if is_stack or process.generated_code is not None:
                    generated.append((i, mapping, address))
                continue  # unknown ones are not cached, so they are not looked up in advance
            offset = address - mapping.start + mapping.offset
            label = label_of(mapping)
            frames[i] = self._by_offset.get((binary.index, offset, label))
            if frames[i] is None:
                by_file.setdefault(binary, []).append(_FileLocation(i, offset, mapping))
                continue
            self._cache(process, addresses[i], frames[i])
        if generated:
            self._look_up_generated(process, addresses, frames, generated)
        for binary, locations in by_file.items():
            symbolized = self._symbolize(process, binary, locations)
            for location, known in zip(locations, symbolized, strict=True):
                frames[location.position] = known
                self._cache(process, addresses[location.position], known)
        if is_stack:
            self.counters.frames_unmapped += unmapped
            if unmapped > 1 or len(generated) > 1:
                pairs = zip([None, *frames], frames, strict=False)
                return [it for before, it in pairs if before is not it or not _is_place(it)]
        return frames

    def _look_up_generated(
        self,
        process: TrackedProcess,
        addresses: Sequence[CodeAddress],
        frames: list[KnownFrame | None],
        generated: Sequence[tuple[int, Mapping, int]],
    ) -> None:
        """Fill in frames of addresses, (position, mapping, address), whose code is in no file."""
        found, is_put_off = self._without_file.at(process, [it[1:] for it in generated])
        if is_put_off:
            self._put_off.add(process)
            self.budget.left_out[process.party] += len(generated)
            self.counters.names_put_off += len(generated)
        for (i, _, _), known in zip(generated, found, strict=True):
            frames[i] = known
            if known.frame.kind != "unknown":  # else not cached: a perf map may name it soon
                self._cache(process, addresses[i], known)

    def _cache(
        self, process: TrackedProcess, address: CodeAddress, known: KnownFrame | None
    ) -> None:
        if known is None:
            return
        if (
            self._cached_addresses >= MAX_PROCESS_FRAMES
            or self._cached_bytes >= MAX_PROCESS_FRAME_BYTES
        ):
            for it in self._with_frames:
                self._dropped_frames += len(it.frames)
                it.forget_frames()
            self._with_frames.clear()
            self._cached_addresses = self._cached_bytes = 0
        self._cached_addresses += 1
        self._cached_bytes += frame_bytes(known)
        self._with_frames.add(process)
        process.frames.put(*address, known, needs_reorder=known.frame.function == EVAL_FUNCTION)

    def update_mappings(self, process: TrackedProcess) -> None:
        """Take in what a process has mapped since its mappings were used last."""
        if process.image.pending:
            with self.files_budget.charged(process.party):
                process.space()

    def _mappings(self, process: TrackedProcess, addresses: Sequence[int]) -> list[Mapping | None]:
        party, image, previous = process.party, process.image, process.previous
        if not image.is_built and self.files_budget.is_over(party):
            self._put_off.add(process)
            self.budget.left_out[party] += len(addresses)
            self.counters.names_put_off += len(addresses)
            return [None] * len(addresses)
        with self.files_budget.charged(party):
            found = process.space().find_all(addresses)
            if previous is None or None not in found:
                return found
            # The process ran another program earlier in this tick.
            before = process.previous_space().find_all(addresses)
            return [now or then for now, then in zip(found, before, strict=True)]

    def _symbolize(
        self, process: TrackedProcess, binary: Binary, locations: Sequence[_FileLocation]
    ) -> list[KnownFrame]:
        offsets = [it.offset for it in locations]
        with self.files_budget.charged(process.party):
            is_open = self._binaries.open(binary, process, locations[0].mapping)
            if is_open:
                self._binaries.note_link(binary, process, locations[0].mapping)
        names: Sequence[tuple[str, int] | None] | None = [None] * len(offsets)
        if is_open:
            may_build = not self.budget.is_over(process.party)
            with suppress(OSError), self.budget.charged(process.party):
                names = self._symbols.elf_open(
                    binary.fd, offsets, process.party, may_build, binary.distinct
                )
        if names is None:
            return self._put_names_off(process, binary, locations)
        found = []
        for location, name in zip(locations, names, strict=True):
            function = shared(name[0]) if name else ""
            frame = _frame_in(binary, function, location)
            known = KnownFrame(frame_id(frame), frame)
            self.counters.frames_new += 1
            self.counters.frames_unnamed += not function
            if is_open:  # else not cached: the file may be opened through another process
                label = label_of(location.mapping)
                self._by_offset.put((binary.index, location.offset, label), known)
            found.append(known)
        return found

    def is_put_off(self, process: TrackedProcess) -> bool:
        """Whether code of a process has no name for now, as its party has no time left for it."""
        return process in self._put_off

    def _must_wait(self, process: TrackedProcess, mapping: Mapping) -> bool:
        """Whether a file still has to be opened, and its party has no time left for that."""
        is_new = mapping.has_file and self._binaries.is_to_find(mapping)
        return is_new and self.files_budget.is_over(process.party)

    def _binary_of(self, process: TrackedProcess, mapping: Mapping) -> Binary | None:
        """The file behind a mapping; looking for it is charged to the party."""
        if not (mapping.has_file or mapping.path) or not self._binaries.is_to_find(mapping):
            return mapping.binary  # None for anonymous memory
        with self.files_budget.charged(process.party, free_s=0.0):
            return self._binaries.of(process, mapping)

    def _put_file_off(self, process: TrackedProcess, mapping: Mapping, address: int) -> KnownFrame:
        """A frame of a file that is not looked at until its party has time for that."""
        self._put_off.add(process)
        self.budget.left_out[process.party] += 1
        self.counters.names_put_off += 1
        offset = address - mapping.start + mapping.offset
        label = label_of(mapping)
        return self._without_file.shared(Frame("unknown", "", label.name, offset=offset))

    def _put_names_off(
        self, process: TrackedProcess, binary: Binary, locations: Sequence[_FileLocation]
    ) -> list[KnownFrame]:
        """Frames without names, until their party has time for them again."""
        self._put_off.add(process)
        self.budget.left_out[process.party] += len(locations)
        self.counters.names_put_off += len(locations)
        frames = [_frame_in(binary, "", it) for it in locations]
        return [KnownFrame(frame_id(frame), frame) for frame in frames]
