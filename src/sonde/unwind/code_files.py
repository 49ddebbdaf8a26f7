# SPDX-License-Identifier: Apache-2.0
"""The files with code that processes map, and their unwind tables in the kernel.

A process may map thousands of files that are not known yet. So its files are looked up over several
updates where one has no time for all, and up to MAX_FILES.
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from sonde import _native
from sonde._native import ExecutableSegment, executable_segments
from sonde.resolve import Resolver
from sonde.resolve.binary import Binary, FileKey
from sonde.resolve.mappings import Mapping
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind.chain import FoundEngine, Rule, rule_of
from sonde.unwind.cpython import (
    FoundInterpreter,
    Interpreter,
    UnsupportedPythonError,
    interpreter,
)
from sonde.unwind.idle_files import IdleFiles
from sonde.unwind.table_cache import TableCache, key_of

MAX_FILES: Final = 2048
"""Files of one process that are looked up. Code of others is walked by frame pointers, and counted.
PyTorch comes with 135."""
MAX_IDLE: Final = 2 * MAX_FILES
"""Files without a table that are remembered though no loaded process maps them; of the party that
has most the one that it looked up least recently is forgotten first. A process that is being loaded
has its files among them."""
MAX_BEGUN: Final = 64
"""Processes of which it is remembered how far their files have been looked up."""
ORDER_S: Final = 0.25
"""Between two sorts of the files that wait for a table, by how much each is needed."""
_KERNELS: Final = ("[uprobes]", "[vsyscall]")
"""Mappings with code of the kernel."""


class NoRoomError(Exception):
    """The kernel's maps are full."""


class OutOfTimeError(Exception):
    """An update has taken as long as it may."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when an update may go on: by time.thread_time, and by time.monotonic."""

    cpu_s: float
    clock_s: float

    @property
    def has_passed(self) -> bool:
        """Whether either has come."""
        return time.thread_time() > self.cpu_s or time.monotonic() > self.clock_s


@dataclass(slots=True)
class CodeFile:
    """One file with code, and its table in the kernel."""

    key: str
    """In the table cache."""
    table: int = 0
    """Number of its table in the kernel; 0: not loaded."""
    is_final: bool = False
    """Its table is loaded, or none can be built."""
    lacks_room: bool = False
    """Its table is built, and did not fit into the kernel's maps."""
    was_rebuilt: bool = False
    """Its first table was refused when it was loaded, and then built again."""
    segments: Sequence[ExecutableSegment] = ()
    """Its executable segments."""
    python: FoundInterpreter | None = None
    """The CPython interpreter in it."""
    is_refused: bool = False
    """In some process at least, that interpreter is not supported."""
    engine: FoundEngine | None = None
    """The engine of Ruby or PHP in it."""
    loop_rule: Rule | None = None
    """Of the engine's evaluation loop."""
    users: dict[int, int] = field(default_factory=dict)
    """Parties of loaded processes that map it, by pid."""


@dataclass(slots=True)
class _Begun:
    """A process whose files are being looked up."""

    key: tuple[int, int]
    """(pid, start_ns)"""
    at: int = 0
    """Files of mappings below this address have been."""
    files: set[FileKey] = field(default_factory=set)
    fits: bool = True
    """All their tables did fit into the kernel's maps."""


def has_code(mapping: Mapping) -> bool:
    """Whether a mapping has code of the process."""
    return "x" in mapping.prot and mapping.path not in _KERNELS


