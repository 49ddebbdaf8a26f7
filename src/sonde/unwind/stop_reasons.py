# SPDX-License-Identifier: Apache-2.0
"""The reasons why a user stack ends where it does: `enum unwind_stop`, from abi/errors.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from sonde import _native


@dataclass(frozen=True, slots=True)
class StopReason:
    """One reason."""

    c_name: str
    """Its constant in C."""
    name: str
    """In captures and metrics."""
    kind: str
    """whole: the stack is complete. early: it is cut. first: cut, at the first walks of a process
    only. note: further information on a walk."""
    text: str
    """One sentence for people."""


STOP_REASONS: Final = tuple(
    StopReason(*row) for row in json.loads(_native.errors_contract())["stops"]
)
"""By number."""
TAIL_DROPPED: Final = next(
    i for i, reason in enumerate(STOP_REASONS) if reason.c_name == "STOP_TAIL"
)
"""Number of the one reason that is no walk's: user space sets it where the pieces of a long stack
behind the first were dropped before it read them."""
WHOLE: Final = 0
"""Number of the reason that the walk reached the thread's entry."""
