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
from typing import BinaryIO

from sonde.export.pprof_profile_pb2 import Mapping
from sonde.export.pprof_profile_pb2 import Profile as PprofProfile
from sonde.export.stack_frames import check_size
from sonde.model.code import NO_STACK, Frame
from sonde.model.profile import BASIC_KINDS, MEMORY_KINDS, Profile, ProfileKind
from sonde.query import queries
from sonde.query.queries import EVERYTHING, Where
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
"""(name, unit) of the values of each kind: events, time or bytes, and bytes that calls moved."""

_LABELS = {
    ProfileKind.OFF_CPU: "reason",
    ProfileKind.RUN_QUEUE: "reason",
    ProfileKind.GPU_CALLS: "call",
    ProfileKind.GPU_TIME: "kernel",
    **dict.fromkeys(MEMORY_KINDS, "memory"),
}

_MOST_PENDING = 1 << 18
"""A message is written once it has about this many stack frames."""
_SAMPLE_WEIGHT = 16
"""Size of a sample without its stack, in units of a stack frame."""


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write one gzipped profile; pprof shows the first kind by default."""
    with gzip.GzipFile("", "wb", 6, out, mtime=0) as packed:
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
        self._pending = 0
        self.message = message = PprofProfile()
        self._strings: dict[str, int] = {}
        self._text("")  # The format wants '' first.
        self._mappings: dict[tuple[str, str], Mapping] = {}
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
        for loss in queries.losses(session):
            message.comment.append(self._text(f"lost: {loss.amount:.0f} {loss.name} {loss.text}"))

    def add(self, profile: Profile) -> None:
        """Append the rows of a profile as samples."""
        at = self._value_at[profile.kind]
        with_bytes = len(SAMPLE_TYPES[profile.kind]) == 3
        name_key = self._text(_LABELS.get(profile.kind, ""))
        check_size(profile)
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
        """Write the rest, and the mappings, whose lengths are known now."""
        for mapping in self._mappings.values():
            self.message.mapping.append(mapping)
        self._flush()

    def _flush(self) -> None:
        """Write the message so far: concatenated protobuf messages are merged by the reader."""
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
            # Addresses are offsets in the file, so each mapping starts at 0 and ends after the
            # greatest of them. Names are resolved already: pprof need not search for files.
            self._mappings[key] = Mapping(
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
        return mapping.id

    def _function(self, frame: Frame) -> int:
        key = (frame.name, frame.binary, frame.file)
        if key not in self._functions:
            number = self._functions[key] = len(self._functions) + 1
            name = self._text(frame.name)
            self.message.function.add(
                id=number, name=name, system_name=name, filename=self._text(frame.file)
            )
        return self._functions[key]
