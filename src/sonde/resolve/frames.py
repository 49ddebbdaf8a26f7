# SPDX-License-Identifier: Apache-2.0
"""Addresses to frames, each looked up once.

```
address ──▶ frames of its process ──▶ frames of (file, offset) ──▶ symbol index of the file
            native; whole walks        where another process        native; kept for the
            at once                    has seen it                  files used last
```
No address is dropped: without a symbol its frame keeps binary and offset, without a mapping it is
unknown.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from sys import intern
from typing import TYPE_CHECKING, Final, NamedTuple

from sonde import _native
from sonde.model.code import Frame, KnownFrame
from sonde.model.owner import GroupNote, Owner, ProcessNote
from sonde.model.process import Process
from sonde.resolve.binaries import Binaries, Binary
from sonde.resolve.counters import Counters
from sonde.resolve.live import LiveProcess
from sonde.resolve.mappings import Mapping
from sonde.resolve.owners import Owners
from sonde.resolve.perf_maps import PerfMaps
from sonde.resolve.processes import GRACE_NS, ProcessTable
from sonde.resolve.recent import Recent
from sonde.resolve.seen_files import SeenFiles

if TYPE_CHECKING:
    from sonde.resolve.pods import Pods

try:
    from _blake2 import blake2b  # hashlib has the same, and loads OpenSSL with it: 4 MB
except ImportError:
    from hashlib import blake2b

MAX_FRAMES: Final = 32_768
"""Frames kept by place: by (file, offset), by kernel address, by name of generated code."""
MAX_PROCESS_FRAMES: Final = 65_536
"""Addresses kept of all processes together."""
CACHE_BYTES: Final = 10 << 20
"""For the indices of files: enough for the largest library there is, and a dozen large ones."""
MAX_NEW_FILES: Final = 32
"""Files opened ahead at one tick, in case their process ends before it is asked about."""

MAX_KERNEL_FRAMES: Final = 16_384

EVALUATION: Final = "_PyEval_EvalFrameDefault"
"""CPython's evaluation loop; on a stack in place of frames that it does not have."""
_KERNEL: Final = "[kernel]"
_JIT: Final = "[jit]"


CodePlace = tuple[int, int]
"""(address, 1 where it is a leaf's: where the code was; else 0: the call is before it)"""


class _Place(NamedTuple):
    """Where an address of a stack lies."""

    position: int
    offset: int
    mapping: Mapping


