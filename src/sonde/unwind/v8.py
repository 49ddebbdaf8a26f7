# SPDX-License-Identifier: Apache-2.0
"""The V8s among the processes that are walked (Node.js): where their code is, and its names."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from sonde import _native
from sonde.model.code import Frame, KnownFrame
from sonde.procfs.party_memory import PartyMemory
from sonde.resolve import Resolver
from sonde.resolve.allowance import ROOT
from sonde.resolve.frame_fields import frame_id
from sonde.resolve.mappings import Mapping
from sonde.resolve.tracked_process import JitName, TrackedProcess
from sonde.unwind.attempts import ATTEMPTS, OVER_S, RETRY_S, Attempts
from sonde.unwind.process_memory import ProcessMemory
from sonde.unwind.runtime_memory import MOST_BYTES, RuntimeMemory
from sonde.unwind.v8_code import V8Codes
from sonde.unwind.v8_functions import TRUST_NS, V8Functions
from sonde.unwind.v8_layout import EXPORTS, MARK, UnsupportedV8Error, V8Layout, read_layout
from sonde.unwind.v8_mappings import V8Mappings, generated

V8_FRAME: Final = 2
"""Bit of a stack's first word: a frame of V8 (abi/unwind.h)."""
V8_BUILTIN: Final = 4
"""Bit of that word: in V8's own code (builtins, the interpreter)."""
RUNTIME: Final = 2
"""RUNTIME_V8 of abi/unwind.h."""
MAX_V8S: Final = 256
PARTS: Final = 4
"""A party other than root may have one part in PARTS of them."""
MAX_CACHED_FRAMES: Final = 16_384
TABLE_BYTES: Final = 1 << 27
"""Of generated code in one range; more is split into several."""
_RULES: Final = [(0, (14, 0, 0, 0))]
"""CFA_V8 everywhere."""
_ADDRESS: Final = (1 << 47) - 1
_HALF: Final = 0xFFFF
_UNKNOWN: Final = Frame("jit", "", "[jit]")
UNREAD: Final = KnownFrame(frame_id(_UNKNOWN), _UNKNOWN)
"""In place of a frame whose function was not read."""

Range = tuple[int, int, int, int]
"""(start, end, bias, table), as `UnwindMaps.set_process` takes it."""


class V8(RuntimeMemory):
    """One running V8."""

    def __init__(
        self,
        process: TrackedProcess,
        resolver: Resolver,
        exports: dict[str, int],
        memory_of_all: PartyMemory | None = None,
    ) -> None:
        """`exports`: addresses in its memory; `memory_of_all`: see RuntimeMemory. Raises
        UnsupportedV8Error, OSError."""
        super().__init__(process, memory_of_all)
        self._process = process
        self._resolver = resolver
        self._memory = ProcessMemory(*process.key)
        try:
            self.layout: V8Layout = read_layout(self._memory, exports)
        except BaseException:
            self.close()
            raise
        self._functions = V8Functions(self.layout)
        self.codes = V8Codes(self.layout, self._functions)
        self._frames_since_ns = 0
        self._frames_drops = 0
        """`drops` of the functions that the frames were made of."""
        self.inlined: dict[tuple[int, int], list[KnownFrame]] = {}
        """Frames of functions that were inlined, innermost first, by the two words of a walk."""
        self._inlined_frames = 0
        self.code_left_out = 0
        """Ranges of generated code beyond MAX_GENERATED when it was last loaded."""

    @property
    def _name_bytes(self) -> int:
        return self._functions.held_bytes

    def _forget_names(self) -> None:
        self._functions.forget()
        self.codes.forget()
        self.inlined, self._inlined_frames = {}, 0

    def name_at(self, address: int) -> JitName | None:
        """None: generated code has its names in frames, not by address."""
        return None

    def frame_cache(self) -> _native.FrameCache:
        """Frames by the two words of a walk, as far as they are known."""
        now_ns = time.monotonic_ns()
        if (
            now_ns > self._frames_since_ns + TRUST_NS
            or len(self._frames) > MAX_CACHED_FRAMES
            or self._inlined_frames >= MAX_CACHED_FRAMES
            or self._frames_drops != self._functions.drops
        ):
            self._forget_frames()
            self._frames_since_ns, self._frames_drops = now_ns, self._functions.drops
            self.inlined, self._inlined_frames = {}, 0
            self._count()
        return self._frames

    def frame(self, word: int, where: int, cache: _native.FrameCache) -> KnownFrame:
        """The frame of two words of a walk, which is put into `cache`."""
        place = (word >> 47 & _HALF) << 16 | where >> 47 & _HALF
        shared, code = word & _ADDRESS & ~7, where & _ADDRESS
        try:
            found = self._frames_at(shared, code, place, bool(word & V8_BUILTIN))
        except Exception:  # its memory may hold anything, and must not stop the event loop
            found = [UNREAD]
        *inlined, known = found
        if self._inlined_frames >= MAX_CACHED_FRAMES:
            inlined = []  # until the next cache, with which these begin again
        if inlined:
            self.inlined[word, where] = inlined
            self._inlined_frames += len(inlined)
        cache.put(word, where, known, needs_reorder=bool(inlined))
        for one in found:
            self._count_frame(one)
        self._count()
        return known

    def _frames_at(self, shared: int, code: int, place: int, is_builtin: bool) -> list[KnownFrame]:
        """The frames at a place, those of inlined functions first, from the innermost on."""
        memory, now_ns = self._memory, time.monotonic_ns()
        function = self._functions.find(memory, shared, now_ns)
        if is_builtin and (function is None or function.is_builtin):
            native = self._resolver.resolve(self._process, (), [code])
            if native and (function is None or native[0].frame.function):
                return native[:1]
        if function is None:
            return [UNREAD]
        if is_builtin:
            bytecode = place - self.layout.bytecodes + 1
            calls = [(function, self._functions.line_of_bytecode(memory, function, bytecode))]
        else:
            calls = self.codes.calls_at(memory, function, code, place, now_ns)
        frames = [
            Frame("jit", it.name, "[jit]", file=it.script.file, line=line) for it, line in calls
        ]
        return [KnownFrame(frame_id(it), it) for it in frames]

    def close(self) -> None:
        """Close its memory for good. What is known stays."""
        self._memory.close()


