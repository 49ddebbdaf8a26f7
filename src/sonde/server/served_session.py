# SPDX-License-Identifier: Apache-2.0
"""A session of the server, which has what takes a timeline apart computed in a child."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sonde.errors import CaptureError, CaptureTooLarge, SondeError, UsageError
from sonde.query.databases import Databases
from sonde.query.schema import TABLES
from sonde.query.selection import Selection
from sonde.query.stored_capture import NothingStoredError
from sonde.query.stored_session import (
    QueryTimedOutError,
    StoredSession,
    UnreadableStoreError,
)
from sonde.server import children

GOOD, BAD = b"+", b"-"
"""The first byte of a child's answer."""
HEAD_BYTES = 64 << 10
"""Of the first line of a child's answer, and of an error."""
GRACE_S = 0.5
"""A child has this long to report that its time is over."""
ERRORS: Mapping[str, type[SondeError]] = {
    one.__name__: one
    for one in (
        *(NothingStoredError, QueryTimedOutError, UnreadableStoreError, CaptureTooLarge),
        *(CaptureError, UsageError),
    )
}
"""Errors that a child reports by their name: the most specific first."""


class BeyondMemoryError(CaptureTooLarge):
    """What was asked takes more memory than a child may have."""


class ChildError(Exception):
    """A defect, which a child has met."""


class Computed(NamedTuple):
    """The answer of a child."""

    content: bytes
    media_type: str


class ServedSession(StoredSession):
    """As `StoredSession`, over the files of a tenant. Not thread-safe."""

    def __init__(
        self,
        allowed: Sequence[Path],
        files: Mapping[str, Sequence[Path]],
        memory_bytes: int,
        spill: Path,
        most_s: float,
        computing: children.Children,
        databases: Databases,
    ) -> None:
        """`most_s`: for what is computed in a child, outside of a `deadline`."""
        super().__init__(allowed, files, memory_bytes, spill, databases)
        self._folders = [str(one) for one in allowed], str(spill)
        self._memory_bytes, self._most_s = memory_bytes, most_s
        self._computing = computing
        self._explained: dict[tuple[tuple[str, ...], int, int], dict[str, Any] | CaptureError] = {}

    def explained(self, selection: Selection, most_bytes: int) -> dict[str, Any]:
        """As `timeline_answers.explained_with_steps`: of one node in a time a child is asked once,
        also where it found an error. Raises CaptureError as `computed`."""
        key = tuple(selection.nodes), selection.start_ns, selection.end_ns
        found = self._explained.get(key)
        if found is None:
            try:
                content = self.computed("explained", selection, "json", most_bytes).content
                found = json.loads(content)
            except CaptureError as error:
                found = error
            self._explained[key] = found
        if isinstance(found, CaptureError):
            raise found
        return found

    def computed(self, name: str, selection: Selection, form: str, most_bytes: int) -> Computed:
        """What a child answers to the question `name` about one node in a time (question_child.py).
        The caller holds a place of `Children`.

        Raises CaptureError: BeyondMemoryError, QueryTimedOutError where it takes more than it may.
        """
        seconds = min(self._most_s, self._ends_s - time.monotonic())
        self.check()
        memory_bytes = children.memory_bytes()
        asked = {
            "name": name,
            "nodes": list(selection.nodes),
            "start_ns": selection.start_ns,
            "end_ns": selection.end_ns,
            "form": form,
            "allowed": self._folders[0],
            "spill": self._folders[1],
            "files": {
                table: [str(path) for path in self.files.get(table, ())]
                for table in (*TABLES, "chunk")
            },
            "memory_bytes": min(self._memory_bytes, memory_bytes // 4),
            "ends_s": time.monotonic() + seconds,
        }
        try:
            content, was_late = self._computing.output_of(
                "sonde.server.question_child",
                [str(memory_bytes), str(2 + math.ceil(2 * seconds))],
                seconds + GRACE_S,
                most_bytes + HEAD_BYTES,
                given=json.dumps(asked).encode(),
            )
        except OSError as error:
            raise CaptureError(f"no child can be started: {error.strerror}", "try again") from error
        if content[:1] == GOOD:
            head, _, answer = content[1:].partition(b"\n")
            found = json.loads(head)
            self.leave_out(found["rows_left_out"])
            return Computed(answer, found["media_type"])
        if content[:1] == BAD:
            raise _reported(json.loads(content[1:]))
        if was_late:
            raise QueryTimedOutError(
                "the query took longer than it may", "choose a shorter time or fewer nodes"
            )
        raise beyond_memory(memory_bytes)


def beyond_memory(memory_bytes: int) -> BeyondMemoryError:
    """The error of a question that takes more than this."""
    return BeyondMemoryError(
        f"this time takes more than {memory_bytes >> 20} MiB of memory, or of CPU time than one"
        " question may use",
        "choose a shorter time",
    )


def _reported(found: Mapping[str, Any]) -> Exception:
    kind = found["kind"]
    if kind == "MemoryError":
        return beyond_memory(children.memory_bytes())
    if kind in ERRORS:
        return ERRORS[kind](found["error"], found["remedy"])
    return ChildError(found["error"])