def frame_id(frame: Frame) -> int:
    """64-bit hash of a frame's content, never 0."""
    content = "\0".join(map(str, frame))
    digest = blake2b(content.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _places(addresses: Sequence[int], has_leaf: bool) -> list[CodePlace]:
    """Of a stack's part, leaf first."""
    places = [(address, 0) for address in addresses]
    if has_leaf:
        places[0] = (addresses[0], 1)
    return places


_UNMAPPED: Final = Frame("unknown", "", "[unknown]")
_ASTRAY: Final = KnownFrame(frame_id(_UNMAPPED), _UNMAPPED)
"""For what lies in no mapping. The address says nothing, and would make a frame of its own."""


class Resolver:
    """Names what runs: the one object that the agent talks to."""

    def __init__(
        self,
        cache_bytes: int = CACHE_BYTES,
        grace_ns: int = GRACE_NS,
        pods: Pods | None = None,
        seen: SeenFiles | None = None,
        names_code: bool = True,
    ) -> None:
        """`cache_bytes` for the symbol indices of files. `grace_ns`: how long the names of dead
        processes are kept; longer than it takes until they are written. `seen` is told where the
        files were, for those who look for source lines later. `names_code`: False where nobody will
        ask for frames: then files are not opened ahead.
        """
        self._names_code = names_code
        self.counters = Counters()
        self.processes = ProcessTable(self.counters, grace_ns=grace_ns)
        self.owners = Owners(pods)
        self._symbols = _native.Symbolizer(cache_bytes)
        self._binaries = Binaries(self.counters, seen=seen)
        self._perf_maps = PerfMaps(self.counters)
        self._placed: Recent[tuple[int, int], KnownFrame] = Recent(MAX_FRAMES)
        self._nowhere: Recent[Frame, KnownFrame] = Recent(MAX_FRAMES // 4)
        """Frames that have no place of their own: generated code."""
        self.kernel_frames = _native.Places()
        """Of addresses in the kernel that are known already."""
        self._kernel_build_id = _native.kernel_build_id()
        self._users: set[LiveProcess] = set()
        """Processes that have frames."""
        self._in_use = 0
        self._forgotten = 0

    def start(self) -> None:
        """Take in the processes that run already, and the control groups."""
        self.owners.start()
        self.processes.scan()

    def on_process_events(self, events: Iterable[_native.ProcessEvent]) -> None:
        """Take in what processes did since the last call, in order of time."""
        self.processes.feed(events)
        for process, keeper in self.processes.new_steps:
            self.owners.started(process, keeper)
        self.processes.new_steps.clear()
        fresh = self.processes.new_files
        if fresh:
            for process, file in fresh[-MAX_NEW_FILES:] if self._names_code else ():
                for mapping in process.image.told(file):
                    self._binaries.of(process, mapping)
            fresh.clear()

    def learn(self, notes: Iterable[ProcessNote], groups: Iterable[GroupNote]) -> None:
        """What the kernel told of processes and control groups, in order of time."""
        self.owners.learn(notes, groups)

    def settle(self, timeout_s: float) -> None:
        """Wait for names that were asked for and are still to come."""
        self.owners.settle(timeout_s)

    def process(self, pid: int, start_ns: int) -> Process:
        """A process as the tables have it, with its owner."""
        process = self.processes.find(pid, start_ns)
        self.owners.of(process, self.processes.parent, time.monotonic_ns())
        return process.record()

    def program(self, pid: int, start_ns: int) -> tuple[str, Owner]:
        """What a process runs, '' unknown, and whose it is: what `process` says, for those who ask
        it of every process in every tick."""
        process = self.processes.find(pid, start_ns)
        owner = self.owners.of(process, self.processes.parent, time.monotonic_ns())
        return process.exe or process.comm, owner

    def on_events_lost(self) -> None:
        """Ask /proc about everything again."""
        self.processes.resync()

    def tick(self, now_ns: int) -> None:
        """Let go of what is no longer needed. `now_ns`: CLOCK_MONOTONIC."""
        self.processes.expire(now_ns)
        self._binaries.expire(now_ns)
        self._perf_maps.expire()
        self._users = {it for it in self._users if it.frames}
        evicted = self._placed.evicted + self._nowhere.evicted
        self.counters.frames_evicted = evicted + self._forgotten

    def usage(self) -> dict[str, int]:
        """What is held now, by name, for metrics."""
        files, file_bytes, _, functions, kernel_bytes = self._symbols.usage()
        return {
            "processes": len(self.processes),
            "frames": len(self._placed) + len(self._nowhere) + len(self.kernel_frames),
            "files_open": self._binaries.held_open,
            "files_indexed": files,
            "file_index_bytes": file_bytes,
            "kernel_functions": functions,
            "kernel_table_bytes": kernel_bytes,
        }

    def close(self) -> None:
        """Close every file."""
        self._binaries.close()
        self.owners.close()

    def file_of(self, process: LiveProcess, mapping: Mapping) -> Binary | None:
        """The file behind a mapping, open; None where no file with code can be opened."""
        binary = self._binaries.of(process, mapping)
        if binary is None or binary.holds_no_code:
            return None
        if not self._binaries.open(binary, process, mapping) or not binary.is_elf:
            return None
        return binary

    def resolve(
        self,
        process: LiveProcess,
        kernel: Sequence[int],
        user: Sequence[int],
        has_leaf: bool = True,
    ) -> list[KnownFrame]:
        """The frames of a stack, leaf first, kernel before user: one for each address, in order.

        Addresses are those of a stack walk: the first of each part is where the code was, the
        others are return addresses and stand for the call before them; without `has_leaf` all of
        the user part are. Where a walk went astray,
        addresses that lie in no mapping follow one another: those become one frame, [unknown].
        """
        found: list[KnownFrame | None] = []
        if kernel:
            places = _places(kernel, True)
            found = [self.kernel_frames.get(*place) for place in places]
            if not all(found):
                self._look_up_kernel(places, found)
        if user:
            if process.image.pending:
                process.space()
            places = _places(user, has_leaf)
            frames = [process.frames.get(*place) for place in places]
            found += frames if all(frames) else self._look_up(process, places, frames)
        return found  # type: ignore[return-value]  # every None was replaced

    def prepare(
        self, process: LiveProcess, kernel: Sequence[CodePlace], user: Sequence[CodePlace]
    ) -> None:
        """Look up places that are not known yet, all at once: a file is asked once for many. Those
        that lie nowhere stay unknown."""
        if kernel:
            self._look_up_kernel(kernel, [None] * len(kernel))
        if user:
            self._look_up(process, user, [None] * len(user), is_stack=False)

    def _look_up_kernel(self, places: Sequence[CodePlace], frames: list[KnownFrame | None]) -> None:
        missing = [i for i, frame in enumerate(frames) if frame is None]
        lookups = [max(places[i][0] - (not places[i][1]), 0) for i in missing]
        found = self._symbols.kernel(lookups)
        if len(self.kernel_frames) > MAX_KERNEL_FRAMES:
            self._forgotten += len(self.kernel_frames)
            self.kernel_frames.clear()
        for i, symbol in zip(missing, found, strict=True):
            if symbol is None:
                frame = Frame("kernel", "", _KERNEL)
                self.counters.frames_unnamed += 1
            else:
                name, _, module, offset = symbol
                build_id = "" if module else self._kernel_build_id
                binary = f"[{module}]" if module else _KERNEL
                frame = Frame("kernel", intern(name), intern(binary), build_id, offset)
            known = KnownFrame(frame_id(frame), frame)
            self.counters.frames_new += 1
            self.kernel_frames.put(*places[i], known)
            frames[i] = known

    def _look_up(
        self,
        process: LiveProcess,
        places: Sequence[CodePlace],
        frames: list[KnownFrame | None],
        is_stack: bool = True,
    ) -> list[KnownFrame | None]:
        """Fill in the frames that are None; of a stack, those astray become one."""
        wanted: dict[Binary, list[_Place]] = {}
        missing = [i for i, known in enumerate(frames) if known is None]
        lookups = [places[i][0] - (not places[i][1]) for i in missing]
        astray = 0
        mappings = self._mappings(process, lookups)
        for i, address, mapping in zip(missing, lookups, mappings, strict=True):
            if mapping is None:
                frames[i] = _ASTRAY
                astray += 1
                continue  # not kept: it may be mapped soon, and seldom comes twice
            binary = mapping.binary or self._binaries.of(process, mapping)
            if binary is None or binary.holds_no_code:
                generated = self._generated(process, mapping, address)
                frames[i] = generated
                if generated.frame.kind == "unknown":
                    continue  # not kept: a perf map may name it soon
            else:
                offset = address - mapping.start + mapping.offset
                frames[i] = self._placed.get((binary.index, offset))
                if frames[i] is None:
                    wanted.setdefault(binary, []).append(_Place(i, offset, mapping))
                    continue
            self._keep(process, places[i], frames[i])
        for binary, there in wanted.items():
            for place, known in zip(there, self._symbolize(process, binary, there), strict=True):
                frames[place.position] = known
                self._keep(process, places[place.position], known)
        if is_stack:
            self.counters.frames_unmapped += astray
            if astray > 1:
                runs = zip([None, *frames], frames, strict=False)
                return [it for before, it in runs if it is not _ASTRAY or before is not it]
        return frames

    def _keep(self, process: LiveProcess, place: CodePlace, known: KnownFrame | None) -> None:
        if known is None:
            return
        if self._in_use >= MAX_PROCESS_FRAMES:
            for user in self._users:
                self._forgotten += len(user.frames)
                user.forget_frames()
            self._users.clear()
            self._in_use = 0
        self._in_use += 1
        self._users.add(process)
        process.frames.put(*place, known, apart=known.frame.function == EVALUATION)

    @staticmethod
    def _mappings(process: LiveProcess, addresses: Sequence[int]) -> list[Mapping | None]:
        found = process.space().find_all(addresses)
        if process.previous is not None and None in found:
            # It ran another program earlier in this interval.
            before = process.previous.space().find_all(addresses)
            found = [now or then for now, then in zip(found, before, strict=True)]
        return found

    def _symbolize(
        self, process: LiveProcess, binary: Binary, places: Sequence[_Place]
    ) -> list[KnownFrame]:
        offsets = [place.offset for place in places]
        is_open = self._binaries.open(binary, process, places[0].mapping)
        names: Sequence[tuple[str, int] | None] = [None] * len(offsets)
        if is_open:
            with suppress(OSError):
                names = self._symbols.elf_open(binary.fd, offsets)
        found = []
        for offset, name in zip(offsets, names, strict=True):
            function = intern(name[0]) if name else ""
            frame = Frame(binary.kind, function, binary.name, binary.build_id, offset)
            known = KnownFrame(frame_id(frame), frame)
            self.counters.frames_new += 1
            self.counters.frames_unnamed += not function
            if is_open:  # otherwise another process may still lead to the file
                self._placed.put((binary.index, offset), known)
            found.append(known)
        return found

    def _generated(self, process: LiveProcess, mapping: Mapping, address: int) -> KnownFrame:
        """Code that no file holds."""
        name = self._perf_maps.find(process, address, time.monotonic_ns())
        if name is not None:
            return self._without_place(Frame(name.kind, name.function, _JIT, file=name.file))
        start = mapping.start - (mapping.offset if mapping.has_file else 0)
        return self._without_place(Frame("unknown", "", mapping.name, offset=address - start))

    def _without_place(self, frame: Frame) -> KnownFrame:
        known = self._nowhere.get(frame)
        if known is None:
            known = KnownFrame(frame_id(frame), frame)
            self._nowhere.put(frame, known)
            self.counters.frames_new += 1
            self.counters.frames_unnamed += not frame.function
        return known
