# SPDX-License-Identifier: Apache-2.0
"""The JVMs among the processes that are walked: tables of their generated code, and names."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from sonde import _native
from sonde.model.code import Frame, KnownFrame
from sonde.procfs.party_memory import PartyMemory
from sonde.resolve import Resolver
from sonde.resolve.allowance import ROOT
from sonde.resolve.frame_fields import frame_id
from sonde.resolve.tracked_process import JitName, TrackedProcess
from sonde.unwind.attempts import ATTEMPTS, OVER_S, RETRY_S, Attempts
from sonde.unwind.hotspot_code import MAX_BLOBS, MAX_ROWS, HotspotCode
from sonde.unwind.hotspot_layout import EXPORTS, UnsupportedJvmError, read_layout
from sonde.unwind.java_methods import TRUST_NS, JavaMethods
from sonde.unwind.process_memory import ProcessMemory
from sonde.unwind.runtime_memory import MOST_BYTES, RuntimeMemory

LIBRARY: Final = "libjvm.so"
JAVA_FRAME: Final = 1
"""Lowest bit of a stack's word: a frame of HotSpot's interpreter (abi/unwind.h)."""
MAX_JVMS: Final = 64
PARTS: Final = 4
"""A party other than root may have one part in PARTS of JVMs, of their code, and of rules."""
MAX_ALL_BLOBS: Final = 1 << 18
"""Blobs of all JVMs. Beyond it, new JVMs are walked by frame pointers, and new code of the others
is not known, and counted."""
MAX_ALL_ROWS: Final = 1 << 20
"""Rules of all JVMs: 100 MB here, 4 MB in the kernel. Code beyond it is not known, and counted."""
REFRESH_S: Final = 0.03
"""Time limit of one refresh: a look for new code."""
PAUSE_S: Final = 0.25
"""Between two refreshes, at first."""
MAX_PAUSE_S: Final = 1.0
"""The same at most: the pause doubles each time that nothing was new."""
PUT_SHARE: Final = 0.04
"""Share of a core for putting tables of one JVM into the kernel while its code keeps changing: each
time all of its table is copied."""
MAX_PUT_PAUSE_S: Final = 16.0
"""Between two tables of a JVM, at most; at least PAUSE_S. It doubles each time that the kernel has
no room."""
CHECK_S: Final = 5.0
"""After this, code is checked without a walk's request, as it may have been replaced."""
MAX_CACHED_FRAMES: Final = 16_384
_WORD: Final = (1 << 63) - 1
_UNKNOWN: Final = Frame("jit", "", "[jit]")
UNREAD: Final = KnownFrame(frame_id(_UNKNOWN), _UNKNOWN)
"""In place of a frame of the interpreter whose method was not read."""
_FAILURES: Final = (OSError, ValueError, LookupError, ArithmeticError, struct.error)


class Jvm(RuntimeMemory):
    """One running JVM."""

    def __init__(
        self,
        process: TrackedProcess,
        exports: dict[str, int],
        memory_of_all: PartyMemory | None = None,
    ) -> None:
        """`exports`: addresses in its memory; `memory_of_all`: see RuntimeMemory. Raises
        UnsupportedJvmError, OSError."""
        super().__init__(process, memory_of_all)
        self._memory = ProcessMemory(*process.key)
        try:
            self._layout = read_layout(self._memory, exports)
        except BaseException:
            self.close()
            raise
        self.code = HotspotCode(self._layout)
        self._methods = JavaMethods(self._layout)
        self._frames_since_ns = 0
        self._frames_drops = 0
        """`drops` of the methods that the frames were made of."""

    @property
    def _name_bytes(self) -> int:
        return self._methods.held_bytes

    def _forget_names(self) -> None:
        self._methods.forget()

    def refresh(self) -> bool:
        """Look for new code. Returns whether anything changed. Raises OSError, ValueError."""
        try:
            return self.code.refresh(self._memory, time.monotonic() + REFRESH_S)
        except (LookupError, ArithmeticError, struct.error) as error:
            raise ValueError("its memory holds no code heap") from error

    def name_at(self, address: int) -> JitName | None:
        """The compiled method or stub at an address: the method that was compiled, not those
        that the compiler inlined."""
        blob = self.code.find(address)
        if blob is None:
            return None
        if not blob.method:
            return JitName("jit", blob.kind) if blob.kind else None
        method = self._methods.find(self._memory, blob.method, time.monotonic_ns())
        self._count()
        return JitName("jit", method.name, method.file) if method is not None else None

    def frame_cache(self) -> _native.FrameCache:
        """Frames of the interpreter by the two words of a walk, as far as they are known."""
        now_ns = time.monotonic_ns()
        if (
            now_ns > self._frames_since_ns + TRUST_NS
            or len(self._frames) > MAX_CACHED_FRAMES
            or self._frames_drops != self._methods.drops
        ):
            self._forget_frames()
            self._frames_since_ns, self._frames_drops = now_ns, self._methods.drops
            self._count()
        return self._frames

    def frame(self, method: int, bytecode: int, cache: _native.FrameCache) -> KnownFrame:
        """The frame of two words of a walk, which is put into `cache`."""
        found = None
        with suppress(Exception):  # its memory may hold anything, and must not stop the event loop
            at = method & _WORD & ~JAVA_FRAME
            found = self._methods.find(self._memory, at, time.monotonic_ns())
        known = UNREAD
        if found is not None:
            line = found.line_at(bytecode & _WORD)
            frame = Frame("jit", found.name, "[jit]", file=found.file, line=line)
            known = KnownFrame(frame_id(frame), frame)
        cache.put(method, bytecode, known)
        self._count_frame(known)
        self._count()
        return known

    def close(self) -> None:
        """Close its memory for good. What is known stays."""
        self._memory.close()


