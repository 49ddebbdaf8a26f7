# SPDX-License-Identifier: Apache-2.0
"""The stalls of a device with their causes: what `sonde.analyze.blame` finds."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.analyze.causes import CODE
from sonde.analyze.stalls import Stalls
from sonde.model.causes import Cause
from sonde.model.timeline import I32, I64, U8


@dataclass(frozen=True, slots=True)
class BlamedStalls:
    """One cause for each of `stalls`. All columns have one entry for each stall."""

    stalls: Stalls
    cause: U8
    """The cause, as its number in `sonde.analyze.causes.CODE`."""
    track: I32
    """The thread that launched late, or that launched the operation after the stall; -1 unknown."""
    launch_ns: I64
    """When the launch began that ended the stall; the end of the stall where it is unknown."""
    op: I64
    """Row of `stalls.events` that ended the stall, -1 none."""
    earlier_wait_ns: I64
    """A time within the earlier wait that caused the stall; -1: the cause lies in the stall."""
    threads_left: int = 0
    """Late threads that were not analysed, because too many others were late for longer."""

    def total_ns(self, cause: Cause) -> int:
        """Summed length of the stalls with this cause."""
        return int(self.stalls.duration_ns[self.cause == CODE[cause]].sum())
