# SPDX-License-Identifier: Apache-2.0
"""What a message of protobuf is counted as, before it is decoded, is what it then takes or more."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message, struct_pb2
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2

from otlp_requests import request
from sonde.protobuf_size import sizes_of
from sonde.server.otlp_profiles import MAX_BYTES, MAX_DECODED_BYTES

REQUEST: Any = profiles_service_pb2.ExportProfilesServiceRequest
SIZES = sizes_of(REQUEST.DESCRIPTOR)
SPARE_BYTES = 4 << 20
"""Of a process beside what is decoded."""


def part(number: int, content: bytes) -> bytes:
    """A field whose content has a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def shapes(outermost: Any) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """(numbers of the fields that it is in, what is repeated there): for each field of each type of
    message the smallest content, some of it, and a field that the type lacks before it."""
    ahead: list[tuple[Any, tuple[int, ...]]] = [(outermost, ())]
    known = {outermost.full_name}
    for described, path in ahead:  # which grows meanwhile
        for field in described.fields:
            inner = field.message_type
            if inner is None:
                yield path, part(field.number, b"\1" * 64)
                small = scalar(field)
            else:
                small = part(field.number, b"")
                if inner.full_name not in known:
                    known.add(inner.full_name)
                    ahead.append((inner, (*path, field.number)))
            yield path, small
            yield path, part(30, b"") + small


def scalar(field: Any) -> bytes:
    """A field of a number or a text, with the smallest content."""
    if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        return part(field.number, b"")
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FIXED64):
        return varint(field.number << 3 | 1) + bytes(8)
    if field.type == field.TYPE_FIXED32:
        return varint(field.number << 3 | 5) + bytes(4)
    return varint(field.number << 3) + b"\1"


def filled(path: tuple[int, ...], unit: bytes, count: int) -> bytes:
    """A request with a unit `count` times within messages."""
    content = unit * count
    for number in reversed(path):
        content = part(number, content)
    return content


def largest(path: tuple[int, ...], unit: bytes, sizes: Any = SIZES) -> bytes:
    """As `filled`, as often as a server takes it."""
    most = MAX_BYTES // len(unit) - 16
    one = (sizes.decoded_bytes(filled(path, unit, 1_001), 1 << 40)
           - sizes.decoded_bytes(filled(path, unit, 1), 1 << 40)) / 1_000  # fmt: skip
    return filled(path, unit, max(1, min(most, int(0.999 * MAX_DECODED_BYTES / max(one, 1)))))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown_bytes(raw: bytes) -> int:
    """How much memory decoding takes, in a copy of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        made = REQUEST()
        before = resident_bytes()
        try:
            made.ParseFromString(raw)
            grown = resident_bytes() - before
        except message.DecodeError:
            grown = -1
        os.write(writing, str(grown).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        found = int(answer.read())
    os.waitpid(child, 0)
    return found


def main() -> None:
    """Print what each shape is counted as and takes."""
    for path, unit in shapes(REQUEST.DESCRIPTOR):
        raw = largest(path, unit)
        counted = SIZES.decoded_bytes(raw, MAX_DECODED_BYTES)
        if counted > MAX_DECODED_BYTES // 8:  # else it is a field that is not repeated
            print(json.dumps([path, unit.hex(), len(raw), counted, grown_bytes(raw)]))


def test_no_shape_takes_more_memory_than_it_is_counted_as() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(found) > 100
    assert max(grown for *_, grown in found) > MAX_DECODED_BYTES // 3
    over = [it for it in found if it[4] > it[3] + SPARE_BYTES or it[3] > MAX_DECODED_BYTES]
    assert over == []


@pytest.mark.parametrize(
    ("samples", "stacks", "depth", "places", "named_share"),
    [
        (2_000, 1_500, 30, 6_000, 0.5),
        (13_000, 200, 30, 500, 0.5),
        (500, 100, 30, 12_000, 1.0),
        (200, 100, 30, 24_000, 0.0),
        (5_000, 15_000, 4, 2_000, 0.5),
        (200, 2_000, 120, 5_000, 0.5),
    ],
)
def test_what_profilers_send_fits(
    samples: int, stacks: int, depth: int, places: int, named_share: float
) -> None:
    """Whatever it has most of; as much of it as a request may have would be within the limit."""
    rng = random.Random(1)
    made: Any = request(0)
    tables = made.dictionary
    for number in range(max(1, places // 2)):
        tables.string_table.append(f"module.function_{number}")
        tables.function_table.add(name_strindex=8 + number, filename_strindex=5)
    for _ in range(places):
        address = rng.randrange(1 << 28)
        place = tables.location_table.add(mapping_index=1, address=address, attribute_indices=[3])
        if rng.random() < named_share:
            place.lines.add(function_index=rng.randrange(places // 2), line=rng.randrange(2_000))
    for _ in range(stacks):
        indices = [rng.randrange(places) for _ in range(rng.randrange(depth // 2, 2 * depth))]
        tables.stack_table.add(location_indices=indices)
    profile = made.resource_profiles[0].scope_profiles[0].profiles[0]
    for number in range(samples):
        attributes = [rng.randrange(2_000) for _ in range(3)]
        times = [10**18 + number]
        profile.samples.add(
            stack_index=rng.randrange(stacks),
            attribute_indices=attributes,
            timestamps_unix_nano=times,
        )
    raw = made.SerializeToString()

    counted = SIZES.decoded_bytes(raw, 1 << 40)
    assert counted / len(raw) * MAX_BYTES < 0.8 * MAX_DECODED_BYTES


def test_what_is_decoded_is_a_message_and_the_other_way_round() -> None:
    """But for groups, which no message here has."""
    rng = random.Random(5)
    whole = request().SerializeToString()
    groups, both, neither = 0, 0, 0
    for _ in range(20_000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        raw = bytes(damaged[: rng.choice((len(whole), rng.randrange(len(whole))))])
        try:
            SIZES.decoded_bytes(raw, 1 << 40)
            is_counted = True
        except ValueError as error:
            is_counted = False
            groups += (is_group := "group" in str(error))
        try:
            REQUEST().ParseFromString(raw)
            assert is_counted or is_group
            both += 1
        except message.DecodeError:
            neither += not is_counted
    assert both > 1_000 and neither > 1_000 and groups > 100


def test_depth_is_that_of_the_decoder() -> None:
    """Whatever is deeper than the decoder takes is refused before."""
    value = b""
    for depth in range(1, 120):
        value = part(5, part(1, value))  # array_value.values
        raw = filled((1, 1, 1, 2), value, 1)
        decoded = True
        try:
            REQUEST().ParseFromString(raw)
        except message.DecodeError:
            decoded = False
        try:
            SIZES.decoded_bytes(raw, 1 << 40)
        except ValueError:
            assert not decoded
            assert depth > 40
            return
    raise AssertionError("no depth is refused")


def test_maps_have_no_size() -> None:
    with pytest.raises(ValueError, match="maps"):
        sizes_of(struct_pb2.Struct.DESCRIPTOR)


if __name__ == "__main__":
    main()
