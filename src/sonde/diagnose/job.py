# SPDX-License-Identifier: Apache-2.0
"""The ranks of one job on this node, as an explanation of a stall reads them.

A stall here is a job that makes no progress. Small records that go to the child process that
explains (`child.py`), and into recorded incidents: fields are only ever added, at the end, with a
default.
"""

from __future__ import annotations

import msgspec


class StackFrame(msgspec.Struct, array_like=True, frozen=True):
    """One frame of a stack."""

    kind: str
    """As in the table frame: kernel, user, python, ..."""
    function: str
    where: str
    """File of a Python frame, binary of another one."""
    line: int = 0
    origin: str = ""
    """Whose code it is: a value of `CodeOrigin`."""

    @property
    def text(self) -> str:
        """'function file:line', or 'function binary'."""
        at = f"{self.where}:{self.line}" if self.kind == "python" else self.where
        return f"{self.function or '?'} {at}".strip()


class RankThread(msgspec.Struct, array_like=True, frozen=True):
    """A thread of a rank and its stack, leaf first."""

    tid: int
    name: str
    state: str
    """As in ps(1)."""
    frames: tuple[StackFrame, ...] = ()


class RankLook(msgspec.Struct, frozen=True):
    """A rank at one moment."""

    rank: int
    pid: int
    name: str
    state: str
    """Of its first thread, as in ps(1); '' it has ended."""
    is_frozen: bool = False
    """Its control group is frozen."""
    cpu: float = 0.0
    """CPUs that it used since the job stopped."""
    moved_bytes: float = 0.0
    """Bytes a second, read from and written to storage since then."""
    listens: bool = False
    """It accepts connections from others than the ranks."""
    threads: tuple[RankThread, ...] = ()
    """The first one first."""
    failed: str = ""
    """Why its stacks are missing."""


class RasRank(msgspec.Struct, frozen=True):
    """What NCCL RAS reports of one rank of a communicator."""

    rank: int
    pid: int = 0
    """0: not known."""
    counts: dict[str, int] = {}
    """Operations launched so far, by collective."""
    is_missing: bool = False
    """It did not answer in time."""
    is_dead: bool = False


class RasComm(msgspec.Struct, frozen=True):
    """One communicator."""

    hash: str
    size: int
    """Number of ranks; 0 not known."""
    ranks: tuple[RasRank, ...] = ()
    """Some or all of them; of number -1: only their counts are known."""


class RasReport(msgspec.Struct, frozen=True):
    """An answer of NCCL RAS."""

    version: str = ""
    communicators: tuple[RasComm, ...] = ()
    failed: str = ""
    """Why RAS, which listens, gave no answer; '' it gave one."""


class JobLook(msgspec.Struct, frozen=True):
    """All ranks at about one moment. Time: CLOCK_MONOTONIC, ns."""

    time_ns: int
    ranks: tuple[RankLook, ...]
    ras: RasReport | None = None
    """None: no process of the job listens for requests to RAS."""


class JobFacts(msgspec.Struct, frozen=True):
    """A job that made progress and has stopped."""

    name: str
    """Whose job it is, as far as that is known."""
    quiet_s: float
    """How long it has made no progress."""
    longest_pause_s: float
    """The longest of its earlier pauses, after which it went on."""
    looks: tuple[JobLook, ...]
    numbered_by: str = ""
    """The environment variable, or other source, that gave its ranks their numbers."""
    symptoms: tuple[str, ...] = ()
    """What showed that it stopped: 'rank N: what'."""
