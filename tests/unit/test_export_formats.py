# SPDX-License-Identifier: Apache-2.0
"""Formats of other tools, and JSON for scripts."""

import gzip
import io
import json
import re
from pathlib import Path

import pytest

from captures import START_NS, WALL_OFFSET_NS, Writer, scene
from sonde.export import json_report, pprof, pprof_profile_pb2, speedscope
from sonde.model.profile import BASIC_KINDS, ProfileKind
from sonde.query.capture import read
from sonde.query.queries import Where
from sonde.query.session import Session


@pytest.fixture
def session(tmp_path):
    return Session(read(scene().write(tmp_path / "a.sonde")))


def written(exporter, session, **more):
    out = io.BytesIO()
    exporter.write(session, out, **more)
    return out.getvalue()


# ---- pprof ----


class Decoded:
    """A profile read back with the same message classes."""

    def __init__(self, data):
        self.message = pprof_profile_pb2.Profile.FromString(gzip.decompress(data))
        self.text = self.message.string_table
        self.functions = {function.id: function for function in self.message.function}
        self.locations = {location.id: location for location in self.message.location}
        self.mappings = {mapping.id: mapping for mapping in self.message.mapping}

    def stack(self, sample):
        lines = (self.locations[number].line[0] for number in sample.location_id)
        return [self.text[self.functions[line.function_id].name] for line in lines]

    def labels(self, sample):
        return {self.text[label.key]: self.text[label.str] or label.num for label in sample.label}


@pytest.fixture
def decoded(session):
    return Decoded(written(pprof, session))


def test_pprof_has_the_sample_types_of_every_kind(decoded):
    types = [(decoded.text[t.type], decoded.text[t.unit]) for t in decoded.message.sample_type]
    assert types == [pair for kind in BASIC_KINDS for pair in pprof.SAMPLE_TYPES[kind]]
    assert decoded.text[decoded.message.default_sample_type] == "cpu"
    assert decoded.text[0] == ""


def test_pprof_sums_are_those_of_the_capture(decoded):
    sums = [sum(values) for values in zip(*(s.value for s in decoded.message.sample), strict=True)]
    assert sums[0] == 650
    assert sums[2:4] == [525, 25_500_000_000]
    assert sums[4:6] == [490, 3_250_000_000]
    assert sums[6:] == [3000, 3_251_000_000, 5_000_000_000]


def test_pprof_stacks_are_leaf_first_with_labels(decoded):
    first = decoded.message.sample[0]
    assert decoded.stack(first) == ["memmove", "train_step", "main", "_start"]
    assert decoded.labels(first) == {
        "pid": 4211,
        "tid": 4211,
        "process": "python3",
        "thread": "python3",
    }


def test_pprof_labels_name_the_reason_and_the_call(decoded):
    labels = [decoded.labels(sample) for sample in decoded.message.sample]
    assert {"futex", "read", "sleep"} <= {label.get("reason") for label in labels}
    assert "clFinish" in {label.get("call") for label in labels}


def test_pprof_knows_mappings_lines_and_times(decoded):
    message = decoded.message
    by_file = {decoded.text[mapping.filename]: mapping for mapping in message.mapping}
    assert len(decoded.text[by_file["libc.so.6"].build_id]) == 40
    assert decoded.text[by_file["[kernel]"].build_id] == ""
    for location in message.location:
        assert location.address < decoded.mappings[location.mapping_id].memory_limit
    lines = {
        decoded.text[decoded.functions[line.function_id].name]: line.line
        for location in message.location
        for line in location.line
    }
    assert lines["train_step"] == 120
    assert message.time_nanos == START_NS + WALL_OFFSET_NS
    assert message.duration_nanos == 10_000_000_000
    assert message.period == round(1e9 / 99)


def test_pprof_of_one_kind_and_process(session):
    where = Where(pids=(4211,))
    decoded = Decoded(written(pprof, session, kinds=(ProfileKind.OFF_CPU,), where=where))
    assert [decoded.text[t.type] for t in decoded.message.sample_type] == ["waits", "off_cpu"]
    assert {decoded.labels(sample)["pid"] for sample in decoded.message.sample} == {4211}


