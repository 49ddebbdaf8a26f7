# SPDX-License-Identifier: Apache-2.0
"""pprof's format: a gzipped protocol buffer with one profile.

Each kind has separate sample types in that profile. Show one kind with
`pprof -sample_index=cpu`, one process with `-tagfocus=pid=4211`, one reason of waits with
`-tagfocus=reason=futex`. The messages are declared in `pprof_profile.proto`. Source:
https://github.com/google/pprof/blob/main/proto/README.md
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sonde.export.pprof_code import Added, Code, NewFrames, Strings
from sonde.export.pprof_profile_pb2 import Label, Sample
from sonde.export.pprof_profile_pb2 import Profile as PprofProfile
from sonde.export.protobuf_columns import (
    content,
    joined,
    lengths,
    messages,
    messages_of,
    number_fields,
    tag,
    varint,
    varint_lengths,
    varints,
)
from sonde.export.stack_frames import check_size, first_of_each, first_rows, with_no_stack
from sonde.model.code import Stacks
from sonde.model.profile import BASIC_KINDS, MEMORY_KINDS, Profile, ProfileKind
from sonde.query import queries
from sonde.query.function_weights import frames_of_stacks
from sonde.query.grouping import grouped
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SAMPLE_TYPES: dict[ProfileKind, tuple[tuple[str, str], ...]] = {
    ProfileKind.ON_CPU: (("samples", "count"), ("cpu", "nanoseconds")),
    ProfileKind.OFF_CPU: (("waits", "count"), ("off_cpu", "nanoseconds")),
    ProfileKind.RUN_QUEUE: (("run_queue_waits", "count"), ("run_queue", "nanoseconds")),
    ProfileKind.GPU_CALLS: (
        ("gpu_calls", "count"),
        ("gpu_call_time", "nanoseconds"),
        ("gpu_call_bytes", "bytes"),
    ),
    ProfileKind.GPU_TIME: (("gpu_runs", "count"), ("gpu_time", "nanoseconds")),
    ProfileKind.MEMORY_MAPPED: (("mappings", "count"), ("mapped_bytes", "bytes")),
    ProfileKind.MEMORY_FAULTED: (("faults", "count"), ("faulted_bytes", "bytes")),
    ProfileKind.MEMORY_HELD: (("held_mappings", "count"), ("held_bytes", "bytes")),
}
"""(name, unit) of the values of each kind: events, time or bytes, and bytes that calls moved."""

# The key of the label that has a row's name.
_LABELS = {
    ProfileKind.OFF_CPU: "reason",
    ProfileKind.RUN_QUEUE: "reason",
    ProfileKind.GPU_CALLS: "call",
    ProfileKind.GPU_TIME: "kernel",
    **dict.fromkeys(MEMORY_KINDS, "memory"),
}

_LOCATION_ID, _VALUE, _LABEL = (
    Sample.LOCATION_ID_FIELD_NUMBER,
    Sample.VALUE_FIELD_NUMBER,
    Sample.LABEL_FIELD_NUMBER,
)
_KEY, _STR, _NUM = Label.KEY_FIELD_NUMBER, Label.STR_FIELD_NUMBER, Label.NUM_FIELD_NUMBER

_LEVEL = 4
"""Of compression: level 6 takes three times as long for 3 to 7 % less."""
_MAX_PENDING_BYTES = 1 << 21
"""A message is written once it has about this many bytes."""


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write one gzipped profile; pprof shows the first kind by default."""
    with gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as packed:
        builder = _Builder(session, kinds, packed.write)
        for kind in kinds:
            builder.add(queries.profile(session, kind, where))
        builder.finish()


