# SPDX-License-Identifier: Apache-2.0
"""OTLP profiles as chunks: what other agents send is stored and queried like Sonde's data.

Schema: opentelemetry-proto 1.45, `profiles/v1development`, which is not stable. On-CPU and off-CPU
sample types become samples of kind cpu and blocked; others are left out and counted as a loss. A
request whose profiles have times always makes the same chunks, so one that is sent twice is stored
once. A reference to no entry of a table makes a name empty; it is no error.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any

import pyarrow as pa
from google.protobuf import message
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2

from sonde.protobuf_size import sizes_of
from sonde.query.chunk_writer import chunk_of
from sonde.query.schema import TABLES
from sonde.server.otlp_dictionary import (
    MAX_FRAMES,
    Attributes,
    FrameRow,
    OtlpDictionary,
    RequestBudget,
    value_of,
)
from sonde.server.service import RefusedRequestError

MAX_BYTES = 4 << 20
"""Of a request, decompressed."""
MAX_DECODED_BYTES = 64 << 20
"""Of a decoded request, as `protobuf_size` counts them: 27 to 45 MiB of 4 MiB of samples, stacks,
places and names as profilers make them, most of which have ten bytes or more. 4 MiB of empty
messages would take up to 280 MB."""
_SIZES = sizes_of(profiles_service_pb2.ExportProfilesServiceRequest.DESCRIPTOR)
MAX_ROWS = 200_000
"""Samples of a request; more are left out and counted as a loss."""
MAX_HOSTS = 64
"""Of a request. Each host makes a separate chunk; agents send for one, collectors for some."""
_MAX_NS = 10**15
"""Largest weight of one row: eleven days."""
_ON_CPU = {"cpu", "samples", "sample", "on-cpu", "on_cpu", ""}
_OFF_CPU = {"off_cpu", "off-cpu", "events"}
"""Sample types of on-CPU and of off-CPU profiles."""
_NS_OF = {
    **dict.fromkeys(("nanoseconds", "nanosecond", "ns"), 1),
    **dict.fromkeys(("microseconds", "microsecond", "us"), 10**3),
    **dict.fromkeys(("milliseconds", "millisecond", "ms"), 10**6),
    **dict.fromkeys(("seconds", "second", "s"), 10**9),
}
"""Units of time, in ns."""
_COUNTED = {"", "1", "count", "counts", "sample", "samples", "event", "events"}
"""Units of values that count samples, each of which stands for a period."""
_USUAL_NS = 10**9 // 19
"""The period where a profile has none: Parca's agent samples at 19 Hz by default."""
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
"""The resource attribute of each column of `process`."""
_ATTRIBUTES = frozenset(
    (*_OWNERS.values(), "host.name", "process.pid", "process.executable.name", "thread.id",
     "thread.name")
)  # fmt: skip
_SAMPLE_STEPS, _STACK_STEPS, _PROFILE_STEPS = 6, 4, 20
"""Entries of the budget that a sample, a stack and a profile take besides their lists."""
_FRAME_BYTES, _PROCESS_BYTES, _THREAD_BYTES = 64, 256, 64
"""Memory of a row without its texts."""


@dataclass(frozen=True, slots=True)
class NodeChunk:
    """A chunk, and the name of its node."""

    node: str
    content: bytes


