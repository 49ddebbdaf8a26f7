# SPDX-License-Identifier: Apache-2.0
"""speedscope's own file format: one "sampled" profile a kind, weights in nanoseconds,
of memory in bytes.

Source: https://www.speedscope.app/file-format-schema.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, BinaryIO

from sonde.export.picture import frames_root_first, tip
from sonde.model.profile import KINDS, MEMORY, Profile
from sonde.query import questions
from sonde.query.questions import EVERYTHING, Where
from sonde.query.session import Session

_TITLES = {
    "cpu": "On-CPU",
    "blocked": "Off-CPU: blocked",
    "runqueue": "Off-CPU: run queue",
    "device": "Device calls",
    "kernel": "On the device",
    "mapped": "Memory mapped",
    "faulted": "Memory touched",
    "held": "Memory held",
}


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[str] = KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write one JSON document. Kinds of which nothing was seen are left out, unless all are."""
    profiles = [questions.profile(session, kind, where) for kind in kinds]
    seen = [profile for profile in profiles if len(profile)] or profiles
    frames = _Frames()
    document = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": f"sonde@{session.info.version}",
        "name": session.info.path.name,
        "activeProfileIndex": 0,
        "profiles": [_profile(profile, frames) for profile in seen],
        "shared": {"frames": frames.listed},
    }
    out.write(json.dumps(document, separators=(",", ":")).encode(errors="replace"))


class _Frames:
    """The frames that all profiles share."""

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
    is_memory = profile.kind in MEMORY
    stacks = profile.stacks
    known: dict[int, list[int]] = {}
    samples: list[list[int]] = []
    weights: list[int] = []
    for row in profile:
        if row.stack not in known:
            known[row.stack] = [
                shared.number(frame.name, frame.file or frame.binary, frame.line)
                for frame in frames_root_first(stacks, row.stack)
            ]
        process = profile.threads[row.thread].process
        sample = [shared.number(process.label), *known[row.stack]]
        if end := tip(profile, row):
            sample.append(shared.number(end))
        samples.append(sample)
        weights.append(row.bytes if is_memory else row.ns)
    return {
        "type": "sampled",
        "name": _TITLES[profile.kind],
        "unit": "bytes" if is_memory else "nanoseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
