# SPDX-License-Identifier: Apache-2.0
"""OTLP profiles as chunks: what other agents send is stored and asked for as our own.

Schema: opentelemetry-proto 1.45, `profiles/v1development`, which is not stable. On-CPU and off-CPU
sample types become samples of kind cpu and blocked; others are left out and counted as a loss. The
same request makes the same chunks, so one that is sent twice is stored once. References that lead
nowhere leave a name empty; they are no error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import pyarrow as pa
from google.protobuf import message
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2

from sonde.query.chunk_writer import chunk_of
from sonde.query.schema import TABLES
from sonde.server.service import RefusedRequestError

MOST_BYTES = 4 << 20
"""Of a request, decompressed: decoded objects take some ten times as much."""
MOST_ROWS = 200_000
MOST_FRAMES = 1_024
"""Of a stack; the outermost are left out."""
MOST_TEXT = 512
_MOST_NS = 10**15
"""Largest weight of one row: eleven days."""
_ON_CPU = {"cpu", "samples", "sample", "on-cpu", "on_cpu", ""}
_OFF_CPU = {"off_cpu", "off-cpu", "events"}
_NS_OF = {"nanoseconds": 1, "ns": 1, "microseconds": 1_000, "us": 1_000, "milliseconds": 1_000_000}
_USUAL_NS = 1_000_000_000 // 19
_KINDS = {"kernel": "kernel", "cpython": "python", "native": "user", "go": "user", "rust": "user"}
_OWNERS = {
    "container": "container.id",
    "container_name": "k8s.container.name",
    "pod": "k8s.pod.name",
    "pod_uid": "k8s.pod.uid",
    "namespace": "k8s.namespace.name",
    "exe": "process.executable.path",
    "user": "process.owner",
    "unit": "service.name",
}
"""Columns of `process`, by resource attributes."""


@dataclass(frozen=True, slots=True)
class NodeChunk:
    """A chunk, and the node that it is of."""

    node: str
    content: bytes


def chunks(body: bytes, encoding: str, node: str, received_ns: int) -> list[NodeChunk]:
    """The chunks of an ExportProfilesServiceRequest. Raises RefusedRequestError.

    `encoding`: of the body, gzip or identity. `node`: where a resource names no host; `received_ns`
    where a profile has no time.
    """
    request: Any = profiles_service_pb2.ExportProfilesServiceRequest()
    try:
        request.ParseFromString(unpacked(body, encoding))
    except message.DecodeError:
        raise RefusedRequestError(
            400, "no profiles by opentelemetry-proto 1.45", "send application/x-protobuf"
        ) from None
    name = blake2b(body, digest_size=16).hexdigest()
    of_node: dict[str, _Builder] = {}
    rows = 0
    for resource in request.resource_profiles:
        attributes = {one.key: one.value for one in resource.resource.attributes}
        host = _text(attributes, "host.name") or node or "unknown"
        host = "".join(c if c.isascii() and c.isprintable() else "?" for c in host)[:253]
        builder = of_node.setdefault(host, _Builder(request.dictionary, received_ns))
        for scope in resource.scope_profiles:
            for profile in scope.profiles:
                rows = builder.add(profile, attributes, MOST_ROWS - rows) + rows
    return [NodeChunk(host, builder.chunk(name)) for host, builder in of_node.items()]


def unpacked(body: bytes, encoding: str) -> bytes:
    """The decompressed body, within its bound. Raises RefusedRequestError."""
    if encoding in ("", "identity"):
        content = body
    elif encoding == "gzip":
        try:
            content = zlib.decompressobj(wbits=31).decompress(body, MOST_BYTES + 1)
        except zlib.error:
            raise RefusedRequestError(400, "the body is no gzip", "send it again") from None
    else:
        raise RefusedRequestError(415, "no such encoding", "use gzip")
    if len(content) > MOST_BYTES:
        raise RefusedRequestError(
            413, f"more than {MOST_BYTES >> 20} MiB of profiles at once", "send them more often"
        )
    return content


def _text(attributes: Mapping[str, Any], key: str) -> str:
    value = attributes.get(key)
    return str(value.string_value)[:MOST_TEXT] if value is not None else ""


def _whole(attributes: Mapping[str, Any], key: str) -> int:
    value = attributes.get(key)
    return int(value.int_value) if value is not None else 0


@dataclass(slots=True)
class _Builder:
    """The tables of one node."""

    dictionary: Any
    received_ns: int
    samples: list[tuple[Any, ...]] = field(default_factory=list)
    frames: dict[tuple[Any, ...], int] = field(default_factory=dict)
    stacks: dict[int, list[int]] = field(default_factory=dict)
    processes: dict[int, dict[str, Any]] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    of_location: dict[int, list[int]] = field(default_factory=dict)
    left_out: int = 0
    """Samples of other types, beyond the bound, or with an impossible weight."""

    def add(self, profile: Any, resource: Mapping[str, Any], room: int) -> int:
        """Add a profile; returns how many rows it made, at most `room`."""
        kind = self._string(profile.sample_type.type_strindex).lower()
        unit = self._string(profile.sample_type.unit_strindex).lower()
        if kind not in _ON_CPU | _OFF_CPU:
            self.left_out += len(profile.samples)
            return 0
        column = "blocked" if kind in _OFF_CPU else "cpu"
        period = profile.period if 0 < profile.period < _MOST_NS else _USUAL_NS
        scale = _NS_OF.get(unit, 0)
        begun = len(self.samples)
        for sample in profile.samples:
            attributes = dict(self._attributes(sample.attribute_indices))
            pid = _pid(_whole(attributes, "process.pid") or _whole(resource, "process.pid"))
            tid = _pid(_whole(attributes, "thread.id") or pid)
            self._note(pid, tid, resource, attributes)
            stack = self._stack(sample.stack_index)
            for time_ns, value in self._points(sample, profile.time_unix_nano):
                ns = value * (scale or period)
                count = 1.0 if scale else float(value)
                if not 0 <= ns <= _MOST_NS or len(self.samples) - begun >= room:
                    self.left_out += 1
                    continue
                row = (time_ns, column, "", pid, 0, tid, stack, count, float(ns), 0.0)
                self.samples.append(row)
        return len(self.samples) - begun

    def _points(self, sample: Any, time_ns: int) -> Iterator[tuple[int, int]]:
        times, values = list(sample.timestamps_unix_nano), list(sample.values)
        if not times:
            yield self._time(time_ns), sum(values) if values else 1
        elif len(values) == len(times):
            yield from zip(map(self._time, times), values, strict=True)
        else:
            yield self._time(times[0]), sum(values) if values else len(times)

    def _time(self, time_ns: int) -> int:
        return time_ns if 0 < time_ns < 1 << 62 else self.received_ns

    def _string(self, at: int) -> str:
        table = self.dictionary.string_table
        return table[at][:MOST_TEXT] if 0 <= at < len(table) else ""

    def _attributes(self, indices: Sequence[int]) -> Iterator[tuple[str, Any]]:
        table = self.dictionary.attribute_table
        for at in indices:
            if 0 <= at < len(table):
                yield self._string(table[at].key_strindex), table[at].value

    def _note(
        self, pid: int, tid: int, resource: Mapping[str, Any], sample: Mapping[str, Any]
    ) -> None:
        both = {**resource, **sample}
        comm = _text(both, "process.executable.name") or _text(both, "service.name")
        if pid not in self.processes:
            owners = {column: _text(both, key) for column, key in _OWNERS.items()}
            self.processes[pid] = {"pid": pid, "start_ns": 0, "comm": comm, **owners}
        self.threads.setdefault((pid, tid), _text(both, "thread.name") or comm)

    def _stack(self, at: int) -> int:
        """The id of a stack, leaf first."""
        if at not in self.stacks:
            table = self.dictionary.stack_table
            places = table[at].location_indices if 0 <= at < len(table) else ()
            ids: list[int] = []
            for place in places:
                ids += self._location(place)
                if len(ids) >= MOST_FRAMES:
                    break
            self.stacks[at] = ids[:MOST_FRAMES]
        return at + 1

    def _location(self, at: int) -> list[int]:
        """Frames of a location, innermost first: several where functions are inlined."""
        known = self.of_location.get(at)
        if known is not None:
            return known
        tables = self.dictionary
        found: list[int] = []
        if 0 <= at < len(tables.location_table):
            location = tables.location_table[at]
            attributes = dict(self._attributes(location.attribute_indices))
            kind = _text(attributes, "profile.frame.type").lower()
            kind = _KINDS.get(kind, "jit" if kind else "user")
            binary = "[kernel]" if kind == "kernel" else ""
            if 0 < location.mapping_index < len(tables.mapping_table):
                mapping = tables.mapping_table[location.mapping_index]
                binary = self._string(mapping.filename_strindex).rpartition("/")[2] or binary
            offset = location.address if 0 <= location.address < 1 << 63 else 0
            for line in list(location.lines)[:64] or [None]:
                function, file, number = "", "", 0
                if line is not None and 0 <= line.function_index < len(tables.function_table):
                    entry = tables.function_table[line.function_index]
                    function = self._string(entry.name_strindex)
                    file = self._string(entry.filename_strindex)
                    number = line.line if 0 <= line.line < 1 << 31 else 0
                row = (kind, function, binary, "", 0 if function else offset, file, number)
                found.append(self.frames.setdefault(row, len(self.frames) + 1))
        self.of_location[at] = found
        return found

    def chunk(self, name: str) -> bytes:
        """All of it, sorted by time."""
        self.samples.sort()
        times = [row[0] for row in self.samples] or [self.received_ns]
        frames = [(number, *row) for row, number in self.frames.items()]
        stacks = [(at + 1, ids, True) for at, ids in self.stacks.items()]
        threads = [(pid, 0, tid, comm) for (pid, tid), comm in self.threads.items()]
        tables = {
            "sample": _table("sample", self.samples),
            "frame": _table("frame", frames),
            "stack": _table("stack", stacks),
            "process": pa.Table.from_pylist(
                [_filled("process", row) for row in self.processes.values()], TABLES["process"]
            ),
            "thread": _table("thread", threads),
        }
        if self.left_out:
            row = (times[-1], "loss", "otlp.samples_left_out", 0, 0, float(self.left_out), "")
            tables["event"] = _table("event", [row])
        meta = {
            "seq": 0,
            "start_ns": times[0],
            "end_ns": times[-1],
            "wall_offset_ns": 0,
            "capture": {"id": name, "version": "otlp", "host": {}},
        }
        return chunk_of(meta, {name: table for name, table in tables.items() if table.num_rows})


def _pid(number: int) -> int:
    return number if 0 <= number < 1 << 32 else 0


def _table(name: str, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    names = TABLES[name].names
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], TABLES[name])


def _filled(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """With the column's empty value where there is none."""
    return {
        one.name: row.get(one.name, "" if not pa.types.is_integer(one.type) else 0)
        for one in TABLES[name]
    }
