# SPDX-License-Identifier: Apache-2.0
"""Traces of torch.profiler (Kineto): Chrome JSON, plain or compressed.

Read piece by piece, so that memory holds columns and not the text. Events without a time (Kineto
writes 0 for records it lost) are left out and counted; a file that ends early is read up to there.
Format: what `torch.profiler.profile.export_chrome_trace` of PyTorch 1.13 to 2.11 writes.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from sonde.errors import NotACapture
from sonde.model.collectives import is_collective
from sonde.model.timeline import (
    CallKind,
    DeviceKind,
    Events,
    HostKind,
    Memory,
    Naming,
    Timeline,
    Way,
    events,
)
from sonde.readers.calls import call_kind
from sonde.readers.text import opened_text

_PIECE = 4 << 20
_HEAD_LIMIT = 16 << 20
"""The list of events begins within this, or the file is something else."""

_SPACE = re.compile(r"[\s,]*")
_COPY = re.compile(r"Memcpy (\w+?)(?: \((\w+) -> (\w+)\))?$")
_WAYS = {"HtoD": Way.H2D, "DtoH": Way.D2H, "DtoD": Way.D2D, "HtoH": Way.H2H, "PtoP": Way.P2P}
_MEMORY = {"Pageable": Memory.PAGEABLE, "Pinned": Memory.PINNED}

Progress = Callable[[int], None]
"""Called with the events read so far."""


def looks_like(head: str) -> bool:
    """Whether a file that begins so may be one of these."""
    start = head.lstrip()
    return start.startswith("{") or (start.startswith("[") and '"ph"' in head)


@dataclass(slots=True)
class _Columns:
    """One table while it grows."""

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("B"))
    name: array[int] = field(default_factory=lambda: array("i"))
    lane: array[int] = field(default_factory=lambda: array("i"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("q"))
    blocks: array[int] = field(default_factory=lambda: array("i"))
    way: array[int] = field(default_factory=lambda: array("B"))
    detail: array[int] = field(default_factory=lambda: array("B"))

    def add(
        self,
        start: int,
        end: int,
        kind: int,
        name: int,
        lane: int,
        correlation: int = 0,
        size: int = 0,
        blocks: int = 0,
        way: int = 0,
        detail: int = 0,
    ) -> None:
        self.start.append(start)
        self.end.append(end)
        self.kind.append(kind)
        self.name.append(name)
        self.lane.append(lane)
        self.correlation.append(correlation)
        self.size.append(size)
        self.blocks.append(blocks)
        self.way.append(way)
        self.detail.append(detail)

    def events(self) -> Events:
        return events(
            start_ns=np.frombuffer(self.start, np.int64),
            end_ns=np.frombuffer(self.end, np.int64),
            kind=np.frombuffer(self.kind, np.uint8),
            name=np.frombuffer(self.name, np.int32),
            lane=np.frombuffer(self.lane, np.int32),
            correlation=np.frombuffer(self.correlation, np.int64),
            bytes=np.frombuffer(self.size, np.int64),
            blocks=np.frombuffer(self.blocks, np.int32),
            way=np.frombuffer(self.way, np.uint8),
            detail=np.frombuffer(self.detail, np.uint8),
        )


class _Reader:
    """Sorts events into tables."""

    def __init__(self) -> None:
        self.naming = Naming()
        self.device, self.calls, self.host = _Columns(), _Columns(), _Columns()
        self.lost: Counter[str] = Counter()
        self.threads: dict[tuple[int, int], str] = {}
        self.processes: dict[int, str] = {}
        self._call_kinds: dict[str, int] = {}
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
        }
        # What the profiler's first versions called them.
        for old, new in (("Kernel", "kernel"), ("Memcpy", "gpu_memcpy"), ("Memset", "gpu_memset"),
                         ("Runtime", "cuda_runtime"), ("Operator", "cpu_op")):  # fmt: skip
            self._sorters[old] = self._sorters[new]

    def add(self, event: dict[str, Any]) -> None:
        """Take one event; those of no use here are passed over."""
        phase = event.get("ph")
        if phase == "X":
            sort = self._sorters.get(event.get("cat", ""))
            if sort is None:
                return
            start_us, length_us = event["ts"], event.get("dur", 0)
            start_ns = round(float(start_us) * 1e3)
            if start_ns <= 0:
                self.lost["without a time"] += 1
                return
            sort(event, start_ns, start_ns + max(0, round(float(length_us) * 1e3)))
        elif phase == "M":
            self._meta(event)

    def _meta(self, event: dict[str, Any]) -> None:
        name = str(event.get("args", {}).get("name", ""))
        pid, tid = event.get("pid"), event.get("tid")
        if event.get("name") == "thread_name" and isinstance(pid, int) and isinstance(tid, int):
            self.threads[pid, tid] = re.sub(r"^thread \d+ \((.*)\)$", r"\1", name)
        elif event.get("name") == "process_name" and isinstance(pid, int):
            self.processes[pid] = name

    def _thread(self, event: dict[str, Any]) -> int:
        return self.naming.thread(int(event["pid"]), int(event["tid"]))

    def _stream(self, args: dict[str, Any], event: dict[str, Any]) -> int:
        device = args.get("device", event["pid"])
        return self.naming.stream(int(device), int(args.get("stream", event["tid"])))

    def _kernel(self, event: dict[str, Any], start: int, end: int) -> None:
        args = event.get("args", {})
        name = event["name"]
        kind = DeviceKind.COLLECTIVE if is_collective(name) else DeviceKind.KERNEL
        blocks = 1
        for axis in args.get("grid", (0,)):
            blocks *= int(axis)
        self.device.add(
            start, end, kind, self.naming.name(name), self._stream(args, event),
            int(args.get("correlation", 0)), 0, min(blocks, (1 << 31) - 1),
        )  # fmt: skip

    def _copy(self, event: dict[str, Any], start: int, end: int) -> None:
        args = event.get("args", {})
        told = _COPY.match(event["name"])
        way = _WAYS.get(told[1], Way.UNKNOWN) if told else Way.UNKNOWN
        memory = Memory.UNKNOWN
        if told and way in (Way.H2D, Way.D2H):
            memory = _MEMORY.get(told[2 if way == Way.H2D else 3] or "", Memory.UNKNOWN)
        self.device.add(
            start, end, DeviceKind.COPY, self.naming.name(event["name"]),
            self._stream(args, event), int(args.get("correlation", 0)),
            int(args.get("bytes", 0)), 0, way, memory,
        )  # fmt: skip

    def _set(self, event: dict[str, Any], start: int, end: int) -> None:
        args = event.get("args", {})
        self.device.add(
            start, end, DeviceKind.SET, self.naming.name(event["name"]),
            self._stream(args, event), int(args.get("correlation", 0)), int(args.get("bytes", 0)),
        )  # fmt: skip

    def _call(self, event: dict[str, Any], start: int, end: int) -> None:
        name = event["name"]
        kind = self._call_kinds.get(name)
        if kind is None:
            kind = self._call_kinds[name] = call_kind(name)
        if kind == CallKind.OTHER:
            return
        self.calls.add(
            start, end, kind, self.naming.name(name), self._thread(event),
            int(event.get("args", {}).get("correlation", 0)),
        )  # fmt: skip

    def _operator(self, event: dict[str, Any], start: int, end: int) -> None:
        name = self.naming.name(event["name"])
        self.host.add(start, end, HostKind.OPERATOR, name, self._thread(event))

    def _python(self, event: dict[str, Any], start: int, end: int) -> None:
        name = self.naming.name(without_path(event["name"]))
        self.host.add(start, end, HostKind.PYTHON, name, self._thread(event))

    def _range(self, event: dict[str, Any], start: int, end: int) -> None:
        name = self.naming.name(event["name"])
        self.host.add(start, end, HostKind.RANGE, name, self._thread(event))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def without_path(name: str) -> str:
    """A Python frame without what tells where it lies or where an object is.

    '/home/me/src/train.py(88): step' → 'train.py(88): step'; installed packages keep their
    dotted place ('torch/nn/functional.py(3): relu').
    """
    name = _ADDRESS.sub("", name)
    file, bracket, rest = name.partition("(")
    if not file.startswith("/") or not bracket:
        return name
    parts = file.split("/")
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            return "/".join(parts[parts.index(root) + 1 :]) + bracket + rest
    if re.fullmatch(r"python3\.\d+t?", parts[-2] if len(parts) > 1 else ""):
        return parts[-1] + bracket + rest
    return parts[-1] + bracket + rest


def read(path: Path, on_progress: Progress | None = None) -> Timeline:
    """Read a trace. Raises CaptureError; NotACapture if it is none of torch.profiler's."""
    reader = _Reader()
    head: dict[str, Any] = {}
    tail: list[str] = []
    complete = False
    count = 0
    with opened_text(path) as text:
        for item in _events(text, str(path), head, tail):
            if item is None:
                complete = True
                break
            try:
                reader.add(item)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                reader.lost["not understood"] += 1
            count += 1
            if on_progress and not count % 100_000:
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
    naming = reader.naming
    for number, lane in enumerate(naming.lanes):
        if lane.kind == "thread":
            name = reader.threads.get((lane.pid, lane.number), "")
            process = reader.processes.get(lane.pid, "")
            naming.lanes[number] = type(lane)(
                "thread", lane.pid, lane.number, name or process, -1, process
            )
    listed = head.get("deviceProperties", [])
    devices = {
        one["id"]: one
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict) and isinstance(one.get("id"), int)
    }
    notes = [f"{amount:,} events {what}" for what, amount in reader.lost.items()]
    if not complete:
        notes.append("the file ends early; what came before is used")
    return Timeline(
        names=naming.names,
        lanes=naming.lanes,
        device=device,
        calls=calls,
        host=host,
        wall_offset_ns=_wall_offset(head, "".join(tail)),
        devices={number: str(one.get("name", "")) for number, one in devices.items()},
        device_ids={number: ids for number, one in devices.items() if (ids := _ids(one))},
        multiprocessors={
            number: one["numSms"]
            for number, one in devices.items()
            if isinstance(one.get("numSms"), int)
        },
        sources=("torch.profiler",),
        notes=notes,
    )


