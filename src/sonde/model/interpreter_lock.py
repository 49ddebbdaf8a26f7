# SPDX-License-Identifier: Apache-2.0
"""Which thread of CPython has the interpreter lock (GIL), by the stacks of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from sonde.model.code import Frame
from sonde.model.libraries import GIL_FRAMES
from sonde.model.thread_stack import ThreadStack

_INTERPRETER = re.compile(r"^(libpython|python[\d.]*$)")
"""Code that runs with the lock where Python code called it and it calls nothing: a call of libc may
be made without."""
_LIBC = re.compile(r"^(libc|libpthread|ld-linux)\b")
_CONDITION = re.compile(r"^_*pthread_cond_(timed|clock)?wait")
_GIVES_BACK = ("drop_gil", "PyEval_SaveThread", "_PyThreadState_Detach", "PyEval_ReleaseThread")


class LockUse(StrEnum):
    """What a thread has to do with the interpreter lock."""

    NONE = ""
    """Nothing, or it is not known: it runs other code than the interpreter's."""
    HOLDS = "holds"
    HELD = "held"
    """It had the lock when its stack was taken, and so had another thread at its moment."""
    WAITS = "waits"


def lock_uses(threads: Sequence[ThreadStack]) -> list[LockUse]:
    """The use of each thread. Stacks are taken one after the other, within milliseconds."""
    found = [_use(one) for one in threads]
    if found.count(LockUse.HOLDS) < 2:
        return found
    return [LockUse.HELD if one == LockUse.HOLDS else one for one in found]


def _in_interpreter(inside: Sequence[Frame]) -> bool:
    """Whether the interpreter itself waits for a condition: on Linux, CPython does so for its lock
    alone. Builds without symbols do not show `take_gil`. `inside`: below the innermost Python code.
    """
    native = [one for one in inside if one.kind not in ("kernel", "vdso")]
    others = [one for one in native if not _INTERPRETER.match(one.binary)]
    waits = any(_CONDITION.match(one.function) for one in others)
    return waits and len(others) < len(native) and all(_LIBC.match(one.binary) for one in others)


def _use(thread: ThreadStack) -> LockUse:
    number = next((at for at, one in enumerate(thread.frames) if one.kind == "python"), -1)
    inside: Sequence[Frame] = thread.frames[: max(0, number)]
    functions = {one.function for one in inside}
    if not functions.isdisjoint(GIL_FRAMES) or (number >= 0 and _in_interpreter(inside)):
        return LockUse.WAITS
    if number < 0 or thread.state != "R" or not functions.isdisjoint(_GIVES_BACK):
        return LockUse.NONE
    calls_kernel = any(one.kind == "kernel" and "syscall" in one.function.lower() for one in inside)
    others = [one for one in inside if one.kind != "kernel"]
    is_interpreter = all(_INTERPRETER.match(one.binary) for one in others)
    return LockUse.HOLDS if is_interpreter and not calls_kernel else LockUse.NONE
