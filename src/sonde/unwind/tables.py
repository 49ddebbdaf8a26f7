# SPDX-License-Identifier: Apache-2.0
"""Unwind tables of files: made once, kept on disk, handed out when they are ready.

A table is named after the build id and size of its file (device, inode and time of change where it
has no build id), so that one image in a hundred containers has one table.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.unwind.cpython import Found

MAX_CACHE_BYTES: Final = 512 << 20
MAX_QUEUED: Final = 1024
MAX_SENT: Final = 8
"""Requests under way. They are answered in order: where the process dies, it is over the first."""
DEADLINE_S: Final = 60.0
"""A file that takes longer has no table: it may lie where reading hangs."""
BUILDER: Final = (sys.executable, "-P", str(Path(__file__).with_name("build.py")))
"""By its path, not as a module of this package, which would load all of the package with it."""
END_S: Final = 1.0
"""How long the building process may take to end."""
MAX_FAILED: Final = 65_536
IDLE_S: Final = 5.0
"""The building process ends when it had nothing to do for so long."""


def default_folder() -> Path:
    """Where tables are kept: shared by the users of the machine where we may, else one's own."""
    shared = Path("/var/cache/sonde/unwind")
    with suppress(OSError):
        shared.mkdir(parents=True, exist_ok=True)
        if os.access(shared, os.W_OK):
            return shared
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonde" / "unwind"
    own.mkdir(parents=True, exist_ok=True)
    return own


@dataclass(frozen=True, slots=True)
class Built:
    """A table on disk."""

    path: Path
    python: Found | None


@dataclass(slots=True)
class _Request:
    name: str
    fd: int


def _found(told: list[Any]) -> Found:
    version, runtime, key, evaluation, raw = told
    return Found(version, runtime, key, tuple(evaluation), bytes.fromhex(raw))


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
        self._folder = folder or default_folder()
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

    def find(self, name: str) -> Built | None:
        """The table called `name`, None where there is none (yet)."""
        path = self._folder / f"{name}.unw"
        try:
            about = json.loads((self._folder / f"{name}.unw.json").read_bytes())
            if not path.exists():
                return None
            told = about["python"]
            python = _found(told) if told else None
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        return Built(path, python)

    def has_failed(self, name: str) -> bool:
        """Whether there is no way to make it."""
        return name in self._failed

    def request(self, name: str, fd: int) -> None:
        """Have the table of an open file made. The descriptor is duplicated."""
        if name in self._waiting or name in self._failed or len(self._queue) >= MAX_QUEUED:
            return
        self._waiting.add(name)
        self._queue.append(_Request(name, os.dup(fd)))
        self._send()

    def warm_up(self) -> None:
        """Start the building process ahead of its first request."""
        if self._child is None:
            self._start_child()
            self._used_s = time.monotonic()

    def poll(self) -> list[str]:
        """Names that were finished (or failed) since the last call."""
        done = []
        while self._sent and (answer := self._answer()) is not None:
            request = self._sent.popleft()
            os.close(request.fd)
            self._waiting.discard(request.name)
            if answer:
                self.refuse(request.name)
            else:
                self.built += 1
            done.append(request.name)
            self._began_s = time.monotonic()
            if self._child is None:  # those behind it were not its fault: another process is asked
                self._queue.extendleft(reversed(self._sent))
                self._sent.clear()
            self._send()
        if self._child and not self.is_busy and time.monotonic() - self._used_s > IDLE_S:
            self.close()
        return done

    def refuse(self, name: str) -> None:
        """There will be no table of this name."""
        self.failed += 1
        self._failed[name] = None
        while len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def forget(self, name: str) -> None:
        """What is on disk under this name is of no use."""
        with suppress(OSError):
            (self._folder / f"{name}.unw").unlink()

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
            line = json.dumps({"path": path, "out": str(self._folder / f"{request.name}.unw")})
            assert child.stdin is not None
            with suppress(BrokenPipeError):
                child.stdin.write(line.encode() + b"\n")
                child.stdin.flush()

    def _answer(self) -> str | None:
        """'' done, else why not; None: not yet."""
        child = self._child
        if child is None or child.stdout is None:
            return "not running"
        while b"\n" not in self._heard:
            if not self._selector.select(0):
                if time.monotonic() - self._began_s < self._deadline_s:
                    return None
                self._end_child()
                return "it took too long"
            more = os.read(child.stdout.fileno(), 65536)
            if not more:
                self._end_child()
                return "the process that reads it ended"
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return str(json.loads(line).get("error", ""))

    def _start_child(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            self._builder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
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