def _ids(device: dict[str, Any]) -> list[str]:
    """UUID and PCI address of a device, where the profiler wrote them (older ones do not)."""
    found = [str(device[key]) for key in ("uuid", "UUID") if device.get(key)]
    bus, slot = device.get("pciBusID"), device.get("pciDeviceID", 0)
    if isinstance(bus, int) and isinstance(slot, int):
        found.append(f"{int(device.get('pciDomainID', 0)):04x}:{bus:02x}:{slot:02x}.0")
    return found


def _wall_offset(head: dict[str, Any], tail: str) -> int:
    value = head.get("baseTimeNanoseconds")
    if value is None and (told := re.search(r'"baseTimeNanoseconds"\s*:\s*(\d+)', tail)):
        value = told[1]
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0


def _events(
    text: TextIO, path: str, head: dict[str, Any], tail: list[str]
) -> Iterator[dict[str, Any] | None]:
    """Every event of the file; None at the end of a list that was closed.

    What stands before the list goes into `head`, what was read behind it into `tail`.
    """
    piece = text.read(_PIECE)
    at = -1
    if piece.lstrip().startswith("["):
        at = piece.index("[") + 1
    elif piece.lstrip().startswith("{"):
        while not (told := re.search(r'"traceEvents"\s*:\s*\[', piece)):
            more = text.read(_PIECE) if len(piece) < _HEAD_LIMIT else ""
            if not more:
                break
            piece += more
        if told:
            at = told.end()
            try:
                head.update(json.loads(piece[: told.start()].rstrip().rstrip(",") + "}"))
            except ValueError:
                head.clear()
    if at < 0:
        raise NotACapture(f"{path} is no trace in Chrome's JSON", "give what torch.profiler wrote")
    decode = json.JSONDecoder().raw_decode
    while True:
        space = _SPACE.match(piece, at)
        at = space.end() if space else at
        if at < len(piece) and piece[at] == "]":
            tail.append(piece[at:])
            yield None
            return
        try:
            if at >= len(piece):
                raise ValueError
            event, at = decode(piece, at)
        except ValueError:
            # Either the piece ends within this event, or the file does.
            more = text.read(_PIECE)
            if not more:
                return
            piece, at = piece[at:] + more, 0
            continue
        if isinstance(event, dict):
            yield event
