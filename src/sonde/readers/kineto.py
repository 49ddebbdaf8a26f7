# SPDX-License-Identifier: Apache-2.0
"""Reads traces of torch.profiler (Kineto): Chrome JSON, plain or compressed.

The file is read piece by piece, so memory holds columns, not the text. Events without a time
(Kineto writes 0 for lost records) are counted and skipped; a truncated file is read up to its end.
Format: what `torch.profiler.profile.export_chrome_trace` of PyTorch 1.13 to 2.11 writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from sonde.errors import CaptureTooLarge, NotACapture
from sonde.limits import MAX_NAME_CHARS, Budget, shortened, text_bytes
from sonde.model.collectives import is_collective
from sonde.model.interner import Interner
from sonde.model.timeline import (
    CallKind,
    CopyDirection,
    DeviceKind,
    HostKind,
    Memory,
    StreamWaits,
    Timeline,
    TrackKind,
)
from sonde.readers import kineto_head
from sonde.readers.calls import call_kind
from sonde.readers.event_columns import EventColumns
from sonde.readers.json_list import END, values_of_list
from sonde.readers.kineto_head import Head, is_small
from sonde.readers.text import opened_text

_PIECE = 1 << 20
"""Characters that are read at once."""
_HEAD_LIMIT = 16 << 20
"""The list of events begins within this many characters, or the file is no trace."""

_MAX_EVENT = 1 << 20
"""Largest length of one event; events with shapes and stacks have about 100 kB."""
_ROW_BYTES = 200
"""Memory of a name, from reading to the verdict."""
_TRACK_BYTES = 700
"""The same of a track."""
_COLUMN_BYTES = 256
"""The same of an event."""
_EVENTS_AT_ONCE = 4_096
"""Memory is accounted for, and progress reported, once for this many events."""
_PIECES_BYTES = 48 << 20
"""Memory of the text while it is read: pieces of it, and one decoded event."""
_MAX_TRACKS = 1 << 20
_MAX_LOST = 1_000_000
"""Entries that are no events; a file with more is refused."""
_LAST_DEVICE = (1 << 16) - 1
"""Largest number of a device."""
_MAX_CALLS = 100_000
"""Names of calls whose kinds are kept; kinds of further ones are found each time."""
_MAX_CORRELATION = (1 << 48) - 1
"""Largest correlation id; those of CUPTI have 32 bits."""
_MAX_BYTES = 1 << 50
"""Of one copy or fill: more than any device has."""
_LAST_NS = 1 << 62
"""Latest start of an event: with _LONGEST_NS it is a signed number of 64 bits."""
_LONGEST_NS = 1 << 53
"""Longest event: 104 days."""

_RECORD = "wait_on_cuda_event_record_corr_id"
"""The key with the correlation id of the call that recorded the event that a stream waits for."""
_OPERATOR = re.compile(r"::|Backward\d*$|^\w+$")
"""Names of operators, and of nodes of autograd."""
_COPY = re.compile(r"Memcpy (\w+?)(?: \((\w+) -> (\w+)\))?$")
_DIRECTIONS = {
    "HtoD": CopyDirection.H2D,
    "DtoH": CopyDirection.D2H,
    "DtoD": CopyDirection.D2D,
    "HtoH": CopyDirection.H2H,
    "PtoP": CopyDirection.P2P,
}
_MEMORY = {"Pageable": Memory.PAGEABLE, "Pinned": Memory.PINNED}

Progress = Callable[[int], None]
"""Called with the number of events read so far."""


def looks_like(head: str) -> bool:
    """Whether a file that begins with `head` may be such a trace."""
    start = head.lstrip()
    return start.startswith("{") or (start.startswith("[") and '"ph"' in head)


class _Reader:
    """Sorts the events of a trace into tables."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.interner = Interner()
        self.device, self.calls, self.host = EventColumns(), EventColumns(), EventColumns()
        self.stream_waits: list[tuple[int, int, int, int]] = []
        """Rows of `sonde.model.timeline.StreamWaits`."""
        self.lost: Counter[str] = Counter()
        self.names_cut = 0
        self._devices: set[int] = set()
        self.threads: dict[tuple[int, int], str] = {}
        self.processes: dict[int, str] = {}
        self._call_kinds: dict[str, int] = {}
        # By category (`cat`): the method that adds an event of it to its table.
        self._sorters: dict[str, Callable[[dict[str, Any], int, int], None]] = {
            "kernel": self._kernel,
            "gpu_memcpy": self._copy,
            "gpu_memset": self._set,
            "cuda_runtime": self._call,
            "cuda_driver": self._call,
            "hip_runtime": self._call,
            "cpu_op": self._operator,
            "python_function": self._python,
            "user_annotation": self._range,
            "cuda_sync": self._stream_wait,
        }
        # Categories of the profiler's first versions.
        for old, new in (("Kernel", "kernel"), ("Memcpy", "gpu_memcpy"), ("Memset", "gpu_memset"),
                         ("Runtime", "cuda_runtime")):  # fmt: skip
            self._sorters[old] = self._sorters[new]
        self._sorters["Operator"] = self._operator_or_range

    def add(self, event: dict[str, Any]) -> None:
        """Adds one event; kinds without a table are ignored. Raises for a malformed event."""
        phase = event.get("ph")
        if phase == "X":
            sort = self._sorters.get(event.get("cat", ""))
            if sort is None:
                return
            start_ns = _nanoseconds(event["ts"])
            length_ns = max(0, _nanoseconds(event.get("dur", 0)))
            if start_ns <= 0:
                self.lost["without a time"] += 1
                return
            if start_ns > _LAST_NS or length_ns > _LONGEST_NS:
                raise ValueError("time out of range")
            sort(event, start_ns, start_ns + length_ns)
        elif phase == "M":
            self._meta(event)

    def _meta(self, event: dict[str, Any]) -> None:
        if event.get("name") not in ("thread_name", "process_name"):
            return
        name = self._text(_args(event).get("name", ""))
        pid, tid = event.get("pid"), event.get("tid")
        if type(pid) is not int:
            return  # Kineto's own tracks
        if event["name"] == "process_name":
            self.processes[pid] = name
        elif type(tid) is int:
            self.threads[pid, tid] = re.sub(r"^thread \d+ \((.*)\)$", r"\1", name)
        self.budget.hold(_ROW_BYTES + text_bytes(name))

    def _name(self, text: str) -> int:
        before = len(self.interner.names)
        number = self.interner.name(text)
        if len(self.interner.names) > before:
            self.budget.hold(_ROW_BYTES + text_bytes(text))
        return number

    def _text(self, value: object) -> str:
        """A name, truncated if too long; lone surrogates, which JSON may escape, are replaced."""
        if not isinstance(value, str):
            raise TypeError("a name")
        if len(value) > MAX_NAME_CHARS:
            self.names_cut += 1
            value = shortened(value)
        return value if value.isascii() else value.encode(errors="replace").decode()

    def _thread(self, event: dict[str, Any]) -> int:
        before = len(self.interner.tracks)
        track = self.interner.thread(_number(event["pid"]), _number(event["tid"]))
        return self._track(track, before)

    def _stream(self, args: dict[str, Any], event: dict[str, Any]) -> int:
        device = _number(args.get("device", event["pid"]), _LAST_DEVICE)
        self._devices.add(device)
        if len(self._devices) > kineto_head.MAX_DEVICES:
            raise CaptureTooLarge(
                f"{self.budget.name} has more than {kineto_head.MAX_DEVICES} devices",
                "trace fewer of them",
            )
        before = len(self.interner.tracks)
        track = self.interner.stream(device, _number(args.get("stream", event["tid"])))
        return self._track(track, before)

    def _track(self, track: int, before: int) -> int:
        if track >= before:
            self.budget.hold(_TRACK_BYTES)
        if track >= _MAX_TRACKS:
            raise CaptureTooLarge(
                f"{self.budget.name} has more than {_MAX_TRACKS:,} threads and streams",
                "trace for a shorter time",
            )
        return track

    def _kernel(self, event: dict[str, Any], start: int, end: int) -> None:
        args = _args(event)
        name = self._text(event["name"])
        kind = DeviceKind.COLLECTIVE if is_collective(name) else DeviceKind.KERNEL
        blocks = 1
        for axis in args.get("grid") or (0,):
            blocks = min(blocks * _number(axis), (1 << 31) - 1)
        correlation, track = _correlation(args), self._stream(args, event)
        self.device.add(start, end, kind, self._name(name), track, correlation, 0, blocks)

    def _copy(self, event: dict[str, Any], start: int, end: int) -> None:
        args = _args(event)
        name = self._text(event["name"])
        match = _COPY.match(name)
        direction = (
            _DIRECTIONS.get(match[1], CopyDirection.UNKNOWN) if match else CopyDirection.UNKNOWN
        )
        memory = Memory.UNKNOWN
        if match and direction in (CopyDirection.H2D, CopyDirection.D2H):
            memory = _MEMORY.get(
                match[2 if direction == CopyDirection.H2D else 3] or "", Memory.UNKNOWN
            )
        correlation, size = _correlation(args), _size(args)
        track = self._stream(args, event)
        self.device.add(
            start,
            end,
            DeviceKind.COPY,
            self._name(name),
            track,
            correlation,
            size,
            0,
            direction,
            memory,
        )

    def _set(self, event: dict[str, Any], start: int, end: int) -> None:
        args = _args(event)
        name, correlation, size = self._text(event["name"]), _correlation(args), _size(args)
        track = self._stream(args, event)
        self.device.add(start, end, DeviceKind.SET, self._name(name), track, correlation, size)

    def _call(self, event: dict[str, Any], start: int, end: int) -> None:
        name = self._text(event["name"])
        kind = self._call_kinds.get(name)
        if kind is None:
            kind = call_kind(name)
            if len(self._call_kinds) < _MAX_CALLS:
                self.budget.hold(_ROW_BYTES + text_bytes(name))
                self._call_kinds[name] = kind
        if kind == CallKind.OTHER:
            return
        correlation, track = _correlation(_args(event)), self._thread(event)
        self.calls.add(start, end, kind, self._name(name), track, correlation)

    def _operator(self, event: dict[str, Any], start: int, end: int) -> None:
        self._on_host(HostKind.OPERATOR, self._text(event["name"]), event, start, end)

    def _operator_or_range(self, event: dict[str, Any], start: int, end: int) -> None:
        """The first versions wrote named ranges as operators: 'Optimizer.step#SGD.step'."""
        name = self._text(event["name"])
        kind = HostKind.OPERATOR if _OPERATOR.search(name) else HostKind.RANGE
        self._on_host(kind, name, event, start, end)

    def _stream_wait(self, event: dict[str, Any], start: int, end: int) -> None:
        """A wait of a stream for an event of another stream, taken to be of the same device; waits
        of the host are calls."""
        args = _args(event)
        if args.get("cuda_sync_kind") != "Stream Wait Event":
            return
        other, record = args.get("wait_on_stream", -1), args.get(_RECORD, -1)
        if not (is_small(other) and type(record) is int and record > 0):
            return
        self.budget.hold(_ROW_BYTES)
        waiting = self._stream(args, event)
        awaited = self._stream({**args, "stream": other}, event)
        row = (waiting, awaited, _correlation(args), min(record, _MAX_CORRELATION))
        self.stream_waits.append(row)

    def _python(self, event: dict[str, Any], start: int, end: int) -> None:
        self._on_host(HostKind.PYTHON, without_path(self._text(event["name"])), event, start, end)

    def _range(self, event: dict[str, Any], start: int, end: int) -> None:
        self._on_host(HostKind.RANGE, self._text(event["name"]), event, start, end)

    def _on_host(
        self, kind: HostKind, name: str, event: dict[str, Any], start: int, end: int
    ) -> None:
        track = self._thread(event)
        self.host.add(start, end, kind, self._name(name), track)


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args") or {}
    if not isinstance(args, dict):
        raise TypeError("args")
    return args