def chunks(body: bytes, encoding: str, node: str, received_ns: int) -> list[NodeChunk]:
    """The chunks of an ExportProfilesServiceRequest. Raises RefusedRequestError.

    `encoding`: of the body, gzip or identity; `node`: the name where a resource has no host;
    `received_ns`: the time where a profile has none.
    """
    request: Any = profiles_service_pb2.ExportProfilesServiceRequest()
    content = unpacked(body, encoding)
    try:
        if _SIZES.decoded_bytes(content, MAX_DECODED_BYTES) > MAX_DECODED_BYTES:
            raise RefusedRequestError(
                413, "the profiles of one request are too many messages", "send them more often"
            )
        request.ParseFromString(content)
    except (message.DecodeError, ValueError):
        raise RefusedRequestError(
            400, "no profiles by opentelemetry-proto 1.45", "send application/x-protobuf"
        ) from None
    name = blake2b(body, digest_size=16).hexdigest()
    budget = RequestBudget()
    dictionary = OtlpDictionary(request.dictionary, _ATTRIBUTES, budget)
    of_node: dict[str, _Builder] = {}
    rows = 0
    for resource in request.resource_profiles:
        budget.charge_entries(_PROFILE_STEPS + len(resource.resource.attributes))
        attributes = {
            one.key: value_of(one.value)
            for one in resource.resource.attributes
            if one.key in _ATTRIBUTES
        }
        host = _text(attributes, "host.name") or node or "unknown"
        host = "".join(c if c.isascii() and c.isprintable() else "?" for c in host)[:253]
        builder = of_node.get(host)
        if builder is None:
            if len(of_node) >= MAX_HOSTS:
                raise RefusedRequestError(
                    413, f"profiles of more than {MAX_HOSTS} hosts at once", "send them by host"
                )
            builder = of_node[host] = _Builder(dictionary, received_ns)
        for scope in resource.scope_profiles:
            budget.charge_entries(_PROFILE_STEPS)
            for profile in scope.profiles:
                rows += builder.add(profile, attributes, MAX_ROWS - rows)
    return [NodeChunk(host, builder.chunk(name)) for host, builder in of_node.items()]


def unpacked(body: bytes, encoding: str) -> bytes:
    """The decompressed body, at most `MAX_BYTES`. Raises RefusedRequestError."""
    if encoding in ("", "identity"):
        content = body
    elif encoding == "gzip":
        stream = zlib.decompressobj(wbits=31)
        try:
            content = stream.decompress(body, MAX_BYTES + 1)
        except zlib.error:
            raise RefusedRequestError(400, "the body is no gzip", "send it again") from None
        if len(content) <= MAX_BYTES and (not stream.eof or stream.unused_data):
            raise RefusedRequestError(
                400, "the gzip body is cut, or has something after its end", "send it again"
            )
    else:
        raise RefusedRequestError(415, "no such encoding", "use gzip")
    if len(content) > MAX_BYTES:
        raise RefusedRequestError(
            413, f"more than {MAX_BYTES >> 20} MiB of profiles at once", "send them more often"
        )
    return content


def _text(attributes: Attributes, key: str) -> str:
    return attributes.get(key, ("", 0))[0]


def _whole(attributes: Attributes, key: str) -> int:
    return attributes.get(key, ("", 0))[1]


@dataclass(slots=True)
class _Rows:
    """Samples of a node, by column."""

    time_ns: array[int] = field(default_factory=lambda: array("Q"))
    kind: list[str] = field(default_factory=list)
    pid: array[int] = field(default_factory=lambda: array("I"))
    tid: array[int] = field(default_factory=lambda: array("I"))
    stack_id: array[int] = field(default_factory=lambda: array("Q"))
    weight_count: array[float] = field(default_factory=lambda: array("d"))
    weight_ns: array[float] = field(default_factory=lambda: array("d"))

    def table(self) -> pa.Table:
        """As the table `sample`, sorted by time."""
        count = len(self.kind)
        columns = {
            "kind": pa.array(self.kind, pa.string()),
            "name": pa.repeat("", count),
            "start_ns": pa.repeat(0, count),
            "weight_bytes": pa.repeat(0.0, count),
        }
        arrays = [
            columns[one.name].cast(one.type)
            if one.name in columns
            else _numbers(getattr(self, one.name), one.type)
            for one in TABLES["sample"]
        ]
        return pa.Table.from_arrays(arrays, schema=TABLES["sample"]).sort_by("time_ns")


