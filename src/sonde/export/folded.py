# SPDX-License-Identifier: Apache-2.0
"""Folded stacks, one per line, as Brendan Gregg's FlameGraph reads them.

    python3;_start;main;train_step;do_syscall_64_[k] 4211

The process comes first. Frames of the kernel end in `_[k]`, of JIT code in `_[j]`, inlined ones in
`_[i]`. Weights are CPU samples, bytes of memory, and microseconds of all other kinds; a stack whose
weight rounds to 0 has no line. In names `;` is `:`. Files that the server's page saves have the
same form, but times in ns (web/src/exports.ts). Source:
https://github.com/brendangregg/FlameGraph#2-fold-stacks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from sonde.errors import CaptureTooLarge
from sonde.export.layout import one_line
from sonde.export.stack_frames import (
    I64,
    check_size,
    distinct_stacks,
    leaf_labels,
    root_first_blocks,
    summed,
)
from sonde.model.code import NO_STACK, Frame
from sonde.model.profile import BASIC_KINDS, Profile, ProfileKind
from sonde.query import queries
from sonde.query.grouping import grouped
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session

MAX_CHARS = 1 << 30
"""Of the folded stacks of one kind."""
_ANNOTATIONS = {"kernel": "_[k]", "jit": "_[j]", "inlined": "_[i]"}


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write one line per stack, heaviest first. With several kinds, the first frame is the kind."""
    texts = _Texts()
    for kind in kinds:
        profile = queries.profile(session, kind, where)
        check_size(profile)
        lines = _lines(profile, texts)
        _check_size(texts, lines)
        in_samples = kind == ProfileKind.ON_CPU
        amounts = profile.row_events if in_samples else profile.row_weight
        weights = summed(amounts, lines.of_row, len(lines.path))
        unit = 1 if in_samples or kind.is_memory else 1000
        before = f"{kind};" if len(kinds) > 1 else ""
        heaviest = sorted(range(len(weights)), key=lambda line: -weights[line])
        for line in heaviest:
            if rounded := round(weights[line] / unit):
                text = ";".join(map(texts.listed.__getitem__, lines.numbers(line)))
                out.write(f"{before}{text} {rounded}\n".encode(errors="replace"))


@dataclass(frozen=True, slots=True)
class _Lines:
    """The different lines of a profile, in the order of the rows in which each is first. Lines are
    indices of their texts: as text they would need many times the capture's memory."""

    process: list[int]
    path: list[int]
    """Index in `paths`."""
    end: list[int]
    """Of the leaf label; -1 none."""
    of_row: I64
    paths: list[bytes]
    """The texts of the frames of each, as int32; different ones."""

    def numbers(self, line: int) -> Iterator[int]:
        """The numbers of a line's texts: process, frames, and the leaf label if there is one."""
        yield self.process[line]
        yield from memoryview(self.paths[self.path[line]]).cast("i")
        if self.end[line] >= 0:
            yield self.end[line]


def _lines(profile: Profile, texts: _Texts) -> _Lines:
    used = distinct_stacks([profile])
    paths, path_of_stack = _paths(profile, used, texts)
    path = path_of_stack[np.searchsorted(used, np.asarray(profile.row_stack, np.int64))]
    threads, thread = grouped(np.asarray(profile.row_thread, np.int64))
    processes = [
        texts.number(_safe(profile.threads[number].process.name)) for number in threads.tolist()
    ]
    process = np.array(processes, np.int64)[thread]
    labels, label = leaf_labels(profile)
    # One more, for rows without a label.
    ends = np.array([*(texts.number(_safe(text)) for text in labels), -1], np.int64)
    end = ends[label]
    of_both, index = grouped((process << 32) | path)
    keys, of_row = grouped((index << 32) | (end + 1))
    both = of_both[keys >> 32]
    return _Lines(
        process=(both >> 32).tolist(),
        path=(both & 0xFFFFFFFF).tolist(),
        end=((keys & 0xFFFFFFFF) - 1).tolist(),
        of_row=of_row,
        paths=paths,
    )


def _paths(profile: Profile, used: I64, texts: _Texts) -> tuple[list[bytes], I64]:
    """(the different paths of the stacks, for each stack the index of its path)."""
    frames = profile.stacks.frames
    nothing = np.array([texts.of_frame(NO_STACK)], np.int32).tobytes()
    of_frame = np.full(len(frames), -1, np.int32)
    paths: dict[bytes, int] = {}
    of_stack = []
    for _, flat, ends in root_first_blocks(profile.stacks, used):
        for index in np.unique(flat[of_frame[flat] < 0]).tolist():
            of_frame[index] = texts.of_frame(frames[index])
        packed, begin = of_frame[flat].tobytes(), 0
        for end in (4 * ends).tolist():
            of_stack.append(paths.setdefault(packed[begin:end] or nothing, len(paths)))
            begin = end
    return [*paths], np.array(of_stack, np.int64)


class _Texts:
    """Interned texts: a number for each text of a line."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self._numbers: dict[str, int] = {}
        self._frames: dict[tuple[str, str], int] = {}

    def number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self.listed)
            self.listed.append(text)
        return number

    def of_frame(self, frame: Frame) -> int:
        key = (frame.name, frame.kind)
        number = self._frames.get(key)
        if number is None:
            text = _safe(frame.name) + _ANNOTATIONS.get(frame.kind, "")
            number = self._frames[key] = self.number(text)
        return number


def _check_size(texts: _Texts, lines: _Lines) -> None:
    """Raise CaptureTooLarge for too much text: any line may repeat a long name."""
    length = np.array([*map(len, texts.listed), 0], np.int64)  # one more, for no label
    of_path = np.array(
        [int(length[np.frombuffer(path, np.int32)].sum()) for path in lines.paths], np.int64
    )
    sizes = of_path[lines.path] + length[lines.process] + length[lines.end]
    size = int(sizes.sum())
    if size > MAX_CHARS:
        raise CaptureTooLarge(
            f"the folded stacks of this capture have {size:,} characters",
            "choose a process (--pid) or a part of the time (--from, --to), or use --format html",
        )


def _safe(name: str) -> str:
    """A name that cannot end its line or its frame."""
    return one_line(name).replace(";", ":")
