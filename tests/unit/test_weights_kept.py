# SPDX-License-Identifier: Apache-2.0
"""Weights, signs, directions and bounds: each is held by a truth that a change of it would miss."""

from __future__ import annotations

import io
import struct
import subprocess
import zlib
from pathlib import Path
from types import SimpleNamespace

import opendp.prelude as dp
import pytest

from captures import chunk, file_header, filled, meta
from sonde import _native
from sonde.agent.run_metrics import RunMetrics
from sonde.agent.top import _by_process
from sonde.collect import inject_abi as abi
from sonde.collect.collector import Batch
from sonde.collect.device_records import RunReader
from sonde.collect.device_rows import name_of, row_of
from sonde.collect.inject_records import _DIRECTIONS, Ring, Run
from sonde.collect.ring_budget import Turn
from sonde.collect.waits import WaitCollector
from sonde.fleet.discovery import NO_UNKNOWN_KERNEL, discover, threshold_of
from sonde.fleet.evaluation.local_deployment import small_task
from sonde.fleet.noise import chance_of_sum, discovery_threshold
from sonde.fleet.result import Result, Row
from sonde.query import framing
from sonde.sinks.chunk import columns_of
from sonde.sinks.series import MetricRegistry

PROGRAM = Path(__file__).parents[1] / "programs/inject/weights.c"
DEVICE_RUN = columns_of("device_run")
KEY = (7, 11)


# ---- checksums ----


def regions(one):
    meta_len, _, payload_len = struct.unpack_from("<IIQ", one, 8)
    return {
        "header": range(28),
        "header checksum": range(28, 32),
        "meta": range(32, 32 + meta_len),
        "payload": range(32 + meta_len, 32 + meta_len + payload_len),
    }


@pytest.mark.parametrize("region", ["header", "header checksum", "meta", "payload"])
def test_a_bit_flipped_anywhere_in_a_region_is_found_before_anything_is_decoded(region):
    one = chunk({"sample": filled("sample", [{"pid": 9, "kind": "cpu"}])}, **meta())
    places = regions(one)[region]
    for place in places:
        damaged = bytearray(one)
        damaged[place] ^= 1 << place % 8
        data = file_header() + bytes(damaged)
        (found,) = framing.chunks(io.BytesIO(data), len(data))
        assert isinstance(found, framing.BadChunk), (region, place)


def test_the_writer_sums_each_region_whole():
    made = _native.encode_chunk('{"seq": 1}', [("event", [_events(200)])])
    _, _, _, meta_len, meta_crc, payload_len, payload_crc, header_crc = struct.unpack_from(
        "<4sHHIIQII", made
    )
    assert len(made) == 32 + meta_len + payload_len
    assert zlib.crc32(made[:28]) == header_crc
    assert zlib.crc32(made[32 : 32 + meta_len]) == meta_crc
    assert zlib.crc32(made[32 + meta_len :]) == payload_crc
    assert len({meta_crc, payload_crc, header_crc}) == 3


def _events(count):
    rows = [(n, "notice", "n", 1, 2, float(n), "") for n in range(count)]
    return dict(zip(columns_of("event"), map(list, zip(*rows, strict=True)), strict=True))


# ---- what the library carries ----


@pytest.fixture(scope="module")
def carried(tmp_path_factory):
    program = tmp_path_factory.mktemp("weights") / "weights"
    command = ["cc", "-O1", "-g", "-w", "-o", program, PROGRAM, "-pthread"]
    subprocess.run(command, check=True)
    ran = subprocess.run([program], capture_output=True, text=True, check=True)
    found: dict[str, list[list[int]]] = {}
    for line in ran.stdout.splitlines():
        name, *numbers = line.split()
        found.setdefault(name, []).append([int(number) for number in numbers])
    return found


