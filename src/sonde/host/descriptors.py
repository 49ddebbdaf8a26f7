# SPDX-License-Identifier: Apache-2.0
"""How many files this process may have open."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from typing import Final

WANTED: Final = 65_536
"""Several times what all bounds add up to: 4,096 probed functions with up to three descriptors
each, 256 control groups with up to seven, 256 rings. The usual soft limit is 1,024."""


def raise_limit(wanted: int | None = None) -> int:
    """Raise the soft limit to `wanted` (None: to WANTED), or to the hard one where that is lower;
    returns how many files may be open then. Children inherit it, so a program that is to be
    recorded is forked before this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if wanted is None else wanted
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    reached = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < reached:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
            return reached
    return soft
