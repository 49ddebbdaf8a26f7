# SPDX-License-Identifier: Apache-2.0
"""One JSON document for scripts, with every row of its sections; times in ns, sizes in bytes.

Sections of a kind are empty where that kind is not asked for; processes, usage, losses, notices and
metrics are of none. Waits of Sonde's own library are rows like others, with `of_sonde`; tables for
people leave them out. A section is read as it is written: an error in a later one leaves a part of
the document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, TypeVar

from sonde.export import strict_json
from sonde.model.answers import Wait
from sonde.model.process import Process
from sonde.model.profile import BASIC_KINDS, ProfileKind
from sonde.query import queries
from sonde.query.capture import CaptureInfo
from sonde.query.device_callers import device_callers
from sonde.query.device_runs import device_runs
from sonde.query.memory import growth, memory
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session

T = TypeVar("T")

FORMAT = 2
"""Raised when a field is renamed or removed; new fields leave it as it is."""


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write the document. Fields are those of `sonde.model.answers`."""
    rows = _Rows()
    has_memory = any(kind.is_memory for kind in kinds)
    document: dict[str, Any] = {
        "format": FORMAT,
        "capture": capture(session.info),
        "processes": map(rows.of, _each(queries.processes, session, where)),
        "functions": {
            kind: map(rows.of, _each(queries.top_functions, session, kind, where))
            for kind in kinds
        },
        "waits": (rows.of_wait(row) for row in _each(queries.waits, session, where)
                  if row.kind in kinds),
        "device_calls": map(rows.of, _each(queries.device_calls, session, where))
        if ProfileKind.GPU_CALLS in kinds
        else [],
        "usage": map(rows.of, _each(queries.usage, session, where)),
        "device_runs": (
            {**rows.of(row), "mean_ns": row.mean_ns} for row in _each(device_runs, session, where)
        )
        if ProfileKind.GPU_TIME in kinds
        else [],
        "device_callers": map(rows.of, _each(device_callers, session, where))
        if ProfileKind.GPU_TIME in kinds
        else [],
        "memory": map(rows.of, _each(memory, session, where)) if has_memory else [],
        "memory_growth": map(rows.of, _each(growth, session, where)) if has_memory else [],
        "losses": map(rows.of, _each(queries.losses, session)),
        "notices": map(rows.of, _each(queries.notices, session)),
        "metrics": map(rows.of, _each(queries.metrics, session)),
    }  # fmt: skip
    strict_json.write_indented(out.write, document)
    out.write(b"\n")


def _each(query: Callable[..., Iterable[T]], *about: Any) -> Iterator[T]:
    """The rows of a query, which runs when the first of them is written."""
    yield from query(*about)


def _fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


class _Rows:
    """Rows as JSON objects; the fields of a process are put in place of the process."""

    def __init__(self) -> None:
        self._process: tuple[Process | None, dict[str, Any]] = (None, {})

    def of(self, row: Any) -> dict[str, Any]:
        fields = _fields(row)
        process = fields.get("process")
        if isinstance(process, Process):
            del fields["process"]
            return {**self._of(process), **fields}
        return fields

    def of_wait(self, row: Wait) -> dict[str, Any]:
        fields = _fields(row)
        del fields["thread"]
        who = {"tid": row.thread.tid, "thread": row.thread.name}
        return {**self._of(row.thread.process), **who, **fields}

    def _of(self, process: Process) -> dict[str, Any]:
        known, fields = self._process
        if known is not process:
            # Not `asdict`: it makes deep copies and is ten times slower.
            fields = {**_fields(process), "owner": _fields(process.owner)}
            self._process = (process, fields)
        return fields


def capture(info: CaptureInfo) -> dict[str, Any]:
    """The document's section on the capture itself."""
    return {
        **asdict(info),
        "path": str(info.path),
        "duration_ns": info.duration_ns,
        "wall_start_ns": info.start_ns + info.wall_offset_ns,
    }
