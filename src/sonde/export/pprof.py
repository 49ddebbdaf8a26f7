# SPDX-License-Identifier: Apache-2.0
"""pprof's profile.proto, gzipped: one profile that holds every kind as sample types of its own.

The message classes are made at run time from the table below, whose field numbers are those of the
public https://github.com/google/pprof/blob/main/proto/profile.proto. Look at one kind with
`pprof -sample_index=cpu`, at one process with `-tagfocus=pid=4211`, at one reason with
`-tagfocus=reason=futex`.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from sonde.export.picture import check_amount
from sonde.model.code import NO_STACK, Frame
from sonde.model.profile import BASIC_KINDS, MEMORY_KINDS, Profile, ProfileKind
from sonde.query import questions
from sonde.query.questions import EVERYTHING, Where
from sonde.query.session import Session

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
"""Name and unit of the values of each kind: events, time, and bytes where calls move them."""

_LABELS = {
    ProfileKind.OFF_CPU: "reason",
    ProfileKind.RUN_QUEUE: "reason",
    ProfileKind.GPU_CALLS: "call",
    ProfileKind.GPU_TIME: "kernel",
    **dict.fromkeys(MEMORY_KINDS, "memory"),
}

# name, number, type; a leading * marks a repeated field, a capital a message.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Profile": (
        ("sample_type", 1, "*ValueType"),
        ("sample", 2, "*Sample"),
        ("mapping", 3, "*Mapping"),
        ("location", 4, "*Location"),
        ("function", 5, "*Function"),
        ("string_table", 6, "*string"),
        ("drop_frames", 7, "int64"),
        ("keep_frames", 8, "int64"),
        ("time_nanos", 9, "int64"),
        ("duration_nanos", 10, "int64"),
        ("period_type", 11, "ValueType"),
        ("period", 12, "int64"),
        ("comment", 13, "*int64"),
        ("default_sample_type", 14, "int64"),
    ),
    "ValueType": (("type", 1, "int64"), ("unit", 2, "int64")),
    "Sample": (
        ("location_id", 1, "*uint64"),
        ("value", 2, "*int64"),
        ("label", 3, "*Label"),
    ),
    "Label": (
        ("key", 1, "int64"),
        ("str", 2, "int64"),
        ("num", 3, "int64"),
        ("num_unit", 4, "int64"),
    ),
    "Mapping": (
        ("id", 1, "uint64"),
        ("memory_start", 2, "uint64"),
        ("memory_limit", 3, "uint64"),
        ("file_offset", 4, "uint64"),
        ("filename", 5, "int64"),
        ("build_id", 6, "int64"),
        ("has_functions", 7, "bool"),
        ("has_filenames", 8, "bool"),
        ("has_line_numbers", 9, "bool"),
        ("has_inline_frames", 10, "bool"),
    ),
    "Location": (
        ("id", 1, "uint64"),
        ("mapping_id", 2, "uint64"),
        ("address", 3, "uint64"),
        ("line", 4, "*Line"),
        ("is_folded", 5, "bool"),
    ),
    "Line": (("function_id", 1, "uint64"), ("line", 2, "int64")),
    "Function": (
        ("id", 1, "uint64"),
        ("name", 2, "int64"),
        ("system_name", 3, "int64"),
        ("filename", 4, "int64"),
        ("start_line", 5, "int64"),
    ),
}
_MOST_PENDING = 1 << 18
_SAMPLE_WEIGHT = 16
"""What is written at once, in frames of stacks; a sample without them is as large as some."""
_PACKAGE = "perftools.profiles"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int64": _FIELD.TYPE_INT64,
    "uint64": _FIELD.TYPE_UINT64,
    "bool": _FIELD.TYPE_BOOL,
    "string": _FIELD.TYPE_STRING,
}


@cache
def profile_class() -> Any:
    """The class of `perftools.profiles.Profile`."""
    file = descriptor_pb2.FileDescriptorProto(
        name="sonde/profile.proto", package=_PACKAGE, syntax="proto3"
    )
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind in fields:
            field = described.field.add(name=name, number=number)
            field.label = _FIELD.LABEL_REPEATED if kind[0] == "*" else _FIELD.LABEL_OPTIONAL
            kind = kind.lstrip("*")
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = _FIELD.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Profile"))


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write one gzipped profile; the time of the first kind is what pprof shows unless asked."""
    with gzip.GzipFile("", "wb", 6, out, mtime=0) as packed:
        builder = _Builder(session, kinds, packed.write)
        for kind in kinds:
            builder.add(questions.profile(session, kind, where))
        builder.finish()


