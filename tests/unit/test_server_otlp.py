# SPDX-License-Identifier: Apache-2.0
"""OTLP profiles in: stored and asked for as our own; bounded, and the same once however often."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from otlp_requests import NOW_NS, request
from sonde.server import answers, otlp_profiles
from sonde.server.parameters import parse
from sonde.server.service import RefusedRequestError, Service
from sonde.server.tokens import Caller, Scope
from sonde.store.chunks import joined, open_chunk
from sonde.store.flush import Flusher
from sonde.store.record import Record

ME = Caller("test", "default", frozenset(Scope))


def ask(service: Service, question: str) -> Any:
    items = [("from", "1799990000"), ("to", "1800090000")]
    answer = answers.ask(service, ME, answers.QUESTIONS[question], parse(items))
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
    bomb = gzip.compress(bytes(otlp_profiles.MAX_BYTES + 1))
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

    unpacked = open_chunk(Record("a", one.node, b"0" * 16, 1, one.content))
    tables, rows_refused = joined([unpacked])
    assert rows_refused == 0
    assert tables["event"].column("value").to_pylist() == [2.0]


def weights(made: Any) -> tuple[list[float], list[float]]:
    """The weights of a request's samples in ns, and what was left out."""
    (one,) = otlp_profiles.chunks(made.SerializeToString(), "", "", NOW_NS)
    tables, _ = joined([open_chunk(Record("a", one.node, b"0" * 16, 1, one.content))])
    lost = tables["event"].column("value").to_pylist() if "event" in tables else []
    found = tables["sample"].column("weight_ns").to_pylist() if "sample" in tables else []
    return found, lost


@pytest.mark.parametrize(
    ("unit", "ns"),
    [("ns", 1), ("Nanoseconds", 1), ("us", 10**3), ("ms", 10**6), ("milliseconds", 10**6),
     ("s", 10**9), ("seconds", 10**9), ("count", 52e6), ("samples", 52e6), ("", 52e6)],
)  # fmt: skip
def test_a_weight_is_in_the_unit_that_its_type_names(unit: str, ns: float) -> None:
    made = request(1)
    profile = made.resource_profiles[0].scope_profiles[0].profiles[0]
    made.dictionary.string_table[2] = unit
    profile.samples[0].values.append(3)

    assert weights(made) == ([3.0 * ns], [])


def test_a_weight_in_another_unit_is_left_out_and_counted() -> None:
    made = request(4)
    made.dictionary.string_table[2] = "fortnights"
    assert weights(made) == ([], [4.0])


@pytest.mark.parametrize(
    ("unit", "period", "ns"),
    [("ms", 10, 10**7), ("nanoseconds", 10, 10), ("bytes", 10, 10**9 // 19), ("", 0, 10**9 // 19)],
)
def test_a_period_is_in_the_unit_that_its_type_names(unit: str, period: int, ns: int) -> None:
    made = request(1)
    profile = made.resource_profiles[0].scope_profiles[0].profiles[0]
    profile.period, profile.period_type.unit_strindex = period, 8
    made.dictionary.string_table.append(unit)

    assert weights(made) == ([float(ns)], [])


def test_a_cut_gzip_is_refused() -> None:
    whole = gzip.compress(request().SerializeToString())
    assert len(otlp_profiles.chunks(whole, "gzip", "", 1)) == 1
    for body in (whole[:-1], whole[: len(whole) // 2], b"", whole + whole):
        with pytest.raises(RefusedRequestError, match="gzip") as refused:
            otlp_profiles.chunks(body, "gzip", "", 1)
        assert refused.value.status == 400


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_profiles, "MAX_ROWS", 4)
    (one,) = otlp_profiles.chunks(request(10).SerializeToString(), "", "", 1)

    assert b'"name": "event"' in one.content
    assert b'"name": "sample"' in one.content
