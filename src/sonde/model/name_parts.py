# SPDX-License-Identifier: Apache-2.0
"""Matches names against patterns in bounded time.

Names may come from other tools' files. C++ template names have kilobytes, mostly template arguments
in the middle, and the time of a search grows with the length. So only both ends are searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from sonde.model.timeline import I32, Mask

HEAD_CHARS = 384
TAIL_CHARS = 128


def both_ends(name: str) -> str:
    """The first `HEAD_CHARS` and last `TAIL_CHARS` of a long name; a short name unchanged."""
    if len(name) <= HEAD_CHARS + TAIL_CHARS:
        return name
    return f"{name[:HEAD_CHARS]}\n{name[-TAIL_CHARS:]}"


def matching(names: Sequence[str], numbers: I32, pattern: re.Pattern[str]) -> Mask:
    """Whether the name of each row matches; `numbers` are the rows' indices into `names`."""
    return named(names, numbers, lambda name: pattern.search(both_ends(name)) is not None)


def named(names: Sequence[str], numbers: I32, is_wanted: Callable[[str], bool]) -> Mask:
    """Whether each row has a wanted name; `numbers` are the rows' indices into `names`.

    Only names that occur in `numbers` are checked, each once: rows of one thread use few of all
    names.
    """
    wanted = np.zeros(len(names) + 1, bool)
    for number in np.flatnonzero(np.bincount(numbers)).tolist() if len(numbers) else ():
        wanted[number] = is_wanted(names[number])
    mask: Mask = wanted[numbers]
    return mask
