# SPDX-License-Identifier: Apache-2.0
"""Traces whose maker is no friend: a clear error or a counted skip, no traceback, no wrong join."""

from __future__ import annotations

import gzip
import json
import random
import time
import zlib

import pytest
from test_readers_kineto import COPY, KERNEL, LAUNCH, NAME, PYTHON, document, written
from test_readers_others import PERF, profiles

from sonde.cli import main as cli
from sonde.errors import CaptureError, CaptureTooLarge
from sonde.model.timeline import COLUMNS
from sonde.readers import kineto, perf_script
from sonde.recording.timelines import open_timeline

WORDS = {
    "huge": "9223372036854775807",
    "beyond": "9223372036854775808",
    "unsigned": "18446744073709551615",
    "astronomic": "1" + "0" * 4000,
    "endless": "1" * 5000,
    "negative": "-1",
    "least": "-9223372036854775808",
    "fraction": "1.5",
    "nan": "NaN",
    "infinity": "Infinity",
    "overflow": "1e999",
    "text": '"seven"',
    "digits": '"\\u0667"',
    "surrogate": '"\\ud800"',
    "null": "null",
    "true": "true",
    "list": "[1, 2]",
    "object": '{"a": 1}',
    "deep": "[" * 3000 + "]" * 3000,
}
FIELDS = {
    "kernel": (KERNEL, ["ts", "dur", "name", "cat", "ph", "pid", "tid", "args"]),
    "launch": (LAUNCH, ["ts", "dur", "name", "cat", "pid", "tid", "args"]),
    "copy": (COPY, ["name", "args"]),
    "python": (PYTHON, ["ts", "dur", "name", "pid", "tid", "args"]),
    "meta": (NAME, ["name", "pid", "tid", "args"]),
}
ARGS = {"kernel": ["device", "stream", "correlation", "grid"], "launch": ["correlation"],
        "copy": ["device", "stream", "bytes", "correlation"], "meta": ["name"]}  # fmt: skip
HERE = "@here@"


def cases():
    for kind, (event, fields) in FIELDS.items():
        for one in fields:
            yield f"{kind}.{one}", {**event, one: HERE}
        for one in ARGS.get(kind, ()):
            yield f"{kind}.args.{one}", {**event, "args": {**event["args"], one: HERE}}


CASES = list(cases())


def checked(timeline):
    """The rows of all columns belong together."""
    for table in (timeline.device, timeline.calls, timeline.host):
        assert len({len(getattr(table, column)) for column in COLUMNS}) == 1
        assert (table.end_ns >= table.start_ns).all()
        assert (table.start_ns > 0).all()
    return timeline


@pytest.mark.parametrize(("place", "event"), CASES, ids=[place for place, _ in CASES])
@pytest.mark.parametrize("word", WORDS)
def test_one_bad_value_does_not_move_what_follows_it(tmp_path, word, place, event):
    after = [
        {**KERNEL, "ts": 500.0, "args": {**KERNEL["args"], "correlation": 77}},
        {**LAUNCH, "ts": 490.0, "args": {"correlation": 77}},
    ]
    text = json.dumps(document(event, KERNEL, LAUNCH, *after)).replace(f'"{HERE}"', WORDS[word])
    timeline = checked(kineto.read(written(tmp_path, text)))

    device, calls = timeline.device, timeline.calls
    (run,) = device.take(device.correlation == 77).start_ns.tolist()
    (call,) = calls.take(calls.correlation == 77).start_ns.tolist()
    assert (run, call) == (500_000, 490_000)
    assert not (device.correlation < 0).any()
    assert not (calls.correlation < 0).any()


@pytest.mark.parametrize("word", ["huge", "beyond", "negative", "fraction", "text", "true", "nan"])
def test_a_bad_correlation_is_counted_and_reported(tmp_path, word, capsys):
    event = {**KERNEL, "args": {**KERNEL["args"], "correlation": HERE}}
    text = json.dumps(document(event, KERNEL, LAUNCH)).replace(f'"{HERE}"', WORDS[word])
    path = written(tmp_path, text)
    assert kineto.read(path).notes == ["1 events not understood"]
    assert cli.main(["explain", str(path)]) == 0
    assert "note: 1 events not understood" in capsys.readouterr().out