@dataclass(slots=True)
class _Builder:
    """Makes the tables of one node."""

    dictionary: OtlpDictionary
    received_ns: int
    samples: _Rows = field(default_factory=_Rows)
    frames: dict[FrameRow, int] = field(default_factory=dict)
    """Rows of `frame` and their ids."""
    stacks: dict[int, int] = field(default_factory=dict)
    """By index of a stack in the request, in order: where it ends in `frame_ids`, which has the
    stacks one after another."""
    frame_ids: array[int] = field(default_factory=lambda: array("Q"))
    of_location: dict[int, array[int]] = field(default_factory=dict)
    """Ids of the frames of each location."""
    processes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows of `process` by pid."""
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    """Names by (pid, tid)."""
    left_out: int = 0
    """Samples of other types or units, beyond `MAX_ROWS`, or with an impossible weight."""
    stacks_cut: int = 0
    """Stacks of which frames beyond the dictionary's bounds are left out."""

    def add(self, profile: Any, resource: Attributes, room: int) -> int:
        """Add a profile; returns how many rows it made, at most `room`."""
        charge_entries = self.dictionary.budget.charge_entries
        charge_entries(_PROFILE_STEPS)
        sampled = self.dictionary.string(profile.sample_type.type_strindex).lower()
        unit = self.dictionary.string(profile.sample_type.unit_strindex).lower()
        if sampled not in _ON_CPU | _OFF_CPU or unit not in _NS_OF.keys() | _COUNTED:
            self.left_out += len(profile.samples)
            return 0
        kind = "blocked" if sampled in _OFF_CPU else "cpu"
        scale = _NS_OF.get(unit, 0)
        ns_of_one = scale or self._period_ns(profile)
        rows = self.samples
        made = 0
        threads: dict[bytes, tuple[int, int]] = {}
        for sample in profile.samples:
            times, values = sample.timestamps_unix_nano, sample.values
            charge_entries(_SAMPLE_STEPS + len(times) + len(values))
            pid, tid = self._thread_of(sample.attribute_indices, resource, threads)
            stack = self._stack(sample.stack_index)
            for time_ns, value in self._points(times, values, profile.time_unix_nano):
                ns = value * ns_of_one
                if not 0 <= ns <= _MAX_NS or made >= room:
                    self.left_out += 1
                    continue
                rows.time_ns.append(time_ns)
                rows.kind.append(kind)
                rows.pid.append(pid)
                rows.tid.append(tid)
                rows.stack_id.append(stack)
                rows.weight_count.append(1.0 if scale else value)
                rows.weight_ns.append(ns)
                made += 1
        return made

    def _period_ns(self, profile: Any) -> int:
        """The time that one sample stands for."""
        unit = self.dictionary.string(profile.period_type.unit_strindex).lower()
        period = profile.period * _NS_OF.get(unit, 0 if unit else 1)
        return period if 0 < period < _MAX_NS else _USUAL_NS

    def _points(
        self, times: Sequence[int], values: Sequence[int], time_ns: int
    ) -> Iterator[tuple[int, int]]:
        """(time, value) of each event of a sample; one with the sum where times and values do not
        correspond. `time_ns`: of the profile."""
        if not times:
            yield self._time(time_ns), sum(values) if values else 1
        elif len(values) == len(times):
            yield from zip(map(self._time, times), values, strict=True)
        else:
            yield self._time(times[0]), sum(values) if values else len(times)

    def _time(self, time_ns: int) -> int:
        return time_ns if 0 < time_ns < 1 << 62 else self.received_ns

    def _thread_of(
        self, indices: Sequence[int], resource: Attributes, known: dict[bytes, tuple[int, int]]
    ) -> tuple[int, int]:
        """(pid, tid) of a sample by its attributes; `known`: by list of indices, as bytes."""
        self.dictionary.budget.charge_entries(len(indices))
        key = array("l", indices).tobytes()
        found = known.get(key)
        if found is None:
            sample = self.dictionary.attributes(indices)
            pid = _pid(_whole(sample, "process.pid") or _whole(resource, "process.pid"))
            found = known[key] = pid, _pid(_whole(sample, "thread.id") or pid)
            self._note(*found, {**resource, **sample})
        return found

    def _note(self, pid: int, tid: int, attributes: Attributes) -> None:
        """Add a process and a thread, if they are new."""
        charge_row = self.dictionary.budget.charge_row
        comm = _text(attributes, "process.executable.name") or _text(attributes, "service.name")
        if pid not in self.processes:
            owners = {column: _text(attributes, key) for column, key in _OWNERS.items()}
            charge_row(_PROCESS_BYTES, (comm, *owners.values()))
            self.processes[pid] = {"pid": pid, "start_ns": 0, "comm": comm, **owners}
        if (pid, tid) not in self.threads:
            name = _text(attributes, "thread.name") or comm
            charge_row(_THREAD_BYTES, (name,))
            self.threads[pid, tid] = name

    def _stack(self, at: int) -> int:
        """The id of a stack in the chunk, its index plus 1; 0: there is none."""
        if at not in self.stacks:
            if at < 0:
                return 0
            locations, is_cut = self.dictionary.stack(at)
            self.dictionary.budget.charge_entries(_STACK_STEPS + len(locations))
            start = len(self.frame_ids)
            for number, location in enumerate(locations, 1):
                ids = self.of_location.get(location)
                if ids is None:
                    ids = self.of_location[location] = self._location(location)
                self.frame_ids += ids
                is_cut |= location in self.dictionary.cut_locations
                if (length := len(self.frame_ids) - start) >= MAX_FRAMES:
                    is_cut |= length > MAX_FRAMES or number < len(locations)
                    del self.frame_ids[start + MAX_FRAMES :]
                    break
            self.dictionary.budget.charge_entries(len(self.frame_ids) - start)
            self.stacks[at] = len(self.frame_ids)
            self.stacks_cut += is_cut
        return at + 1

    def _location(self, at: int) -> array[int]:
        """Ids of the frames of a location."""
        ids = array("Q")
        for row in self.dictionary.location(at):
            number = self.frames.get(row)
            if number is None:
                self.dictionary.budget.charge_row(_FRAME_BYTES, (row[1], row[2], row[5]))
                number = self.frames[row] = len(self.frames) + 1
            ids.append(number)
        self.dictionary.budget.charge_entries(len(ids))
        return ids

    def chunk(self, name: str) -> bytes:
        """The chunk of the node; `name`: id of its capture."""
        samples = self.samples.table()
        times = samples.column("time_ns")
        begin, end = (times[0].as_py(), times[-1].as_py()) if len(times) else [self.received_ns] * 2
        frames = ((number, *row) for row, number in self.frames.items())
        threads = ((pid, 0, tid, comm) for (pid, tid), comm in self.threads.items())
        processes = (_filled("process", row) for row in self.processes.values())
        tables = {
            "sample": samples,
            "frame": _table("frame", frames),
            "stack": self._stack_table(),
            "process": _table("process", processes),
            "thread": _table("thread", threads),
        }
        losses = {"samples_left_out": self.left_out, "stacks_cut": self.stacks_cut}
        tables["event"] = _table("event", (
            (end, "loss", f"otlp.{name}", 0, 0, float(count), "")
            for name, count in losses.items() if count
        ))  # fmt: skip
        meta = {
            "seq": 0,
            "start_ns": begin,
            "end_ns": end,
            "wall_offset_ns": 0,
            "capture": {"id": name, "version": "otlp", "host": {}},
        }
        return chunk_of(meta, {name: table for name, table in tables.items() if table.num_rows})

    def _stack_table(self) -> pa.Table:
        ends = pa.array(chain([0], self.stacks.values()), pa.int32())
        arrays = [
            pa.array((at + 1 for at in self.stacks), pa.uint64()),
            pa.ListArray.from_arrays(ends, _numbers(self.frame_ids, pa.uint64())),
            pa.repeat(True, len(self.stacks)),
        ]
        return pa.Table.from_arrays(arrays, schema=TABLES["stack"])


def _numbers(values: array[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array over the same memory; `kind` has the size of the array's numbers."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _pid(number: int) -> int:
    return number if 0 <= number < 1 << 32 else 0


def _table(name: str, rows: Iterable[Sequence[Any]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(TABLES[name])
    arrays = [pa.array(one, f.type) for one, f in zip(columns, TABLES[name], strict=True)]
    return pa.Table.from_arrays(arrays, schema=TABLES[name])


def _filled(name: str, row: dict[str, Any]) -> list[Any]:
    """The values of a row by column; 0 or '' where it has none."""
    return [
        row.get(one.name, "" if not pa.types.is_integer(one.type) else 0) for one in TABLES[name]
    ]