class CodeFiles:
    """All files of the processes that are walked."""

    def __init__(
        self,
        maps: _native.UnwindMaps,
        resolver: Resolver,
        cache: TableCache,
        make_room: Callable[[int, set[int]], None],
    ) -> None:
        """`make_room`: called with the pid of a process whose table did not fit, and the indices
        of its files."""
        self._maps = maps
        self._resolver = resolver
        self._cache = cache
        self._make_room = make_room
        self._files: dict[int, CodeFile] = {}
        """By `resolve.binary.Binary.index`."""
        self._idle = IdleFiles()
        """Those without a table that are remembered beside those with users."""
        self._waiting: dict[str, set[int]] = {}
        """Pids that wait for a table that is requested, by the key of its file."""
        self._crowded: dict[int, int] = {}
        """Parties of those with a file whose table could not be requested, as too many of their
        party were; by pid."""
        self._begun: OrderedDict[int, _Begun] = OrderedDict()
        """By pid."""
        self._ordered_s = 0.0
        """When requests for tables were put in order last."""
        self.left_out = 0
        """How often a process had more than MAX_FILES."""
        self.refused_python = 0
        """Files with an unsupported CPython."""

    def look_up(
        self, process: TrackedProcess, mappings: Sequence[Mapping], until: Deadline
    ) -> bool:
        """Look up the files of a process, and load their tables or request them.

        Returns whether all tables that are built fit. Raises OutOfTimeError at the
        deadline, after one file at least; the next call goes on there.
        """
        begun = self._begun.pop(process.pid, None)
        if begun is None or begun.key != process.key:
            begun = _Begun(process.key)
        first = bisect_left(mappings, begun.at, key=lambda it: it.start)
        for mapping in filter(has_code, mappings[first:]):
            begun.files.add(mapping.file)
            if len(begun.files) > MAX_FILES:
                self.left_out += 1
                break
            try:
                self._look_up(process, mapping)
            except NoRoomError:
                known = {it.binary.index for it in mappings if it.binary is not None}
                self._make_room(process.pid, known)
                begun.fits = False
            if until.has_passed:
                begun.at = mapping.end
                self._begun[process.pid] = begun
                if len(self._begun) > MAX_BEGUN:
                    self._begun.popitem(last=False)
                raise OutOfTimeError
        return begun.fits

    def is_begun(self, pid: int) -> bool:
        """Whether a look at the files of a process is to go on."""
        return pid in self._begun

    def forget(self, pid: int) -> None:
        """A process is no longer of interest."""
        self._begun.pop(pid, None)
        self._crowded.pop(pid, None)

    def of(self, mapping: Mapping) -> tuple[CodeFile | None, int]:
        """(file, its index) of a mapping that was looked up; (None, its index or 0) of another."""
        index = mapping.binary.index if mapping.binary is not None else 0
        return self._files.get(index), index

    def used(self, pid: int, party: int, indices: Iterable[int]) -> None:
        """A process of a party is loaded with these files."""
        for index in indices:
            self._files[index].users[pid] = party
            self._idle.drop(index, party)

    def drop_user(self, pid: int, indices: Iterable[int]) -> None:
        """It does not map these any more."""
        for index in indices:
            file = self._files[index]
            party = file.users.pop(pid)
            if not file.users and not file.table:
                self._idle.use(index, party)
        self._drop_idle()

    def wait_for(self, file: CodeFile, pid: int, party: int) -> None:
        """Load a process of a party again when the table of a file is built, if that is still to
        come."""
        if file.is_final or file.lacks_room:
            return
        if self._cache.awaits(file.key):
            self._waiting.setdefault(file.key, set()).add(pid)
        else:
            self._crowded[pid] = party

    def finished(self) -> set[int]:
        """Pids of those for which a table was built, or failed, since the last call, and of those
        that can request one now."""
        has_room = {it: self._cache.has_room(it) for it in set(self._crowded.values())}
        ready = {pid for pid, party in self._crowded.items() if has_room[party]}
        for pid in ready:
            del self._crowded[pid]
        for key in self._cache.poll():
            ready |= self._waiting.pop(key, set())
        return ready

    def order_requests(self) -> None:
        """Have the files of processes that are walked most built first; a process that waits for
        many files has a part of its walks for each."""
        now_s = time.monotonic()
        if not self._cache.has_queue or now_s < self._ordered_s + ORDER_S:
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

    def python_in(self, file: CodeFile, mapping: Mapping) -> Interpreter | None:
        """The CPython in a file, by the file's name in the process; None without a known one."""
        if file.python is None:
            return None
        try:
            return interpreter(file.python, mapping.name)
        except UnsupportedPythonError:
            self.refused_python += not file.is_refused
            file.is_refused = True
            return None

    def drop_unused(self, keep: set[int]) -> None:
        """Take tables that no loaded process uses out of the kernel, but those of `keep`."""
        unused = [(i, it) for i, it in self._files.items() if it.table and not it.users]
        for index, file in unused:
            if index not in keep:
                self._maps.drop_table(file.table)
                del self._files[index]

    def close(self) -> None:
        """Write down which pages of tables were needed, for the next run."""
        for file in self._files.values():
            if file.table:
                self._cache.keep_pages(file.key, self._maps.pages(file.table))

    def _look_up(self, process: TrackedProcess, mapping: Mapping) -> None:
        """Find the file of a mapping, and load its table if it is built. Raises NoRoomError."""
        known, index = self.of(mapping)
        if known is not None and not known.table:
            self._idle.use(index, process.party)
            self._drop_idle()
        if known is not None and (known.is_final or self._cache.awaits(known.key)):
            return
        binary = self._resolver.file_of(process, mapping)
        if binary is None:
            return
        found = self._files.get(binary.index)
        if found is None:
            found = self._files[binary.index] = CodeFile(
                key_of_file(binary), segments=executable_segments(binary.fd)
            )
            self._idle.use(binary.index, process.party)
            self._drop_idle()
        if not found.is_final:
            self._load_table(found, binary, process.party)
            if found.table:
                self._idle.drop(binary.index)

    def _drop_idle(self) -> None:
        for index in self._idle.forget_beyond(MAX_IDLE):
            if not self._files[index].users:
                del self._files[index]

    def _load_table(self, file: CodeFile, binary: Binary, party: int) -> None:
        """Load the table of a file, or request it for a party. Raises NoRoomError."""
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
                file.lacks_room = True
                raise NoRoomError from error
            if file.was_rebuilt:
                self._cache.mark_failed(file.key)
                file.is_final = True
                return
            file.was_rebuilt = True
            self._cache.discard(file.key)  # damaged, or of another version
            self._cache.request(file.key, binary.fd, party)
            return
        file.is_final, file.lacks_room = True, False
        file.python = built.python
        if (engine := built.engine) is not None:
            file.engine = engine
            middle = (engine.evaluation[0] + engine.evaluation[1]) // 2
            (rule,) = _native.find_unwind_rules(str(built.path), [middle])
            file.loop_rule = rule_of(rule) if rule is not None else None


def key_of_file(binary: Binary) -> str:
    """Its key in the table cache. A copy in memory, and a file whose identity another may have, has
    one without a device: its table is looked for by content."""
    own = (0, binary.distinct) if binary.distinct else ()
    return key_of(binary.build_id, (*own, *binary.identity))
