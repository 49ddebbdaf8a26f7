# SPDX-License-Identifier: Apache-2.0
"""speedscope's file format: one "sampled" profile per kind, with weights in ns or bytes.

Source: https://www.speedscope.app/file-format-schema.json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.export import strict_json
from sonde.export.json_columns import blocks
from sonde.export.protobuf_columns import lengths
from sonde.export.stack_frames import (
    I64,
    check_size,
    first_of_each,
    first_rows,
    leaf_labels,
    root_first_blocks,
    with_no_stack,
)
from sonde.model.code import NO_STACK
from sonde.model.profile import BASIC_KINDS, Profile, ProfileKind
from sonde.query import queries
from sonde.query.frame_columns import FrameColumns
from sonde.query.grouping import grouped
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session

_TITLES = {
    ProfileKind.ON_CPU: "On-CPU",
    ProfileKind.OFF_CPU: "Off-CPU: blocked",
    ProfileKind.RUN_QUEUE: "Off-CPU: run queue",
    ProfileKind.GPU_CALLS: "GPU API calls",
    ProfileKind.GPU_TIME: "GPU time",
    ProfileKind.MEMORY_MAPPED: "Memory mapped",
    ProfileKind.MEMORY_FAULTED: "Memory page-faulted",
    ProfileKind.MEMORY_HELD: "Memory held",
}


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write one JSON document. Empty kinds are left out, unless all are empty."""
    profiles = [queries.profile(session, kind, where) for kind in kinds]
    seen = [profile for profile in profiles if len(profile)] or profiles
    frames = _Frames()
    document = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": f"sonde@{session.info.version}",
        "name": session.info.path.name + (f", {session.hide.label}" if session.hide else ""),
        "activeProfileIndex": 0,
        "profiles": tuple(_profile(session, profile, frames) for profile in seen),
        # After the profiles: their samples collect the frames.
        "shared": {"frames": frames.listed},
    }
    strict_json.write_compact(out.write, document)


class _Frames:
    """The frames that all profiles share, each with a number."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self._numbers: dict[tuple[str, str, int], int] = {}

    def numbers(self, frames: FrameColumns, wanted: I64) -> list[int]:
        """Of frames by their index; the one after the last is `NO_STACK`."""
        at = wanted[wanted < len(frames)]
        texts = (frames.texts_of(column, at) for column in ("file", "binary"))
        rows = zip(frames.names_of(at), *texts, frames.line[at].tolist(), strict=True)
        return [
            self.number(*next(rows)) if one < len(frames) else self.number(*_NO_STACK)
            for one in wanted.tolist()
        ]

    def number(self, name: str, file: str = "", binary: str = "", line: int = 0) -> int:
        file = file or binary
        key = (name, file, line)
        if key not in self._numbers:
            self._numbers[key] = len(self.listed)
            frame: dict[str, Any] = {"name": name}
            if file:
                frame["file"] = file
            if line:
                frame["line"] = line
            self.listed.append(frame)
        return self._numbers[key]


_NO_STACK = (NO_STACK.name, NO_STACK.file, NO_STACK.binary, NO_STACK.line)


def _profile(session: Session, profile: Profile, shared: _Frames) -> dict[str, Any]:
    is_memory = profile.kind.is_memory
    check_size(profile)
    weights = profile.row_weight
    return {
        "type": "sampled",
        "name": _TITLES[profile.kind],
        "unit": "bytes" if is_memory else "nanoseconds",
        "startValue": 0,
        "endValue": sum(weights),  # of Python: too large for an array, maybe
        "samples": strict_json.Fragments(_samples(session, profile, shared)),
        "weights": np.asarray(weights, np.int64),
    }


def _samples(session: Session, profile: Profile, shared: _Frames) -> Iterator[str]:
    """The frame numbers of each row as JSON, some thousand rows in a text."""
    wanted, stack = grouped(np.asarray(profile.row_stack, np.int64))
    by_number = np.argsort(wanted)
    of_stacks = _texts_of_stacks(session, profile, wanted[by_number], shared)
    stack = np.argsort(by_number)[stack]
    labels, label = leaf_labels(profile)
    threads, thread = grouped(np.asarray(profile.row_thread, np.int64))
    processes = [profile.threads[number].process.label for number in threads.tolist()]
    before = np.zeros(len(threads), np.int64)
    behind = [""] * len(labels) + [""]  # the last is that of rows without a label
    firsts = [(row, 0) for row in first_rows(grouped(label)[1]).tolist() if label[row] >= 0]
    firsts += [(row, 1) for row in first_rows(thread).tolist()]
    for row, which in sorted(firsts):  # the first that needs a number gets the next one
        if which:
            before[thread[row]] = shared.number(processes[thread[row]])
        else:
            behind[label[row]] = f",{shared.number(labels[label[row]])}"
    ends, begins = pa.array(behind), pa.array(before).cast(pa.string())
    label = np.where(label < 0, len(labels), label)
    for rows in blocks(lengths(of_stacks)[stack]):
        columns = ((begins, thread), (of_stacks, stack), (ends, label))
        texts = [column.take(pa.array(index[rows])) for column, index in columns]
        joined = pc.binary_join_element_wise(",[", texts[0], ",", texts[1], texts[2], "]", "")
        yield str(joined.buffers()[2], "ascii")[1:]


def _texts_of_stacks(session: Session, profile: Profile, wanted: I64, shared: _Frames) -> pa.Array:
    """The frame numbers of stacks, with commas between them."""
    frames = session.frames
    no_stack = len(frames)
    number = np.full(no_stack + 1, -1, np.int32)
    parts = []
    for _, flat, ends in root_first_blocks(profile.stacks, wanted):
        flat, depth = with_no_stack(flat, np.diff(ends, prepend=0), no_stack)
        new, _ = first_of_each(flat, number[flat] < 0)
        number[new] = shared.numbers(frames, new)
        offsets = np.append(0, np.cumsum(depth)).astype(np.int32)
        texts = (
            pa.array(np.arange(len(shared.listed))).cast(pa.string()).take(pa.array(number[flat]))
        )
        parts.append(pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), texts), ","))
    return pa.concat_arrays(parts) if parts else pa.array([], pa.string())
