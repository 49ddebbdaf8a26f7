# SPDX-License-Identifier: Apache-2.0
"""Small numbers for the streams of a process: their handles are addresses, which are not recorded.

A number lasts as long as its ring is read, or one stream would become two. So these are kept when
other memory of a ring is given back, and take little: two sorted arrays, of handles and of numbers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

MAX_STREAMS: Final = 4_096
"""Streams of a ring that get a number; it is 0 for further ones."""
STREAM_BYTES: Final = 12
"""Memory of one stream, and of the room for more that an array has: 48 KB of a ring at most, of
all 256 rings (`device_time.MAX_RINGS`) 12 MB."""


class StreamNumbers:
    """The numbers of one ring's streams, from 1 on."""

    __slots__ = ("_handles", "_numbers")

    def __init__(self) -> None:
        self._handles = array("Q")
        """Sorted."""
        self._numbers = array("H")
        """Of the same streams."""

    def __len__(self) -> int:
        return len(self._handles)

    def of(self, handle: int) -> int:
        """The number of a stream; 0 without a handle, and beyond MAX_STREAMS."""
        if not handle:
            return 0
        handles = self._handles
        at = bisect_left(handles, handle)
        if at < len(handles) and handles[at] == handle:
            return self._numbers[at]
        number = len(handles) + 1
        if number > MAX_STREAMS:
            return 0
        handles.insert(at, handle)
        self._numbers.insert(at, number)
        return number
