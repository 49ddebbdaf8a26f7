# SPDX-License-Identifier: Apache-2.0
"""Timelines for viewers: every packet valid, all tracks and flows there, read back independently.

`Wire` reads protobuf by its wire format alone, without the generated messages that wrote the file.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from sonde.analyze.bound import StallCauses
from sonde.cli import main as cli
from sonde.export import chrome, perfetto
from sonde.model.timeline import Counter, HostKind
from sonde.recording.timelines import open_timeline
from timelines import Scene

RUNS = Path(__file__).parents[1] / "data" / "explain"
FLOW_IDS, TERMINATING_FLOW_IDS = 47, 48


def varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def fields(raw: bytes) -> dict[int, list]:
    """Field number to its values: whole numbers, or bytes."""
    found: dict[int, list] = defaultdict(list)
    at = 0
    while at < len(raw):
        key, at = varint(raw, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(raw, at)
        elif kind == 2:
            length, at = varint(raw, at)
            value, at = raw[at : at + length], at + length
            assert len(value) == length
        else:
            size = {1: 8, 5: 4}[kind]
            value, at = int.from_bytes(raw[at : at + size], "little"), at + size
        found[number].append(value)
    return found


class Wire:
    """What a viewer makes of the file: tracks with nested slices, flows between slices."""

    def __init__(self, raw: bytes) -> None:
        self.tracks: dict[int, tuple[str, int]] = {}
        self.slices: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        self.flows: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self.counters: dict[int, int] = defaultdict(int)
        names: dict[int, str] = {}
        stacks: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.packets = fields(raw)[1]
        assert list(fields(raw)) == [1]
        for packet in map(fields, self.packets):
            for interned in packet[12]:
                for name in map(fields, fields(interned)[2]):
                    names[name[1][0]] = name[2][0].decode()
            for track in map(fields, packet[60]):
                self.tracks[track[1][0]] = (track[2][0].decode(), (track[5] or [0])[0])
            for event in map(fields, packet[11]):
                (track,), (kind,) = event[11], event[9]
                assert track in self.tracks
                (time,) = packet[8]
                if kind == 1:
                    stacks[track].append((time, names[event[10][0]]))
                    for number, field in (("s", FLOW_IDS), ("f", TERMINATING_FLOW_IDS)):
                        for flow in event[field]:
                            self.flows[flow].append((number, track))
                elif kind == 2:
                    begin, name = stacks[track].pop()
                    assert time >= begin
                    self.slices[track].append((begin, time, name))
                elif kind == 4:
                    self.counters[track] += 1
        assert not any(stacks.values())


def exported(timeline) -> bytes:
    out = io.BytesIO()
    perfetto.write(timeline, out, StallCauses(timeline))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["slow_loader", "gil_bound", "serialised_streams", "jax_float"])
def test_everything_is_there_by_an_independent_reading(kind):
    timeline = open_timeline([RUNS / f"{kind}.json.gz", RUNS / f"{kind}.sonde"])
    seen = Wire(exported(timeline))

    expected = defaultdict(int)
    for table in ("device", "calls", "host", "states"):
        for name in getattr(timeline, table).name.tolist():
            expected[timeline.names[name]] += 1
    for _, _, _, title in StallCauses(timeline):
        expected[title] += 1
    found = defaultdict(int)
    for slices in seen.slices.values():
        for _, _, name in slices:
            found[name] += 1
    assert found == expected
    joined = set(timeline.device.correlation.tolist()) & set(timeline.calls.correlation.tolist())
    both = {flow for flow, ends in seen.flows.items() if {e for e, _ in ends} == {"s", "f"}}
    assert both == joined - {0}
    titles = {name for name, _ in seen.tracks.values()}
    assert {"GPU0", "stalls by cause"} <= titles
    for track in timeline.tracks:
        assert any(track.label in title for title in titles)


def test_every_packet_is_valid_by_the_schema():
    timeline = open_timeline([RUNS / "slow_loader.json.gz", RUNS / "slow_loader.sonde"])
    known = {field.number for field in proto.TracePacket.DESCRIPTOR.fields}
    for raw in fields(exported(timeline))[1]:
        packet = proto.TracePacket.FromString(raw)
        assert packet.IsInitialized()
        assert packet.SerializeToString() == raw  # so nothing in it is unknown to the schema
        assert set(fields(raw)) <= known
        assert packet.trusted_packet_sequence_id


def test_slices_that_overlap_without_nesting_are_kept_apart():
    scene = Scene()
    scene.kernel(100, 200, stream=1)
    scene.python(0, 100, "a")
    scene.python(50, 150, "b")
    scene.python(60, 90, "c")
    seen = Wire(exported(scene.timeline()))

    names = {name for slices in seen.slices.values() for _, _, name in slices}
    assert {"a", "b", "c"} <= names


def test_processes_of_one_name_are_groups_of_their_own():
    scene = Scene()
    for number in range(2):
        track = scene.interner.thread(500 + number, 500 + number, "python", "python")
        scene._add("host", 0, 10, name="a", kind=HostKind.PYTHON, track=track)
    timeline = scene.timeline()
    seen = Wire(exported(timeline))
    out = io.BytesIO()
    chrome.write(timeline, out)

    groups = {parent for name, parent in seen.tracks.values() if parent}
    assert {seen.tracks[group][0] for group in groups} == {"python (500)", "python (501)"}
    named = [e for e in json.loads(out.getvalue())["traceEvents"] if e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in named] == [(500, "python"), (501, "python")]


def test_counters_are_tracks():
    scene = Scene()
    scene.kernel(100, 200)
    counter = Counter("power W", np.array([1, 2, 3]), np.array([400.0, 410.5, 390.25]))
    seen = Wire(exported(scene.timeline(counters=[counter])))

    assert list(seen.counters.values()) == [3]


def test_chrome_json_is_read_back_by_our_own_reader_and_by_json(tmp_path):
    timeline = open_timeline([RUNS / "slow_loader.json.gz"])
    out = io.BytesIO()
    chrome.write(timeline, out, StallCauses(timeline))
    events = json.loads(out.getvalue())["traceEvents"]

    assert sum(e["ph"] == "X" and e["cat"] == "device" for e in events) == len(timeline.device)
    starts = {e["id"] for e in events if e["ph"] == "s"}
    ends = {e["id"] for e in events if e["ph"] == "f"}
    assert starts & ends
    total = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "device")
    assert total * 1000 == pytest.approx(timeline.device.duration_ns.sum())


def test_the_command_writes_both(tmp_path, capsys):
    trace = str(RUNS / "slow_loader.json.gz")
    first, second = tmp_path / "out.pftrace", tmp_path / "out.json"
    command = ["explain", trace, "--perfetto", str(first), "--chrome", str(second)]
    assert cli.main(command) == 0
    assert Wire(first.read_bytes()).tracks
    assert json.loads(second.read_text())["traceEvents"]
    assert cli.main(["explain", trace, "--perfetto", str(tmp_path / "no" / "where")]) == 1
    assert "cannot write" in capsys.readouterr().err
