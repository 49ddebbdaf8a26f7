# SPDX-License-Identifier: Apache-2.0
"""speedscope's file format: one "sampled" profile per kind, with weights in ns or bytes.

Source: https://www.speedscope.app/file-format-schema.json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from sonde.export import strict_json
from sonde.export.stack_frames import (
    PerFrame,
    check_size,
    distinct_stacks,
    leaf_labels,
    root_first,
)
from sonde.model.code import NO_STACK, Frame
from sonde.model.profile import BASIC_KINDS, Profile, ProfileKind
from sonde.query import queries
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
        "name": session.info.path.name,
        "activeProfileIndex": 0,
        "profiles": tuple(_profile(profile, frames) for profile in seen),
        # After the profiles: their samples collect the frames.
        "shared": {"frames": frames.listed},
    }
    strict_json.write_compact(out.write, document)


class _Frames:
    """The frames that all profiles share, each with a number."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self._numbers: dict[tuple[str, str, int], int] = {}

    def number(self, name: str, file: str = "", line: int = 0) -> int:
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


def _profile(profile: Profile, shared: _Frames) -> dict[str, Any]:
    is_memory = profile.kind.is_memory
    check_size(profile)
    weights = profile.row_weight
    return {
        "type": "sampled",
        "name": _TITLES[profile.kind],
        "unit": "bytes" if is_memory else "nanoseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": strict_json.Fragments(_samples(profile, shared)),
        "weights": list(weights),
    }


def _samples(profile: Profile, shared: _Frames) -> Iterator[str]:
    """The frame numbers of each row as JSON; those of a stack are formatted once."""
    frames = profile.stacks.frames

    def text_of(frame: Frame) -> str:
        return str(shared.number(frame.name, frame.file or frame.binary, frame.line))

    of_frame = PerFrame(lambda index: text_of(frames[index]))
    known = {
        stack: ",".join(map(of_frame.__getitem__, indices)) or text_of(NO_STACK)
        for stack, indices in root_first(profile.stacks, distinct_stacks([profile]))
    }
    labels, label_of_row = leaf_labels(profile)
    behind = PerFrame(lambda label: f",{shared.number(labels[label])}" if label >= 0 else "")
    before = PerFrame(lambda number: str(shared.number(profile.threads[number].process.label)))
    rows = zip(profile.row_thread, profile.row_stack, label_of_row.tolist(), strict=True)
    for thread, stack, label in rows:
        end = behind[label]  # before the process: the first that needs a number gets the next one
        yield f"[{before[thread]},{known[stack]}{end}]"
