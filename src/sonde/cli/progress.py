# SPDX-License-Identifier: Apache-2.0
"""Live counts of a recording: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer
from typing import TYPE_CHECKING, TextIO

from sonde.export.layout import size

if TYPE_CHECKING:
    from sonde.agent import Live

PLAIN_EVERY_S = 10.0
"""Between lines where the stream is no terminal."""
SLOW_START_S = 3.0
"""A start that takes longer is noted."""
_BAR_CELLS = 16
"""Width of the bar, in characters."""


@contextmanager
def noted_start(stream: TextIO, *, quiet: bool = False) -> Iterator[None]:
    """A block that starts a recording: where that takes long, a line names it."""
    text = "sonde: starting: loading programs into the kernel takes long where the CPUs are busy\n"

    def note() -> None:
        with suppress(OSError, ValueError):  # closed meanwhile
            stream.write(text)
            stream.flush()

    timer = Timer(SLOW_START_S, note)
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Progress:
    """Prints `Live` counts to `stream`, at most once a second on a terminal."""

    def __init__(self, stream: TextIO, duration_s: float | None, *, quiet: bool = False) -> None:
        self._stream = stream
        self._duration_s = duration_s
        self._quiet = quiet
        self._rewrites = stream.isatty()
        self._every_s = 1.0 if self._rewrites else PLAIN_EVERY_S
        self._next_s = time.monotonic() + (0.0 if self._rewrites else PLAIN_EVERY_S)
        self._shown = False

    def update(self, live: Live) -> None:
        """Show the counts, if the last ones were shown long enough ago."""
        if self._quiet or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._every_s * 0.95  # ticks may come a little early
        line = describe(live, self._duration_s)
        if self._rewrites:
            self._stream.write(f"\r\033[K{line}")
            self._shown = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Erase the line before other output."""
        if self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()
            self._shown = False


def describe(live: Live, duration_s: float | None) -> str:
    """One line of counts, e.g. `12 s  4,712 samples  83,201 waits  96 device calls  1.20 MB`."""
    if duration_s:
        filled = min(_BAR_CELLS, int(live.elapsed_s / duration_s * _BAR_CELLS))
        bar = "█" * filled + "░" * (_BAR_CELLS - filled)
        parts = [f"{bar} {live.elapsed_s:.0f}/{duration_s:g} s"]
    else:
        parts = [f"{live.elapsed_s:.0f} s"]
    parts += [
        f"{live.samples:,} samples",
        f"{live.waits:,} waits",
        f"{live.device_calls:,} device calls",
        size(live.written_bytes),
    ]
    if live.lost:
        parts.append(f"{live.lost:,} LOST")
    return "  ".join(parts)
