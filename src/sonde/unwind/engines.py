# SPDX-License-Identifier: Apache-2.0
"""The engines of Ruby and PHP in the processes that are walked: how to find and name frames."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from sys import getsizeof
from typing import Final

from sonde import _native
from sonde.model.code import Frame, KnownFrame
from sonde.procfs.party_memory import PartyMemory
from sonde.resolve.allowance import ROOT
from sonde.resolve.frame_fields import frame_id
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.mappings import Mapping
from sonde.resolve.naming_budget import NamingBudget
from sonde.resolve.tracked_process import JitName, TrackedProcess
from sonde.unwind.attempts import ATTEMPTS, OVER_S, RETRY_S, Attempts
from sonde.unwind.chain import (
    CHAIN_NATIVE,
    RUNTIME,
    Access,
    ChainLayout,
    FoundEngine,
    Root,
    RootKind,
    Rule,
    UnsupportedEngineError,
)
from sonde.unwind.function_names import FAILURES, Function, Names, shown_path
from sonde.unwind.php_layout import generated_rule, php_layout
from sonde.unwind.php_names import PhpNames
from sonde.unwind.process_memory import ProcessMemory, read_exactly
from sonde.unwind.ruby_layout import ruby_layout
from sonde.unwind.ruby_names import RubyNames
from sonde.unwind.runtime_memory import MOST_BYTES, RuntimeMemory
from sonde.unwind.v8 import Range

MAX_ENGINES: Final = 256
PARTS: Final = 4
"""A party other than root may have one part in PARTS of them."""
MAX_NOTICES: Final = 32
"""Reasons that are kept until they are reported."""
MAX_TABLES: Final = 16
"""Tables for generated code, one for each rule; a rule comes from the file of an engine."""
TABLE_BYTES: Final = 1 << 27
"""Of generated code in one range; more is split into several."""
MAX_CODE_BYTES: Final = 1 << 32
"""Size of a mapping that is taken for generated code, at most."""
MAX_RANGES: Final = 4_096
"""Of one process."""
_GENERATED: Final = ("", "/dev/zero")
"""Paths of mappings of no file: private, and shared with forked processes."""
MAX_FUNCTIONS: Final = 4_096
"""Of one engine, each a name and a path."""
MAX_FUNCTION_BYTES: Final = 4 << 20
"""Of those together."""
MAX_FILES: Final = 512
MAX_FILE_BYTES: Final = 256 << 10
"""Paths as they are shown, of one engine."""
_FUNCTION_BYTES: Final = 300
"""Memory of a function beside its texts."""
_PATH_BYTES: Final = 130
"""Of a path beside its text: its hash, and an entry of a cache."""
MAX_CACHED_FRAMES: Final = 16_384
TRUST_NS: Final = 10_000_000_000
"""How long a function is used before it is read again: its memory may have another by then."""
_ADDRESS: Final = (1 << 47) - 1
_TLS_LIMIT: Final = 1 << 31  # bytes from a thread's base, or in a module's variables
_MAX_MODULE: Final = 1 << 15
NAMES: Final = {"ruby": "Ruby", "php": "PHP"}
UNREAD: Final = {
    language: KnownFrame(frame_id(it), it)
    for language in NAMES
    for it in [Frame("jit", "", f"[{language}]")]
}
"""In place of a frame whose function was not read."""
EMPTY_LOOPS: Final = {
    language: KnownFrame(frame_id(it), it)
    for language, loop in (("ruby", "vm_exec_core"), ("php", "execute_ex"))
    for it in [Frame("jit", loop, f"[{language}]")]
}
"""In place of an evaluation loop without a frame, which was just entered or is about to be left."""
_REST_FRAME: Final = Frame("unknown", "", "[rest]")
REST: Final = KnownFrame(frame_id(_REST_FRAME), _REST_FRAME)
"""A mark, not a frame: the frames of the chain that follow were taken by no evaluation loop, as the
newest loop had not been entered yet."""
_EMPTY_IDS: Final = {it.id for it in EMPTY_LOOPS.values()}


def is_empty_loop(known: KnownFrame) -> bool:
    """Whether it is one of EMPTY_LOOPS."""
    return known.id in _EMPTY_IDS


def _function_bytes(known: tuple[Function, int]) -> int:
    function = known[0]
    return _FUNCTION_BYTES + getsizeof(function.name) + getsizeof(function.file)


def _path_bytes(path: str) -> int:
    return _PATH_BYTES + getsizeof(path)


class Engine(RuntimeMemory):
    """One running Ruby or PHP."""

    def __init__(
        self,
        process: TrackedProcess,
        found: FoundEngine,
        bias: int,
        is_musl: bool,
        loop_rule: Rule | None,
        memory_of_all: PartyMemory | None = None,
    ) -> None:
        """`bias`: at which its file is loaded; `loop_rule`: of its evaluation loop;
        `memory_of_all`: see RuntimeMemory.

        Raises UnsupportedEngineError, OSError; ValueError where its memory is not initialized yet.
        """
        super().__init__(process, memory_of_all)
        self._process = process
        self.language = found.language
        layout: ChainLayout
        self.generated: Rule | None
        """How to unwind code that its JIT compiler has made; None: not known."""
        self._names: Names
        if found.language == "ruby":
            ruby = ruby_layout(found.version)
            layout, self._names = (
                ruby.chain,
                RubyNames(ruby, *(it + bias for it in found.variables)),
            )
            offset, self.generated = 0, ruby.generated
        else:
            php = php_layout(found.version)
            layout, self._names = php.chain, PhpNames(php)
            offset, self.generated = php.current, generated_rule(loop_rule)
        _check(found)
        self._memory = ProcessMemory(*process.key)
        try:
            root = _root(self._memory, found, bias, offset)
        except BaseException:
            self.close()
            raise
        self.for_kernel = layout.for_kernel(root, found.evaluation, bias, is_musl)
        """`struct unwind_chain`."""
        self._functions: LruCache[int, tuple[Function, int]] = self._no_functions()
        """(function with its file as it is shown, time when it was read in ns) by address, plus 1
        of native ones."""
        self._files = self._no_files()
        """Paths as they are shown, by hash of the whole one: that may be long."""
        self._frames_since_ns = 0

    @staticmethod
    def _no_functions() -> LruCache[int, tuple[Function, int]]:
        return LruCache(MAX_FUNCTIONS, MAX_FUNCTION_BYTES, _function_bytes)

    @staticmethod
    def _no_files() -> LruCache[int, str]:
        return LruCache(MAX_FILES, MAX_FILE_BYTES, _path_bytes)

    @property
    def _name_bytes(self) -> int:
        return self._functions.bytes + self._files.bytes

    def _forget_names(self) -> None:
        self._functions = self._no_functions()
        self._files = self._no_files()

    def name_at(self, address: int) -> JitName | None:
        """None: code of a JIT compiler has its names in frames, not by address."""
        return None

    def frame_cache(self) -> _native.FrameCache:
        """Frames by the two words of a walk, as far as they are known."""
        now_ns = time.monotonic_ns()
        if now_ns > self._frames_since_ns + TRUST_NS or len(self._frames) > MAX_CACHED_FRAMES:
            self._forget_frames()
            self._frames_since_ns = now_ns
            self._count()
        return self._frames

    def frame(self, word: int, where: int, cache: _native.FrameCache) -> KnownFrame:
        """The frame of two words of a walk, which is put into `cache`."""
        at = word & _ADDRESS & ~7
        if not at:
            known = EMPTY_LOOPS[self.language] if where & _ADDRESS else REST
            cache.put(word, where, known, needs_reorder=True)
            return known
        known = self._read(at, bool(word & CHAIN_NATIVE), where & _ADDRESS)
        cache.put(word, where, known)
        self._count_frame(known)
        self._count()
        return known

    def _read(self, at: int, is_native: bool, place: int) -> KnownFrame:
        now_ns = time.monotonic_ns()
        key = at | is_native
        function, read_ns = self._functions.get(key) or (None, 0)
        if function is None or now_ns > read_ns + TRUST_NS:
            try:
                found = self._names.read(self._memory, at, is_native, self._process.pid)
                function = dataclasses.replace(found, file=self._shown(found.file))
            except FAILURES:
                if function is None:
                    return UNREAD[self.language]
            self._functions.put(key, (function, now_ns))
        line = function.line
        with suppress(*FAILURES):  # where it cannot be read, the first line of the function stays
            line = self._names.line_at(self._memory, function, place)
        frame = Frame("jit", function.name, f"[{self.language}]", file=function.file, line=line)
        return KnownFrame(frame_id(frame), frame)

    def _shown(self, path: str) -> str:
        """A path as it is shown; '' stays."""
        if not path:
            return ""
        key = hash(path)
        known = self._files.get(key)
        if known is None:
            known = shown_path(path, self._process.pid)
            self._files.put(key, known)
        return known

    def close(self) -> None:
        """Close its memory for good. What is known stays."""
        self._memory.close()


def _check(found: FoundEngine) -> None:
    """Raises UnsupportedEngineError where its frames cannot be reached."""
    language = NAMES[found.language]
    if found.access == Access.NONE:
        raise UnsupportedEngineError(f"{language}: where a thread's frames begin was not found")
    if not found.evaluation[0]:
        raise UnsupportedEngineError(f"{language}: its evaluation loop was not found")


def _root(memory: ProcessMemory, found: FoundEngine, bias: int, offset: int) -> Root:
    """Where the pointer to a thread's newest frame is. `offset`: of it in the variable. Raises
    OSError; ValueError where the dynamic linker has not filled in the variable's address yet."""
    if found.access == Access.ADDRESS:
        return Root(RootKind.AT_ADDRESS, found.root + bias + offset)
    if found.access == Access.THREAD:
        return Root(RootKind.OF_THREAD, found.root + offset)
    if found.access == Access.SLOT:
        raw = read_exactly(memory, 8, found.root + bias)
        value = int.from_bytes(raw, "little", signed=True)
        if not -_TLS_LIMIT < value < 0:
            raise ValueError("no offset of a thread's variable")
        return Root(RootKind.OF_THREAD, value + offset)
    raw = read_exactly(memory, 16, found.root + bias)
    module, value = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
    if not 0 < module < _MAX_MODULE or value >= _TLS_LIMIT:
        raise ValueError("no module of a thread's variables")
    return Root(RootKind.OF_MODULE, value + offset, module)


