# SPDX-License-Identifier: Apache-2.0
"""The verdict on a capture that was read, or on files, where it is shown beside other things."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import CaptureTooLarge, SondeError
from sonde.model.verdict import Explained

if TYPE_CHECKING:
    from sonde.query.capture import Capture


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


def command_for(path: Path) -> str:
    """The command that gives the verdict on a file; '' for a pipe, which is read once."""
    return "" if str(path).startswith("/dev/") else f"sonde explain {shlex.quote(str(path))}"
