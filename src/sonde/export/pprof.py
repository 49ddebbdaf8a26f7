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

from sonde.export.pprof_profile_pb2 import Mapping, Sample
from sonde.export.pprof_profile_pb2 import Profile as PprofProfile
from sonde.export.stack_frames import check_size
from sonde.model.code import NO_STACK, Frame
from sonde.model.process import Thread
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

# The key of the label that has a row's name.
_LABELS = {
    ProfileKind.OFF_CPU: "reason",
    ProfileKind.RUN_QUEUE: "reason",
    ProfileKind.GPU_CALLS: "call",
    ProfileKind.GPU_TIME: "kernel",
    **dict.fromkeys(MEMORY_KINDS, "memory"),
}

_MAX_PENDING_BYTES = 1 << 21
"""A message is written once it has about this many bytes."""

_NO_STACK = -1
"""Index that stands for the frame of stacks without frames."""

# Samples share stacks and labels, so these parts are encoded once: parts of a message that follow
# one another are one message. https://protobuf.dev/programming-guides/encoding/#last-one-wins
_SAMPLE_TAG = bytes([PprofProfile.SAMPLE_FIELD_NUMBER << 3 | 2])
_LOCATION_IDS_TAG = bytes([Sample.LOCATION_ID_FIELD_NUMBER << 3 | 2])


def _varint(number: int) -> bytes:
    """A whole number that is not negative, 7 bits a byte, the lowest first."""
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


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
        """Rough size of the message so far, in units of 8 bytes."""
        self.message = message = PprofProfile()
        self._strings: dict[str, int] = {}
        self._text("")  # The format wants '' first.
        self._mappings: dict[tuple[str, str], Mapping] = {}
        self._functions: dict[tuple[str, str, str], int] = {}
        self._packed: dict[int, bytes] = {}
        """The number of each frame's location, as a varint, by the frame's index."""
        self._samples = bytearray()
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
        stacks: dict[int, bytes] = {}
        labels: dict[tuple[int, str], bytes] = {}
        for row in profile:
            values = [0] * self._values
            values[at : at + 2] = row.events, row.bytes if profile.kind.is_memory else row.ns
            if with_bytes:
                values[at + 2] = row.bytes
            stack = stacks.get(row.stack)
            if stack is None:
                stack = stacks[row.stack] = self._stack(profile, row.stack)
            label = labels.get((row.thread, row.name))
            if label is None:
                label = self._labels(profile.threads[row.thread], name_key, row.name)
                labels[row.thread, row.name] = label
            value = Sample(value=values).SerializeToString()
            size = _varint(len(stack) + len(value) + len(label))
            self._samples += b"".join((_SAMPLE_TAG, size, stack, value, label))
            if len(self._samples) + 8 * self._pending > _MAX_PENDING_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write the rest, and the mappings, whose lengths are known now."""
        for mapping in self._mappings.values():
            self.message.mapping.append(mapping)
        self._flush()

    def _flush(self) -> None:
        """Write the message so far: concatenated protobuf messages are merged by the reader."""
        self._write(self.message.SerializeToString())
        self._write(bytes(self._samples))
        self.message.Clear()
        self._samples.clear()
        self._pending = 0

    def _text(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings)
            self.message.string_table.append(text.encode(errors="replace").decode())
            self._pending += len(text) // 8
        return self._strings[text]

    def _stack(self, profile: Profile, stack: int) -> bytes:
        """The stack's part of a `Sample`."""
        indices = profile.stacks.indices(stack)
        frames = profile.stacks.frames
        packed = self._packed
        numbers = [packed.get(i) or self._location(i, frames[i]) for i in indices]
        if not numbers:
            numbers = [packed.get(_NO_STACK) or self._location(_NO_STACK, NO_STACK)]
        text = b"".join(numbers)
        return b"".join((_LOCATION_IDS_TAG, _varint(len(text)), text))

    def _labels(self, thread: Thread, name_key: int, name: str) -> bytes:
        """The labels' part of a `Sample`."""
        sample = Sample()
        sample.label.add(key=self._text("pid"), num=thread.process.pid)
        sample.label.add(key=self._text("tid"), num=thread.tid)
        sample.label.add(key=self._text("process"), str=self._text(thread.process.name))
        sample.label.add(key=self._text("thread"), str=self._text(thread.name))
        if name:
            sample.label.add(key=name_key, str=self._text(name))
        return sample.SerializeToString()

    def _location(self, index: int, frame: Frame) -> bytes:
        """The number of a new location, as a varint."""
        number = len(self._packed) + 1
        location = self.message.location.add(
            id=number, mapping_id=self._mapping(frame), address=frame.offset
        )
        location.line.add(function_id=self._function(frame), line=frame.line)
        self._pending += 1
        packed = self._packed[index] = _varint(number)
        return packed

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
