# SPDX-License-Identifier: Apache-2.0
"""Reads what `nsys export --type sqlite` writes: Nsight Systems' report as a SQLite database.

Kernels, copies, memory sets, graphs, calls of the CUDA API, NVTX ranges, waits in calls of the OS
runtime, and waits of streams for events. The database may come from anybody: only plain tables are
read, by name, and no code of the database (views, triggers, virtual tables) runs.
Schema: docs.nvidia.com/nsight-systems, "SQLite Export Schema Reference" (2021.5 to 2025.5).
"""

from __future__ import annotations

import bisect
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from sonde.errors import NotACapture
from sonde.limits import MAX_NAME_CHARS, Budget, shortened, text_bytes
from sonde.model.collectives import is_collective
from sonde.model.timeline import (
    CallKind,
    CopyDirection,
    DeviceKind,
    Events,
    HostKind,
    Memory,
    StateKind,
    StreamWaits,
    Timeline,
    WaitDetail,
    events,
)
from sonde.readers.calls import call_kind
from sonde.readers.charged_interner import ChargedInterner
from sonde.readers.event_columns import EventColumns
from sonde.readers.text import opened

_MAGIC: Final = b"SQLite format 3\x00"
_ROW_BYTES: Final = 256
"""Memory of a row, from reading to the verdict."""
_EVENT_BYTES: Final = 400
"""Memory of an event of CUDA's beside its first record."""
_COLUMN_BYTES: Final = 100
"""Memory of a column of a table beside its name."""
_AT_ONCE: Final = 4_096
"""Memory is accounted for once for this many rows."""
_LONGEST_VALUE_BYTES: Final = 256 << 10
"""Of one value in the database; SQLite refuses to read longer ones."""
_LONGEST_SQL_BYTES: Final = 16 << 10
"""Of the SQL of one table; the longest in real exports has a third of that."""
_STEPS_OF_SCHEMA: Final = 8_192
"""Steps that reading the schema may take: seven for each of its tables and indices. Real exports
have up to two hundred."""
_BYTES_OF_SQL: Final = 40
"""Memory of the schema for each byte of its SQL: an expression takes 72 for two characters."""
_STEPS_AT_ONCE: Final = 10_000
"""Steps of SQLite's virtual machine between two calls of `_Steps.on_progress`."""
_LEAST_STEPS: Final = 5_000_000
_STEPS_A_BYTE: Final = 16
"""Steps that reading may take: this many, and this many for each byte of the file. Real exports
need less than 2 a byte."""
_LEAST_S: Final = 20.0
_BYTES_A_S: Final = 1_000_000
"""CPU time that reading may take: this many seconds, and one for this many bytes that the file has
on its disk. Real exports are read at 10 MB a second and more."""
_LAST_NS: Final = 1 << 62
_LONGEST_NS: Final = 1 << 53
_MAX_DEVICE: Final = (1 << 16) - 1
_MAX_STREAM: Final = 1 << 40
_MAX_BYTES: Final = 1 << 50
_ID_BITS: Final = 24
"""Bits of a process's or thread's id in `globalTid`, which holds vendor and host, process,
thread."""
_SUFFIX: Final = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
"""Of names of CUDA's functions: 'cudaLaunchKernel_v7000'."""
_MOST_CHARS: Final = 128
"""Of a function's name that is looked at: some patterns take the square of it."""
_NVTX_RANGES: Final = (59, 60)
"""NvtxPushPopRange, NvtxStartEndRange."""
_STREAM_WAIT_EVENT: Final = 2
"""CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT."""
_DIRECTIONS: Final = {
    1: CopyDirection.H2D,
    2: CopyDirection.D2H,
    8: CopyDirection.D2D,
    9: CopyDirection.H2H,
    10: CopyDirection.P2P,
    11: CopyDirection.H2D,
    12: CopyDirection.D2H,
    13: CopyDirection.D2D,
}
"""By CUpti_ActivityMemcpyKind; 11 to 13 are unified memory's."""
_MEMORY: Final = {"pageable": Memory.PAGEABLE, "pinned": Memory.PINNED}
_WAITS: Final = (
    (re.compile(r"cond_(timed|clock)?wait"), "futex", WaitDetail.QUEUE),
    (re.compile(r"mutex|rwlock|sem_\w*wait|futex|pthread_join|barrier_wait"), "futex",
     WaitDetail.NONE),
    (re.compile(r"fsync|fdatasync|syncfs|msync"), "sync to disk", WaitDetail.NONE),
    (re.compile(r"poll|select|epoll"), "poll", WaitDetail.NONE),
    (re.compile(r"recv|send|accept|connect"), "socket", WaitDetail.NONE),
    (re.compile(r"sleep"), "sleep", WaitDetail.NONE),
    (re.compile(r"write"), "write", WaitDetail.NONE),
    (re.compile(r"read"), "read", WaitDetail.NONE),
    (re.compile(r"^open"), "file", WaitDetail.NONE),
)  # fmt: skip
"""Reasons of waits, as captures name them, by functions of the OS runtime."""