def test_a_record_carries_as_much_again_and_the_rest_waits(carried):
    """(carried before, weight of the run, weight of its record, carried after)"""
    for before, weight, put, after in carried["carried"]:
        assert put + after == before + weight, "no weight appears or goes"
        most = min(max(weight, 8, before // 16), 1_000_000)
        assert put == weight + min(before, most)


def test_what_is_carried_stays_with_its_type(carried):
    assert carried["other-type"] == [[2, 4]]


def test_a_record_that_finds_no_room_is_carried_and_not_counted_as_timed(carried):
    assert carried["no-room"] == [[11, 0]]


def test_what_is_chosen_beyond_the_tokens_is_carried_by_its_whole_weight(carried):
    ((timed, weights, left, lost),) = carried["tokens"]
    assert (timed, weights) == (3, 30)
    assert left == 10 * lost
    assert abs(weights + left - 1000) <= 10, "all launches, to within a block"


@pytest.mark.parametrize(
    ("name", "left", "lost", "timed", "given_back"),
    [
        ("read-good", 0, 0, 1, 1),
        ("read-not-ready", 0, 0, 0, 0),
        ("read-negative", 6, 1, 0, 1),
        ("read-timed-out", 6, 1, 0, 1),
        ("read-unproved", 6, 0, 0, 1),  # counted when its pair was made whole
        ("read-no-time", 0, 1, 0, 1),  # the launch failed: it stands for nothing that ran
    ],
)
def test_a_pair_that_is_discarded_is_counted_and_what_it_stood_for_carried(
    carried, name, left, lost, timed, given_back
):
    assert carried[name] == [[left, lost, timed, given_back]]


@pytest.mark.parametrize(
    ("name", "lost", "given_back", "queued"),
    [("end-good", 0, 0, 1), ("end-unproved", 1, 0, 1), ("end-not-launched", 0, 1, 0),
     ("end-not-recorded", 0, 1, 0)],
)  # fmt: skip
def test_a_pair_is_kept_only_if_it_is_whole(carried, name, lost, given_back, queued):
    assert carried[name] == [[lost, given_back, queued]]


# ---- runs: directions, bytes, live weights ----


def a_run(kind=abi.Type.KERNEL, **more):
    fields = {
        "type": kind, "source": abi.Source.BY_EVENT, "name": "k", "correlation": 5,
        "start_ns": 1_000, "end_ns": 1_300, "weight": 4.0, "stream": 0, "bytes": 0, "tid": 7,
        "device": 0, "window": 0, "direction": "", "grid": (1, 1, 1), "block": (1, 1, 1),
        "shared_bytes": 0, "registers": 0, "stack": (),
    }  # fmt: skip
    return Run(**{**fields, **more})


def record_of(direction, moved=4096, kind=abi.Type.COPY):
    """A record as it comes out of the ring, unpacked."""
    fields = {"type": kind, "source": abi.Source.BY_EVENT, "correlation": 1, "weight": 3.0}
    fields |= {"start_ns": 1_000, "end_ns": 2_000, "bytes": moved, "kind": direction}
    return abi.Record(**dict.fromkeys(abi.Record._fields, 0) | fields)


@pytest.mark.parametrize(
    ("code", "direction"), [(1, "h2d"), (2, "d2h"), (8, "d2d"), (10, "p2p"), (0, "unknown")]
)
def test_which_way_a_copy_went_and_how_far(code, direction):
    """Codes are CUPTI's (CUpti_ActivityMemcpyKind), as in abi/inject.h."""
    ring = Ring(-1, 0)
    ring._names[0] = ""
    run = ring._run(record_of(code, moved=123_456), abi.Type.COPY, 10_000)
    assert run is not None
    row = dict(zip(DEVICE_RUN, row_of(run, KEY, 9, 0, 2), strict=True))
    assert (row["kind"], row["direction"], row["bytes"]) == ("copy", direction, 123_456)
    assert row["name"] == f"(copy {direction})"
    assert (row["weight"], row["start_time_ns"], row["end_time_ns"]) == (3.0, 1_000, 2_000)
    assert (row["pid"], row["start_ns"], row["tid"], row["stream"]) == (*KEY, 9, 2)


def test_only_copies_have_a_direction():
    ring = Ring(-1, 0)
    ring._names[0] = ""
    run = ring._run(record_of(0, 0, abi.Type.SET), abi.Type.SET, 10_000)
    assert run is not None
    assert run.direction == ""
    assert name_of(run) == "(set)"


def test_the_library_and_the_reader_agree_on_directions():
    root = Path(__file__).parents[2]
    source = (root / "abi/inject.h").read_text() + "".join(
        path.read_text() for path in sorted((root / "inject").glob("*.[ch]"))
    )
    for word, code in (("H2D", 1), ("D2H", 2), ("D2D", 8), ("P2P", 10)):
        assert f"{word} = {code}" in source or f"{word} {code}" in source, word
        assert _DIRECTIONS[code] == word.lower()


@pytest.fixture
def live():
    """A collector with one process, and what it makes of some runs."""
    ring = Ring(-1, 0)
    ring.keep_stack_id(5, 99)
    process = SimpleNamespace(key=KEY, ring=ring, same_tids=True)

    def weighed(*runs):
        batch, weights = Batch(), {}
        for run in runs:
            RunReader().add_run(process, run, batch, weights, Turn.of(1.0))
        return batch, weights

    return weighed


def test_live_samples_weigh_count_time_and_bytes(live):
    _, weights = live(
        a_run(weight=4.0, start_ns=1_000, end_ns=1_300, bytes=10),
        a_run(weight=2.5, start_ns=2_000, end_ns=2_100, bytes=20, correlation=6),
        a_run(weight=1.5, start_ns=3_000, end_ns=3_400, correlation=6),
    )
    assert weights == {("k", 7, 99): [4.0, 1_200.0, 40.0], ("k", 7, 0): [4.0, 850.0, 50.0]}


def test_waits_of_the_host_are_no_time_of_a_device(live):
    batch, weights = live(a_run(abi.Type.SYNC))
    assert not weights
    assert len(batch.rows["device_run"]) == 1


def test_what_is_shown_live_is_weighed(live):
    batch, _ = live(
        a_run(weight=4.0),
        a_run(abi.Type.COPY, weight=3.0, bytes=100, direction="h2d", end_ns=1_010),
        a_run(abi.Type.REPLAY, weight=2.0, end_ns=1_050, bytes=7),
        a_run(abi.Type.SYNC, weight=50.0),
    )
    sums = _by_process(batch)[7]
    assert sums.ns == 4 * 300 + 3 * 10 + 2 * 50
    assert sums.launches == 4 + 2
    assert sums.bytes == 3 * 100
    assert sums.timed == 3


def test_counters_of_copies_have_their_directions():
    board = MetricRegistry()
    metrics = RunMetrics(board)
    for way, moved, weight in (("h2d", 1000, 2.0), ("d2h", 300, 5.0)):
        run = a_run(abi.Type.COPY, direction=way, bytes=moved, weight=weight)
        metrics.take(row_of(run, KEY, 7, 0, 0))
    (family,) = [found for metric, found in board.families() if metric.name == "sonde.gpu.copies"]
    copied = {one.attributes["network.io.direction"]: one.value for one in family}
    assert copied == {"receive": 2.0, "transmit": 5.0}


# ---- waits ----


def test_a_wait_s_stack_has_the_weights_of_its_own_kind():
    row = (7, 9, 110, 42, 0, 3, 1_000, 200, 30.0, 40_000, 500, 700, 90, 1, 2)
    batch = Batch()
    WaitCollector._add_rows(batch, 5, [row])
    samples = {one[1]: one for one in batch.rows["sample"]}
    totals = {one[1]: one for one in batch.rows["activity"]}
    assert samples["blocked"][-3:] == (30.0, 40_000.0, 0.0)
    assert samples["runqueue"][-3:] == (30.0, 500.0, 0.0)
    names = columns_of("activity")
    blocked, ready = (dict(zip(names, totals[kind], strict=True)) for kind in samples)
    assert (blocked["ns"], blocked["max_ns"], blocked["count"]) == (1_000, 700, 3)
    assert (ready["ns"], ready["max_ns"], ready["count"]) == (200, 90, 3)
    assert (blocked["waker_pid"], blocked["waker_tid"]) == (1, 2)
    assert batch.seen == 3


@pytest.mark.parametrize(("blocked_ns", "ready_ns"), [(0, 5), (5, 0)])
def test_a_wait_of_no_length_is_none(blocked_ns, ready_ns):
    row = (7, 9, 110, 42, 0, 3, blocked_ns, ready_ns, 1.0, 1, 1, 1, 1, 0, 0)
    batch = Batch()
    WaitCollector._add_rows(batch, 5, [row])
    kinds = ["blocked"] if blocked_ns else ["runqueue"]
    assert [one[1] for one in batch.rows["activity"]] == kinds
    assert [one[1] for one in batch.rows["sample"]] == kinds


def test_a_wait_of_which_no_stack_was_taken_is_counted_and_has_no_sample():
    batch = Batch()
    WaitCollector._add_rows(batch, 5, [(7, 9, 110, 0, 0, 3, 5, 5, 0.0, 0, 0, 1, 1, 0, 0)])
    assert len(batch.rows["activity"]) == 2
    assert "sample" not in batch.rows


def test_a_wait_whose_stack_found_no_room_keeps_its_weight():
    batch = Batch()
    WaitCollector._add_rows(batch, 5, [(7, 9, 110, 0, 0, 3, 5, 5, 2.0, 10, 11, 1, 1, 0, 0)])
    assert [row[-3:] for row in batch.rows["sample"]] == [(2.0, 10.0, 0.0), (2.0, 11.0, 0.0)]


# ---- what a fleet may show of unknown kernels ----


def test_the_threshold_is_the_least_that_keeps_a_lone_key_hidden():
    for scale, delta, contribution in ((1.0, 1e-6, 1), (5.0, 1e-6, 1), (5.0, 1e-9, 3)):
        found = discovery_threshold(scale, delta, contribution)
        chance = chance_of_sum(scale, found - contribution)
        assert chance <= delta < chance_of_sum(scale, found - 1 - contribution)
        dp.enable_features("contrib")
        domain = dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T="i64"))
        metric = dp.l01inf_distance(dp.absolute_distance(T="i64"))

        def spent(threshold, scale=scale, contribution=contribution, at=(domain, metric)):
            made = dp.m.make_laplace_threshold(*at, scale=scale, threshold=threshold)
            return made.map((1, contribution, contribution))[1]

        assert spent(found) < chance  # with the noise of one aggregator alone


def test_the_threshold_is_above_what_one_unit_adds_however_little_the_noise():
    assert discovery_threshold(0.05, 1e-2, 1) == discovery_threshold(0.05, 1e-2) == 2
    assert discovery_threshold(0.05, 1e-2, 3) == 4


def test_a_count_at_the_threshold_is_shown_and_one_below_is_not():
    task = small_task(buckets=512)
    least = threshold_of(task)
    rows = [
        Row(bucket, "", "", "", count, 1.0, 0.0)
        for bucket, count in (
            (1, least - 1),
            (2, least),
            (3, least + 1),
            (NO_UNKNOWN_KERNEL, 10**6),
        )
    ]
    release = Result("t", 0, 1, "gpu", {}, 1e-6, 8.0, 1.0, rows)
    assert [one.bucket for one in discover(task, release, [])] == [3, 2]
