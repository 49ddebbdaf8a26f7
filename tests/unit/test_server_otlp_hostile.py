# SPDX-License-Identifier: Apache-2.0
"""OTLP requests that are small and ask for much work: refused, or done in about a second."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from otlp_requests import NOW_NS, request
from sonde.server import otlp_profiles
from sonde.server.otlp_dictionary import MAX_FRAMES
from sonde.server.service import RefusedRequestError
from sonde.store.chunks import joined, open_chunk
from sonde.store.record import Record

MAX_S = 4.0
"""A request takes at most 1.5 s where the machine has nothing else to do; all of these took 7 to 90
and more when what they refer to was read again for each reference."""


def profile_of(made: Any) -> Any:
    return made.resource_profiles[0].scope_profiles[0].profiles[0]


def many_hosts() -> Any:
    made = request(0)
    for number in range(40_000):
        attributes = made.resource_profiles.add().resource.attributes
        attributes.add(key="host.name").value.string_value = f"h{number}"
    return made


def stacks_of_many_hosts() -> Any:
    made = request(0)
    for _ in range(1_000):
        made.dictionary.stack_table.add(location_indices=[0, 1] * (MAX_FRAMES // 2))
    for number in range(otlp_profiles.MAX_HOSTS - 1):
        resource = made.resource_profiles.add()
        resource.resource.attributes.add(key="host.name").value.string_value = f"h{number}"
        profile = resource.scope_profiles.add().profiles.add()
        for stack in range(1_000):
            profile.samples.add(stack_index=stack)
    return made


def stacks_of_many_lines() -> Any:
    made = request(0)
    for at in range(1_024):
        location = made.dictionary.location_table.add()
        for line in range(64):
            location.lines.add(function_index=0, line=at * 64 + line)
    for at in range(1_800):
        places = [2 + (at + number) % 1_024 for number in range(1_024)]
        made.dictionary.stack_table.add(location_indices=places)
        profile_of(made).samples.add(stack_index=1 + at)
    return made


def lines_of_long_names() -> Any:
    made = request(0)
    made.dictionary.string_table.extend(["f" * 512, "g" * 512])
    made.dictionary.function_table.add(name_strindex=8, filename_strindex=9)
    for at in range(6_000):
        location = made.dictionary.location_table.add()
        for line in range(64):
            location.lines.add(function_index=2, line=at * 64 + line)
    for at in range(400):
        made.dictionary.stack_table.add(location_indices=range(2 + 15 * at, 17 + 15 * at))
        profile_of(made).samples.add(stack_index=1 + at)
    return made


def processes_of_long_names() -> Any:
    made = request(0)
    made.dictionary.string_table.append("process.pid")
    for key in ("container.id", "k8s.pod.name", "process.executable.path", "service.name"):
        attributes = made.resource_profiles[0].resource.attributes
        attributes.add(key=key).value.string_value = "q" * 512
    for number in range(170_000):
        made.dictionary.attribute_table.add(key_strindex=8).value.int_value = number + 1
        profile_of(made).samples.add(attribute_indices=[number])
    return made


def long_lists_of_attributes() -> Any:
    made = request(0)
    for _ in range(40):
        profile_of(made).samples.add(attribute_indices=list(range(100)) * 1_000)
    return made


def many_samples() -> Any:
    made = request(0)
    profile_of(made).samples.extend([type(profile_of(made).samples.add())()] * 1_500_000)
    return made


def many_attributes_of_a_resource() -> Any:
    made = request(0)
    for number in range(100_000):
        made.resource_profiles[0].resource.attributes.add(key=f"k{number}")
    for _ in range(100_000):
        profile_of(made).samples.add(stack_index=0)
    return made


def a_long_key() -> Any:
    made = request(0)
    made.dictionary.string_table.append("y" * 2_000_000)
    made.dictionary.attribute_table.add(key_strindex=8)
    for _ in range(100_000):
        profile_of(made).samples.add(attribute_indices=[0] * 4)
    return made


def taken(made: Any) -> tuple[int, list[otlp_profiles.NodeChunk]]:
    """(status, chunks) of a request, which is checked to be done soon."""
    body = made.SerializeToString()
    begun = time.process_time()
    found: list[otlp_profiles.NodeChunk] = []
    status = 200
    try:
        found = otlp_profiles.chunks(body, "", "", NOW_NS)
    except RefusedRequestError as error:
        status = error.status
    assert time.process_time() - begun < MAX_S
    return status, found


@pytest.mark.parametrize(
    "make",
    [
        many_hosts, stacks_of_many_hosts, stacks_of_many_lines, lines_of_long_names,
        processes_of_long_names, long_lists_of_attributes, many_samples,
    ],
)  # fmt: skip
def test_what_asks_for_much_work_is_refused(make: Callable[[], Any]) -> None:
    assert taken(make()) == (413, [])


EMPTY_MESSAGES = """
import gzip, sys
from pathlib import Path
from sonde.server import otlp_profiles
from sonde.server.service import RefusedRequestError

