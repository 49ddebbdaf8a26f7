# SPDX-License-Identifier: Apache-2.0
"""Opens files of any supported format as one timeline, for `explain` and `diff`."""

from __future__ import annotations

import codecs
import importlib
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sonde.errors import MissingDependency, NotACapture, SondeError

if TYPE_CHECKING:
    from sonde.model.timeline import Timeline
    from sonde.query.capture import Capture

_HEAD_BYTES = 4096
"""The beginning of a file that shows its format."""
_PERF_DATA = (b"PERFILE2", b"2ELIFREP", b"PERFFILE")
"""Beginnings of perf.data: in either byte order, and from before Linux 2.6.36."""


class Record(NamedTuple):
    """What was recorded at one time."""

    files: tuple[str, ...]
    timeline: Timeline


def open_timeline(paths: Sequence[Path], *, chosen: bool = False) -> Timeline:
    """The files as one timeline: the first one with device activity, and what the others add to it.
    `chosen`: of captures of very many threads those that a verdict can be about
    (`query.chosen_threads`). Raises CaptureError, MissingDependency."""
    parts = _opened(paths, chosen)
    from sonde.analyze.merge import merged, with_interpreter_lock

    parts.sort(key=lambda part: not len(part.device))
    return with_interpreter_lock(merged(*parts))


def open_records(paths: Sequence[Path], *, chosen: bool = False) -> list[Record]:
    """The files as one timeline for each record: a trace and what was captured meanwhile are one,
    two captures are two (`analyze.merge.grouped`). `chosen`, raises: as of `open_timeline`."""
    parts = _opened(paths, chosen)
    from sonde.analyze.merge import grouped, merged, with_interpreter_lock

    return [
        Record(
            tuple(named(paths[number]) for number in sorted(group)),
            with_interpreter_lock(merged(*(parts[number] for number in group))),
        )
        for group in grouped(parts)
    ]


def _opened(paths: Sequence[Path], chosen: bool) -> list[Timeline]:
    """A timeline for each file. `chosen`, raises: as of `open_timeline`."""
    try:
        importlib.import_module("sonde.analyze.merge")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sonde":
            raise
        raise MissingDependency(
            f"the Python package {error.name} is not installed",
            "install Sonde with its dependencies: pip install sonde",
        ) from error
    with ExitStack() as kept:
        return [_open_named(path, kept, chosen) for path in paths]


def named(path: Path) -> str:
    """A file for people: its path, of /dev/stdin 'standard input'."""
    return "standard input" if str(path) == "/dev/stdin" else str(path)


def _open_named(path: Path, kept: ExitStack, chosen: bool) -> Timeline:
    """`_open`, with errors that name what the user named, not the copy that is read."""
    readable = _seekable(path, kept)
    try:
        return _open(readable, chosen)
    except SondeError as error:
        for text in {str(readable), str(path)}:
            error.cause = error.cause.replace(text, named(path))
        raise


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