class _Builder:
    """A profile under construction."""

    def __init__(
        self, session: Session, kinds: Sequence[ProfileKind], write: Callable[[bytes], object]
    ) -> None:
        self._write = write
        self._session = session
        self._size = 0
        """Of what is not written yet, about, in bytes."""
        self._samples = bytearray()
        self._parts = [bytearray() for _ in range(3)]
        """Locations, functions and strings of the message so far."""
        self._head, self._rest = PprofProfile(), PprofProfile()
        """The fields before and after those; empty once they are written."""
        self._strings = Strings()
        self._strings.number("")  # The format wants '' first.
        self._code = Code(session, self._strings)
        self._value_at: dict[ProfileKind, int] = {}
        self._values = 0
        text = self._strings.number
        for kind in kinds:
            self._value_at[kind] = self._values
            for name, unit in SAMPLE_TYPES[kind]:
                self._head.sample_type.add(type=text(name), unit=text(unit))
                self._values += 1
        info, message = session.info, self._rest
        message.time_nanos = info.start_ns + info.wall_offset_ns
        message.duration_nanos = info.duration_ns
        message.default_sample_type = text(SAMPLE_TYPES[kinds[0]][1][0])
        if ProfileKind.ON_CPU in kinds and info.hz:
            message.period_type.type = text("cpu")
            message.period_type.unit = text("nanoseconds")
            message.period = round(1e9 / info.hz)
        message.comment.append(text(f"recorded by sonde {info.version}"))
        if session.hide:
            message.comment.append(text(f"stacks: {session.hide.label}"))
        for loss in queries.losses(session):
            message.comment.append(text(f"lost: {loss.amount:.0f} {loss.name} {loss.text}"))

    def add(self, profile: Profile) -> None:
        """Append the rows of a profile as samples."""
        name_key = self._strings.number(_LABELS.get(profile.kind, ""))
        check_size(profile)
        if not len(profile):
            return
        stacks, stack = grouped(np.asarray(profile.row_stack, np.int64))
        threads, thread = grouped(np.asarray(profile.row_thread, np.int64))
        name = np.asarray(profile.row_name, np.int64)
        parts, new = self._stacks(profile.stacks, stacks, first_rows(stack))
        functions = self._code.name(new, self._label_texts(profile, threads[thread], name))
        added = (self._code.locate(new), functions, self._strings.added())
        of_thread = self._thread_labels(threads)
        of_name = self._name_labels(name_key, profile.names)
        values = self._value_columns(profile)
        before = bytes(self._value_at[profile.kind])  # each of these values is 0
        after = bytes(self._values - len(before) - len(values))

        def samples(rows: slice) -> bytes:
            fields = messages(
                PprofProfile.SAMPLE_FIELD_NUMBER,
                parts.take(pa.array(stack[rows])),
                messages(_VALUE, before, *(varints(column[rows]) for column in values), after),
                of_thread.take(pa.array(thread[rows])),
                of_name.take(pa.array(name[rows])),
            )
            return content(fields)

        sizes = self._values - len(values) + np.sum([*map(varint_lengths, values)], axis=0)
        sizes += 1 + varint_lengths(sizes)
        sizes += lengths(parts)[stack] + lengths(of_thread)[thread] + lengths(of_name)[name]
        sizes += 1 + varint_lengths(sizes)
        for one in added:
            np.add.at(sizes, one.rows, one.sizes)
        self._append(np.cumsum(sizes), added, samples)

    def _append(self, ends: I64, added: Sequence[Added], samples: Callable[[slice], bytes]) -> None:
        """Write rows, in messages of some size; `ends`: the size of all rows up to each."""
        begin, written = 0, -self._size
        while begin < len(ends):
            end = int(np.searchsorted(ends, written + _MAX_PENDING_BYTES, side="right")) + 1
            rows = slice(begin, end)
            for part, one in zip(self._parts, added, strict=True):
                part += one.needed_by(rows)
            self._samples += samples(rows)
            begin = end
            if end <= len(ends):
                written = int(ends[end - 1])
                self._flush()
        self._size = int(ends[-1]) - written

    def finish(self) -> None:
        """Write the rest, and the mappings, whose lengths are known now."""
        mappings = self._code.mappings()
        self._parts[-1] += self._strings.added().needed_by(slice(0, 1))
        self._flush(mappings)

    def _flush(self, mappings: bytes = b"") -> None:
        """Write the message so far: concatenated protobuf messages are merged by the reader."""
        head, rest = self._head.SerializeToString(), self._rest.SerializeToString()
        self._write(b"".join((head, mappings, *self._parts, rest)))
        self._write(bytes(self._samples))
        for part in (self._head, self._rest):
            part.Clear()
        for some in (*self._parts, self._samples):
            some.clear()

    def _stacks(self, stacks: Stacks, wanted: I64, rows: I64) -> tuple[pa.Array, NewFrames]:
        """(the part of a `Sample` for each of the stacks, the frames in them that get a location).

        `rows`: the first sample that has each stack, ascending.
        """
        no_stack = len(stacks.frames)
        number = self._code.location
        parts, new_frames, new_rows = [], [], []
        for some, flat, depth in frames_of_stacks(stacks, wanted):
            flat, depth = with_no_stack(flat, depth, no_stack)
            fresh, first = first_of_each(flat, number[flat] == 0)
            given = int(number.max())
            number[fresh] = np.arange(given + 1, given + 1 + len(fresh))
            ends = np.cumsum(depth)
            new_frames.append(fresh)
            new_rows.append(rows[some][np.searchsorted(ends, first, side="right")])
            ids = varints(number[flat])
            starts = np.append(0, np.cumsum(lengths(ids)))
            parts.append(messages_of(_LOCATION_ID, content(ids), starts[ends]))
        new = NewFrames(np.concatenate(new_frames), np.concatenate(new_rows))
        return pa.concat_arrays(parts), new

    def _label_texts(
        self, profile: Profile, thread: I64, name: I64
    ) -> list[tuple[int, tuple[str, ...]]]:
        """(row, the texts of its labels) of rows that may be the first to need one."""
        processes, threads = self._session.processes, self._session.threads
        of_processes, of_process = processes.coded_names
        of_threads, of_thread = threads.coded_names
        process = of_process[threads.process[thread]]
        columns = (process, of_thread[thread], name)
        firsts = [first_rows(grouped(column.astype(np.int64))[1]) for column in columns]
        return [
            (row, ("pid", "tid", "process", of_processes[process[row]], "thread", *texts))
            for row in np.unique(np.concatenate(firsts)).tolist()
            for label in [profile.names[name[row]]]
            for texts in [(of_threads[of_thread[thread[row]]], *([label] if label else []))]
        ]

    def _thread_labels(self, thread: I64) -> pa.Array:
        """The labels' part of a `Sample` for each of the threads, but for the name of a row."""
        processes, threads = self._session.processes, self._session.threads
        process = threads.process[thread]
        labels: dict[str, tuple[int, npt.NDArray[Any]]] = {
            "pid": (_NUM, processes.pid[process]),
            "tid": (_NUM, threads.tid[thread]),
            "process": (_STR, self._numbers_of(processes.coded_names, process)),
            "thread": (_STR, self._numbers_of(threads.coded_names, thread)),
        }
        return joined(
            *(
                messages(_LABEL, tag(_KEY) + varint(self._strings.number(key)), number_fields(*of))
                for key, of in labels.items()
            )
        )

    def _numbers_of(self, coded: tuple[list[str], npt.NDArray[np.int32]], rows: I64) -> I64:
        """The numbers of texts, which the strings have."""
        texts, codes = coded
        used, index = np.unique(codes[rows], return_inverse=True)
        numbers = [self._strings.number(texts[code]) for code in used.tolist()]
        return np.array(numbers, np.int64)[index]

    def _name_labels(self, key: int, names: Sequence[str]) -> pa.Array:
        """The part of a `Sample` for the names of rows."""
        numbers = np.array([self._strings.number(name) if name else 0 for name in names], np.int64)
        keys = number_fields(_KEY, np.full(len(numbers), key))
        labels = messages(_LABEL, keys, number_fields(_STR, numbers))
        return pc.if_else(pa.array(numbers > 0), labels, pa.scalar(b""))

    def _value_columns(self, profile: Profile) -> list[I64]:
        """The values of the kind itself."""
        measured = profile.row_bytes if profile.kind.is_memory else profile.row_ns
        columns = [profile.row_events, measured, profile.row_bytes]
        wanted = columns[: len(SAMPLE_TYPES[profile.kind])]
        return [np.asarray(column, np.int64) for column in wanted]
