# SPDX-License-Identifier: Apache-2.0
"""Names and tracks of a timeline, whose memory a budget accounts for."""

from __future__ import annotations

from typing import Final

from sonde.limits import Budget, text_bytes
from sonde.model.interner import Interner

NAME_BYTES: Final = 200
"""Memory of a name beside its text, from reading to the verdict."""
TRACK_BYTES: Final = 700
"""Memory of a track beside its names, from reading to the verdict."""


class ChargedInterner(Interner):
    """An interner of a file that somebody else wrote: it may name a track and a name in each row.

    All methods raise CaptureTooLarge.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self._budget = budget
        self._charged = 0
        """Tracks so far."""

    def name(self, text: str) -> int:
        """The index of a name in `names`."""
        if text not in self._name:
            self._budget.hold(NAME_BYTES + text_bytes(text))
        return super().name(text)

    def thread(self, pid: int, tid: int, name: str = "", process: str = "") -> int:
        """The index in `tracks` of a thread."""
        number = super().thread(pid, tid, name, process)
        self._charge(number, name, process)
        return number

    def stream(self, device: int, stream: int, pid: int = 0) -> int:
        """The index in `tracks` of a stream."""
        number = super().stream(device, stream, pid)
        self._charge(number)
        return number

    def _charge(self, number: int, *names: str) -> None:
        """A track that may be new, with its names."""
        if number == self._charged:
            self._charged += 1
            self._budget.hold(TRACK_BYTES + sum(map(text_bytes, names)))
