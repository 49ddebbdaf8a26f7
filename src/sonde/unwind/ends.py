# SPDX-License-Identifier: Apache-2.0
"""Why walks of user stacks end: abi/errors.json, `enum unwind_stop`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from sonde import _native


@dataclass(frozen=True, slots=True)
class End:
    """One reason."""

    c_name: str
    name: str
    kind: str
    """whole | early | first | note"""
    text: str


ENDS: Final = tuple(End(*row) for row in json.loads(_native.errors_contract())["stops"])
"""By number."""
TAIL_DROPPED: Final = next(i for i, end in enumerate(ENDS) if end.c_name == "STOP_TAIL")
WHOLE: Final = 0
"""The walk reached the thread's entry."""
