# SPDX-License-Identifier: Apache-2.0
"""The verdict on a capture that was read, or on files, where it is shown beside other things."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import CaptureTooLarge, SondeError
from sonde.model.verdict import Explained

if TYPE_CHECKING:
    from sonde.query.capture import Capture

_LARGE_BYTES = 8 << 20
"""A file of at least this size is read without single intervals at first."""
_SPANS = ("span",)
"""The table of single intervals: a third of a capture."""


def of_capture(capture: Capture) -> Explained:
    """The verdict; of a capture of very many threads by those that it can be about
    (`query.chosen_threads`). The capture's memory budget is as before."""
    from sonde.analyze.bound import explain
    from sonde.analyze.merge import with_interpreter_lock
    from sonde.query.timeline import of_capture as timeline_of

    budget = capture.budget
    held_bytes = budget.held_bytes if budget is not None else 0
    try:
        return Explained(explain(with_interpreter_lock(timeline_of(capture, chosen=True))))
    except CaptureTooLarge as error:
        return Explained(None, error.cause, command_for(capture.info.path))
    finally:
        if budget is not None:
            budget.held_bytes = held_bytes


def of_files(paths: Sequence[Path]) -> Explained:
    """The verdict on files of any format, those of the same time together."""
    from sonde.analyze.bound import explain
    from sonde.recording.timelines import open_timeline

    try:
        return Explained(explain(open_timeline(paths, chosen=True)))
    except SondeError as error:
        return Explained(None, error.cause)


def read_for_verdict(path: Path, read: Callable[[Path, Collection[str]], Capture]) -> Capture:
    """A capture, without the single intervals of a large one where the verdict needs none: they
    show what held up a device. `read`: reads a file without some tables. Raises CaptureError."""
    from sonde.query.schema import TABLES

    if not _is_large(path):
        return read(path, ())
    capture = read(path, _SPANS)
    kinds = capture.tables["activity"].column("kind").combine_chunks().dictionary.to_pylist()
    if not capture.tables["device_run"].num_rows and "device" not in kinds:
        return capture
    again = read(path, [name for name in TABLES if name not in _SPANS]).tables
    spans = {name: again[name] for name in _SPANS}
    return replace(capture, tables=capture.tables | spans)


def _is_large(path: Path) -> bool:
    """Whether a file can be read twice, and that takes less than reading all of it once."""
    from sonde.input_files import own_descriptor

    with suppress(OSError):
        return own_descriptor(path) is None and path.stat().st_size >= _LARGE_BYTES
    return False


def command_for(path: Path) -> str:
    """The command that gives the verdict on a file; '' for a pipe, which is read once."""
    return "" if str(path).startswith("/dev/") else f"sonde explain {shlex.quote(str(path))}"