def test_pprof_numbers_each_location_once_where_several_kinds_have_rows_without_a_stack(tmp_path):
    writer = Writer()
    app = writer.process(1, "app")
    writer.on_cpu(app, 1, 0, 1)
    writer.wait(app, 1, "futex", 1.0)
    calls = {"count": 1, "seconds": 1.0, "op": "alloc"}
    writer.calls(app, 1, "cuMemAlloc_v2", **calls, stack=writer.stack("main"))
    found = Decoded(written(pprof, Session(read(writer.write(tmp_path / "a.sonde")))))

    assert len(found.locations) == len(found.message.location)


def test_pprof_of_the_same_capture_is_the_same_bytes(session):
    assert written(pprof, session) == written(pprof, session)


def test_generated_messages_are_those_of_the_proto():
    folder = Path(pprof_profile_pb2.__file__).parent
    text = re.sub(r"//.*", "", (folder / "pprof_profile.proto").read_text())
    declared = {
        message: set(re.findall(r"(\w+) = (\d+);", fields))
        for message, fields in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL)
    }
    assert declared == {
        name: {(field.name, str(field.number)) for field in message.fields}
        for name, message in pprof_profile_pb2.DESCRIPTOR.message_types_by_name.items()
    }


# ---- speedscope ----


@pytest.fixture
def scope(session):
    return json.loads(written(speedscope, session))


def test_speedscope_has_one_sampled_profile_a_kind(scope):
    assert [(p["type"], p["name"], p["unit"]) for p in scope["profiles"]] == [
        ("sampled", "On-CPU", "nanoseconds"),
        ("sampled", "Off-CPU: blocked", "nanoseconds"),
        ("sampled", "Off-CPU: run queue", "nanoseconds"),
        ("sampled", "GPU API calls", "nanoseconds"),
    ]


def test_speedscope_samples_match_their_weights_and_frames(scope):
    frames = scope["shared"]["frames"]
    for profile in scope["profiles"]:
        assert len(profile["samples"]) == len(profile["weights"]) > 0
        assert profile["endValue"] == sum(profile["weights"])
        assert all(0 <= number < len(frames) for s in profile["samples"] for number in s)


def test_speedscope_stacks_stand_on_their_process(scope):
    frames = [frame["name"] for frame in scope["shared"]["frames"]]
    first = [frames[number] for number in scope["profiles"][0]["samples"][0]]
    assert first == ["python3 (4211)", "_start", "main", "train_step", "memmove"]
    ends = {frames[sample[-1]] for sample in scope["profiles"][1]["samples"]}
    assert {"(futex)", "(sleep)"} <= ends


def test_speedscope_leaves_out_what_was_not_seen(tmp_path):
    writer = Writer()
    writer.on_cpu(writer.process(7, "p"), 7, writer.stack("main"), 3)
    session = Session(read(writer.write(tmp_path / "b.sonde")))
    assert [p["name"] for p in json.loads(written(speedscope, session))["profiles"]] == ["On-CPU"]


def test_speedscope_of_nothing_is_still_a_file(tmp_path):
    session = Session(read(Writer().write(tmp_path / "b.sonde")))
    assert len(json.loads(written(speedscope, session))["profiles"]) == 4


# ---- JSON ----


def test_json_answers_every_question(session):
    document = json.loads(written(json_report, session))
    assert document["format"] == 2
    assert document["capture"]["duration_ns"] == 10_000_000_000
    assert document["processes"][0]["comm"] == "python3"
    assert document["functions"]["on-cpu"][0]["function"] == "memmove"
    (futex,) = (w for w in document["waits"] if w["reason"] == "futex" and w["kind"] == "off-cpu")
    assert (futex["pid"], futex["tid"], futex["ns"]) == (4211, 4211, 4_000_000_000)
    assert document["device_calls"][0]["function"] == "clFinish"
    assert document["losses"] == []
    assert document["metrics"][0]["series"] == "sonde.agent.cpu_ns"


def test_json_of_one_kind(session):
    document = json.loads(written(json_report, session, kinds=(ProfileKind.RUN_QUEUE,)))
    assert list(document["functions"]) == ["run-queue"]
    assert {wait["kind"] for wait in document["waits"]} == {"run-queue"}
    assert document["device_calls"] == []