class _Loaded:
    """A JVM, and its table in the kernel."""

    def __init__(self, jvm: Jvm, party: int) -> None:
        self.jvm = jvm
        self.party = party
        self.table = 0
        """Number of its table in the kernel; 0: none yet."""
        self.replaced: list[int] = []
        """Earlier tables, which walks may use until the process is loaded with the newest one."""
        self.pause_s = PAUSE_S
        """Between two refreshes."""
        self.looked_s = 0.0
        """When it was last refreshed (time.monotonic)."""
        self.is_changed = False
        """Its code has changed since its table was put into the kernel."""
        self.is_partial = False
        """Not all code was read when its table was put into the kernel."""
        self.put_s = -2 * MAX_PUT_PAUSE_S
        """When its table was last put into the kernel, or had no room there."""
        self.put_pause_s = PAUSE_S

    def is_due(self, now_s: float) -> bool:
        """Whether to look at it without a walk's request."""
        wait_s = CHECK_S if self.table else self.pause_s
        if self.is_changed and now_s > max(self.looked_s + self.pause_s, self.put_due_s):
            return True
        return self.jvm.code.is_behind or now_s > self.looked_s + wait_s

    @property
    def put_due_s(self) -> float:
        """When a table may be put into the kernel again."""
        return self.put_s + self.put_pause_s

    def may_put(self, now_s: float) -> bool:
        """Whether to put a table into the kernel now. One of all code follows one of a part of it
        without a pause."""
        is_whole_now = self.is_partial and not self.jvm.code.is_behind
        is_due = is_whole_now or now_s >= self.put_due_s
        return is_due and (self.is_changed or not self.table)

    def note_put(self, now_s: float, cpu_s: float) -> None:
        """A table was put into the kernel, which took `cpu_s` of CPU time."""
        self.is_partial = self.jvm.code.is_behind
        self.put_pause_s = min(max(PAUSE_S, cpu_s / PUT_SHARE), MAX_PUT_PAUSE_S)
        self.put_s = now_s

    def note_full(self, now_s: float) -> None:
        """The kernel had no room for a table."""
        self.put_pause_s = min(2 * self.put_pause_s, MAX_PUT_PAUSE_S)
        self.put_s = now_s


