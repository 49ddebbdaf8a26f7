# SPDX-License-Identifier: Apache-2.0
"""Opens files of any supported format as one timeline, for `explain` and `diff`."""

from __future__ import annotations

import codecs
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import MissingDependency, NotACapture

if TYPE_CHECKING:
    from sonde.model.timeline import Timeline
    from sonde.query.capture import Capture

_HEAD_BYTES = 4096
"""The beginning of a file that shows its format."""
_PERF_DATA = (b"PERFILE2", b"2ELIFREP", b"PERFFILE")
"""Beginnings of perf.data: in either byte order, and from before Linux 2.6.36."""


def open_timeline(paths: Sequence[Path], *, chosen: bool = False) -> Timeline:
    """The files as one timeline: the first one with device activity, and what the others add to it.
    `chosen`: of captures of very many threads those that a verdict can be about
    (`query.chosen_threads`). Raises CaptureError, MissingDependency."""
    try:
        from sonde.analyze.merge import merged, with_interpreter_lock
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sonde":
            raise
        raise MissingDependency(
            f"the Python package {error.name} is not installed",
            "install Sonde with its dependencies: pip install sonde",
        ) from error
    with ExitStack() as kept:
        parts = [_open(_seekable(path, kept), chosen) for path in paths]
    parts.sort(key=lambda part: not len(part.device))
    return with_interpreter_lock(merged(*parts))


def timeline_of(capture: Capture) -> Timeline:
    """The timeline of a capture that was read already. Raises ModuleNotFoundError."""
    from sonde.analyze.merge import merged, with_interpreter_lock
    from sonde.query.timeline import of_capture

    return with_interpreter_lock(merged(of_capture(capture)))


def _seekable(path: Path, kept: ExitStack) -> Path:
    """The path, or for a pipe that of an unnamed copy. Raises CaptureError.

    A file is opened twice: first to detect its format.
    """
    from sonde.input_files import is_stream
    from sonde.limits import Budget
    from sonde.readers.text import opened

    try:
        if not is_stream(path):
            return path
    except OSError:  # no such descriptor: reported when it is opened
        return path
    copy = kept.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (`kept` closes it)
    budget = Budget(str(path), 1)
    with opened(path) as pipe:
        while piece := pipe.read(1 << 20):
            budget.hold(len(piece))
            copy.write(piece)
    copy.flush()
    return Path(f"/proc/self/fd/{copy.fileno()}")


def _open(path: Path, chosen: bool) -> Timeline:
    """One file as a timeline, by the format that its beginning shows. `chosen`: as of
    `open_timeline`."""
    from sonde.query.framing import FILE_NAME
    from sonde.readers import kineto, nsys_sqlite, otlp_profiles, perf_script
    from sonde.readers.text import opened

    with opened(path) as file:
        head = file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    if head.startswith(FILE_NAME):
        from sonde.query.capture import read
        from sonde.query.timeline import of_capture
        from sonde.recording.large_captures import read_for_verdict

        def reader(path: Path, without: Collection[str]) -> Capture:
            return read(path, without=without)

        capture = read_for_verdict(path, reader) if chosen else read(path)
        return of_capture(capture, chosen=chosen)
    if nsys_sqlite.looks_like(head):
        return nsys_sqlite.read(path)
    if otlp_profiles.looks_like(head):
        return otlp_profiles.read(path)
    if head.startswith(_PERF_DATA):
        raise NotACapture(
            f"{path} is perf's binary data, which names no function: perf finds the names in the "
            "binaries of the machine that recorded it",
            f"run `perf script -i {path} > perf.txt` there, and give perf.txt",
        )
    text = head.decode("utf-8", "replace")
    if kineto.looks_like(text):
        return kineto.read(path)
    if perf_script.looks_like(text):
        return perf_script.read(path)
    raise NotACapture(
        f"{path} has no known format",
        "give a capture (.sonde), a trace of torch.profiler (JSON), Nsight Systems' SQLite export, "
        "output of `perf script`, or OTLP profiles",
    )
