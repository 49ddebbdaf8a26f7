# SPDX-License-Identifier: Apache-2.0
"""A timeline as a Perfetto trace, for https://ui.perfetto.dev.

Written packet by packet with the messages of the `perfetto` package (its generated protos), all on
one sequence (Perfetto's word for packets of one writer, which share interned names): track
descriptors, begin and end of each slice, a flow from each call to the run on the device that it
launched, counters, and a track of causes per device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from sonde.export.tracks import Track, tracks_of
from sonde.model.timeline import Timeline

_SEQUENCE = 1
_REALTIME, _MONOTONIC = 1, 3
"""BUILTIN_CLOCK_REALTIME, BUILTIN_CLOCK_MONOTONIC"""
_STATE_CLEARED = 1
_NEEDS_STATE = 2
"""SEQ_INCREMENTAL_STATE_CLEARED, SEQ_NEEDS_INCREMENTAL_STATE of TracePacket"""
_GROUPS = 1 << 40
"""First uuid of the tracks of groups (devices, processes), which are the parents of others. Tracks
of slices count from 1."""
_COUNTERS = 1 << 41
"""First uuid of the tracks of counters."""
_CAUSES = 1 << 42
"""First uuid of the tracks of causes."""
_FIELD_PACKET = b"\x0a"
"""Trace.packet: field 1, length-delimited."""

Cause = tuple[int, int, int, str]
"""A stall and its cause: (device, start_ns, end_ns, title of the cause)."""


def write(timeline: Timeline, out: BinaryIO, causes: Iterable[Cause] = ()) -> int:
    """Write the trace; return the number of packets."""
    count = 0
    for packet in packets(timeline, causes):
        raw = packet.SerializeToString()
        out.write(_FIELD_PACKET + _varint(len(raw)) + raw)
        count += 1
    return count


def packets(timeline: Timeline, causes: Iterable[Cause] = ()) -> Iterator[Any]:
    """The packets of the trace in the order of the file."""
    names = _Names()
    first = proto.TracePacket()
    first.trusted_packet_sequence_id = _SEQUENCE
    first.sequence_flags = _STATE_CLEARED
    first.trace_packet_defaults.timestamp_clock_id = _MONOTONIC
    first.first_packet_on_sequence = True
    yield first
    yield _clocks(timeline)
    parents: dict[str, int] = {}
    for track in tracks_of(timeline):
        if track.parent not in parents:
            parents[track.parent] = _GROUPS + len(parents)
            yield _descriptor(parents[track.parent], track.parent)
        yield _descriptor(track.number, track.name, parents[track.parent])
        yield from _slices(timeline, track, names)
    yield from _causes(parents, names, causes)
    for number, counter in enumerate(timeline.counters):
        packet = _descriptor(_COUNTERS + number, counter.label)
        packet.track_descriptor.counter.SetInParent()
        yield packet
        for time_ns, value in zip(counter.time_ns.tolist(), counter.value.tolist(), strict=True):
            packet = _event(time_ns, _COUNTERS + number, proto.TrackEvent.TYPE_COUNTER)
            packet.track_event.double_counter_value = value
            yield packet


def _clocks(timeline: Timeline) -> Any:
    """One instant on the clock of the timeline and in wall-clock time.

    The trace processor needs it to convert times, and drops all events without it.
    """
    packet = proto.TracePacket()
    packet.trusted_packet_sequence_id = _SEQUENCE
    snapshot = packet.clock_snapshot
    snapshot.primary_trace_clock = _MONOTONIC
    now = max(0, timeline.start_ns)
    for clock, time_ns in ((_MONOTONIC, now), (_REALTIME, now + timeline.wall_offset_ns)):
        reading = snapshot.clocks.add()
        reading.clock_id, reading.timestamp = clock, max(0, time_ns)
    return packet


class _Names:
    """Interning ids for names; each name is written once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def put(self, packet: Any, name: str) -> None:
        number = self._known.get(name)
        if number is None:
            number = self._known[name] = len(self._known) + 1
            interned = packet.interned_data.event_names.add()
            interned.iid, interned.name = number, name
        packet.track_event.name_iid = number


def _descriptor(uuid: int, name: str, parent: int = 0) -> Any:
    packet = proto.TracePacket()
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.track_descriptor.uuid = uuid
    packet.track_descriptor.name = name
    if parent:
        packet.track_descriptor.parent_uuid = parent
    return packet


def _event(time_ns: int, track: int, kind: int) -> Any:
    packet = proto.TracePacket()
    packet.trusted_packet_sequence_id = _SEQUENCE
    packet.sequence_flags = _NEEDS_STATE
    packet.timestamp = max(0, time_ns)
    packet.track_event.type = kind
    packet.track_event.track_uuid = track
    return packet


def _slices(timeline: Timeline, track: Track, names: _Names) -> Iterator[Any]:
    begin, end = proto.TrackEvent.TYPE_SLICE_BEGIN, proto.TrackEvent.TYPE_SLICE_END
    open_ends: list[int] = []
    for start_ns, end_ns, name, flow in track.slices:
        while open_ends and open_ends[-1] <= start_ns:
            yield _event(open_ends.pop(), track.number, end)
        packet = _event(start_ns, track.number, begin)
        names.put(packet, timeline.names[name])
        if flow and track.table in ("calls", "device"):
            if track.table == "device":
                packet.track_event.terminating_flow_ids.append(flow)
            else:
                packet.track_event.flow_ids.append(flow)
        yield packet
        open_ends.append(end_ns)
    while open_ends:
        yield _event(open_ends.pop(), track.number, end)


def _causes(parents: dict[str, int], names: _Names, causes: Iterable[Cause]) -> Iterator[Any]:
    begin, end = proto.TrackEvent.TYPE_SLICE_BEGIN, proto.TrackEvent.TYPE_SLICE_END
    known = set()
    for device, start_ns, end_ns, title in causes:
        if device not in known:
            known.add(device)
            parent = parents.get(f"GPU{device}", 0)
            yield _descriptor(_CAUSES + device, "stalls by cause", parent)
        packet = _event(start_ns, _CAUSES + device, begin)
        names.put(packet, title)
        yield packet
        yield _event(end_ns, _CAUSES + device, end)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
