# SPDX-License-Identifier: Apache-2.0
"""Keeps the BPF maps for stack unwinding up to date as processes start, change and end.

A process is loaded into the maps when a stack walk first meets it. Until then its stacks are
walked by frame pointers; so is the code of files whose unwind table is still being built.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from sonde import _native, procfs
from sonde._native import (
    CommEvent,
    ExecutableSegment,
    ExitEvent,
    ForkEvent,
    MmapEvent,
    ProcessEvent,
    executable_segments,
)
from sonde.resolve import Resolver
from sonde.resolve.binary import Binary
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.mappings import Mapping
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind.chain import FoundEngine, Rule, rule_of
from sonde.unwind.cpython import (
    RUNTIME,
    FoundInterpreter,
    Interpreter,
    UnsupportedPythonError,
    interpreter,
)
from sonde.unwind.engines import Engine, Engines
from sonde.unwind.jvm import LIBRARY, Jvm, Jvms
from sonde.unwind.load_bias import load_bias
from sonde.unwind.paging import Paging
from sonde.unwind.preload import startup_files
from sonde.unwind.stop_reasons import STOP_REASONS
from sonde.unwind.table_cache import TableCache, key_of
from sonde.unwind.v8 import V8, V8s
from sonde.unwind.v8_mappings import V8Mappings

UPDATE_CPU_S: Final = 0.025
"""CPU time of one update, which continues at the next call: the event loop must not stall."""
UPDATE_S: Final = 0.25
"""The same of the clock, beside others that take the CPUs."""
READY_INTERVAL_S: Final = 0.2
"""While tables are being built, finished ones are loaded this often."""
ORDER_S: Final = 0.25
"""Between two looks at which of the files that wait for a table is needed most."""
RETRY_S: Final = 1.5
"""First retry of a process that did not fit: by then the kernel has freed what was evicted."""
MAX_RETRY_S: Final = 60.0
"""Longest time between two retries."""
RELOAD_INTERVAL_S: Final = 0.25
"""Between two loads of a process that walks request."""
MAX_PYTHONS: Final = 8192
"""Processes, alive and ended, whose CPython is remembered."""
_SKIPPED: Final = ("[uprobes]", "[vsyscall]")


@dataclass(slots=True)
class _File:
    """One file with code, and its table in the kernel."""

    key: str
    """In the table cache."""
    table: int = 0
    """Number of its table in the kernel; 0: not loaded."""
    is_final: bool = False
    """Its table is loaded, or there will be none."""
    was_rebuilt: bool = False
    """The kernel side refused its first table, which was then built again."""
    segments: Sequence[ExecutableSegment] = ()
    """Its executable ones."""
    python: FoundInterpreter | None = None
    """The CPython interpreter in it."""
    is_refused: bool = False
    """That one is not walked, in some process at least."""
    engine: FoundEngine | None = None
    """The engine of Ruby or PHP in it."""
    loop_rule: Rule | None = None
    """Of the engine's evaluation loop."""
    users: set[int] = field(default_factory=set)
    """Pids of loaded processes that map it."""


@dataclass(slots=True)
class _LoadedProcess:
    """A process whose mappings are in the kernel's maps."""

    process: TrackedProcess
    at_s: float
    """When they were loaded, CLOCK_MONOTONIC."""
    files: set[int] = field(default_factory=set)
    """Indices of its files."""
    python: Interpreter | None = None