def looks_like(head: bytes) -> bool:
    """Whether a file that begins with `head` is a SQLite database."""
    return head.startswith(_MAGIC)


def read(path: Path) -> Timeline:
    """Reads an export. Raises CaptureError; NotACapture if it is not of Nsight Systems."""
    budget = Budget(str(path), 1)
    with opened(path) as file:
        if not hasattr(file.raw, "fileno"):
            raise NotACapture(f"{path} is a compressed database", "decompress it first")
        uri = f"file:/proc/self/fd/{file.fileno()}?mode=ro&immutable=1"
        try:
            database = sqlite3.connect(uri, uri=True)
            try:
                database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE_BYTES)
                # SQLite keeps what it makes of each table's SQL, and reads all of it at once.
                database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _LONGEST_SQL_BYTES)
                database.set_progress_handler(lambda: 1, _STEPS_OF_SCHEMA)
                database.execute("PRAGMA trusted_schema=OFF")
                database.execute("PRAGMA cell_size_check=ON")
                database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
                # Else a few pages that name one another are read for ever, and Ctrl-C waits.
                steps = _Steps(os.fstat(file.fileno()))
                database.set_progress_handler(steps.on_progress, _STEPS_AT_ONCE)
                return _Reader(database, budget).timeline()
            finally:
                database.close()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise NotACapture(
                f"{path} cannot be read as a database: {error}", "export it again: nsys export"
            ) from error


class _Steps:
    """Interrupts a query once all queries took as many steps of SQLite's virtual machine, or as
    much CPU time, as a file of that size may. Of time, too: a step may copy a long value, which
    many rows can share; of a sparse file what is on the disk counts."""

    def __init__(self, file: os.stat_result) -> None:
        size_bytes = min(file.st_size, 512 * file.st_blocks)
        self._left = _LEAST_STEPS + _STEPS_A_BYTE * size_bytes
        self._ends_s = time.thread_time() + _LEAST_S + size_bytes / _BYTES_A_S

    def on_progress(self) -> int:
        """1 interrupts the query, 0 lets it go on."""
        self._left -= _STEPS_AT_ONCE
        return int(self._left < 0 or time.thread_time() > self._ends_s)


