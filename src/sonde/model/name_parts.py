# SPDX-License-Identifier: Apache-2.0
"""What of a name tells what it stands for.

Names come from files that others made. Those of C++ templates reach some kilobytes, of which the
middle is their arguments; a pattern that is searched for in all of it takes time by its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from sonde.model.timeline import I32, Mask

HEAD_CHARS = 384
TAIL_CHARS = 128


def telling_part(name: str) -> str:
    """The beginning and the end of a long name, any other as it is."""
    if len(name) <= HEAD_CHARS + TAIL_CHARS:
        return name
    return f"{name[:HEAD_CHARS]}\n{name[-TAIL_CHARS:]}"


def matching(names: Sequence[str], numbers: I32, pattern: re.Pattern[str]) -> Mask:
    """Whether the name of each row matches; `numbers` are the rows' indices into `names`."""
    return named(names, numbers, lambda name: pattern.search(telling_part(name)) is not None)


def named(names: Sequence[str], numbers: I32, is_wanted: Callable[[str], bool]) -> Mask:
    """Whether each row has a wanted name; `numbers` are the rows' indices into `names`.

    Each name that occurs is looked at once. That is far less than all names where the rows are one
    thread's of many.
    """
    wanted = np.zeros(len(names) + 1, bool)
    for number in np.flatnonzero(np.bincount(numbers)).tolist() if len(numbers) else ():
        wanted[number] = is_wanted(names[number])
    mask: Mask = wanted[numbers]
    return mask