class Unwinder:
    """Keeps the kernel's maps of unwind tables and processes up to date."""

    def __init__(
        self, owner: _native.Bpf, resolver: Resolver, cache: TableCache | None = None
    ) -> None:
        self._maps = _native.UnwindMaps(owner)
        self._resolver = resolver
        self._cache = cache or TableCache()
        self._files: dict[int, _File] = {}
        """By `resolve.binary.Binary.index`."""
        self._ordered_s = 0.0
        """When requests for tables were put in order last."""
        self._waiting: dict[str, set[int]] = {}
        """Pids that wait for a table, by the key of its file."""
        self._loaded: dict[int, _LoadedProcess] = {}
        self._stale: set[int] = set()
        """Pids to load (again)."""
        self._asked: Counter[int] = Counter()
        """How many walks have asked for each pid that is to be loaded."""
        self._expected: set[int] = set()
        """Pids to load before a walk meets them; `expect`."""
        self._headless: set[int] = set()
        """Pids whose first thread has ended before others."""
        self._ready: set[int] = set()
        """Pids with a table that was built since they were loaded."""
        self._ready_loaded_s = 0.0
        self._retries: dict[int, _Retry] = {}
        """Processes that did not fit or were refused, by pid."""
        self._evict_after_s = 0.0
        self._pages = 0
        """Pages loaded so far because walks requested them."""
        self._paging = Paging()
        self._walks: dict[int, int] = {}
        """Walks of each process at the last eviction."""
        self._pythons: LruCache[tuple[int, int], Interpreter] = LruCache(MAX_PYTHONS)
        self._jvms = Jvms(self._maps, resolver)
        self._v8s = V8s(self._maps, resolver)
        self._engines = Engines(self._maps, resolver.budget)
        self.refused_python = 0
        """Files with an unsupported CPython."""
        self.left_out = 0
        """How often a table or a process did not fit into the kernel's maps."""
        self.refused: Counter[str] = Counter()
        """How often loading a process failed otherwise, by name of the error."""

    def expect(self, pids: Iterable[int]) -> None:
        """Load these processes and their children before a walk meets them."""
        self._expected |= {pid for pid in pids if procfs.read_stat(pid) is not None}
        self._stale |= self._expected
        if self._expected:
            self._cache.warm_up()
        self.update()

    def load_now(self, pids: Iterable[int]) -> None:
        """Load these processes before a walk meets them, as they are now."""
        self._stale |= set(pids)
        self._cache.warm_up()
        self.update()

    def preload(self, program: str) -> None:
        """Build the tables of a program that will be launched, and of its loader and libc."""
        for path in startup_files(program):
            fd = procfs.open_regular(path, follow=True)
            if fd is None:
                continue
            with suppress(OSError):
                try:
                    binary = Binary()
                    binary.use_descriptor(fd)
                    key = _key_of(binary)
                    if binary.is_elf and self._cache.find(key) is None:
                        self._cache.request(key, fd)
                finally:
                    os.close(fd)

    @property
    def is_busy(self) -> bool:
        """Whether tables are being built or processes wait: call `update` again in milliseconds."""
        return self._cache.is_busy or self._jvms.is_behind or bool(self._stale or self._ready)

    @property
    def is_paging(self) -> bool:
        """Whether walks are expected to request pages of tables: call `update` again in
        milliseconds. Until a page is loaded, walks that need it are cut."""
        return self._paging.is_expected(time.monotonic())

    def expect_pages(self) -> None:
        """Sampling starts: expect requests for pages."""
        self._paging.expect(time.monotonic())

    def on_process_events(self, events: Iterable[ProcessEvent]) -> None:
        """Note which processes changed or ended."""
        loaded, expected = self._loaded, self._expected
        for event in events:
            pid = event.pid
            if isinstance(event, MmapEvent):
                if pid in loaded or pid in expected:
                    self._stale.add(pid)
            elif isinstance(event, ForkEvent):
                if event.parent_pid in expected:
                    expected.add(pid)
            elif pid not in loaded and pid not in expected:
                if pid in self._stale and isinstance(event, ExitEvent) and event.tid == pid:
                    self._leave_out(pid)
            elif isinstance(event, CommEvent):
                if event.is_exec:
                    self._forget(pid)
            elif event.tid == pid:
                if self._goes_on(pid):
                    self._headless.add(pid)
                else:
                    expected.discard(pid)
                    self._forget(pid)

    def _goes_on(self, pid: int) -> bool:
        """Whether other threads still run, as far as the table of processes knows."""
        loaded = self._loaded.get(pid)
        return loaded.process.is_alive if loaded else self._resolver.processes.start_of(pid) != 0

    def _leave_out(self, pid: int) -> None:
        """No longer load a process that has ended before it was."""
        if not self._goes_on(pid):
            self._stale.discard(pid)
            self._asked.pop(pid, None)

    def update(self) -> bool:
        """Load new tables, pages and processes into the kernel. Cheap when nothing changed.

        Returns whether a process was loaded for the first time, or a page was.
        """
        before = len(self._loaded), self._pages
        for pid in [pid for pid in self._headless if not self._goes_on(pid)]:
            self._expected.discard(pid)
            self._forget(pid)
        for key in self._cache.poll():
            self._ready |= self._waiting.pop(key, set())
        if self._cache.has_queue:
            self._order_requests()
        if refused := self._maps.load_pages():
            self.left_out += refused
            self._evict(0, set())
        now_s = time.monotonic()
        if (pages := self._maps.usage()[4]) != self._pages:
            self._pages = pages
            self._paging.expect(now_s)
        if self._ready and (
            not self._cache.is_busy or now_s > self._ready_loaded_s + READY_INTERVAL_S
        ):
            # Once for several files: all mappings of the process are loaded again.
            self._ready_loaded_s = now_s
            self._stale |= self._ready
            self._ready = set()
        for pid, walks in self._maps.wanted():
            if self._is_due(pid, now_s):
                self._stale.add(pid)
                self._asked[pid] += walks
        self._stale.update(self._jvms.due(now_s), self._v8s.due(now_s), self._engines.due(now_s))
        for pid, retry in self._retries.items():
            if now_s > retry.at_s:
                self._stale.add(pid)
        self._load_stale(now_s)
        return (len(self._loaded), self._pages) != before

    def _load_stale(self, now_s: float) -> None:
        """Load processes as time allows, for events wait to be read meanwhile: expected ones first,
        then those that most walks ask for."""
        cpu_s = time.thread_time() + UPDATE_CPU_S
        for pid in sorted(self._stale, key=lambda it: (it not in self._expected, -self._asked[it])):
            if time.thread_time() > cpu_s or time.monotonic() > now_s + UPDATE_S:
                break
            self._stale.discard(pid)
            self._asked.pop(pid, None)
            try:
                fits = self._load(pid)
            except OSError as error:  # affects the stacks of this process alone
                self.refused[errno.errorcode.get(error.errno or 0, "unknown")] += 1
                self._retry_later(pid, now_s)
                continue
            if fits:
                self._retries.pop(pid, None)
            else:
                self.left_out += 1
                self._retry_later(pid, now_s)

    def resync(self) -> None:
        """Events were lost: load all processes again."""
        self._stale |= self._loaded.keys()

    def _is_due(self, pid: int, now_s: float) -> bool:
        """Whether to load a process now that walks request; they request it until it is loaded."""
        loaded = self._loaded.get(pid)
        pause_s = max(RELOAD_INTERVAL_S, self._jvms.pause_s(pid))
        return loaded is None or now_s > loaded.at_s + pause_s

    def python_of(self, key: tuple[int, int]) -> Interpreter | None:
        """The CPython that a process runs or ran last; None without a supported one."""
        return self._pythons.get(key)

    def runtime_of(self, process: TrackedProcess) -> Jvm | V8 | Engine | None:
        """The JVM, V8, Ruby or PHP that a process runs; None without a supported one."""
        code = process.generated_code
        return code if isinstance(code, Jvm | V8 | Engine) else None

    def take_refusals(self) -> list[tuple[tuple[int, int], str]]:
        """(pid, start_ns) and reason of processes with a Ruby or PHP whose frames are not walked,
        since the last call; some at the most."""
        return self._engines.take_refusals()

    def stops(self) -> dict[str, int]:
        """How often walks ended for each reason so far, by name (`stop_reasons`)."""
        counts = zip(STOP_REASONS, self._maps.stops(), strict=True)
        return {reason.name: count for reason, count in counts if count}

    def losses(self) -> dict[str, int]:
        """How often a process could not be loaded so far: "no_room", or "ERROR.refused"."""
        no_room = self.left_out + self._jvms.left_out
        found = {"no_room": no_room} if no_room else {}
        if self._jvms.refused:
            found["jvm.refused"] = self._jvms.refused
        if self._v8s.refused:
            found["v8.refused"] = self._v8s.refused
        if self._engines.refused:
            found["engine.refused"] = self._engines.refused
        return found | {f"{name.lower()}.refused": n for name, n in self.refused.items()}

    def limit(self, bytes_: int) -> None:
        """Set the memory limit of tables and mappings in the kernel."""
        self._maps.limit(bytes_)

    def usage(self) -> dict[str, int]:
        """Sizes and counts by name; each is a metric `sonde.unwind.NAME`."""
        size, free, tables, processes, pages = self._maps.usage()
        return {
            "table_bytes": size,
            "table_bytes_free": free,
            "tables": tables,
            "processes": processes,
            "pages_loaded": pages,
            "tables_built": self._cache.built,
            "tables_failed": self._cache.failed,
            "put_off": len(self._retries),
            "left_out": self.left_out,
            "python_refused": self.refused_python,
            **self._jvms.usage(),
            **self._v8s.usage(),
            **self._engines.usage(),
        }

    def memory_bytes(self) -> int:
        """Kernel memory of tables and mappings."""
        return self._maps.usage()[0]

    def close(self) -> None:
        """End the subprocess that builds tables, and keep what the next run can begin with."""
        for file in self._files.values():
            if file.table:
                self._cache.keep_pages(file.key, self._maps.pages(file.table))
        self._cache.close()

    def _retry_later(self, pid: int, now_s: float) -> None:
        """Schedule a retry, with exponential backoff."""
        wait_s = RETRY_S
        if before := self._retries.get(pid):
            wait_s = min(2 * before.wait_s, MAX_RETRY_S)
        self._retries[pid] = _Retry(now_s + wait_s, wait_s)

    def _load(self, pid: int) -> bool:
        """Load a process into the kernel's maps, or remove an ended one.

        Returns whether all of it fits. Raises OSError for other errors.
        """
        found = procfs.read_stat(pid)
        if found is None:
            self._forget(pid)
            return True
        if not found.start_code:  # a kernel thread, or exiting
            return True
        process = self._resolver.processes.find(pid, found.start_ns)
        loaded = _LoadedProcess(process, time.monotonic())
        ranges = []
        generated = runtime = None
        v8_mappings = V8Mappings()
        fits, has_engine = True, False
        mappings = process.space().mappings
        is_musl = any("/ld-musl-" in mapping.path for mapping in mappings)
        for mapping in mappings:
            if "x" not in mapping.prot or mapping.path in _SKIPPED:
                continue
            try:
                file, index = self._file_of(process, mapping)
            except _NoRoomError:
                self._evict(pid, loaded.files)
                fits, file = False, None
            bias = load_bias(mapping, file.segments) if file is not None else None
            if file is None or bias is None:
                ranges.append((mapping.start, mapping.end, 0, 0))
                continue
            if not file.is_final:
                self._waiting.setdefault(file.key, set()).add(pid)
            loaded.files.add(index)
            ranges.append((mapping.start, mapping.end, bias % 2**64, file.table))
            if (python := self._python_in(file, mapping)) is not None:
                loaded.python = python
                runtime = RUNTIME, python.for_kernel(bias, is_musl)
            if file.engine is not None and runtime is None:
                runtime = self._engines.load(process, file.engine, bias, is_musl, file.loop_rule)
                has_engine = runtime is not None
            v8_mappings.add(mapping, bias)
            if mapping.path.endswith(f"/{LIBRARY}"):
                library = self._resolver.file_of(process, mapping)
                if library is not None:
                    generated = self._jvms.load(process, library.fd, bias)
        if generated is not None:
            ranges = [_in_generated(it, *generated) for it in ranges]
        if has_engine:
            ranges = self._engines.with_generated(pid, ranges, mappings)
        if runtime is None and v8_mappings.file is not None:
            runtime = self._v8s.load(process, v8_mappings)
            if runtime is not None:
                ranges = self._v8s.with_generated(pid, ranges, mappings)
        try:
            self._maps.set_process(pid, found.start_code, ranges, runtime)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.E2BIG, errno.ENOMEM):
                raise
            self._evict(pid, loaded.files)
            return False
        before = self._loaded.get(pid)
        if before is not None:
            self._drop_user(pid, before.files - loaded.files)
        for index in loaded.files:
            self._files[index].users.add(pid)
        self._loaded[pid] = loaded
        self._jvms.settle(pid)
        if loaded.python is not None:
            self._pythons.put(process.key, loaded.python)
        return fits

    def _forget(self, pid: int) -> None:
        self._retries.pop(pid, None)
        self._headless.discard(pid)
        self._maps.drop_process(pid)
        self._jvms.forget(pid)
        self._v8s.forget(pid)
        self._engines.forget(pid)
        loaded = self._loaded.pop(pid, None)
        if loaded is not None:
            self._drop_user(pid, loaded.files)

    def _drop_user(self, pid: int, files: Iterable[int]) -> None:
        for index in files:
            self._files[index].users.discard(pid)

    def _file_of(self, process: TrackedProcess, mapping: Mapping) -> tuple[_File | None, int]:
        """(file, its index) of a mapping; (None, 0) without one. Loads the table if it is built."""
        known = mapping.binary
        if known is not None and (file := self._files.get(known.index)) and file.is_final:
            return file, known.index
        binary = self._resolver.file_of(process, mapping)
        if binary is None:
            return None, 0
        found = self._files.get(binary.index)
        if found is None:
            found = self._files[binary.index] = _File(
                _key_of(binary), segments=executable_segments(binary.fd)
            )
        if not found.is_final:
            self._load_table(found, binary, process.party)
        return found, binary.index

    def _load_table(self, file: _File, binary: Binary, party: int) -> None:
        """Load the table of a file, or request it for a party. Raises _NoRoomError."""
        built = self._cache.find(file.key)
        if built is None:
            file.is_final = self._cache.has_failed(file.key)
            if not file.is_final:
                self._cache.request(file.key, binary.fd, party)
            return
        try:
            file.table = self._maps.add_table(str(built.path), self._cache.pages_of(file.key))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _NoRoomError from error
            if file.was_rebuilt:
                self._cache.mark_failed(file.key)
                file.is_final = True
                return
            file.was_rebuilt = True
            self._cache.discard(file.key)  # damaged, or of another version
            self._cache.request(file.key, binary.fd, party)
            return
        file.is_final = True
        file.python = built.python
        if (engine := built.engine) is not None:
            file.engine = engine
            middle = (engine.evaluation[0] + engine.evaluation[1]) // 2
            (rule,) = _native.find_unwind_rules(str(built.path), [middle])
            file.loop_rule = rule_of(rule) if rule is not None else None

    def _order_requests(self) -> None:
        """Have the files of processes that are walked most built first; a process that waits for
        many files has a part of its walks for each."""
        now_s = time.monotonic()
        if now_s < self._ordered_s + ORDER_S:
            return
        self._ordered_s = now_s
        walks = self._maps.walks()
        files = Counter(chain.from_iterable(self._waiting.values()))
        self._cache.order(
            {
                key: sum(walks.get(pid, 0) / files[pid] for pid in pids)
                for key, pids in self._waiting.items()
            }
        )

    def _python_in(self, file: _File, mapping: Mapping) -> Interpreter | None:
        """The interpreter in a file, by the name that its own process has the file by."""
        if file.python is None:
            return None
        try:
            return interpreter(file.python, mapping.name)
        except UnsupportedPythonError:
            self.refused_python += not file.is_refused
            file.is_refused = True
            return None

    def _evict(self, pid: int, files: set[int]) -> None:
        """Remove a quarter of the processes, those with the fewest recent walks, and unused tables.

        The kernel frees the memory about a second later. `pid` and `files` stay: the process that
        is being loaded, and the indices of its files so far.
        """
        now_s = time.monotonic()
        if now_s < self._evict_after_s:
            return
        self._evict_after_s = now_s + RETRY_S
        walks = self._maps.walks()
        walks.pop(pid, None)
        by_use = sorted(walks, key=lambda pid: walks[pid] - self._walks.get(pid, 0))
        self._walks = walks
        for other in by_use[: len(by_use) // 4 + 1]:
            self._forget(other)
        unused = [(i, it) for i, it in self._files.items() if it.table and not it.users]
        for index, file in unused:
            if index not in files:
                self._maps.drop_table(file.table)
                del self._files[index]


def _in_generated(
    range_: tuple[int, int, int, int], low: int, high: int, table: int
) -> tuple[int, int, int, int]:
    """An executable mapping, by the table of generated code where it is part of that."""
    start, end, _, has_table = range_
    return (start, end, 0, table) if not has_table and low <= start < high else range_


class _NoRoomError(Exception):
    """The kernel's maps are full."""


@dataclass(frozen=True, slots=True)
class _Retry:
    """When loading a process is tried again, CLOCK_MONOTONIC."""

    at_s: float
    wait_s: float


def _key_of(binary: Binary) -> str:
    """In the table cache. That of a copy is its own, of no device: its table is looked for by its
    content, each time."""
    own = (0, binary.index) if binary.is_copy else ()
    return key_of(binary.build_id, (*own, *binary.identity))
