# SPDX-License-Identifier: Apache-2.0
"""OTLP profiles in: stored and asked for as our own; bounded, and the same once however often."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2

from sonde.server import answers, otlp_profiles
from sonde.server.service import RefusedRequestError, Service
from sonde.server.tokens import Caller, Scope
from sonde.store.flush import Flusher, together, unpack
from sonde.store.record import Record

NOW_NS = 1_800_001_800 * 10**9
ME = Caller("test", "default", frozenset(Scope))


def request(samples: int = 10, host: str = "pod-7") -> Any:
    made: Any = profiles_service_pb2.ExportProfilesServiceRequest()
    strings = ["", "samples", "count", "leaf", "root", "a.py", "thread.name", "/usr/bin/app"]
    made.dictionary.string_table.extend(strings)
    made.dictionary.mapping_table.add()
    made.dictionary.mapping_table.add().filename_strindex = 7
    for name in (3, 4):
        made.dictionary.function_table.add(name_strindex=name, filename_strindex=5)
        location = made.dictionary.location_table.add(mapping_index=1, address=16 * name)
        location.lines.add(function_index=name - 3, line=name)
    made.dictionary.stack_table.add(location_indices=[0, 1])
    resource = made.resource_profiles.add()
    for key, text in (("host.name", host), ("process.executable.name", "app")):
        resource.resource.attributes.add(key=key).value.string_value = text
    resource.resource.attributes.add(key="process.pid").value.int_value = 42
    profile = resource.scope_profiles.add().profiles.add(time_unix_nano=NOW_NS, period=52_000_000)
    profile.sample_type.type_strindex, profile.sample_type.unit_strindex = 1, 2
    for number in range(samples):
        profile.samples.add(stack_index=0, timestamps_unix_nano=[NOW_NS + number * 10**7])
    return made


def ask(service: Service, question: str) -> Any:
    items = [("from", "1799990000"), ("to", "1800090000")]
    answer = answers.ask(service, ME, answers.QUESTIONS[question], answers.parse(items))
    return json.loads(answer.content)


def test_profiles_are_asked_for_as_our_own_and_stored_once(tmp_path: Path) -> None:
    service = Service(tmp_path, open_tenant="default", flushes=False)
    body = request().SerializeToString()
    fresh = []
    for content, encoding in ((body, ""), (body, "identity")):
        for one in otlp_profiles.chunks(content, encoding, "", 1):
            fresh += [new for _, new in service.take(ME, one.node, one.content)]
    service.wal.close()
    assert Flusher(tmp_path, service.catalog).flush().chunks == 1

    assert fresh == [True, False]
    (row,) = ask(service, "overview")
    assert (row["node"], row["cpu_ns"]) == ("pod-7", 10 * 52e6)
    leaf, root = ask(service, "top")
    assert (leaf["function"], leaf["binary"], leaf["own_ns"]) == ("leaf", "app", 10 * 52e6)
    assert (root["function"], root["own_ns"], root["total_ns"]) == ("root", 0, 10 * 52e6)
    (process,) = ask(service, "processes")
    assert (process["pid"], process["comm"]) == (42, "app")


def test_what_is_hostile_is_refused_or_harmless() -> None:
    bomb = gzip.compress(bytes(otlp_profiles.MOST_BYTES + 1))
    for body, encoding, status in (
        (bomb, "gzip", 413), (b"no gzip", "gzip", 400), (b"\xff" * 100, "", 400), (b"", "br", 415),
    ):  # fmt: skip
        with pytest.raises(RefusedRequestError) as refused:
            otlp_profiles.chunks(body, encoding, "", 1)
        assert refused.value.status == status
    wild = request()
    profile = wild.resource_profiles[0].scope_profiles[0].profiles[0]
    profile.samples.add(stack_index=9_999, attribute_indices=[9_999], values=[-5])
    profile.samples.add(stack_index=0, values=[1 << 62], timestamps_unix_nano=[(1 << 64) - 1])
    wild.dictionary.stack_table.add(location_indices=[77, 0])
    wild.dictionary.location_table[0].lines.add(function_index=99, line=-1)
    wild.dictionary.location_table[0].mapping_index = 99

    (one,) = otlp_profiles.chunks(wild.SerializeToString(), "", "", NOW_NS)

    unpacked = unpack(Record("a", one.node, b"0" * 16, 1, one.content))
    origins, tables, rows_refused, chunks_refused = together([unpacked])
    assert (len(origins), rows_refused, chunks_refused) == (1, 0, 0)
    assert tables["event"].column("value").to_pylist() == [2.0]


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_profiles, "MOST_ROWS", 4)
    (one,) = otlp_profiles.chunks(request(10).SerializeToString(), "", "", 1)

    assert b'"name": "event"' in one.content
    assert b'"name": "sample"' in one.content