class V8s:
    """All V8s, by pid."""

    def __init__(
        self,
        maps: _native.UnwindMaps,
        resolver: Resolver,
        memory_of_all: PartyMemory | None = None,
    ) -> None:
        """`memory_of_all`: that all runtimes share."""
        self._maps = maps
        self._memory_of_all = memory_of_all or PartyMemory(MOST_BYTES)
        self._resolver = resolver
        self._loaded: dict[int, V8] = {}
        self._attempts = Attempts()
        self._table = 0
        """Number of the one table for generated code of all; 0: none yet."""
        self.refused = 0
        """Processes whose V8 could not be read, or for which there was no room."""

    def load(self, process: TrackedProcess, mapped: V8Mappings) -> tuple[int, bytes] | None:
        """(RUNTIME, `struct unwind_v8`) of a process; None without a V8 that can be read."""
        known = self._loaded.get(process.pid)
        if known is None or process.generated_code is not known:
            self._drop(process.pid)
            known = self._found(process, mapped)
            if known is None:
                return None
            self._loaded[process.pid] = known
            process.generated_code = known
        return RUNTIME, known.layout.for_kernel(mapped.code)

    def _found(self, process: TrackedProcess, mapped: V8Mappings) -> V8 | None:
        if mapped.file is None:
            return None
        if not self._attempts.is_due(process.key):
            return None
        attempts = self._attempts.made(process.key)
        if self._resolver.budget.is_over(process.party):
            self._attempts.put_off(process.key, attempts, OVER_S)
            return None
        may_be_v8 = True
        with self._resolver.budget.charged(process.party), suppress(OSError):
            exports = self._exports(process, mapped.file)
            may_be_v8 = MARK in exports
            for bias in sorted(mapped.bounds)[:2]:
                if not may_be_v8 or not self._has_room(process.party):
                    break
                with suppress(UnsupportedV8Error, OSError):
                    addresses = {name: at + bias for name, at in exports.items()}
                    found = V8(process, self._resolver, addresses, self._memory_of_all)
                    self._attempts.has_worked(process.key)
                    return found
        # A small program may still load a library with V8. A file without V8 is no loss.
        self.refused += may_be_v8 and attempts + 1 == ATTEMPTS
        self._attempts.put_off(process.key, attempts + 1, RETRY_S)
        return None

    def _has_room(self, party: int) -> bool:
        """Whether a party may have one more V8."""
        of_party = sum(it.party == party for it in self._loaded.values())
        most = MAX_V8S if party == ROOT else MAX_V8S // PARTS
        return of_party < most and len(self._loaded) < MAX_V8S

    def _exports(self, process: TrackedProcess, file: Mapping) -> dict[str, int]:
        """Linked addresses of EXPORTS in a file. Raises OSError."""
        binary = self._resolver.file_of(process, file)
        if binary is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return _native.exported_addresses(binary.fd, EXPORTS)

    def with_generated(
        self, pid: int, ranges: Sequence[Range], mappings: Sequence[Mapping]
    ) -> list[Range]:
        """The executable mappings of a process, with those of the code that V8 generates."""
        if not self._table:
            try:
                self._table = self._maps.add_rules(_RULES, TABLE_BYTES)
            except OSError:
                return list(ranges)
        code, left_out = generated(mappings)
        if (known := self._loaded.get(pid)) is not None:
            known.codes.generated, known.code_left_out = code, left_out
        starts = {start for start, _ in code}
        found = [it for it in ranges if it[3] or it[0] not in starts]
        for start, end in code:
            for at in range(start, end, TABLE_BYTES):
                found.append((at, min(at + TABLE_BYTES, end), at, self._table))
        return found

    def forget(self, pid: int) -> None:
        """A process is no longer loaded. What names its code stays with it."""
        self._attempts.forget(pid)
        self._drop(pid)

    def _drop(self, pid: int) -> None:
        known = self._loaded.pop(pid, None)
        if known is not None:
            known.close()

    def due(self, now_s: float) -> list[int]:
        """Pids of those to load again."""
        return self._attempts.due(now_s)

    def usage(self) -> dict[str, int]:
        """Counts by name; each is a metric `sonde.unwind.NAME`."""
        return {
            "v8s": len(self._loaded),
            "v8_code_left_out": sum(it.code_left_out for it in self._loaded.values()),
            "v8s_refused": self.refused,
        }
