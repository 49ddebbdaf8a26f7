# SPDX-License-Identifier: Apache-2.0
"""Asks NCCL RAS, NCCL's own monitoring in the processes of a job, how far each rank is.

It is asked at a socket of one of the job's processes, and at no other. The answer is not trusted:
it has one deadline and a size limit, and `diagnose.ras` parses it. A job in another network
namespace is not asked, and that is reported.
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
"""NCCL's default; where NCCL_RAS_ADDR names another one, RAS is not found."""
DEADLINE_S: Final = 3.0
"""For the whole conversation."""
TIMEOUT_S: Final = 1
"""How long RAS is to wait for a rank that does not answer."""
MAX_BYTES: Final = 1 << 20
"""Of the report."""
MAX_LINE: Final = 4_096
"""Bytes of an answer of one line, without its end."""


def ask(pids: Iterable[int], deadline_s: float = DEADLINE_S, port: int = PORT) -> RasReport | None:
    """The report of a job; None where none of its processes listens. Raises nothing."""
    tables: Tables = {}
    for pid in pids:
        if not (address := listens_at(pid, port, tables)):  # which raises nothing
            continue
        try:
            if procfs.read_inode(f"/proc/{pid}/ns/net") != procfs.read_inode("/proc/self/ns/net"):
                return RasReport(failed="it listens in another network namespace")
            return _ask(pid, address, port, time.monotonic() + deadline_s)
        except (OSError, ValueError) as error:
            return RasReport(failed=str(error)[:200] or type(error).__name__)
    return None


def _ask(pid: int, address: str, port: int, until_s: float) -> RasReport:
    with _Connection(address, port, until_s) as connection:
        if not listens_at(pid, port):
            raise ValueError("its socket belongs to another process now")
        connection.send(b"CLIENT PROTOCOL 2\n")
        if not connection.receive_line().upper().startswith(b"SERVER PROTOCOL "):
            raise ValueError("it is no NCCL RAS")
        connection.send(b"TIMEOUT %d\n" % TIMEOUT_S)
        connection.receive_line()  # OK, or an error: then RAS waits as long as it usually does
        connection.send(b"SET FORMAT JSON\n")
        connection.receive_line()  # OK, or an error of a version that knows text only
        connection.send(b"VERBOSE STATUS\n")
        return parse(connection.receive_rest())


class _Connection:
    """A TCP connection with one deadline for all of it."""

    def __init__(self, address: str, port: int, until_s: float) -> None:
        self._until_s = until_s
        self._kept = b""
        self._socket = socket.create_connection((address, port), self._left())

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, raw: bytes) -> None:
        self._socket.settimeout(self._left())
        self._socket.sendall(raw)

    def receive_line(self) -> bytes:
        """One line, without its end."""
        while b"\n" not in self._kept[: MAX_LINE + 1]:
            if len(self._kept) > MAX_LINE:
                raise ValueError(f"its answer has no end of a line in {MAX_LINE:,} bytes")
            if not (block := self._block()):
                raise ValueError("it closed the connection")
            self._kept += block
        line, _, self._kept = self._kept.partition(b"\n")
        return line

    def receive_rest(self) -> bytes:
        """All that comes until the other side closes the connection."""
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
