# SPDX-License-Identifier: Apache-2.0
"""An incident as it is kept: with the rows behind it, so that it can be explained again."""

from __future__ import annotations

import msgspec

from sonde.diagnose.incident import Incident
from sonde.diagnose.moments import CodePlace, Moment, ProcessMoment, Role, Window
from sonde.diagnose.offenders import ancestors
from sonde.diagnose.thread_time import family

TICKS_BEFORE = 32
"""Moments before the suspicion that are kept, the last ones."""
LEAST_CPU_NS = 2_000_000
"""A process outside of the family that used less in a moment is left out of it."""


class Recorded(msgspec.Struct):
    """The content of a file."""

    version: int
    incident: Incident
    window: Window
    node: str = ""
    wall_offset_ns: int = 0
    """Added to a time of the incident it gives nanoseconds since 1970; 0: not known."""


class Headline(msgspec.Struct):
    """What a list of incidents shows of such a file: no rows, which are most of it."""

    incident: Incident
    node: str = ""
    wall_offset_ns: int = 0


def headline(raw: bytes) -> Headline:
    """The incident of a file. Raises ValueError for what is none."""
    return msgspec.json.decode(raw, type=Headline)


def shrunk(window: Window) -> Window:
    """The same window, smaller: waits, places and calls of the victim's family alone, and the last
    `TICKS_BEFORE` moments before. Of others an explanation needs what they used."""
    own = family(window)
    before = [_of_family(moment, own) for moment in window.before[-TICKS_BEFORE:]]
    after = [_of_family(moment, own) for moment in window.after]
    used = {
        place.place
        for moment in (*before, *after)
        for one in moment.processes.values()
        for place in one.places
    }
    empty = CodePlace(Role.UNKNOWN, "")
    last = max(used, default=0) + 1
    places = [
        place if number in used else empty for number, place in enumerate(window.places[:last])
    ]
    there = own | {pid for moment in (*before, *after) for pid in moment.processes}
    # Who starts many that live for a moment may do nothing itself, and is named by theirs.
    there |= {parent for pid in there for parent in ancestors(window, pid)}
    who = {pid: one for pid, one in window.who.items() if pid in there or one.is_kernel}
    return msgspec.structs.replace(window, before=before, after=after, places=places, who=who)


def _of_another(one: ProcessMoment) -> ProcessMoment:
    """What is kept of a process outside of the family."""
    again = [flow for flow in one.flows if flow.operation == "retransmit"]
    copies = [call for call in one.calls if call.op == "copy"]
    return ProcessMoment(one.usage, [], [], one.disk, copies, again, one.devices)


def _of_family(moment: Moment, own: set[int]) -> Moment:
    """A moment with all of the family (`own`), and less of other processes."""
    processes = {
        pid: one if pid in own else _of_another(one)
        for pid, one in moment.processes.items()
        if pid in own or one.usage.cpu_ns >= LEAST_CPU_NS or one.disk or one.devices
    }
    return Moment(moment.start_ns, moment.end_ns, processes, moment.left_out, moment.devices)