def peak_kb():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

content = b"\\x12\\0" * 2_000_000  # profiles of a scope, a scope of a resource
for tag in (b"\\x12", b"\\x0a"):
    size = len(content)
    varint = bytes(size >> at & 0x7F | 0x80 * (at < 21) for at in (0, 7, 14, 21))
    content = tag + varint + content
body = gzip.compress(content)
otlp_profiles.chunks(b"", "", "", 1)
before = peak_kb()
try:
    otlp_profiles.chunks(body, "gzip", "", 1)
except RefusedRequestError as error:
    print(len(body), error.status, peak_kb() - before)
"""


def test_what_is_nothing_but_empty_messages_is_refused_before_it_is_decoded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EMPTY_MESSAGES], capture_output=True, text=True, check=True
    )
    body_bytes, status, more_kb = map(int, done.stdout.split())

    assert (body_bytes < 5_000, status) == (True, 413)
    assert more_kb < 32_000  # it was 280,000


@pytest.mark.parametrize("make", [many_attributes_of_a_resource, a_long_key])
def test_what_is_referred_to_often_is_read_once(make: Callable[[], Any]) -> None:
    status, found = taken(make())

    assert (status, len(found)) == (200, 1)


def test_stacks_are_cut_and_references_to_nowhere_are_empty() -> None:
    made = request(1)
    location = made.dictionary.location_table.add()
    for line in range(100):
        location.lines.add(function_index=0, line=line)
    made.dictionary.stack_table.add(location_indices=[2] * 100)
    for stack in (1, 9_999, -5):
        profile_of(made).samples.add(stack_index=stack)
    _, (one,) = taken(made)

    unpacked = open_chunk(Record("a", one.node, b"0" * 16, 1, one.content))
    tables, refused = joined([unpacked])
    assert refused == 0
    lengths = [len(ids) for ids in tables["stack"].column("frame_ids").to_pylist()]
    assert sorted(lengths) == [0, 2, MAX_FRAMES]
    assert tables["frame"].num_rows == 2 + 64
    assert sorted(tables["sample"].column("stack_id").to_pylist()) == [0, 1, 2, 10_000]
    event = tables["event"].to_pylist()
    assert [(it["kind"], it["name"], it["value"]) for it in event] == [
        ("loss", "otlp.stacks_cut", 1.0)
    ]


@pytest.mark.parametrize(
    ("places", "lines", "cut"),
    [(MAX_FRAMES, 1, 0), (MAX_FRAMES + 1, 1, 1), (MAX_FRAMES // 64, 64, 0),
     (MAX_FRAMES // 64 + 1, 64, 1), (1, 64, 0), (1, 65, 1)],
)  # fmt: skip
def test_stacks_that_are_cut_are_counted(places: int, lines: int, cut: int) -> None:
    made = request(0)
    location = made.dictionary.location_table.add()
    for line in range(lines):
        location.lines.add(function_index=0, line=line)
    made.dictionary.stack_table.add(location_indices=[2] * places)
    for _ in range(2):
        profile_of(made).samples.add(stack_index=1)
    _, (one,) = taken(made)
    unpacked = open_chunk(Record("a", one.node, b"0" * 16, 1, one.content))
    tables, _ = joined([unpacked])
    event = tables["event"].to_pylist() if "event" in tables else []
    assert [it["value"] for it in event] == [1.0] * cut
