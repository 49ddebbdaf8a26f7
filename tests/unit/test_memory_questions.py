# SPDX-License-Identifier: Apache-2.0
"""Who holds memory and who is suspected of a leak, over captures made by hand."""

from __future__ import annotations

import gzip
import io
import json

import pytest

from captures import SECOND_NS, START_NS, Writer
from sonde.export import folded, html, json_report, pprof, speedscope, summary, table
from sonde.export.pprof_profile_pb2 import Profile
from sonde.model.profile import MEMORY_KINDS, ProfileKind
from sonde.query.capture import read
from sonde.query.device_runs import kinds_seen
from sonde.query.memory import growth, memory
from sonde.query.queries import profile
from sonde.query.session import Session

MIB = 1 << 20
SECONDS = 20


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A program that leaks, one function of it fills a cache, one comes and goes, one reserves."""
    writer = Writer(seconds=SECONDS)
    who = {**writer.process(70, "app"), "tid": 70}
    ways = {
        name: writer.stack(("main", "app"), (name, "app"), ("malloc", "libc.so.6"))
        for name in ("leak", "fill", "come_and_go", "reserve", "small")
    }

    def row(second, kind, way, size, name="anonymous", count=1.0):
        writer.rows["sample"].append(
            {
                **who,
                "time_ns": START_NS + second * SECOND_NS,
                "kind": kind,
                "name": name,
                "stack_id": ways[way],
                "weight_count": count,
                "weight_bytes": float(size),
            }
        )

    for second in range(SECONDS):
        row(second, "mapped", "leak", 2 * MIB)
        row(second, "mapped", "come_and_go", 8 * MIB)
        row(second, "unmapped", "come_and_go", 8 * MIB)
        row(second, "mapped", "small", 1000)
        row(second, "mapped", "reserve", 64 * MIB, "reserved")
        row(second, "faulted", "leak", 2 * MIB, "write", 512.0)
        if second < 3:
            row(second, "mapped", "fill", 30 * MIB)
        for kind, name, size, count in (
            ("mapped", "anonymous", 11 * MIB, 3),
            ("mapped", "reserved", 64 * MIB, 1),
            ("unmapped", "", 8 * MIB, 1),
            ("faulted", "write", 2 * MIB, 512),
        ):
            writer.rows["activity"].append(
                {
                    **who,
                    "time_ns": START_NS + second * SECOND_NS,
                    "kind": kind,
                    "name": name,
                    "count": count,
                    "bytes": size,
                }
            )
    path = tmp_path_factory.mktemp("memory") / "run.sonde"
    path.write_bytes(writer.bytes())
    return Session(read(path))


def test_what_grows_all_the_while_is_suspected_and_what_grew_at_first_is_not(session):
    found = [(it.frames[0], it.bytes, it.is_suspect) for it in growth(session)]
    assert found == [("leak", 2 * MIB * SECONDS, True), ("fill", 90 * MIB, False)]
    leak = growth(session)[0]
    assert (leak.grew, leak.windows) == (10, 10)
    assert leak.frames == ("leak", "main")  # not malloc


def test_totals_are_those_of_the_exact_rows(session):
    (use,) = memory(session)
    assert use.mapped_bytes == 11 * MIB * SECONDS
    assert use.unmapped_bytes == 8 * MIB * SECONDS
    assert use.reserved_bytes == 64 * MIB * SECONDS
    assert (use.faults, use.faulted_bytes) == (512 * SECONDS, 2 * MIB * SECONDS)


def test_held_is_what_was_mapped_less_what_was_unmapped(session):
    held = profile(session, ProfileKind.MEMORY_HELD)
    by = {held.stacks[row.stack][1].function: row.bytes for row in held}
    assert by == {"leak": 2 * MIB * SECONDS, "fill": 90 * MIB, "small": 1000 * SECONDS}
    assert profile(session, ProfileKind.MEMORY_FAULTED).total_bytes == 2 * MIB * SECONDS


def test_every_format_shows_memory(session):
    kinds = kinds_seen(session)
    assert kinds[-3:] == MEMORY_KINDS

    def written(exporter, *only):
        out = io.BytesIO()
        exporter.write(session, out=out, kinds=only or kinds)
        return out.getvalue()

    assert (
        f"app;main;leak;malloc;(anonymous) {2 * MIB * SECONDS}"
        in written(folded, ProfileKind.MEMORY_HELD).decode()
    )
    (shown,) = json.loads(written(speedscope, ProfileKind.MEMORY_HELD))["profiles"]
    assert shown["unit"] == "bytes"
    assert shown["endValue"] == 2 * MIB * SECONDS + 90 * MIB + 1000 * SECONDS
    message = Profile.FromString(gzip.decompress(written(pprof, ProfileKind.MEMORY_FAULTED)))
    assert [sum(it.value[1] for it in message.sample)] == [2 * MIB * SECONDS]
    report = json.loads(written(json_report))
    assert report["memory"][0]["faulted_bytes"] == 2 * MIB * SECONDS
    assert [it["is_suspect"] for it in report["memory_growth"]] == [True, False]
    of_cpus = json.loads(written(json_report, ProfileKind.ON_CPU))
    assert (of_cpus["memory"], of_cpus["memory_growth"]) == ([], [])
    text = written(table).decode()
    assert "MEMORY" in text
    assert "leak?" in text
    assert "leak?  leak < main" in summary.render(session)
    assert b"Memory held" in written(html)
