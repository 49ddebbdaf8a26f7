# SPDX-License-Identifier: Apache-2.0
"""pprof's format: a gzipped protocol buffer with one profile.

Each kind has separate sample types in that profile. Show one kind with
`pprof -sample_index=cpu`, one process with `-tagfocus=pid=4211`, one reason of waits with
`-tagfocus=reason=futex`. The messages are declared in `pprof_profile.proto`. Source:
https://github.com/google/pprof/blob/main/proto/README.md
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from sonde.export.pprof_profile_pb2 import Mapping, Sample
from sonde.export.pprof_profile_pb2 import Profile as PprofProfile
from sonde.export.stack_frames import check_size
from sonde.model.code import NO_STACK, Frame, Stacks
from sonde.model.process import Thread
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

_MAX_PENDING_BYTES = 1 << 21
"""A message is written once it has about this many bytes."""

# Samples share stacks and labels, so these parts are encoded once: parts of a message that follow
# one another are one message. https://protobuf.dev/programming-guides/encoding/#last-one-wins
_SAMPLE_TAG = bytes([PprofProfile.SAMPLE_FIELD_NUMBER << 3 | 2])
_VALUES_TAG = bytes([Sample.VALUE_FIELD_NUMBER << 3 | 2])
_LOCATION_IDS_TAG = bytes([Sample.LOCATION_ID_FIELD_NUMBER << 3 | 2])


_SHORT = [bytes([number]) for number in range(0x80)]


def _varint(number: int) -> bytes:
    """A whole number, 7 bits a byte, the lowest first; a negative one as if it had 64 bits."""
    if 0 <= number < 0x80:
        return _SHORT[number]
    number &= (1 << 64) - 1
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def _varints(numbers: I64) -> tuple[bytes, I64]:
    """(numbers that are not negative as varints, one after another; the length of each)."""
    shifted = numbers.astype(np.uint32)[:, np.newaxis] >> np.arange(0, 35, 7, dtype=np.uint32)
    used = shifted > 0
    used[:, 0] = True
    more = np.zeros_like(used)
    more[:, :-1] = used[:, 1:]
    packed = (shifted & 0x7F | more * 0x80).astype(np.uint8)
    return packed[used].tobytes(), used.sum(axis=1)


def _with_no_stack(flat: I32, depth: I64, no_stack: int) -> tuple[I32, I64]:
    """The frames and depths of stacks, with one frame `no_stack` in those without any."""
    empty = np.flatnonzero(depth == 0)
    if not len(empty):
        return flat, depth
    at = (np.cumsum(depth) - depth)[empty]
    return np.insert(flat, at, no_stack).astype(np.int32), np.maximum(depth, 1)


def _first_of_each(values: I32, wanted: Mask) -> tuple[I64, I64]:
    """(the distinct values among the wanted ones, in the order of their first positions; these
    positions, ascending)."""
    at = np.flatnonzero(wanted)
    distinct, first = np.unique(values[at], return_index=True)
    order = np.argsort(first)
    return distinct[order].astype(np.int64), at[first[order]]


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
        self._numbers: I64 = np.zeros(0, np.int64)
        """Of each frame, and of the one that stands for no frames: the number of its location, 0
        none yet."""
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
        before = bytes(self._value_at[profile.kind])  # each of these values is 0
        after = bytes(self._values - len(before) - len(SAMPLE_TYPES[profile.kind]))
        with_bytes = len(SAMPLE_TYPES[profile.kind]) == 3
        name_key = self._text(_LABELS.get(profile.kind, ""))
        check_size(profile)
        stacks = self._stacks(profile)
        parts: dict[int, bytes] = {}
        labels: dict[tuple[int, str], bytes] = {}
        is_memory = profile.kind.is_memory
        for thread, stack, name, events, ns, moved in profile:
            values = before + _varint(events) + _varint(moved if is_memory else ns)
            if with_bytes:
                values += _varint(moved)
            values += after
            part = parts.get(stack)
            if part is None:
                # Stacks come in the order of the rows in which each is first.
                part, new = next(stacks)
                parts[stack] = part
                for index in new:
                    self._location(profile.stacks, index)
            label = labels.get((thread, name))
            if label is None:
                label = self._labels(profile.threads[thread], name_key, name)
                labels[thread, name] = label
            value = _VALUES_TAG + _varint(len(values)) + values
            size = _varint(len(part) + len(value) + len(label))
            self._samples += b"".join((_SAMPLE_TAG, size, part, value, label))
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

    def _stacks(self, profile: Profile) -> Iterator[tuple[bytes, list[int]]]:
        """For each stack of the rows, in the order of their first ones: (its part of a `Sample`,
        the frames in it that have no location yet)."""
        stacks = profile.stacks
        no_stack = len(stacks.frames)
        if not len(self._numbers):
            self._numbers = np.zeros(no_stack + 1, np.int64)
        distinct, _ = grouped(np.asarray(profile.row_stack, np.int64))
        for _, flat, depth in frames_of_stacks(stacks, distinct):
            flat, depth = _with_no_stack(flat, depth, no_stack)
            new, first = _first_of_each(flat, self._numbers[flat] == 0)
            given = int(self._numbers.max())
            self._numbers[new] = np.arange(given + 1, given + 1 + len(new))
            packed, lengths = _varints(self._numbers[flat])
            ends = np.cumsum(depth)
            # Of each stack: where its bytes end, and its new frames.
            byte_ends = np.cumsum(lengths)[ends - 1].tolist()
            new_ends = np.searchsorted(first, ends).tolist()
            frames, at, new_at = new.tolist(), 0, 0
            for end, new_end in zip(byte_ends, new_ends, strict=True):
                text = packed[at:end]
                part = b"".join((_LOCATION_IDS_TAG, _varint(len(text)), text))
                yield part, frames[new_at:new_end]
                at, new_at = end, new_end

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

    def _location(self, stacks: Stacks, index: int) -> None:
        """Add the location of a frame."""
        frame = stacks.frames[index] if index < len(stacks.frames) else NO_STACK
        location = self.message.location.add(
            id=int(self._numbers[index]), mapping_id=self._mapping(frame), address=frame.offset
        )
        location.line.add(function_id=self._function(frame), line=frame.line)
        self._pending += 1

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
