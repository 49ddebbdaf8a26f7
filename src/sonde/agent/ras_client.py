# SPDX-License-Identifier: Apache-2.0
"""Asks NCCL RAS of a job how far each rank is: at the socket of one of its processes, and no other.

The answer is another program's to choose: one deadline, a size limit, and `diagnose.ras` reads it.
A job in another network namespace is not asked yet, and that is reported.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Final

from sonde import procfs
from sonde.agent.job_finder import Tables, listens_at
from sonde.diagnose.job import RasReport
from sonde.diagnose.ras import parse

PORT: Final = 28028
"""NCCL_RAS_ADDR names another one; then it is not asked."""
DEADLINE_S: Final = 3.0
TIMEOUT_S: Final = 1
"""For which RAS is to wait for a rank that does not answer."""
MAX_BYTES: Final = 1 << 20
LINE: Final = 4_096


def ask(pids: Iterable[int], deadline_s: float = DEADLINE_S, port: int = PORT) -> RasReport | None:
    """The report of a job; None where none of its processes listens. Raises nothing."""
    tables: Tables = {}
    for pid in pids:
        if not (address := listens_at(pid, port, tables)):
            continue
        try:
            if procfs.read_inode(f"/proc/{pid}/ns/net") != procfs.read_inode("/proc/self/ns/net"):
                return RasReport(failed="it listens in another network namespace")
            return _ask(pid, address, port, time.monotonic() + deadline_s)
        except (OSError, ValueError) as error:
            return RasReport(failed=str(error)[:200] or type(error).__name__)
    return None


def _ask(pid: int, address: str, port: int, until_s: float) -> RasReport:
    with _Line(address, port, until_s) as line:
        if not listens_at(pid, port):
            raise ValueError("its socket belongs to another process now")
        line.send(b"CLIENT PROTOCOL 2\n")
        if not line.receive().upper().startswith(b"SERVER PROTOCOL "):
            raise ValueError("it is no NCCL RAS")
        line.send(b"TIMEOUT %d\n" % TIMEOUT_S)
        line.receive()
        line.send(b"SET FORMAT JSON\n")
        line.receive()  # OK, or an error of a version that knows text only
        line.send(b"VERBOSE STATUS\n")
        return parse(line.rest())


class _Line:
    """A connection with one deadline for all of it."""

    def __init__(self, address: str, port: int, until_s: float) -> None:
        self._until_s = until_s
        self._kept = b""
        self._socket = socket.create_connection((address, port), self._left())

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, raw: bytes) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(raw)

    def receive(self) -> bytes:
        """One line."""
        while b"\n" not in self._kept:
            if len(self._kept) > LINE:
                raise ValueError("its answer has no end of a line")
            if not (block := self._block()):
                raise ValueError("it closed the connection")
            self._kept += block
        line, _, self._kept = self._kept.partition(b"\n")
        return line

    def rest(self) -> bytes:
        """All until it closes the connection."""
        parts, size = [self._kept], len(self._kept)
        while block := self._block():
            size += len(block)
            if size > MAX_BYTES:
                raise ValueError(f"its answer is larger than {MAX_BYTES:,} bytes")
            parts.append(block)
        return b"".join(parts)

    def _block(self) -> bytes:
        self._socket.settimeout(self._left())
        return self._socket.recv(1 << 16)

    def _left(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it gave no whole answer in time")
        return left_s
