# SPDX-License-Identifier: Apache-2.0
"""The child that reads, opens and waits for `procfs.broker`, one request after the other.

Run by its path, without its package: it starts sooner. Standard input is a socket. A request and an
answer are a length (4 bytes) and a marshalled tuple; an answer is (errno, content), and one that
brings a descriptor has it attached (SCM_RIGHTS).

Which files it hands out, and how it opens them: opening.py.
"""

from __future__ import annotations

import errno
import marshal
import os
import signal
import socket
import stat
import struct
import sys
import time
from contextlib import suppress
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

if __name__ == "__main__" and not TYPE_CHECKING:
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120
    from map_costs import cost_of, take_map_lock, tasks_of, times_mapped, wait_until_removable
    from memory_tasks import elsewhere, memory_task
    from opening import Mounts, open_file, open_memory, status_of
    from proc_folder import here, use
else:
    from sonde.procfs.map_costs import (
        cost_of,
        take_map_lock,
        tasks_of,
        times_mapped,
        wait_until_removable,
    )
    from sonde.procfs.memory_tasks import elsewhere, memory_task
    from sonde.procfs.opening import Mounts, open_file, open_memory, status_of
    from sonde.procfs.proc_folder import here, use

CONTROL = 0
"""Descriptor of the socket."""
READ_BYTES = 64 << 10
LENGTH = struct.Struct("<I")
BRIEFEST_S = 0.0005
"""Waits for what a process chooses that are shorter cost it nothing."""
PUT_OFF = -1
"""In place of an error's number: not read, as the files before it in the request took so long."""
KEPT_S = 3600
"""How long descriptors are kept after the parent has ended, at most."""


