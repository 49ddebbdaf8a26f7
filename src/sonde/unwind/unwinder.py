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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from sonde import _native, procfs
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.procfs.party_memory import PartyMemory
from sonde.resolve import Resolver
from sonde.resolve.binary import Binary
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind.code_files import CodeFiles, Deadline, OutOfTimeError, has_code, key_of_file
from sonde.unwind.cpython import RUNTIME, Interpreter
from sonde.unwind.engines import Engine, Engines
from sonde.unwind.jvm import LIBRARY, Jvm, Jvms
from sonde.unwind.load_bias import load_bias
from sonde.unwind.paging import Paging
from sonde.unwind.preload import startup_files
from sonde.unwind.runtime_memory import MOST_BYTES
from sonde.unwind.stop_reasons import STOP_REASONS
from sonde.unwind.table_cache import TableCache
from sonde.unwind.v8 import V8, V8s
from sonde.unwind.v8_mappings import V8Mappings

UPDATE_CPU_S: Final = 0.025
"""CPU time of one update, which continues at the next call: the event loop must not stall."""
UPDATE_S: Final = 0.25
"""The same by the clock, for when other processes take the CPUs."""
READY_INTERVAL_S: Final = 0.2
"""While tables are being built, finished ones are loaded this often."""
RETRY_S: Final = 1.5
"""First retry of a process that did not fit: by then the kernel has freed what was evicted."""
MAX_RETRY_S: Final = 60.0
"""Longest time between two retries."""
PUT_OFF_S: Final = 1.0
"""Until a process is tried again whose user or container had used up its time for files."""
RELOAD_INTERVAL_S: Final = 0.25
"""Between two loads of a process that walks request."""
MAX_PYTHONS: Final = 8192
"""Processes, alive and ended, whose CPython is remembered."""


@dataclass(slots=True)
class _LoadedProcess:
    """A process whose mappings are in the kernel's maps."""

    process: TrackedProcess
    at_s: float
    """When they were loaded, CLOCK_MONOTONIC."""
    files: set[int] = field(default_factory=set)
    """Indices of its files."""
    python: Interpreter | None = None
    """The CPython in it."""
    python_bias: int = 0
    """At which the file of that is loaded."""