class _Reader:
    """Reads the tables of one database."""

    def __init__(self, database: sqlite3.Connection, budget: Budget) -> None:
        self._database = database
        self._budget = budget
        self._columns = self._plain_tables()
        self._naming = ChargedInterner(budget)
        self._names: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self.lost = 0

    def _plain_tables(self) -> dict[str, frozenset[str]]:
        """Columns of each table that is neither virtual nor computed."""
        found = {}
        rows = self._database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        for name, sql in rows.fetchmany(_STEPS_OF_SCHEMA):
            text = str(sql or "").upper()
            self._budget.hold(_BYTES_OF_SQL * len(text))
            if re.fullmatch(r"\w+", str(name)) and not re.search(r"VIRTUAL|GENERATED|\bAS\b", text):
                columns = self._database.execute(f"PRAGMA table_info({name})").fetchall()
                mine = found[str(name)] = frozenset(str(column[1]) for column in columns)
                self._budget.hold(_ROW_BYTES + sum(_COLUMN_BYTES + text_bytes(it) for it in mine))
        return found

    def timeline(self) -> Timeline:
        """All tables. Raises NotACapture without any of a device."""
        self._read_names()
        device, calls, host = EventColumns(), EventColumns(), EventColumns()
        self._kernels(device)
        self._graphs(device)
        self._copies(device)
        self._sets(device)
        self._calls(calls)
        self._ranges(host)
        if any(name.startswith("rocpd_") for name in self._columns):
            raise NotACapture(
                f"{self._budget.name} is a database of rocprofv3, which is not read yet",
                "trace with torch.profiler, or record with sonde record --device-time",
            )
        if not (len(device.start) or len(calls.start) or len(host.start)):
            raise NotACapture(
                f"{self._budget.name} has no table of Nsight Systems with events of a device",
                "trace with nsys profile --trace=cuda,nvtx,osrt, then nsys export --type sqlite",
            )
        names, processors = self._devices()
        notes = [f"{self.lost:,} rows not understood"] if self.lost else []
        states, waits = self._states(), self._stream_waits()
        return Timeline(
            names=self._naming.names,
            tracks=self._naming.tracks,
            device=device.events(),
            calls=calls.events(),
            host=host.events(),
            states=states,
            stream_waits=waits,
            wall_offset_ns=self._wall_offset(),
            devices=names,
            multiprocessors=processors,
            sources=("nsys",),
            notes=notes,
        )

    def _rows(self, table: str, needed: str, optional: str = "") -> Iterator[dict[str, object]]:
        """Rows of a table with the columns that it has; none without all that are needed."""
        have = self._columns.get(table, frozenset())
        wanted = [*needed.split(), *(one for one in optional.split() if one in have)]
        if not have.issuperset(needed.split()):
            return
        quoted = ", ".join(f'"{one}"' for one in wanted)
        cursor = self._database.execute(f"SELECT {quoted} FROM {table}")
        # One by one: many rows may share the pages of one long text.
        for number, row in enumerate(cursor):
            if number % _AT_ONCE == 0:
                self._budget.hold(_ROW_BYTES * _AT_ONCE)
            yield dict(zip(wanted, row, strict=True))

    def _each(
        self,
        table: str,
        needed: str,
        optional: str,
        add: Callable[[dict[str, object], int, int], None],
    ) -> None:
        """Adds each row with a begin and an end; others are counted."""
        for row in self._rows(table, f"start end {needed}", optional):
            try:
                start, end = _number(row["start"], _LAST_NS), _number(row["end"], _LAST_NS)
                if end - start > _LONGEST_NS:
                    raise ValueError("time out of range")
                add(row, start, end)
            except (TypeError, ValueError, KeyError):
                self.lost += 1

    def _read_names(self) -> None:
        for row in self._rows("StringIds", "id value"):
            number, value = row["id"], row["value"]
            if isinstance(number, int) and isinstance(value, str):
                self._budget.hold(text_bytes(value))
                self._names[number] = _shown(value)

    def _name(self, number: object) -> str:
        return self._names.get(number, "") if isinstance(number, int) else ""

    def _thread(self, row: dict[str, object], column: str = "globalTid") -> int:
        number = _number(row[column])
        mask = (1 << _ID_BITS) - 1
        return self._naming.thread(number >> _ID_BITS & mask, number & mask)

    def _correlation(self, row: dict[str, object], column: str) -> int:
        """The id of a call, made different from those of other processes."""
        number = _number(row["correlationId"], (1 << 32) - 1)
        pid = _number(row.get(column, 0)) >> _ID_BITS
        process = self._pids.setdefault(pid, len(self._pids))
        return number + (process << 32) if number else 0

    def _stream(self, row: dict[str, object]) -> int:
        device = _number(row["deviceId"], _MAX_DEVICE)
        stream = _number(row["streamId"], _MAX_STREAM)
        pid = _number(row.get("globalPid", 0)) >> _ID_BITS & (1 << _ID_BITS) - 1
        return self._naming.stream(device, stream, pid)

    def _kernels(self, into: EventColumns) -> None:
        def add(row: dict[str, object], start: int, end: int) -> None:
            name = self._name(row.get("demangledName")) or self._name(row.get("shortName"))
            kind = DeviceKind.COLLECTIVE if is_collective(name) else DeviceKind.KERNEL
            blocks = 1
            for axis in ("gridX", "gridY", "gridZ"):
                blocks = min(blocks * _number(row.get(axis, 0)), (1 << 31) - 1)
            correlation, track = self._correlation(row, "globalPid"), self._stream(row)
            number = self._naming.name(name or "(kernel)")
            into.add(start, end, kind, number, track, correlation, 0, blocks)

        optional = "demangledName shortName gridX gridY gridZ globalPid"
        needed = "deviceId streamId correlationId"
        self._each("CUPTI_ACTIVITY_KIND_KERNEL", needed, optional, add)

    def _graphs(self, into: EventColumns) -> None:
        """Replays of graphs, where their nodes were not traced."""

        def add(row: dict[str, object], start: int, end: int) -> None:
            number, track = self._naming.name("(graph)"), self._stream(row)
            correlation = self._correlation(row, "globalPid")
            into.add(start, end, DeviceKind.KERNEL, number, track, correlation)

        needed = "deviceId streamId correlationId"
        self._each("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", needed, "globalPid", add)

    def _copies(self, into: EventColumns) -> None:
        kinds: dict[object, Memory] = {}
        for row in self._rows("ENUM_CUDA_MEM_KIND", "id label"):
            if isinstance(row["id"], int):
                kinds[row["id"]] = _MEMORY.get(str(row["label"]).lower(), Memory.UNKNOWN)

        def add(row: dict[str, object], start: int, end: int) -> None:
            direction = _DIRECTIONS.get(_number(row["copyKind"]), CopyDirection.UNKNOWN)
            end_of = {CopyDirection.H2D: "srcKind", CopyDirection.D2H: "dstKind"}.get(direction, "")
            memory = kinds.get(row.get(end_of), Memory.UNKNOWN)
            number, track = self._naming.name(f"Memcpy {direction.name}"), self._stream(row)
            correlation = self._correlation(row, "globalPid")
            size = _number(row["bytes"], _MAX_BYTES)
            into.add(
                start, end, DeviceKind.COPY, number, track, correlation, size, 0, direction, memory
            )

        needed = "deviceId streamId correlationId bytes copyKind"
        self._each("CUPTI_ACTIVITY_KIND_MEMCPY", needed, "srcKind dstKind globalPid", add)

    def _sets(self, into: EventColumns) -> None:
        def add(row: dict[str, object], start: int, end: int) -> None:
            number, track = self._naming.name("Memset"), self._stream(row)
            correlation = self._correlation(row, "globalPid")
            size = _number(row.get("bytes", 0), _MAX_BYTES)
            into.add(start, end, DeviceKind.SET, number, track, correlation, size)

        needed = "deviceId streamId correlationId"
        self._each("CUPTI_ACTIVITY_KIND_MEMSET", needed, "bytes globalPid", add)

    def _calls(self, into: EventColumns) -> None:
        def add(row: dict[str, object], start: int, end: int) -> None:
            name = _SUFFIX.sub("", self._name(row["nameId"])[:_MOST_CHARS])
            kind = call_kind(name)
            if kind == CallKind.OTHER:
                return
            correlation, track = self._correlation(row, "globalTid"), self._thread(row)
            into.add(start, end, kind, self._naming.name(name), track, correlation)

        needed = "nameId globalTid correlationId"
        self._each("CUPTI_ACTIVITY_KIND_RUNTIME", needed, "", add)

    def _ranges(self, into: EventColumns) -> None:
        def add(row: dict[str, object], start: int, end: int) -> None:
            if row["eventType"] not in _NVTX_RANGES:
                return
            text = row.get("text") or self._name(row.get("textId"))
            track = self._thread(row)
            into.add(start, end, HostKind.RANGE, self._naming.name(_shown(str(text))), track)

        have = self._rows("NVTX_EVENTS", "start end eventType globalTid", "text textId")
        for row in have:
            if row["end"] is None:  # a mark, or a range that was left open
                continue
            try:
                start, end = _number(row["start"], _LAST_NS), _number(row["end"], _LAST_NS)
                add(row, start, end)
            except (TypeError, ValueError):
                self.lost += 1

    def _states(self) -> Events:
        """Waits in functions of the OS runtime, of which nsys records those of some length."""
        columns: dict[str, list[int]] = {
            name: [] for name in ("start_ns", "end_ns", "kind", "name", "track", "wait_detail")
        }

        def add(row: dict[str, object], start: int, end: int) -> None:
            function = self._name(row["nameId"])[:_MOST_CHARS]
            found = next((one for one in _WAITS if one[0].search(function)), None)
            if found is None:
                return
            _, reason, detail = found
            values = (start, end, StateKind.BLOCKED, self._naming.name(reason),
                      self._thread(row), detail)  # fmt: skip
            for column, value in zip(columns.values(), values, strict=True):
                column.append(int(value))

        self._each("OSRT_API", "nameId globalTid", "", add)
        return events(**columns)

    def _stream_waits(self) -> StreamWaits:
        """Waits of streams for events, joined with the records of these events."""
        records: dict[tuple[object, object], list[tuple[int, int]]] = {}
        for row in self._rows(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
            "deviceId streamId correlationId eventId",
            "contextId globalPid",
        ):
            try:
                at = self._correlation(row, "globalPid"), self._stream(row)
                event = row.get("globalPid", 0), _number(row["eventId"])
            except (TypeError, ValueError):
                self.lost += 1
                continue
            if event not in records:
                self._budget.hold(_EVENT_BYTES)
            records.setdefault(event, []).append(at)
        found: list[tuple[int, int, int, int]] = []
        for mine in records.values():
            mine.sort()
        needed = "deviceId streamId correlationId eventId syncType"
        for row in self._rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", needed, "globalPid"):
            known = records.get((row.get("globalPid", 0), row["eventId"]), [])
            if row["syncType"] != _STREAM_WAIT_EVENT or not known:
                continue
            try:
                wait, waiting = self._correlation(row, "globalPid"), self._stream(row)
            except (TypeError, ValueError):
                self.lost += 1
                continue
            before = bisect.bisect_left(known, (wait,)) - 1
            if before >= 0:
                record, awaited = known[int(before)]
                found.append((waiting, awaited, wait, record))
        columns = np.array(found or np.zeros((0, 4)), np.int64).reshape(-1, 4)
        streams = columns[:, :2].astype(np.int32)
        return StreamWaits(streams[:, 0], streams[:, 1], columns[:, 2], columns[:, 3])

    def _devices(self) -> tuple[dict[int, str], dict[int, int]]:
        """(names, numbers of multiprocessors) of devices."""
        names, processors = {}, {}
        for row in self._rows("TARGET_INFO_GPU", "id name", "smCount"):
            number, count = row["id"], row.get("smCount")
            if isinstance(number, int) and 0 <= number <= _MAX_DEVICE:
                name = names[number] = _shown(str(row["name"]))
                self._budget.hold(text_bytes(name))
                if isinstance(count, int) and 0 < count <= _MAX_DEVICE:
                    processors[number] = count
        return names, processors

    def _wall_offset(self) -> int:
        for row in self._rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
            value = row["utcEpochNs"]
            if isinstance(value, int) and 0 <= value <= _LAST_NS:
                return value
        return 0


def _shown(text: str) -> str:
    """A name, truncated if too long; lone surrogates are replaced."""
    if len(text) > MAX_NAME_CHARS:
        text = shortened(text)
    return text if text.isascii() else text.encode(errors="replace").decode()


def _number(value: object, most: int = (1 << 62) - 1) -> int:
    """A non-negative integer. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("a number")
    return value