class Engines:
    """All engines, by pid."""

    def __init__(
        self,
        maps: _native.UnwindMaps,
        budget: NamingBudget,
        memory_of_all: PartyMemory | None = None,
    ) -> None:
        """`memory_of_all`: that all runtimes share."""
        self._maps = maps
        self._budget = budget
        self._memory_of_all = memory_of_all or PartyMemory(MOST_BYTES)
        self._tables: dict[Rule, int] = {}
        """Tables for generated code, each of one rule."""
        self._loaded: dict[int, Engine] = {}
        self._attempts = Attempts()
        self.refused = 0
        """Processes whose frames are not walked."""
        self._new_refusals: deque[tuple[tuple[int, int], str]] = deque(maxlen=MAX_NOTICES)
        """(process, reason), the newest ones."""

    def load(
        self,
        process: TrackedProcess,
        found: FoundEngine,
        bias: int,
        is_musl: bool,
        loop_rule: Rule | None = None,
    ) -> tuple[int, bytes] | None:
        """(RUNTIME, `struct unwind_chain`) of a process; None where its frames cannot be walked.

        `bias`, `loop_rule`: as `Engine` takes them.
        """
        known = self._loaded.get(process.pid)
        if known is None or process.generated_code is not known:
            self._drop(process.pid)
            known = self._start(process, found, bias, is_musl, loop_rule)
            if known is None:
                return None
            self._loaded[process.pid] = known
            process.generated_code = known
        return RUNTIME, known.for_kernel

    def _start(
        self,
        process: TrackedProcess,
        found: FoundEngine,
        bias: int,
        is_musl: bool,
        loop_rule: Rule | None,
    ) -> Engine | None:
        if not self._attempts.is_due(process.key):
            return None
        attempts = self._attempts.made(process.key)
        if self._budget.is_over(process.party):
            self._attempts.put_off(process.key, attempts, OVER_S)
            return None
        if not self._has_room(process.party):
            self._refuse(
                process.key, f"{NAMES[found.language]}: more processes than are looked into"
            )
            return None
        try:
            with self._budget.charged(process.party):
                engine = Engine(process, found, bias, is_musl, loop_rule, self._memory_of_all)
        except UnsupportedEngineError as error:
            self._refuse(process.key, str(error))
        except FAILURES:
            if attempts + 1 == ATTEMPTS:
                self._refuse(process.key, f"{NAMES[found.language]}: its memory cannot be read")
            else:
                self._attempts.put_off(process.key, attempts + 1, RETRY_S)
        else:
            self._attempts.has_worked(process.key)
            return engine
        return None

    def _refuse(self, key: tuple[int, int], reason: str) -> None:
        """Try no more, as the file of the process stays what it is."""
        self.refused += 1
        self._new_refusals.append((key, reason))
        self._attempts.put_off(key, ATTEMPTS, 0.0)

    def take_refusals(self) -> list[tuple[tuple[int, int], str]]:
        """(key of the process, reason) of refusals since the last call, the newest MAX_NOTICES."""
        found = list(self._new_refusals)
        self._new_refusals.clear()
        return found

    def _has_room(self, party: int) -> bool:
        """Whether a party may have one more engine."""
        of_party = sum(it.party == party for it in self._loaded.values())
        most = MAX_ENGINES if party == ROOT else MAX_ENGINES // PARTS
        return of_party < most and len(self._loaded) < MAX_ENGINES

    def with_generated(
        self, pid: int, ranges: Sequence[Range], mappings: Sequence[Mapping]
    ) -> list[Range]:
        """The executable mappings of a process, those with code of its engine's JIT compiler with
        the table of that code's rule."""
        known = self._loaded.get(pid)
        table = self._table(known.generated) if known is not None and known.generated else 0
        if not table:
            return list(ranges)
        code = {
            it.start: it.end
            for it in mappings
            if "x" in it.prot and it.path in _GENERATED and it.end - it.start <= MAX_CODE_BYTES
        }
        found: list[Range] = []
        for range_ in ranges:
            end = code.get(range_[0])
            if range_[3] or end is None or len(found) > MAX_RANGES:
                found.append(range_)
            else:
                for at in range(range_[0], end, TABLE_BYTES):
                    found.append((at, min(at + TABLE_BYTES, end), at, table))
        return found

    def _table(self, rule: Rule) -> int:
        """The table of a rule; 0 without room for it."""
        table = self._tables.get(rule, 0)
        if not table and len(self._tables) < MAX_TABLES:
            with suppress(OSError):
                table = self._tables[rule] = self._maps.add_rules([(0, rule)], TABLE_BYTES)
        return table

    def forget(self, pid: int) -> None:
        """A process is no longer loaded. What names its frames stays with it."""
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
            "engines": len(self._loaded),
            "engines_refused": self.refused,
        }
