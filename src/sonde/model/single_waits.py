# SPDX-License-Identifier: Apache-2.0
"""Waits of threads that a record has one by one."""

from __future__ import annotations

from typing import NamedTuple


class SingleWaitKey(NamedTuple):
    """What distinguishes them."""

    track: int
    """Of the thread, an index into `Timeline.tracks`."""
    reason: str
    serves: bool
    """They are for the next connection, request or task (`Total.serves`)."""
