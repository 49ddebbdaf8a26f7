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

from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from sonde.errors import CaptureTooLarge
from sonde.export.layout import one_line
from sonde.export.stack_frames import (
    PerFrame,
    check_size,
    distinct_stacks,
    leaf_label,
    root_first,
)
from sonde.model.code import NO_STACK, Frame
from sonde.model.profile import BASIC_KINDS, Profile, ProfileKind
from sonde.query import queries
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
        of_stack = _paths(profile, texts)
        processes = [texts.number(_safe(thread.process.name)) for thread in profile.threads]
        # Lines by indices of their texts: as text they would need many times the capture's memory.
        weights: dict[tuple[int, tuple[int, ...], int], int] = {}
        in_samples = kind == ProfileKind.ON_CPU
        for row, weight in zip(profile, profile.row_weight, strict=True):
            end = leaf_label(profile, row)
            key = (
                processes[row.thread],
                of_stack[row.stack],
                texts.number(_safe(end)) if end else -1,
            )
            weights[key] = weights.get(key, 0) + (row.events if in_samples else weight)
        _check_size(texts, weights)
        unit = 1 if in_samples or kind.is_memory else 1000
        before = f"{kind};" if len(kinds) > 1 else ""
        for key, weight in sorted(weights.items(), key=lambda item: -item[1]):
            if rounded := round(weight / unit):
                line = ";".join(map(texts.listed.__getitem__, _numbers(key)))
                out.write(f"{before}{line} {rounded}\n".encode(errors="replace"))


def _paths(profile: Profile, texts: _Texts) -> dict[int, tuple[int, ...]]:
    """The texts of each stack's frames; equal ones are one object."""
    frames = profile.stacks.frames
    of_frame = PerFrame(lambda index: texts.of_frame(frames[index]))
    nothing = (texts.of_frame(NO_STACK),)
    paths: dict[tuple[int, ...], tuple[int, ...]] = {}
    of_stack = {}
    for stack, indices in root_first(profile.stacks, distinct_stacks([profile])):
        path = tuple(map(of_frame.__getitem__, indices)) or nothing
        of_stack[stack] = paths.setdefault(path, path)
    return of_stack


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


def _numbers(key: tuple[int, tuple[int, ...], int]) -> Iterator[int]:
    """The numbers of a line's texts: process, frames, and the leaf label if there is one."""
    process, path, end = key
    yield process
    yield from path
    if end >= 0:
        yield end


def _check_size(texts: _Texts, keys: Iterable[tuple[int, tuple[int, ...], int]]) -> None:
    """Raise CaptureTooLarge for too much text: any line may repeat a long name."""
    length = [len(text) for text in texts.listed]
    of_path: dict[int, int] = {}
    size = 0
    for process, path, end in keys:
        if id(path) not in of_path:
            of_path[id(path)] = sum(map(length.__getitem__, path))
        size += length[process] + of_path[id(path)] + (length[end] if end >= 0 else 0)
    if size > MAX_CHARS:
        raise CaptureTooLarge(
            f"the folded stacks of this capture have {size:,} characters",
            "choose a process (--pid) or a part of the time (--from, --to), or use --format html",
        )


def _safe(name: str) -> str:
    """A name that cannot end its line or its frame."""
    return one_line(name).replace(";", ":")
