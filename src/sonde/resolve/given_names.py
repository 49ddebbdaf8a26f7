# SPDX-License-Identifier: Apache-2.0
"""Names that a runtime (CPython) gives the threads of its process, where the kernel has others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sonde.resolve.allowance import ROOT
from sonde.resolve.tracked_process import MAX_THREADS, TrackedProcess

MAX_NAMES: Final = 32_768
"""Of all processes, some 14 MB."""
PARTS: Final = 4
"""A party other than root may have one part in PARTS of them."""
_DEFAULT: Final = re.compile(r"(Thread|Dummy)-[0-9]+( \(.*\))?", re.DOTALL)
"""What Python calls a thread that the program gives no name."""


def shown_name(kernel_name: str, given: str, program: str) -> str:
    """The name to show of a thread that has two. `program`: the kernel's name of the process.

    The kernel's stays where somebody has set it and the runtime's is a mere default. A thread
    begins with the kernel's name of the one that started it; CPython 3.14 sets the beginning of
    Python's.
    """
    is_set = kernel_name not in ("", program) and not given.startswith(kernel_name)
    return kernel_name if is_set and _DEFAULT.fullmatch(given) else given


class GivenNames:
    """Adds such names to processes, within a limit."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max = max_names
        self._held: Counter[int] = Counter()
        """By party, at most: processes that were forgotten since the last count are in it."""

    def add(
        self,
        process: TrackedProcess,
        names: Mapping[int, str],
        all_processes: Callable[[], Iterable[TrackedProcess]],
    ) -> int:
        """Add names by thread id to those of earlier calls; the number that were left out."""
        if not names:
            return 0
        known = process.given_names or {}
        kept = {**known, **names}
        if len(kept) > MAX_THREADS:
            kept = dict(list(names.items())[:MAX_THREADS])
        new = len(kept) - len(known)
        if not self._has_room(process.party, new):
            self._held = Counter()
            for one in all_processes():
                if one.given_names:
                    self._held[one.party] += len(one.given_names)
            if not self._has_room(process.party, new):
                return len(names)
        self._held[process.party] += new
        process.given_names = kept
        return 0

    def _has_room(self, party: int, new: int) -> bool:
        if new <= 0:
            return True
        most = self._max if party == ROOT else self._max // PARTS
        return self._held[party] + new <= most and self._held.total() + new <= self._max
