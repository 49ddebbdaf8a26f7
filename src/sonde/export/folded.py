# SPDX-License-Identifier: Apache-2.0
"""Folded stacks, one a line, as Brendan Gregg's FlameGraph reads them.

    python3;_start;main;train_step;do_syscall_64_[k] 4211

The process comes first, kernel frames carry `_[k]`, compiled ones
`_[j]`, inlined ones `_[i]`. Weights are samples
on a CPU, bytes of memory, and microseconds of anything else. Source:
https://github.com/brendangregg/FlameGraph#2-fold-stacks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from sonde.export.layout import one_line
from sonde.export.picture import frames_root_first, tip
from sonde.model.code import Frame
from sonde.model.profile import KINDS, MEMORY
from sonde.query import questions
from sonde.query.questions import EVERYTHING, Where
from sonde.query.session import Session

_ANNOTATIONS = {"kernel": "_[k]", "jit": "_[j]", "inlined": "_[i]"}


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[str] = KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write one line a stack, heaviest first. Several kinds are told apart by a first frame."""
    written: dict[Frame, str] = {}

    def text(frame: Frame) -> str:
        if frame not in written:
            written[frame] = _safe(frame.name) + _ANNOTATIONS.get(frame.kind, "")
        return written[frame]

    for kind in kinds:
        profile = questions.profile(session, kind, where)
        weights: dict[str, int] = {}
        for row in profile:
            process = profile.threads[row.thread].process
            parts = [_safe(process.name), *map(text, frames_root_first(profile.stacks, row.stack))]
            if len(kinds) > 1:
                parts.insert(0, kind)
            if end := tip(profile, row):
                parts.append(_safe(end))
            line = ";".join(parts)
            weight = row.events if kind == "cpu" else row.bytes if kind in MEMORY else row.ns
            weights[line] = weights.get(line, 0) + weight
        unit = 1 if kind == "cpu" or kind in MEMORY else 1000
        for line, weight in sorted(weights.items(), key=lambda item: -item[1]):
            if rounded := round(weight / unit):
                out.write(f"{line} {rounded}\n".encode(errors="replace"))


def _safe(name: str) -> str:
    return one_line(name).replace(";", ":")
