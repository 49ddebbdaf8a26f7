# SPDX-License-Identifier: Apache-2.0
"""A cache of unwind tables on disk, with a subprocess that builds missing ones.

The key of a file consists of a prefix (build id and size) and its identity. Any user can make a
file with any build id, so the prefix only selects candidates: a table is used if every byte that
was read to build it is the same in this file (`native/elf/src/record.rs`). So the same library in
a hundred containers has one table, and no user can supply a table for another's file.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde import _native, interpreter
from sonde.resolve.allowance import ROOT
from sonde.unwind.build_memory import BuildMemory
from sonde.unwind.build_queue import BuildQueue, Request
from sonde.unwind.cache_folder import default_folder
from sonde.unwind.chain import FoundEngine
from sonde.unwind.cpython import FoundInterpreter
from sonde.unwind.table_index import TableIndex
from sonde.unwind.table_room import ENDING, TableRoom

MAX_CACHE_BYTES: Final = 512 << 20
MAX_QUEUED: Final = 1024
"""Requests that wait. A further one is dropped, or takes the place of one of the party that has
most; it is made again once half of its party's are answered."""
MAX_SENT: Final = 8
"""Unanswered requests. They are answered in order: a crash is the fault of the first."""
MAX_CPU_S: Final = 8.0
"""A file whose table takes more CPU time gets none: five times that of PyTorch's largest library,
1.6 s."""
DEADLINE_S: Final = 120.0
"""A build that takes longer by the clock is given up, and tried again later with twice that:
reading the file may block, or others may take the CPUs."""
LATE_S: Final = 60.0
"""The first time; doubled each time."""
MAX_LATE_S: Final = 3600.0
MAX_LATE: Final = 64
"""Requests that are to be tried again."""
LONG_S: Final = 0.5
"""CPU time of a build, after which others of its party are not left at the subprocess: another
party would wait for them."""
DEATH_S: Final = 0.5
"""What a file costs its party at least whose build ends the subprocess: that of the next one."""
BUILDER: Final = interpreter.command(Path(__file__).resolve().with_name("table_builder.py"))
"""By its path: as a module of this package, it would import the whole package."""
END_S: Final = 1.0
"""How long the subprocess may take to end."""
MAX_FAILED: Final = 65_536
"""Files of which it is remembered that they have no table."""
MAX_KNOWN: Final = 65_536
"""Files whose table is known; others are compared with the tables on disk again."""
_KEY_SEPARATOR: Final = "@"
_NAME: Final = re.compile(r"[0-9a-z-]{1,200}")
IDLE_S: Final = 5.0
"""The subprocess ends after this long without a request."""


def key_of(build_id: str, identity: Iterable[int]) -> str:
    """The key of a file. `identity`: a `resolve.binary.FileIdentity`."""
    *_, size, _, _ = numbers = tuple(identity)
    return (
        f"{build_id[:64] or 'none'}-{size:x}{_KEY_SEPARATOR}{'-'.join(f'{it:x}' for it in numbers)}"
    )


@dataclass(frozen=True, slots=True)
class CachedTable:
    """A table on disk."""

    path: Path
    python: FoundInterpreter | None
    """The CPython interpreter in the file, if any."""
    engine: FoundEngine | None
    """The engine of Ruby or PHP in the file, if any."""


def _found(python: tuple[int, int, int, list[int], bytes]) -> FoundInterpreter:
    version, runtime, key, evaluation, raw = python
    start, end, cold, cold_end = evaluation
    return FoundInterpreter(version, runtime, key, (start, end, cold, cold_end), bytes(raw))


def _engine(
    language: str,
    version: str,
    access: int,
    root: int,
    evaluation: list[int],
    variables: list[int],
) -> FoundEngine:
    start, end, cold, cold_end = evaluation
    first, last = variables
    return FoundEngine(language, version, access, root, (start, end, cold, cold_end), (first, last))


