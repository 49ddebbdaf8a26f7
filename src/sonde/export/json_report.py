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
from functools import partial
from typing import Any, BinaryIO, TypeVar

from sonde.export import json_rows, strict_json
from sonde.export.strict_json import Lazy
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
    has_memory = any(kind.is_memory for kind in kinds)
    document: dict[str, Any] = {
        "format": FORMAT,
        "capture": capture(session.info),
        "hide": session.hide.value if session.hide else "",
        "processes": Lazy(lambda: json_rows.processes(session, where)),
        "functions": {
            kind: Lazy(partial(json_rows.functions, session, kind, where)) for kind in kinds
        },
        "waits": Lazy(lambda: json_rows.waits(session, kinds, where)),
        "device_calls": map(_of_process, _each(queries.device_calls, session, where))
        if ProfileKind.GPU_CALLS in kinds
        else [],
        "usage": Lazy(lambda: json_rows.usage(session, where)),
        "device_runs": (
            {**_of_process(row), "mean_ns": row.mean_ns}
            for row in _each(device_runs, session, where)
        )
        if ProfileKind.GPU_TIME in kinds
        else [],
        "device_callers": map(_of_process, _each(device_callers, session, where))
        if ProfileKind.GPU_TIME in kinds
        else [],
        "memory": map(_of_process, _each(memory, session, where)) if has_memory else [],
        "memory_growth": map(_of_process, _each(growth, session, where)) if has_memory else [],
        "losses": map(_fields, _each(queries.losses, session)),
        "notices": map(_fields, _each(queries.notices, session)),
        "metrics": map(_fields, _each(queries.metrics, session)),
    }
    strict_json.write_indented(out.write, document)
    out.write(b"\n")


def _each(query: Callable[..., Iterable[T]], *about: Any) -> Iterator[T]:
    """The rows of a query, which runs when the first of them is written."""
    yield from query(*about)


def _fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def _of_process(row: Any) -> dict[str, Any]:
    """A row as a JSON object; the fields of its process are put in place of the process."""
    fields = _fields(row)
    process = fields.pop("process")
    return {**_process(process), "owner": _fields(process.owner), **fields}


def _process(process: Process) -> dict[str, Any]:
    # Not `asdict`: it makes deep copies and is ten times slower.
    return {
        "pid": process.pid,
        "start_ns": process.start_ns,
        "ppid": process.ppid,
        "comm": process.comm,
        "exe": process.exe,
        "command": process.command,
        "owner": process.owner,
    }


def capture(info: CaptureInfo) -> dict[str, Any]:
    """The document's section on the capture itself."""
    return {
        **asdict(info),
        "path": str(info.path),
        "duration_ns": info.duration_ns,
        "wall_start_ns": info.start_ns + info.wall_offset_ns,
    }