@pytest.mark.parametrize(
    "key", ["id", "name", "numSms", "uuid", "pciBusID", "pciDeviceID", "pciDomainID"]
)
@pytest.mark.parametrize("word", WORDS)
def test_a_bad_value_about_a_device(tmp_path, word, key):
    trace = document(KERNEL)
    trace["deviceProperties"][0] |= {"pciBusID": 1, "pciDeviceID": 0, key: HERE}
    text = json.dumps(trace).replace(f'"{HERE}"', WORDS[word])
    assert len(kineto.read(written(tmp_path, text)).device) == 1


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("bare", [True, False])
def test_a_bad_base_time(tmp_path, word, bare):
    trace = document(KERNEL)
    base = trace.pop("baseTimeNanoseconds")
    assert base
    text = json.dumps(trace)
    more = f'"baseTimeNanoseconds": {WORDS[word]}'
    text = "{" + more + ", " + text[1:] if bare else text[:-1] + ", " + more + "}"
    offset = kineto.read(written(tmp_path, text)).wall_offset_ns
    assert 0 <= offset < 1 << 62


def test_events_that_are_no_events_are_counted(tmp_path):
    text = json.dumps([KERNEL])[:-1] + ', 7, null, "x", [], xyz, {"a" 5}, }, {"b": [1}]}, '
    text += json.dumps(LAUNCH) + "]"
    timeline = checked(kineto.read(written(tmp_path, text)))
    assert len(timeline.device) == len(timeline.calls) == 1
    assert "not understood" in timeline.notes[0]
    assert "truncated" not in "".join(timeline.notes)


def test_of_keys_that_come_twice_the_last_counts(tmp_path):
    text = json.dumps([KERNEL])[:-2] + ', "name": "second"}]'
    timeline = kineto.read(written(tmp_path, text))
    assert "second" in timeline.names


@pytest.mark.parametrize("shape", ["[", '{"a":', "[{", '[[{"a":['])
def test_a_depth_bomb_is_one_event_not_understood(tmp_path, shape):
    depth = 200_000
    closing = {"[": "]", "{": "}"}
    ends = "".join(closing[c] for c in reversed(shape) if c in closing) * depth
    bomb = shape * depth + "0" + ends
    text = f'{{"traceEvents": [{json.dumps(KERNEL)}, {bomb}, {json.dumps(LAUNCH)}]}}'
    began = time.process_time()
    timeline = checked(kineto.read(written(tmp_path, text)))
    assert len(timeline.calls) == 1
    assert timeline.notes == ["1 events not understood"]
    assert time.process_time() - began < 10


def test_a_depth_bomb_before_the_events(tmp_path):
    text = (
        '{"a": ' + "[" * 200_000 + "]" * 200_000 + ', "traceEvents": [' + json.dumps(KERNEL) + "]}"
    )
    assert len(kineto.read(written(tmp_path, text)).device) == 1


