# SPDX-License-Identifier: Apache-2.0
"""One whole run of a program, or of a block of it, as the kernel accounted for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A program that was recorded from its start to its end (`sonde record -- CMD`), or a block of
    a program (`sonde.record()`).

    Source: wait4(2), for a block getrusage(2). CPU times include descendants that ended and were
    waited for.
    """

    wall_ns: int
    """From its start to its end."""
    user_ns: int
    """CPU time in user mode."""
    system_ns: int
    """CPU time in the kernel."""
    peak_rss_bytes: int
    """Largest resident set of any one of its processes."""
    status: int
    """Exit code; negative: the number of the signal that ended it."""

    @property
    def cpu_ns(self) -> int:
        """CPU time in user mode and in the kernel."""
        return self.user_ns + self.system_ns

    @property
    def exit_code(self) -> int:
        """As a shell reports it, 0 to 255: after a signal 128 plus its number."""
        return self.status if self.status >= 0 else 128 - self.status