class Unwinder:
    """Keeps the kernel's maps of unwind tables and processes up to date."""

    def __init__(
        self, owner: _native.Bpf, resolver: Resolver, cache: TableCache | None = None
    ) -> None:
        self._maps = _native.UnwindMaps(owner)
        self._resolver = resolver
        self._cache = cache or TableCache()
        self._files = CodeFiles(self._maps, resolver, self._cache, self._evict)
        self._loaded: dict[int, _LoadedProcess] = {}
        self._stale: set[int] = set()
        """Pids to load (again)."""
        self._asked: Counter[int] = Counter()
        """How many walks have asked for each pid that is to be loaded."""
        self._expected: set[int] = set()
        """Pids to load before a walk meets them; `expect`."""
        self._first: set[int] = set()
        """Pids that are loaded before anything is sampled."""
        self._put_off: dict[int, float] = {}
        """When to try processes again whose party had used up its time (time.monotonic), by pid."""
        self._headless: set[int] = set()
        """Pids whose first thread has ended before others."""
        self._ready: set[int] = set()
        """Pids with a table that was built since they were loaded."""
        self._ready_loaded_s = 0.0
        """When such processes were last loaded again."""
        self._retries: dict[int, _Retry] = {}
        """Processes that did not fit or were refused, by pid."""
        self._evict_after_s = 0.0
        """Nothing is evicted before this time."""
        self._pages = 0
        """Pages loaded so far because walks requested them."""
        self._paging = Paging()
        self._walks: dict[int, int] = {}
        """Walks of each process at the last eviction."""
        self._pythons: LruCache[tuple[int, int], tuple[Interpreter, int]] = LruCache(MAX_PYTHONS)
        """With the bias at which its file is loaded."""
        self._runtimes = PartyMemory(MOST_BYTES)
        self._jvms = Jvms(self._maps, resolver, self._runtimes)
        self._v8s = V8s(self._maps, resolver, self._runtimes)
        self._engines = Engines(self._maps, resolver.budget, self._runtimes)
        self.left_out = 0
        """How often a table or a process did not fit into the kernel's maps."""
        self.delayed = 0
        """How often a process was not loaded, as its party had used up its time for files."""
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
        self._first = set(pids)
        self._stale |= self._first
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
                    key = key_of_file(binary)
                    if binary.is_elf and self._cache.find(key) is None:
                        self._cache.request(key, fd)
                finally:
                    os.close(fd)

    @property
    def is_busy(self) -> bool:
        """Whether tables are being built or processes wait: call `update` again in milliseconds."""
        return self._cache.is_busy or self._jvms.is_behind or bool(self._stale or self._ready)

    @property
    def has_stale(self) -> bool:
        """Whether processes are to be loaded that need not wait for tables: `update` goes on."""
        return bool(self._stale)

    @property
    def is_paging(self) -> bool:
        """Whether walks are expected to request pages of tables: call `update` again in
        milliseconds. Until a page is loaded, walks that need it are cut."""
        return self._paging.is_expected(time.monotonic())

    def expect_pages(self) -> None:
        """Sampling starts: expect requests for pages."""
        self._first.clear()
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
        """Do not load a process that has ended before it was loaded."""
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
        self._ready |= self._files.finished()
        self._files.order_requests()
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
        self._stale.update(pid for pid, due_s in self._put_off.items() if now_s > due_s)
        self._load_stale(now_s)
        return (len(self._loaded), self._pages) != before

    def _load_stale(self, now_s: float) -> None:
        """Load processes within the time of one update, as events wait to be read meanwhile."""
        until = Deadline(time.thread_time() + UPDATE_CPU_S, now_s + UPDATE_S)
        for pid in sorted(self._stale, key=self._order_of):
            if until.has_passed:
                break
            self._stale.discard(pid)
            self._asked.pop(pid, None)
            if now_s <= self._put_off.get(pid, 0.0):
                continue
            try:
                fits = self._load(pid, until)
            except OutOfTimeError:
                self._stale.add(pid)  # it goes on at the next update
                continue
            except OSError as error:  # affects the stacks of this process alone
                self.refused[errno.errorcode.get(error.errno or 0, "unknown")] += 1
                self._retry_later(pid, now_s)
                continue
            if fits:
                self._retries.pop(pid, None)
            else:
                self.left_out += 1
                self._retry_later(pid, now_s)

    def _order_of(self, pid: int) -> tuple[bool, bool, int]:
        """Sort key: expected processes first; those whose look-up of files is to go on last; else
        by how many walks request them."""
        return pid not in self._expected, self._files.is_begun(pid), -self._asked[pid]

    def resync(self) -> None:
        """Events were lost: load all processes again."""
        self._stale |= self._loaded.keys()

    def reload(self, pids: Iterable[int]) -> None:
        """Events of these processes were left out: load again those that are loaded."""
        self._stale |= self._loaded.keys() & set(pids)

    def _is_due(self, pid: int, now_s: float) -> bool:
        """Whether to load a process that walks request now: not too soon after its last load."""
        loaded = self._loaded.get(pid)
        pause_s = max(RELOAD_INTERVAL_S, self._jvms.pause_s(pid))
        return loaded is None or now_s > loaded.at_s + pause_s

    def python_of(self, key: tuple[int, int]) -> Interpreter | None:
        """The CPython that a process runs or ran last; None without a supported one."""
        found = self._pythons.get(key)
        return found[0] if found is not None else None

    def loaded_python_of(self, key: tuple[int, int]) -> tuple[Interpreter, int] | None:
        """The same, and the address of its _PyRuntime in the process."""
        found = self._pythons.get(key)
        return (found[0], found[0].runtime + found[1]) if found is not None else None

    def runtime_of(self, process: TrackedProcess) -> Jvm | V8 | Engine | None:
        """The JVM, V8, Ruby or PHP that a process runs; None without a supported one."""
        code = process.generated_code
        return code if isinstance(code, Jvm | V8 | Engine) else None

    def take_refusals(self) -> list[tuple[tuple[int, int], str]]:
        """((pid, start_ns), reason) of processes with a Ruby or PHP whose frames are not walked,
        since the last call; of many, the newest."""
        return self._engines.take_refusals()

    def stops(self) -> dict[str, int]:
        """How often walks ended for each reason so far, by name (`stop_reasons`)."""
        counts = zip(STOP_REASONS, self._maps.stops(), strict=True)
        return {reason.name: count for reason, count in counts if count}

    def losses(self) -> dict[str, int]:
        """How often processes could not be loaded, or not completely, so far, by reason."""
        no_room = self.left_out + self._jvms.left_out
        found = {"no_room": no_room} if no_room else {}
        if self.delayed:
            found["delayed"] = self.delayed
        if self._files.left_out:
            found["too_many_files"] = self._files.left_out
        if self._runtimes.emptied:
            found["caches_emptied"] = self._runtimes.emptied
        if self._cache.put_off:
            found["tables_put_off"] = self._cache.put_off
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
            "tables_put_off": self._cache.put_off,
            "put_off": len(self._retries),
            "left_out": self.left_out,
            "delayed": self.delayed,
            "files_left_out": self._files.left_out,
            "python_refused": self._files.refused_python,
            **self._jvms.usage(),
            **self._v8s.usage(),
            **self._engines.usage(),
        }

    def memory_bytes(self) -> int:
        """Kernel memory of tables and mappings."""
        return self._maps.usage()[0]

    def close(self) -> None:
        """End the subprocess that builds tables, and record for the next run what was needed."""
        self._files.close()
        self._cache.close()

    def _retry_later(self, pid: int, now_s: float) -> None:
        """Schedule a retry, with exponential backoff."""
        wait_s = RETRY_S
        if before := self._retries.get(pid):
            wait_s = min(2 * before.wait_s, MAX_RETRY_S)
        self._retries[pid] = _Retry(now_s + wait_s, wait_s)

    def _load(self, pid: int, until: Deadline) -> bool:
        """Load a process into the kernel's maps, or remove an ended one.

        Returns whether all of it fits. Raises OutOfTimeError where not all of its files are looked
        up by the deadline, OSError for other errors.
        """
        found = procfs.read_stat(pid)
        if found is None:
            self._forget(pid)
            return True
        if not found.start_code:  # a kernel thread, or exiting
            return True
        process = self._resolver.processes.find(pid, found.start_ns)
        budget, is_first = self._resolver.files_budget, pid in self._expected or pid in self._first
        if budget.is_over(process.party, in_turn=not is_first):
            self._put_off[pid] = time.monotonic() + PUT_OFF_S
            self.delayed += 1
            return True
        self._put_off.pop(pid, None)
        with budget.charged(process.party):
            return self._load_process(process, found.start_code, until)

    def _load_process(self, process: TrackedProcess, start_code: int, until: Deadline) -> bool:
        """`start_code`: of /proc/PID/stat. For the rest see `_load`."""
        pid = process.pid
        mappings = process.space().mappings
        fits = self._files.look_up(process, mappings, until)
        loaded = _LoadedProcess(process, time.monotonic())
        ranges = []
        generated = runtime = None
        v8_mappings = V8Mappings()
        has_engine = False
        is_musl = any("/ld-musl-" in mapping.path for mapping in mappings)
        for mapping in filter(has_code, mappings):
            file, index = self._files.of(mapping)
            bias = load_bias(mapping, file.segments) if file is not None else None
            if file is None or bias is None:
                ranges.append((mapping.start, mapping.end, 0, 0))
                continue
            self._files.wait_for(file, pid, process.party)
            loaded.files.add(index)
            ranges.append((mapping.start, mapping.end, bias % 2**64, file.table))
            if (python := self._files.python_in(file, mapping)) is not None:
                loaded.python, loaded.python_bias = python, bias
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
            self._maps.set_process(pid, start_code, ranges, runtime)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.E2BIG, errno.ENOMEM):
                raise
            self._evict(pid, loaded.files)
            return False
        before = self._loaded.get(pid)
        self._files.used(pid, process.party, loaded.files)
        if before is not None:
            self._files.drop_user(pid, before.files - loaded.files)
        self._loaded[pid] = loaded
        self._jvms.settle(pid)
        if loaded.python is not None:
            self._pythons.put(process.key, (loaded.python, loaded.python_bias))
        return fits

    def _forget(self, pid: int) -> None:
        self._retries.pop(pid, None)
        self._put_off.pop(pid, None)
        self._files.forget(pid)
        self._headless.discard(pid)
        self._maps.drop_process(pid)
        self._jvms.forget(pid)
        self._v8s.forget(pid)
        self._engines.forget(pid)
        loaded = self._loaded.pop(pid, None)
        if loaded is not None:
            self._files.drop_user(pid, loaded.files)

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
        self._files.drop_unused(files)


def _in_generated(
    range_: tuple[int, int, int, int], low: int, high: int, table: int
) -> tuple[int, int, int, int]:
    """An executable mapping; where it is part of generated code (from `low` to `high`), with the
    table of that."""
    start, end, _, has_table = range_
    return (start, end, 0, table) if not has_table and low <= start < high else range_


@dataclass(frozen=True, slots=True)
class _Retry:
    """When loading a process is tried again, CLOCK_MONOTONIC."""

    at_s: float
    wait_s: float
    """How long was waited since the try before."""