@pytest.mark.parametrize("filling", ["x", "\\n", '\\"', "é", "{", "\\ud83d\\ude00"])
def test_one_long_string_takes_time_by_its_length(tmp_path, filling):
    long = filling * (25_000_000 // len(filling))
    text = '{"traceEvents": [{"ph": "X", "name": "' + long + '"}, ' + json.dumps(KERNEL) + "]}"
    path = written(tmp_path, text)
    began = time.process_time()
    timeline = checked(kineto.read(path))
    assert len(timeline.device) == 1
    assert timeline.notes == ["1 events not understood"]
    assert time.process_time() - began < 8  # it was 33 s, and 4 times that for twice the length


def test_a_long_string_that_never_ends(tmp_path):
    text = '{"traceEvents": [' + json.dumps(KERNEL) + ', {"name": "' + "x" * 25_000_000
    began = time.process_time()
    timeline = kineto.read(written(tmp_path, text))
    assert "truncated" in timeline.notes[0]
    assert time.process_time() - began < 8


def test_values_are_read_the_same_wherever_pieces_end(tmp_path, monkeypatch):
    text = json.dumps(document(KERNEL, {**LAUNCH, "name": 'a\\"b"}]'}, COPY, PYTHON, NAME, LAUNCH))
    path = written(tmp_path, text)
    want = kineto.read(path)
    from sonde.readers import json_list

    for size in (*range(1, 40), 97, 150):
        monkeypatch.setattr(json_list, "PIECE", size)
        monkeypatch.setattr(kineto, "_PIECE", max(size, 150))
        got = kineto.read(path)
        assert got.names == want.names
        assert got.notes == want.notes
        assert got.device.correlation.tolist() == want.device.correlation.tolist()
        assert got.calls.start_ns.tolist() == want.calls.start_ns.tolist()


def test_a_mark_of_byte_order_and_bytes_that_are_no_utf8(tmp_path):
    path = tmp_path / "t.json"
    raw = b"\xef\xbb\xbf" + json.dumps(document({**KERNEL, "name": "@"}, LAUNCH)).encode()
    path.write_bytes(raw.replace(b'"@"', b'"\xff\xfe\xc3"'))
    timeline = open_timeline([path])
    assert len(timeline.device) == 1
    assert all(c < "\ud800" or c > "\udfff" for name in timeline.names for c in name)


def test_half_a_character_does_not_stop_an_export(tmp_path, capsys):
    pytest.importorskip("perfetto")
    path = written(tmp_path, document({**KERNEL, "name": "k\ud800"}, LAUNCH))
    for flag in ("--perfetto", "--chrome"):
        assert cli.main(["explain", str(path), flag, str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("shape", ["zeros", "spaces", "events"])
def test_a_compressed_bomb_is_an_error(tmp_path, shape):
    """gzip packs a thousand to one at the best: what comes near is no trace."""
    begin = b'{"traceEvents": ['
    filling = {"zeros": b"\0", "spaces": b" ", "events": b"0,"}[shape]
    packer = zlib.compressobj(9, wbits=31)
    packed = packer.compress(begin)
    block = filling * ((1 << 22) // len(filling))
    for _ in range(60):
        packed += packer.compress(block)
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed + packer.flush())
    began = time.process_time()
    with pytest.raises(CaptureError) as refused:
        open_timeline([path])
    assert refused.value.remedy
    assert time.process_time() - began < 30


def test_a_compressed_trace_that_is_cut(tmp_path):
    whole = gzip.compress(json.dumps(document(*[KERNEL] * 50)).encode())
    path = tmp_path / "t.json.gz"
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CaptureError):
            open_timeline([path])


def test_names_without_end_are_bounded(tmp_path, monkeypatch):
    events = [{**KERNEL, "name": f"k{number}" + "n" * 1000} for number in range(3000)]
    path = written(tmp_path, document(*events))
    assert len(kineto.read(path).device) == 3000
    monkeypatch.setenv("SONDE_READ_LIMIT", "1M")
    with pytest.raises(CaptureTooLarge):
        kineto.read(path)


HEAD = "python3  4211/4215  [001] 12345.100000:   10101010 cpu-clock:u:"


@pytest.mark.parametrize(
    "line",
    [
        HEAD.replace("12345.1", "9" * 5000 + ".1"),
        HEAD.replace("12345.1", "9999999999.1"),
        HEAD.replace("10101010", "9" * 18),
        HEAD.replace("10101010", "9" * 30),
        HEAD.replace("4215", "9" * 40),
        HEAD.replace("4215", "-1"),
        HEAD.replace("001", "9" * 5000),
        "x" + " " * 200_000 + "1",
        ("1 " * 100_000),
        "\t" + " " * 16_000,
        "\t7f00 a" + " (" * 8_000,
        "\t7f00 a" + " (" * 8_000 + ")",
        "\t7f00 " + "+0x1" * 4_000 + ")",
        "s 0 [000] 1.2: sched:sched_switch: " + "prev_comm=" * 1_500,
        "s 0 [000] 1.2: sched:sched_waking: " + "comm=" * 3_000,
        "x" * 20_000_000,
        "\x00\x1b[2J",
        "\u0661 \u0661 \u0661.\u0661: a:",
    ],
    ids=range(18),
)
def test_a_hostile_line_of_perf_script(tmp_path, line):
    path = tmp_path / "perf.txt"
    path.write_text(PERF + (line + "\n") * (1 if len(line) > 10**6 else 20) + "\n" + PERF)
    began = time.process_time()
    timeline = perf_script.read(path)
    assert len(timeline.samples) >= 4
    assert (timeline.samples.weight_ns >= 0).all()
    assert time.process_time() - began < 5


@pytest.mark.parametrize("comm", ["a 7 1.0: x:", "7/8 [001] 1.0:", "x 1/1 1.0: a: ", "(a) 5 6"])
def test_a_command_that_looks_like_the_rest_of_its_line(tmp_path, comm):
    path = tmp_path / "perf.txt"
    path.write_text(HEAD.replace("python3", comm[:15]) + "\n\n")
    track = perf_script.read(path).tracks[0]
    assert (track.pid, track.number, track.name) == (4211, 4215, comm[:15].strip())


def test_commands_set_to_the_right_are_read(tmp_path):
    path = tmp_path / "perf.txt"
    path.write_text(f"         {HEAD}\n" * 3)
    assert len(perf_script.read(path).samples) == 3


class TestProfiles:
    def read(self, tmp_path, data):
        path = tmp_path / "p"
        path.write_bytes(data.SerializeToString())
        return open_timeline([path])

    @pytest.mark.parametrize("index", [-1, -(2**31), 2**31 - 1, 99])
    def test_indices_that_point_nowhere(self, tmp_path, index):
        def changed(change):
            data = profiles()
            change(data)
            return data

        def stack(data):
            data.resource_profiles[0].scope_profiles[0].profiles[0].samples[0].stack_index = index

        def location(data):
            data.dictionary.stack_table[1].location_indices[:] = [index, index]

        def function(data):
            data.dictionary.location_table[0].lines[0].function_index = index
            data.dictionary.location_table[1].lines.clear()

        def text(data):
            data.dictionary.function_table[1].name_strindex = index

        def attribute(data):
            sample = data.resource_profiles[0].scope_profiles[0].profiles[0].samples[0]
            sample.attribute_indices[:] = [index]

        def key(data):
            data.dictionary.attribute_table[0].key_strindex = index

        for change in (stack, location, function, text, attribute, key):
            assert len(self.read(tmp_path, changed(change)).samples) == 2

    @pytest.mark.parametrize("value", [-1, -(2**63), 2**63 - 1])
    def test_weights_that_cannot_be_are_counted(self, tmp_path, value):
        data = profiles()
        sample = data.resource_profiles[0].scope_profiles[0].profiles[0].samples[0]
        sample.values[0] = value
        timeline = self.read(tmp_path, data)
        assert timeline.samples.weight_ns.tolist() == [7_000_000]
        assert timeline.notes == ["1 samples with an impossible weight"]

    def test_times_that_cannot_be_are_counted(self, tmp_path):
        data = profiles()
        sample = data.resource_profiles[0].scope_profiles[0].profiles[0].samples[0]
        sample.timestamps_unix_nano[0] = 2**64 - 1
        timeline = self.read(tmp_path, data)
        assert len(timeline.samples) == 1
        assert timeline.notes == ["1 samples with a time out of range"]

    def test_a_period_that_is_negative_is_none(self, tmp_path):
        data = profiles()
        profile = data.resource_profiles[0].scope_profiles[0].profiles[0]
        profile.sample_type.unit_strindex = 0
        profile.period = -5
        profile.samples[0].values[:] = [1, 1]
        assert (self.read(tmp_path, data).samples.weight_ns > 0).all()

    @pytest.mark.parametrize("form", ["deep", "empty", "lying"])
    def test_messages_that_are_bombs(self, tmp_path, form, monkeypatch):
        path = tmp_path / "p"
        if form == "deep":
            path.write_text('{"resourceProfiles": ' + "[" * 100_000 + "]" * 100_000 + "}")
        elif form == "empty":
            path.write_bytes(b"\x0a\x00" * 5_000_000)
            monkeypatch.setenv("SONDE_READ_LIMIT", "100M")
        else:
            path.write_bytes(b"\x0a\xff\xff\xff\xff\x0f" + b"\0" * 100)
        with pytest.raises(CaptureError) as refused:
            open_timeline([path])
        assert refused.value.remedy


def test_bytes_at_random_in_every_format(tmp_path):
    dice = random.Random(17)
    path = tmp_path / "t"
    for whole in (
        json.dumps(document(KERNEL, LAUNCH, COPY, PYTHON, NAME)).encode(),
        PERF.encode(),
        profiles().SerializeToString(),
        gzip.compress(json.dumps(document(KERNEL, LAUNCH)).encode()),
    ):
        for _ in range(200):
            damaged = bytearray(whole)
            for _ in range(dice.randint(1, 6)):
                at = dice.randrange(len(damaged))
                damaged[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 4))
            path.write_bytes(damaged)
            try:
                checked(open_timeline([path]))
            except CaptureError as error:
                assert error.remedy
