# SPDX-License-Identifier: Apache-2.0
"""Unwind tables of files: made once, kept on disk, handed out when they are ready.

A file is asked for by its key: what it calls itself, then which file it is. What it calls itself
(build id, size) is its maker's choice, and only leads to tables that may be its own: one is taken
where every byte that was read to make it is the same in this file (`native/elf/src/record.rs`). So
one image in a hundred containers has one table, and nobody can give another's file a table.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde import _native, interpreter
from sonde.unwind.cpython import Found
from sonde.unwind.folder import default_folder

MAX_CACHE_BYTES: Final = 512 << 20
MAX_QUEUED: Final = 1024
MAX_SENT: Final = 8
"""Requests under way. They are answered in order: where the process dies, it is over the first."""
DEADLINE_S: Final = 60.0
"""A file that takes longer has no table: it may lie where reading hangs."""
BUILDER: Final = interpreter.command(Path(__file__).resolve().with_name("build.py"))
"""By its path, not as a module of this package, which would load all of the package with it."""
END_S: Final = 1.0
"""How long the building process may take to end."""
MAX_FAILED: Final = 65_536
MAX_KNOWN: Final = 65_536
"""Files whose table is known; one more is held against the tables on disk again."""
_WHICH: Final = "@"
_ENDING: Final = ".unw"
_NAME: Final = re.compile(r"[0-9a-z-]{1,200}")
IDLE_S: Final = 5.0
"""The building process ends when it had nothing to do for so long."""


def key_of(build_id: str, identity: Iterable[int]) -> str:
    """How a file is asked for; `identity`: numbers that only this file has, until it changes."""
    *_, size, _, _ = numbers = tuple(identity)
    return f"{build_id[:64] or 'none'}-{size:x}{_WHICH}{'-'.join(f'{it:x}' for it in numbers)}"


@dataclass(frozen=True, slots=True)
class Built:
    """A table on disk."""

    path: Path
    python: Found | None


@dataclass(slots=True)
class _Request:
    key: str
    fd: int


def _found(python: tuple[int, int, int, list[int], bytes]) -> Found:
    version, runtime, key, evaluation, raw = python
    first, end, moved, moved_end = evaluation
    return Found(version, runtime, key, (first, end, moved, moved_end), bytes(raw))


class TableCache:
    """Tables on disk, and the process that makes those that are missing."""

    def __init__(
        self,
        folder: Path | None = None,
        max_bytes: int = MAX_CACHE_BYTES,
        builder: Sequence[str] = BUILDER,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._builder = builder
        self._deadline_s = deadline_s
        self._temporary = None
        folder = folder or default_folder()
        if folder is None:  # tables of this run alone
            self._temporary = tempfile.TemporaryDirectory(
                prefix="sonde-unwind-", ignore_cleanup_errors=True
            )
            folder = Path(self._temporary.name)
        self._folder = folder.absolute()
        self._names: dict[str, str] = {}
        """Of tables on disk, by the key of the file that each was made of or held against."""
        self._child: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._queue: deque[_Request] = deque()
        self._waiting: set[str] = set()
        self._failed: dict[str, None] = {}
        self._sent: deque[_Request] = deque()
        self._heard = b""
        self._used_s = 0.0
        self._began_s = 0.0
        """When the request that is being answered became the first."""
        self.built = 0
        self.failed = 0
        self._shrink(max_bytes)

    @property
    def is_busy(self) -> bool:
        """Whether tables are being made."""
        return bool(self._sent or self._queue)

    def find(self, key: str) -> Built | None:
        """The table of a file, None where there is none (yet)."""
        name = self._names.get(key)
        if name is None:
            return None
        path = self._folder / f"{name}{_ENDING}"
        try:
            _, python = _native.unwind_table_origin(str(path))
        except OSError:
            return None
        return Built(path, _found(python) if python else None)

    def has_failed(self, key: str) -> bool:
        """Whether there is no way to make it."""
        return key in self._failed

    def request(self, key: str, fd: int) -> None:
        """Have the table of an open file found or made. The descriptor is duplicated."""
        if key in self._waiting or key in self._failed or len(self._queue) >= MAX_QUEUED:
            return
        self._waiting.add(key)
        self._queue.append(_Request(key, os.dup(fd)))
        self._send()

    def warm_up(self) -> None:
        """Start the building process ahead of its first request."""
        if self._child is None:
            self._start_child()
            self._used_s = time.monotonic()

    def poll(self) -> list[str]:
        """Keys that were finished (or failed) since the last call."""
        done = []
        while self._sent and (answer := self._answer()) is not None:
            request = self._sent.popleft()
            os.close(request.fd)
            self._waiting.discard(request.key)
            name = answer.get("name", "")
            if _NAME.fullmatch(name):
                self._learn(request.key, name)
                self.built += not answer.get("was_there", False)
            else:
                self.refuse(request.key)
            done.append(request.key)
            self._began_s = time.monotonic()
            if self._child is None:  # those behind it were not its fault: another process is asked
                self._queue.extendleft(reversed(self._sent))
                self._sent.clear()
            self._send()
        if self._child and not self.is_busy and time.monotonic() - self._used_s > IDLE_S:
            self.close()
        return done

    def _learn(self, key: str, name: str) -> None:
        self._names[key] = name
        while len(self._names) > MAX_KNOWN:
            del self._names[next(iter(self._names))]

    def refuse(self, key: str) -> None:
        """There will be no table of this file."""
        self.failed += 1
        self._failed[key] = None
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def forget(self, key: str) -> None:
        """What is on disk for this file is of no use."""
        name = self._names.pop(key, None)
        if name is not None:
            with suppress(OSError):
                (self._folder / f"{name}{_ENDING}").unlink()

    def close(self) -> None:
        """End the building process; what is not made yet is not made."""
        for request in (*self._queue, *self._sent):
            os.close(request.fd)
        self._queue.clear()
        self._waiting.clear()
        self._sent.clear()
        self._end_child()

    def _send(self) -> None:
        while self._queue and len(self._sent) < MAX_SENT:
            child = self._child or self._start_child()
            request = self._queue.popleft()
            self._used_s = time.monotonic()
            if not self._sent:
                self._began_s = self._used_s
            self._sent.append(request)
            path = f"/proc/{os.getpid()}/fd/{request.fd}"
            prefix = request.key.partition(_WHICH)[0]
            line = json.dumps({"path": path, "folder": str(self._folder), "prefix": prefix})
            assert child.stdin is not None
            with suppress(BrokenPipeError):
                child.stdin.write(line.encode() + b"\n")
                child.stdin.flush()

    def _answer(self) -> dict[str, Any] | None:
        """{"name", "was_there"} or {"error"}; None: not yet."""
        child = self._child
        if child is None or child.stdout is None:
            return {"error": "not running"}
        while b"\n" not in self._heard:
            if not self._selector.select(0):
                if time.monotonic() - self._began_s < self._deadline_s:
                    return None
                self._end_child()
                return {"error": "it took too long"}
            more = os.read(child.stdout.fileno(), 65536)
            if not more:
                self._end_child()
                return {"error": "the process that reads it ended"}
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start_child(self) -> subprocess.Popen[bytes]:
        self._child = interpreter.start(self._builder, own_session=True)
        assert self._child.stdout is not None
        self._selector.register(self._child.stdout, selectors.EVENT_READ)
        self._heard = b""
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
        # It hangs in the kernel, and ends with what it hangs on.

    def _shrink(self, max_bytes: int) -> None:
        """Drop the tables not written or used for longest."""
        found = []
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                status = entry.stat()
                found.append((max(status.st_atime, status.st_mtime), status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= max_bytes:
                break
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
                total -= size