def _number(value: object, most: int = (1 << 62) - 1) -> int:
    """A non-negative integer, also as text or as a float without a fraction. Raises ValueError."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("a number")
    return value


def _correlation(args: dict[str, Any]) -> int:
    """The correlation id, 0 none. Raises for an invalid one, which would join unrelated events."""
    value = args.get("correlation")
    return 0 if value is None else _number(value, _MAX_CORRELATION)


def _size(args: dict[str, Any]) -> int:
    value = args.get("bytes")
    return 0 if value is None else _number(value, _MAX_BYTES)


def _nanoseconds(value: object) -> int:
    """Nanoseconds from microseconds, a number or text. Raises if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("a time")
    return round(float(value) * 1e3)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def without_path(name: str) -> str:
    """A Python frame without its folder and without addresses of objects.

    '/home/me/src/train.py(88): step' → 'train.py(88): step'; installed packages keep their
    path within the package folder ('torch/nn/functional.py(3): relu').
    """
    name = _ADDRESS.sub("", name)
    file, bracket, rest = name.partition("(")
    if not file.startswith("/") or not bracket:
        return name
    parts = file.split("/")
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            return "/".join(parts[parts.index(root) + 1 :]) + bracket + rest
    return parts[-1] + bracket + rest


def read(path: Path, on_progress: Progress | None = None) -> Timeline:
    """Reads a trace. Raises CaptureError; NotACapture if it is not of torch.profiler."""
    budget = Budget(str(path), 1)
    budget.hold(min(_PIECES_BYTES, budget.limit_bytes // 4))
    reader = _Reader(budget)
    head = Head()
    tail: list[str] = []
    complete = False
    count = 0
    with opened_text(path) as text:
        for item in _events(text, budget, head, tail):
            if item is END:
                complete = True
                break
            try:
                if not isinstance(item, dict):
                    raise TypeError("no event")
                reader.add(item)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                reader.lost["not understood"] += 1
                if reader.lost["not understood"] > _MAX_LOST:
                    raise NotACapture(
                        f"{path} has more than {_MAX_LOST:,} entries that are no events",
                        "give what torch.profiler wrote",
                    ) from None
            count += 1
            if not count % _EVENTS_AT_ONCE:
                budget.hold(_EVENTS_AT_ONCE * _COLUMN_BYTES)
                if on_progress:
                    on_progress(count)
        if complete:
            tail.append(text.read(_PIECE))
    device = reader.device.events()
    host = reader.host.events()
    calls = reader.calls.events()
    if not (len(device) or len(host) or len(calls)):
        lost = reader.lost["without a time"]
        raise NotACapture(
            f"{path} holds no event that torch.profiler writes"
            + (f" with a time ({lost:,} without one)" if lost else ""),
            "export it with torch.profiler's export_chrome_trace, before the next session begins",
        )
    interner = reader.interner
    for number, track in enumerate(interner.tracks):
        if track.kind == TrackKind.THREAD:
            name = reader.threads.get((track.pid, track.number), "")
            process = reader.processes.get(track.pid, "")
            interner.tracks[number] = type(track)(
                TrackKind.THREAD, track.pid, track.number, name or process, -1, process
            )
    devices = head.devices
    notes = [f"{amount:,} events {what}" for what, amount in reader.lost.items()]
    if reader.names_cut:
        notes.append(
            f"{reader.names_cut:,} names were longer than {MAX_NAME_CHARS:,} characters and "
            "are truncated"
        )
    if not complete:
        notes.append("the file is truncated; events up to there are used")
    return Timeline(
        names=interner.names,
        tracks=interner.tracks,
        device=device,
        calls=calls,
        host=host,
        stream_waits=_stream_waits(reader.stream_waits),
        wall_offset_ns=_wall_offset(head, "".join(tail)),
        devices={number: str(one.get("name", "")) for number, one in devices.items()},
        device_ids={number: ids for number, one in devices.items() if (ids := _ids(one))},
        multiprocessors={
            number: one["numSms"] for number, one in devices.items() if is_small(one.get("numSms"))
        },
        sources=("torch.profiler",),
        notes=notes,
    )


def _stream_waits(rows: list[tuple[int, int, int, int]]) -> StreamWaits:
    columns = np.array(rows or np.zeros((0, 4)), np.int64).reshape(-1, 4)
    streams = columns[:, :2].astype(np.int32)
    return StreamWaits(streams[:, 0], streams[:, 1], columns[:, 2], columns[:, 3])


def _ids(device: dict[str, Any]) -> list[str]:
    """UUID and PCI address of a device, if the trace has them (older versions do not)."""
    found = [str(device[key])[:256] for key in ("uuid", "UUID") if device.get(key)]
    domain, bus = device.get("pciDomainID", 0), device.get("pciBusID")
    slot = device.get("pciDeviceID", 0)
    if is_small(domain) and is_small(bus) and is_small(slot):
        found.append(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
    return found


def _wall_offset(head: Head, tail: str) -> int:
    value = head.base_time_ns
    if value is None and (match := re.search(r'"baseTimeNanoseconds"\s*:\s*([0-9]{1,19})\b', tail)):
        value = match[1]
    try:
        return _number(value or 0)
    except ValueError:
        return 0


def _events(text: TextIO, budget: Budget, head: Head, tail: list[str]) -> Iterator[object]:
    """Yields every value in the list of events, and END at the end of a complete list.

    What is used of the text before the list goes into `head`, text behind it into `tail`. A value
    that is no JSON, too deep or too large is yielded as `json_list.NOT_READ`.
    """
    piece = text.read(_PIECE).removeprefix("\ufeff")
    at = -1
    if piece.lstrip().startswith("["):
        at = piece.index("[") + 1
    elif piece.lstrip().startswith("{"):
        while not (match := re.search(r'"traceEvents"\s*:\s*\[', piece)):
            more = text.read(_PIECE) if len(piece) < _HEAD_LIMIT else ""
            if not more:
                break
            budget.hold(kineto_head.CHAR_BYTES * len(more))
            piece += more
        if match:
            at = match.end()
            before = piece[: match.start()].rstrip().rstrip(",") + "}"
            head.take(kineto_head.read(before, budget))
            del before
    if at < 0:
        raise NotACapture(
            f"{budget.name} is no trace in Chrome's JSON", "give what torch.profiler wrote"
        )
    yield from values_of_list(text.read, piece, at, tail, _MAX_EVENT)
