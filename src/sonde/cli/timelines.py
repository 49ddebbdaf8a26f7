# SPDX-License-Identifier: Apache-2.0
"""Files of any kind that `explain` and `diff` are given, as one timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import MissingDependency, NotACapture

if TYPE_CHECKING:
    from sonde.model.timeline import Timeline

_HEAD_BYTES = 4096


def open_timeline(paths: Sequence[Path]) -> Timeline:
    """The files as one timeline: the first that knows a device leads. Raises CaptureError."""
    try:
        from sonde.analyze.merge import merged, with_interpreter_lock
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sonde":
            raise
        raise MissingDependency(
            f"the Python package {error.name} is not installed",
            "install Sonde with its dependencies: pip install sonde",
        ) from error
    parts = [_open(path) for path in paths]
    parts.sort(key=lambda part: not len(part.device))
    return with_interpreter_lock(merged(*parts))


def _open(path: Path) -> Timeline:
    from sonde.readers import kineto, otlp_profiles, perf_script
    from sonde.readers.text import opened

    with opened(path) as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"SONDE"):
        from sonde.query.capture import read
        from sonde.query.timeline import of_capture

        return of_capture(read(path))
    if otlp_profiles.looks_like(head):
        return otlp_profiles.read(path)
    text = head.decode("utf-8", "replace")
    if kineto.looks_like(text):
        return kineto.read(path)
    if perf_script.looks_like(text):
        return perf_script.read(path)
    raise NotACapture(
        f"{path} is of no known kind",
        "give a capture (.sonde), a trace of torch.profiler (JSON), what `perf script` printed, or "
        "OTLP profiles",
    )