class _Builder:
    """A profile under construction."""

    def __init__(
        self, session: Session, kinds: Sequence[ProfileKind], write: Callable[[bytes], object]
    ) -> None:
        self._write = write
        self._pending = 0
        self.message = message = profile_class()()
        self._strings: dict[str, int] = {}
        self._text("")  # The format wants '' first.
        self._mapping_class = type(message.mapping.add())
        del message.mapping[:]
        self._mappings: dict[tuple[str, str], Any] = {}
        self._functions: dict[tuple[str, str, str], int] = {}
        self._locations: dict[int, int] = {}
        self._value_at: dict[ProfileKind, int] = {}
        self._values = 0
        for kind in kinds:
            self._value_at[kind] = self._values
            for name, unit in SAMPLE_TYPES[kind]:
                message.sample_type.add(type=self._text(name), unit=self._text(unit))
                self._values += 1
        info = session.info
        message.time_nanos = info.start_ns + info.wall_offset_ns
        message.duration_nanos = info.duration_ns
        message.default_sample_type = self._text(SAMPLE_TYPES[kinds[0]][1][0])
        if ProfileKind.ON_CPU in kinds and info.hz:
            message.period_type.type = self._text("cpu")
            message.period_type.unit = self._text("nanoseconds")
            message.period = round(1e9 / info.hz)
        message.comment.append(self._text(f"recorded by sonde {info.version}"))
        for loss in questions.losses(session):
            message.comment.append(self._text(f"lost: {loss.amount:.0f} {loss.name} {loss.text}"))

    def add(self, profile: Profile) -> None:
        """Append the rows of a profile as samples."""
        at = self._value_at[profile.kind]
        with_bytes = len(SAMPLE_TYPES[profile.kind]) == 3
        name_key = self._text(_LABELS.get(profile.kind, ""))
        check_amount(profile)
        stacks: dict[int, list[int]] = {}
        pid_key, tid_key = self._text("pid"), self._text("tid")
        process_key, thread_key = self._text("process"), self._text("thread")
        for row in profile:
            thread = profile.threads[row.thread]
            values = [0] * self._values
            values[at : at + 2] = row.events, row.bytes if profile.kind.is_memory else row.ns
            if with_bytes:
                values[at + 2] = row.bytes
            sample = self.message.sample.add()
            sample.value.extend(values)
            stack = stacks.get(row.stack)
            if stack is None:
                stack = stacks[row.stack] = self._stack(profile, row.stack)
            sample.location_id.extend(stack)
            sample.label.add(key=pid_key, num=thread.process.pid)
            sample.label.add(key=tid_key, num=thread.tid)
            sample.label.add(key=process_key, str=self._text(thread.process.name))
            sample.label.add(key=thread_key, str=self._text(thread.name))
            if row.name:
                sample.label.add(key=name_key, str=self._text(row.name))
            self._pending += len(stack) + _SAMPLE_WEIGHT
            if self._pending > _MOST_PENDING:
                self._flush()

    def finish(self) -> None:
        """Write what is left, and the mappings, whose lengths are known now."""
        for mapping in self._mappings.values():
            self.message.mapping.append(mapping)
        self._flush()

    def _flush(self) -> None:
        """Write what there is so far: messages one after another are one message."""
        self._write(self.message.SerializeToString())
        self.message.Clear()
        self._pending = 0

    def _text(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings)
            self.message.string_table.append(text.encode(errors="replace").decode())
            self._pending += len(text) // 8
        return self._strings[text]

    def _stack(self, profile: Profile, stack: int) -> list[int]:
        stacks = profile.stacks
        indices = stacks.indices(stack)
        if not len(indices):
            return [self._location(-1, NO_STACK)]
        known = self._locations
        return [known.get(i) or self._location(i, stacks.frames[i]) for i in indices]

    def _location(self, index: int, frame: Frame) -> int:
        if index not in self._locations:
            number = self._locations[index] = len(self._locations) + 1
            location = self.message.location.add(
                id=number, mapping_id=self._mapping(frame), address=frame.offset
            )
            location.line.add(function_id=self._function(frame), line=frame.line)
        return self._locations[index]

    def _mapping(self, frame: Frame) -> int:
        key = (frame.binary, frame.build_id)
        if key not in self._mappings:
            # Addresses are offsets in the file, so each mapping starts at 0 and is as long as the
            # greatest of them needs. Names are resolved already: pprof need not look for files.
            self._mappings[key] = self._mapping_class(
                id=len(self._mappings) + 1,
                filename=self._text(frame.binary),
                build_id=self._text(frame.build_id),
                has_functions=True,
                has_filenames=True,
                has_line_numbers=True,
                has_inline_frames=True,
            )
        mapping = self._mappings[key]
        mapping.memory_limit = max(mapping.memory_limit, min(frame.offset + 1, (1 << 64) - 1))
        number: int = mapping.id
        return number

    def _function(self, frame: Frame) -> int:
        key = (frame.name, frame.binary, frame.file)
        if key not in self._functions:
            number = self._functions[key] = len(self._functions) + 1
            name = self._text(frame.name)
            self.message.function.add(
                id=number, name=name, system_name=name, filename=self._text(frame.file)
            )
        return self._functions[key]
