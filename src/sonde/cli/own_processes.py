# SPDX-License-Identifier: Apache-2.0
"""Leaves out Sonde's own processes where `-p` names them: `-p $(pgrep -f NAME)` finds every command
line with that name, also the shell, sudo and Sonde that it was typed for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sonde import procfs
from sonde.errors import UsageError


def without_own(pids: Sequence[int]) -> tuple[list[int], str]:
    """(the processes to record, a line on those that are left out, '' where there are none).

    Sonde's own process is always left out. One that started it is where others are named, too: a
    program may record itself by such a command. Raises UsageError where none is left.
    """
    me = os.getpid()
    above = set(procfs.parents(me))
    left_out = {me} if all(pid in above or pid == me for pid in pids) else {me, *above}
    kept = list(dict.fromkeys(pid for pid in pids if pid not in left_out))
    found = [pid for pid in dict.fromkeys(pids) if pid in left_out]
    if not kept and found:
        raise UsageError(
            f"process {me} is this command itself",
            "Look the program up: pgrep -a -f NAME. Its process may have ended.",
        )
    if not found:
        return kept, ""
    names = ", ".join(f"{pid} ({_name(pid)})" for pid in found)
    whose = "this command" if found == [me] else "this command and what started it"
    return kept, f"not recorded: {names}, {whose}"


def _name(pid: int) -> str:
    try:
        lines = procfs.read_lines(Path(f"/proc/{pid}/comm"))
    except OSError:
        return "ended"
    return lines[0] if lines else ""