def _left(most: int, held: Iterable[tuple[int, int]], party: int) -> int:
    """How much a party may still have of `most`. `held`: (party, amount) of what is taken."""
    of_all = of_party = 0
    for other, amount in held:
        of_all += amount
        of_party += amount if other == party else 0
    left = most - of_all
    return max(0, left if party == ROOT else min(left, most // PARTS - of_party))


class Jvms:
    """All JVMs, by pid."""

    def __init__(
        self,
        maps: _native.UnwindMaps,
        resolver: Resolver,
        memory_of_all: PartyMemory | None = None,
    ) -> None:
        """`memory_of_all`: that all runtimes share."""
        self._maps = maps
        self._resolver = resolver
        self._memory_of_all = memory_of_all or PartyMemory(MOST_BYTES)
        self._loaded: dict[int, _Loaded] = {}
        self._attempts = Attempts()
        self.refused = 0
        """JVMs whose code could not be read, or for which there was no room."""
        self.left_out = 0
        """Tables that did not fit into the kernel's maps."""

    def load(self, process: TrackedProcess, library: int, bias: int) -> tuple[int, int, int] | None:
        """(first address, end, table) of a process's generated code; None without one.

        `library`: its libjvm.so, open. Call `settle` when the process is loaded with the table.
        """
        known = self._loaded.get(process.pid)
        now_s = time.monotonic()
        if known is None or process.generated_code is not known.jvm:
            self._drop(process.pid)
            known = self._found(process, library, bias)
            if known is None:
                return None
            self._loaded[process.pid] = known
            process.generated_code = known.jvm
        code = known.jvm.code
        is_due = now_s > known.looked_s + known.pause_s or code.is_behind
        if is_due:
            known.looked_s = now_s
        if is_due and self._resolver.budget.is_over(process.party):
            code.is_behind = False  # until its party has time again
        elif is_due:
            changed = False
            with suppress(*_FAILURES), self._resolver.budget.charged(process.party):
                code.most_blobs, code.most_rows = self._most_blobs(known), self._most_rows(known)
                changed = known.jvm.refresh()
                known.is_changed |= changed
                if known.may_put(now_s):
                    self._put(known, now_s)
            known.pause_s = PAUSE_S if changed else min(2 * known.pause_s, MAX_PAUSE_S)
            if changed and code.has_replaced:
                process.forget_frames()
        return (*code.bounds, known.table) if known.table else None

    def _found(self, process: TrackedProcess, library: int, bias: int) -> _Loaded | None:
        if not self._attempts.is_due(process.key):
            return None
        attempts = self._attempts.made(process.key)
        if self._resolver.budget.is_over(process.party):
            self._attempts.put_off(process.key, attempts, OVER_S)
            return None
        if self._has_room(process.party):
            charged = self._resolver.budget.charged(process.party)
            with charged, suppress(UnsupportedJvmError, OSError):
                exports = _native.exported_addresses(library, EXPORTS)
                addresses = {name: at + bias for name, at in exports.items()}
                found = _Loaded(Jvm(process, addresses, self._memory_of_all), process.party)
                self._attempts.has_worked(process.key)
                return found
        self.refused += attempts + 1 == ATTEMPTS
        self._attempts.put_off(process.key, attempts + 1, RETRY_S)
        return None

    def _has_room(self, party: int) -> bool:
        """Whether a party may have one more JVM."""
        ones = [(it.party, 1) for it in self._loaded.values()]
        blobs = [(it.party, len(it.jvm.code)) for it in self._loaded.values()]
        return _left(MAX_JVMS, ones, party) > 0 and _left(MAX_ALL_BLOBS, blobs, party) > 0

    def _most_blobs(self, known: _Loaded) -> int:
        """Blobs that a JVM may have, beside those of the others."""
        others = [it for it in self._loaded.values() if it is not known]
        held = [(it.party, len(it.jvm.code)) for it in others]
        return min(MAX_BLOBS, _left(MAX_ALL_BLOBS, held, known.party))

    def _most_rows(self, known: _Loaded) -> int:
        """The same of rules."""
        others = [it for it in self._loaded.values() if it is not known]
        held = [(it.party, it.jvm.code.rows) for it in others]
        return min(MAX_ROWS, _left(MAX_ALL_ROWS, held, known.party))

    def _put(self, known: _Loaded, now_s: float) -> None:
        """Put the table of a JVM's code into the kernel."""
        since_s = time.thread_time()
        rules = known.jvm.code.rules()
        if len(rules) < 2:  # the JVM has just started
            return
        try:
            table = self._maps.add_rules(rules, known.jvm.code.bounds[1])
        except OSError:
            self.left_out += 1
            known.is_changed = True
            known.note_full(now_s)
            return
        known.is_changed = False
        known.note_put(now_s, time.thread_time() - since_s)
        if known.table and known.replaced:  # the process was not loaded with it
            self._maps.drop_table(known.table)
        elif known.table:
            known.replaced.append(known.table)
        known.table = table

    def settle(self, pid: int) -> None:
        """The process is loaded with its newest table."""
        known = self._loaded.get(pid)
        if known is not None:
            for table in known.replaced:
                self._maps.drop_table(table)
            known.replaced = []

    def forget(self, pid: int) -> None:
        """A process is no longer loaded. What names its code stays with it."""
        self._attempts.forget(pid)
        self._drop(pid)

    def _drop(self, pid: int) -> None:
        known = self._loaded.pop(pid, None)
        if known is not None:
            for table in (*known.replaced, known.table):
                if table:
                    self._maps.drop_table(table)
            known.jvm.close()

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read."""
        return any(it.jvm.code.is_behind for it in self._loaded.values())

    def due(self, now_s: float) -> list[int]:
        """Pids of those to load again: there is more to read, or code to be checked."""
        found = [pid for pid, it in self._loaded.items() if it.is_due(now_s)]
        return found + self._attempts.due(now_s)

    def pause_s(self, pid: int) -> float:
        """How long after a load of a process walks may request another one."""
        known = self._loaded.get(pid)
        return known.pause_s if known is not None else 0.0

    def usage(self) -> dict[str, int]:
        """Counts by name; each is a metric `sonde.unwind.NAME`."""
        return {
            "jvms": len(self._loaded),
            "jvm_code": sum(len(it.jvm.code) for it in self._loaded.values()),
            "jvm_code_left_out": sum(it.jvm.code.left_out for it in self._loaded.values()),
            "jvms_refused": self.refused,
        }