def read_file(path: str, limit: int) -> bytes:
    fd = os.open(here(path), os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while limit > 0 and (piece := os.read(fd, min(limit, 1 << 18))):
            pieces.append(piece)
            limit -= len(piece)
        return b"".join(pieces)
    finally:
        os.close(fd)


def part_of(fd: int, size: int, at: int) -> bytes:
    """What pread() returns; b"" where there is nothing to read."""
    try:
        return os.pread(fd, size, at)
    except (OSError, OverflowError):
        return b""


def links_of(folder: str, limit: int, prefix: bytes) -> tuple[list[bytes], bool]:
    """Where the first `limit` descriptors of /proc/PID/fd lead to, as far as it begins like this,
    each once; and whether there are more descriptors."""
    found: dict[bytes, None] = {}
    with os.scandir(os.fsencode(here(folder))) as entries:
        for entry in islice(entries, limit):
            with suppress(OSError):
                link = os.readlink(entry.path)  # noqa: PTH115
                if link.startswith(prefix):
                    found[link] = None
        return list(found), next(entries, None) is not None


def links_at(folder: str, names: list[int]) -> list[bytes]:
    """Where some descriptors of /proc/PID/fd lead to; b"" of one that is not there."""
    found = []
    for name in names:
        try:
            found.append(os.readlink(os.fsencode(here(f"{folder}/{name}"))))  # noqa: PTH115
        except OSError:
            found.append(b"")
    return found


def of_process(path: str, ask: Callable[[str], Any]) -> Any:
    """What `ask` returns for a path; where there is nothing, as the first thread of the process has
    ended, for the path of another thread. Raises OSError."""
    try:
        found = ask(path)
    except (FileNotFoundError, ProcessLookupError):
        other = elsewhere(path)
        if other is None:
            raise
        return ask(other)
    if found == b"" and (other := elsewhere(path)) is not None:
        return ask(other)
    return found


class Waits:
    """How long this thread waits for what it reads: neither computing nor waiting for a CPU."""

    def __init__(self) -> None:
        self.queued_s = self.queued()
        self.begin()
        self.begin_many()

    def begin(self) -> None:
        """A request came, or one of its answers was sent."""
        self.began_s, self.ran_s = time.monotonic(), time.thread_time()

    def begin_many(self) -> None:
        """The answers from now on count together (`are_over`)."""
        self.together_s, self.queued_before_s = 0.0, self.queued()

    def are_over(self, most_s: float) -> bool:
        """Whether the answers since `begin_many` waited for longer than this together."""
        if self.together_s < most_s:
            return False
        return self.together_s - (self.queued() - self.queued_before_s) >= most_s

    def since_begin(self) -> float:
        """Seconds; 0.0 where they are fewer than BRIEFEST_S."""
        waited_s = time.monotonic() - self.began_s - (time.thread_time() - self.ran_s)
        self.together_s += waited_s
        if waited_s < BRIEFEST_S:
            return 0.0
        before_s, self.queued_s = self.queued_s, self.queued()
        waited_s -= self.queued_s - before_s
        return waited_s if waited_s >= BRIEFEST_S else 0.0

    @staticmethod
    def queued() -> float:
        """For a CPU, so far; 0 where the kernel keeps no such times (CONFIG_SCHED_INFO)."""
        with suppress(OSError, ValueError, IndexError):
            return int(read_file("/proc/self/schedstat", 128).split()[1]) / 1e9
        return 0.0


class Server:
    """Files that stay open between requests, and the answers."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.mounts = Mounts()
        self.held: dict[int, int] = {}
        """Descriptors of files that are read in pieces, by numbers of the parent."""
        self.given: list[int] = []
        """Descriptors that came with requests."""
        self.kept: list[int] = []
        """Of these, probes: they may be closed only while no process keeps its map lock."""
        self.inodes: set[int] = set()
        """Of the files that they are probes on."""
        self.waits = Waits()

    def write(self, pieces: list[tuple[int, bytes]]) -> None:
        fd = self.given.pop()
        try:
            for at, content in pieces:
                os.pwrite(fd, content, at)
        finally:
            os.close(fd)

    def answer(self, number: int, content: Any, fd: int | None = None) -> None:
        raw = marshal.dumps((number, content, self.waits.since_begin()))
        raw = LENGTH.pack(len(raw)) + raw
        if fd is None:
            self.link.sendall(raw)
        else:
            sent = socket.send_fds(self.link, [raw], [fd])
            os.close(fd)
            self.link.sendall(raw[sent:])
        self.waits.begin()

    def first(self, number: int, path: str, limit: int) -> bytes:
        if number in self.held:
            os.close(self.held.pop(number))
        self.held[number] = os.open(here(path), os.O_RDONLY | os.O_CLOEXEC)
        return self.more(number, limit)

    def more(self, number: int, limit: int) -> bytes:
        pieces = []
        while limit > 0 and (piece := os.read(self.held[number], limit)):
            pieces.append(piece)
            limit -= len(piece)
        return b"".join(pieces)

    def answer_whether_mapped(self, pid: int, inode: int) -> None:
        fds = []
        try:
            for task in tasks_of(pid):
                with suppress(OSError):
                    fds.append(os.open(here(f"{task}/maps"), os.O_RDONLY | os.O_CLOEXEC))
            self.answer(0, None)
            found = (times_mapped(fd, inode) for fd in fds)
            self.answer(0, next((it > 0 for it in found if it is not None), False))
        finally:
            for fd in fds:
                os.close(fd)

    def answer_group(self, folder: str, *how: Any) -> None:
        """An answer, and one more with a descriptor for each file that was opened."""
        if __name__ == "__main__" and not TYPE_CHECKING:
            from group_answers import read_group
        else:
            from sonde.procfs.group_answers import read_group
        content, opened = read_group(folder, *how)
        self.answer(0, content)
        while opened:
            self.answer(0, None, opened.pop(0))

    def serve(self, request: tuple[Any, ...]) -> None:
        kind, *rest = request
        if kind == "read":
            path, limit = rest
            self.answer(0, of_process(path, lambda it: read_file(it, limit)))
        elif kind == "each":  # an answer for each path: the caller knows where it hangs
            paths, limit, most_s = rest
            self.waits.begin_many()
            for path in paths:
                if self.waits.are_over(most_s):
                    self.answer(PUT_OFF, None)
                    continue
                try:
                    self.answer(0, read_file(path, limit))
                except OSError as error:
                    self.answer(error.errno or errno.EIO, None)
        elif kind == "groups":  # the same, of folders of control groups
            asked, *how = rest
            for folder, names in asked:
                try:
                    self.answer_group(folder, names, *how)
                except OSError as error:
                    self.answer(error.errno or errno.EIO, None)
        elif kind == "locks":  # the same
            for pid in rest[0]:
                try:
                    take_map_lock(pid)
                    self.answer(0, None)
                except OSError as error:
                    self.answer(error.errno or errno.EIO, None)
        elif kind == "costs":  # the same
            pids, inode = rest
            for pid in pids:
                try:
                    self.answer(0, cost_of(pid, inode))
                except OSError as error:
                    self.answer(error.errno or errno.EIO, None)
        elif kind == "maps":  # two answers: opening it may wait for another lock
            self.answer_whether_mapped(*rest)
        elif kind == "keep":
            ignore_signals()
            self.kept.append(self.given.pop())
            self.inodes.update(rest)
            self.answer(0, None)
        elif kind == "link":
            self.answer(0, os.fsencode(of_process(rest[0], lambda it: os.readlink(here(it)))))  # noqa: PTH115
        elif kind == "links":
            path, limit, prefix = rest
            self.answer(0, of_process(path, lambda it: links_of(it, limit, prefix)))
        elif kind == "links at":
            self.answer(0, links_at(*rest))
        elif kind == "inode":
            self.answer(0, of_process(rest[0], lambda it: os.stat(here(it))).st_ino)  # noqa: PTH116
        elif kind == "which":
            path, *who = rest
            found, is_for_all = of_process(path, lambda it: status_of(it, *who))
            self.answer(0, (found.st_dev, found.st_ino, found.st_uid, is_for_all))
        elif kind == "device":
            found = of_process(rest[0], lambda it: os.stat(here(it)))  # noqa: PTH116
            self.answer(0, found.st_rdev if stat.S_ISCHR(found.st_mode) else 0)
        elif kind == "look up":
            path, flags = rest
            wait_for_folders(path)
            self.answer(0, None, os.open(here(path), flags | os.O_CLOEXEC))
        elif kind == "names":
            path, most = rest
            wait_for_folders(path)
            with os.scandir(here(path)) as entries:
                self.answer(0, [it.name for it in islice(entries, most)])
        elif kind == "write":
            self.write(*rest)
            self.answer(0, None)
        elif kind == "open":
            path, *how = rest
            fd, *known = of_process(path, lambda it: open_file(self.mounts, it, *how))
            self.answer(0, tuple(known), fd)
        elif kind == "memory":
            path, device, size = rest
            self.answer(0, None, of_process(path, lambda it: open_memory(it, device, size)))
        elif kind == "task":
            self.answer(0, memory_task(*rest))
        elif kind == "begin":  # of a file that is read piece by piece
            number, path = rest
            if path.endswith("/mem"):  # it opens without memory, too
                path = elsewhere(path) or path
            flags = os.O_RDONLY | os.O_CLOEXEC
            self.held[number] = of_process(path, lambda it: os.open(here(it), flags))
            self.answer(0, None)
        elif kind == "first":  # most files end with it: then nothing stays open
            number, path, limit = rest
            content = of_process(path, lambda it: self.first(number, it, limit))
            is_all = len(content) < limit
            if is_all:
                os.close(self.held.pop(number))
            self.answer(0, (content, is_all))
        elif kind == "more":
            self.answer(0, self.more(*rest))
        elif kind == "at":
            number, size, at = rest
            self.answer(0, os.pread(self.held[number], size, at))
        elif kind == "many":
            number, parts = rest
            self.answer(0, [part_of(self.held[number], size, at) for size, at in parts])
        elif kind == "end":
            (number,) = rest
            if number in self.held:
                os.close(self.held.pop(number))


def wait_for_folders(path: str) -> None:
    """Wait until no folder above a name in /proc is locked, in a way that SIGKILL ends: by a
    listing, where a look-up would wait for ever. Raises OSError."""
    begin_listing = listing()
    end = 0
    while (end := path.find("/", end + 1)) > 0:
        fd = os.open(here(path[:end]), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            begin_listing(fd)
        finally:
            os.close(fd)


def listing() -> Callable[[int], object]:
    if __name__ == "__main__" and not TYPE_CHECKING:
        from group_answers import begin_listing
    else:
        from sonde.procfs.group_answers import begin_listing
    return begin_listing


def ignore_signals() -> None:
    """Signals that end the recorder and its process group must not end this child."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def outlive(inodes: set[int]) -> None:
    """After the parent's end: wait, for KEPT_S at most, until the probes that are kept can be
    closed, which our exit does."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(KEPT_S)
    wait_until_removable(inodes)


def main() -> None:
    if len(sys.argv) > 1:
        use(int(sys.argv[1]))
    with suppress(OSError), open(here("/proc/self/oom_score_adj"), "wb") as file:  # noqa: PTH123
        file.write(b"1000")  # where memory is short, the kernel ends this process before its parent
    link = socket.socket(fileno=CONTROL)
    server = Server(link)
    if len(sys.argv) < 2:  # so that our parent finds it in memory
        with suppress(OSError):
            os.stat("/proc/self/stat")  # noqa: PTH116
    server.answer(0, None)
    buffer = b""
    while True:
        while (
            len(buffer) < LENGTH.size or len(buffer) < LENGTH.size + LENGTH.unpack_from(buffer)[0]
        ):
            more, fds, _, _ = socket.recv_fds(link, READ_BYTES, 1)
            server.given += fds
            if not more:
                if server.kept:
                    outlive(server.inodes)
                return
            buffer += more
        (length,) = LENGTH.unpack_from(buffer)
        server.waits.begin()
        request = marshal.loads(buffer[LENGTH.size : LENGTH.size + length])
        buffer = buffer[LENGTH.size + length :]
        try:
            server.serve(request)
        except OSError as error:
            if request[0] != "end":
                server.answer(error.errno or errno.EIO, None)
        except (KeyError, ValueError, OverflowError):
            server.answer(errno.EBADF, None)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        main()