class TableCache:
    """Tables on disk, and the subprocess that builds missing ones. No call blocks on it."""

    def __init__(
        self,
        folder: Path | None = None,
        max_bytes: int = MAX_CACHE_BYTES,
        builder: Sequence[str] = BUILDER,
        deadline_s: float = DEADLINE_S,
        max_cpu_s: float = MAX_CPU_S,
    ) -> None:
        self._builder = builder
        self._deadline_s = deadline_s
        self._max_cpu_s = max_cpu_s
        self._temporary = None
        folder = folder or default_folder()
        if folder is None:  # no private folder: tables of this run alone
            self._temporary = tempfile.TemporaryDirectory(
                prefix="sonde-unwind-", ignore_cleanup_errors=True
            )
            folder = Path(self._temporary.name)
        self._folder = folder.absolute()
        self._room = TableRoom(self._folder, max_bytes)
        self._index = TableIndex(self._folder)
        self._memory = BuildMemory()
        self._names = self._index.read()
        """Of tables on disk, by the keys of the files that they belong to."""
        self._used: set[str] = set()
        """Names of tables that were used in this run."""
        self._child: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._queue = BuildQueue(MAX_QUEUED)
        self._requested: set[str] = set()
        self._failed: dict[str, None] = {}
        self._sent: deque[Request] = deque()
        self._late: deque[tuple[float, Request]] = deque()
        """Requests whose build took too long by the clock, and when they are tried again."""
        self._dropped: list[str] = []
        """Keys of requests that were dropped since the last `poll`."""
        self._received = b""
        self._used_s = 0.0
        """When the last request was sent."""
        self._first_since_s = 0.0
        """Since when the subprocess has worked on the oldest unanswered request."""
        self._first_cpu_s = self._cpu_s = 0.0
        """CPU time of the subprocess then, and now."""
        self.put_off = 0
        """Requests that were dropped, as too many of their party wait, or took too long by the
        clock and are tried again."""
        self.built = 0
        self.failed = 0

    @property
    def is_busy(self) -> bool:
        """Whether requests are queued or unanswered, without those to be tried again later."""
        return bool(self._sent or self._queue)

    def find(self, key: str) -> CachedTable | None:
        """The table of a file, None where there is none (yet)."""
        name = self._names.get(key)
        if name is None:
            return None
        path = self._folder / f"{name}{ENDING}"
        try:
            _, python, engine = _native.unwind_table_origin(str(path))
            if name not in self._used:
                self._used.add(name)
                self._room.use(name)
                os.utime(path)
        except OSError:
            return None
        return CachedTable(
            path, _found(python) if python else None, _engine(*engine) if engine else None
        )

    def pages_of(self, key: str) -> Sequence[int]:
        """Pages of a file's table that walks needed in the run before."""
        return self._index.pages.get(self._names.get(key, ""), ())

    def keep_pages(self, key: str, pages: Sequence[int]) -> None:
        """Remember for the next run which pages of a file's table walks needed."""
        if pages and (name := self._names.get(key)):
            self._index.add_pages(name, pages)

    def has_failed(self, key: str) -> bool:
        """Whether no table could be built of the file."""
        return key in self._failed

    def awaits(self, key: str) -> bool:
        """Whether the table of a file is requested, and not there yet."""
        return key in self._requested

    def request(self, key: str, fd: int, party: int = ROOT) -> None:
        """Have the table of an open file found or built, for a party. The descriptor is
        duplicated."""
        if key in self._requested or key in self._failed:
            return
        if not self._queue.has_place(party):
            self.put_off += 1
            return
        self._requested.add(key)
        evicted = self._queue.add(Request(key, os.dup(fd), party))
        if evicted is not None:
            self._drop(evicted)
        self._send()

    @property
    def has_queue(self) -> bool:
        """Whether requests wait that the subprocess does not have yet."""
        return bool(self._queue)

    def has_room(self, party: int) -> bool:
        """Whether the tables of many files can be requested for a party."""
        return self._queue.has_room(party)

    def order(self, weights: Mapping[str, float]) -> None:
        """Have files with the greatest weights built first, of each party; of equal ones the first
        asked for."""
        self._queue.order(weights)

    def warm_up(self) -> None:
        """Start the subprocess before its first request, where no table is known yet: then there
        will be some. Else it starts with a request."""
        if self._child is None and not self._names:
            self._start_child()
            self._used_s = time.monotonic()

    def poll(self) -> list[str]:
        """Keys that were finished (or failed), or dropped, since the last call."""
        self._resume_late()
        done, self._dropped = self._dropped, []
        while self._sent and (response := self._receive()) is not None:
            request = self._sent.popleft()
            used_s = float(response.get("cpu_s", 0.0))
            self._queue.charge(request.party, used_s)
            if response.get("is_late"):
                self._try_later(request)
            else:
                os.close(request.fd)
                self._requested.discard(request.key)
                self._finish(request, response)
                done.append(request.key)
            if self._is_long(request.party, used_s):
                self._end_child()
            if self._child is None:  # nor after a crash over this request
                self._queue.put_back(self._sent)
                self._sent.clear()
            self._begin_first()
            self._send()
        if self._child and not self.is_busy and time.monotonic() - self._used_s > IDLE_S:
            self._end_child()
            self._index.write()
        return done

    def _finish(self, request: Request, response: Mapping[str, Any]) -> None:
        name = response.get("name", "")
        was_there = bool(response.get("was_there", False))
        if _NAME.fullmatch(name) and (was_there or self._room.add(name, request.party)):
            self._add_name(request.key, name)
            self.built += not was_there
        else:
            self.mark_failed(request.key)

    def _is_long(self, party: int, used_s: float) -> bool:
        """Whether requests behind one that took this long go back into the queue."""
        return (
            used_s >= LONG_S
            and self._queue.level(party) > 0
            and any(it.party == party for it in self._sent)
        )

    def _try_later(self, request: Request) -> None:
        self.put_off += 1
        wait_s = min(LATE_S * 2**request.times_late, MAX_LATE_S)
        request.times_late += 1
        self._late.append((time.monotonic() + wait_s, request))
        if len(self._late) > MAX_LATE:
            self._drop(self._late.popleft()[1])

    def _resume_late(self) -> None:
        if not self._late:
            return
        now_s = time.monotonic()
        due = [request for due_s, request in self._late if due_s <= now_s]
        if due:
            self._late = deque(it for it in self._late if it[0] > now_s)
            self._queue.put_back(due)
            self._send()

    def _drop(self, request: Request) -> None:
        """Forget a request; those who wait for it may make it again."""
        os.close(request.fd)
        self._requested.discard(request.key)
        self._dropped.append(request.key)
        self.put_off += 1

    def _add_name(self, key: str, name: str) -> None:
        self._names[key] = name
        self._used.add(name)
        device = key.partition(_KEY_SEPARATOR)[2].partition("-")[0]
        self._index.add(key, int(device or "0", 16), name)
        while len(self._names) > MAX_KNOWN:
            del self._names[next(iter(self._names))]

    def mark_failed(self, key: str) -> None:
        """Record that the file has no usable table."""
        self.failed += 1
        self._failed[key] = None
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def discard(self, key: str) -> None:
        """Delete the table of a file from disk: it is unusable."""
        name = self._names.pop(key, None)
        if name is not None:
            with suppress(OSError):
                (self._folder / f"{name}{ENDING}").unlink()

    def close(self) -> None:
        """End the subprocess and drop unanswered requests."""
        for request in (*self._queue.clear(), *self._sent, *(it for _, it in self._late)):
            os.close(request.fd)
        self._requested.clear()
        self._sent.clear()
        self._late.clear()
        self._end_child()
        self._index.write()

    def _begin_first(self) -> None:
        """The subprocess begins with the oldest unanswered request."""
        self._first_since_s = time.monotonic()
        self._first_cpu_s = self._cpu_s = interpreter.cpu_s(self._child) if self._child else 0.0

    def _send(self) -> None:
        while len(self._sent) < MAX_SENT:
            request = self._queue.take(Counter(it.party for it in self._sent))
            if request is None:
                return
            child = self._child or self._start_child()
            self._used_s = time.monotonic()
            if not self._sent:
                self._begin_first()
            self._sent.append(request)
            path = f"/proc/{os.getpid()}/fd/{request.fd}"
            prefix = request.key.partition(_KEY_SEPARATOR)[0]
            asked = {"path": path, "folder": str(self._folder), "prefix": prefix}
            line = json.dumps(asked | {"memory": self._memory.bytes()})
            assert child.stdin is not None
            with suppress(BrokenPipeError):
                child.stdin.write(line.encode() + b"\n")
                child.stdin.flush()

    def _receive(self) -> dict[str, Any] | None:
        """The next response, {"name", "was_there"} or {"error"}, with "cpu_s" and, where it took
        too long by the clock alone, "is_late"; None where it is not there yet."""
        child = self._child
        if child is None or child.stdout is None:
            return {"error": "not running"}
        while b"\n" not in self._received:
            if not self._selector.select(0):
                self._cpu_s = max(self._cpu_s, interpreter.cpu_s(child))
                used_s = self._cpu_s - self._first_cpu_s
                clock_s = time.monotonic() - self._first_since_s
                is_late = clock_s >= self._deadline_s * 2 ** self._sent[0].times_late
                if used_s < self._max_cpu_s and not is_late:
                    return None
                self._end_child()
                if used_s >= self._max_cpu_s:
                    return {"error": "too much CPU time", "cpu_s": used_s}
                return {"error": "timed out", "cpu_s": clock_s, "is_late": True}
            more = os.read(child.stdout.fileno(), 65536)
            if not more:
                self._end_child()
                used_s = max(self._cpu_s - self._first_cpu_s, DEATH_S)
                return {"error": "the subprocess died", "cpu_s": used_s}
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        response: dict[str, Any] = json.loads(line)
        return response

    def _start_child(self) -> subprocess.Popen[bytes]:
        self._child = interpreter.start(self._builder, own_session=True, ends_first=True)
        assert self._child.stdout is not None
        self._selector.register(self._child.stdout, selectors.EVENT_READ)
        self._received = b""
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        self._selector.unregister(child.stdout)
        with suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()
        for end in (child.terminate, child.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
                return
        # It is blocked in a system call, and ends when that returns.
