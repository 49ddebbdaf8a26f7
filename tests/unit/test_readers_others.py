# SPDX-License-Identifier: Apache-2.0
"""What other tools wrote: `perf script`, OTLP profiles."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tracemalloc

import pytest
from google.protobuf import json_format
from opentelemetry.proto.profiles.v1development import profiles_pb2

from charged import charged
from sonde import protobuf_size
from sonde.cli import main as cli
from sonde.errors import CaptureError, CaptureTooLarge, NotACapture
from sonde.model.timeline import StateKind
from sonde.readers import otlp_profiles, perf_script
from sonde.recording.timelines import open_timeline

PERF = """\
# captured on: today
python3  4211/4215  [001] 12345.100000:   10101010 cpu-clock:u:
\t    7f0012 decode_row+0x10 (/usr/lib/libjpeg.so.62)
\t    7f0000 [unknown] (/usr/bin/python3.12)

python3  4211/4211  [000] 12345.110000:   10101010 cpu-clock:u:
\tffffffff81 clear_page_erms+0x7 ([kernel.kallsyms])
\tffffffff80 handle_mm_fault+0x1 ([kernel.kallsyms])
\t    7f0020 fill+0x2 (/usr/bin/python3.12)

swapper     0 [000] 12345.200000: sched:sched_switch: prev_comm=python3 prev_pid=4211 \
prev_prio=120 prev_state=S ==> next_comm=swapper/0 next_pid=0 next_prio=120
my prog  4215 [001] 12345.230000: sched:sched_waking: comm=python3 pid=4211 prio=120 target_cpu=000
swapper     0 [000] 12345.235000: sched:sched_switch: prev_comm=swapper/0 prev_pid=0 \
prev_prio=120 prev_state=R ==> next_comm=python3 next_pid=4211 next_prio=120
"""


class TestPerfScript:
    def test_samples_and_switches(self, tmp_path):
        path = tmp_path / "perf.txt"
        path.write_text(PERF)
        timeline = open_timeline([path])

        samples = timeline.samples
        assert [timeline.names[i] for i in samples.name] == ["decode_row", "fill"]
        assert samples.weight_ns.tolist() == [10101010, 10101010]
        assert samples.fault.tolist() == [False, True]
        assert [timeline.tracks[i].number for i in samples.track] == [4215, 4211]
        states = timeline.states
        assert states.kind.tolist() == [StateKind.BLOCKED, StateKind.RUNQUEUE]
        assert states.duration_ns.tolist() == [30_000_000, 5_000_000]
        assert not timeline.notes

    @pytest.mark.parametrize(
        "line",
        [
            "prog{0} {0}/{0} [001] 12345.100000: 1010 cpu-clock:u:",
            "a 1 [{0}] 12345.100000: 1010 cpu-clock:u:",
            "a 1 [000] 12345.230000: sched:sched_waking: comm=b pid={0} prio=1 target_cpu=0",
            "a 1 [000] 1234.{0:06}: sched:sched_switch: prev_comm=a prev_pid=9{0} prev_prio=1 "
            "prev_state=S ==> next_comm=b next_pid=9{1} next_prio=1",
        ],
    )
    def test_all_that_is_kept_is_accounted_for(self, tmp_path, monkeypatch, line):
        """Each event may be of another thread and CPU."""
        path = tmp_path / "perf.txt"
        lines = (line.format(number, number - 1) for number in range(1_000, 6_000))
        path.write_text(PERF + "\n" + "\n\n".join(lines) + "\n")
        taken_bytes, held_bytes = charged(perf_script, path, monkeypatch)
        assert taken_bytes < held_bytes

    def test_lines_that_are_something_else_are_counted(self, tmp_path):
        path = tmp_path / "perf.txt"
        path.write_text(PERF + "\nwhat is this\n")
        assert perf_script.read(path).notes == ["1 lines not understood"]

    def test_other_text_is_refused(self, tmp_path):
        path = tmp_path / "perf.txt"
        path.write_text("hello\nworld\n")
        with pytest.raises(NotACapture):
            perf_script.read(path)

    @pytest.mark.parametrize("magic", [b"PERFILE2", b"2ELIFREP"])
    def test_perfs_binary_data_is_refused_with_the_command_that_prints_it(self, tmp_path, magic):
        path = tmp_path / "perf.data"
        path.write_bytes(magic + (104).to_bytes(8, "little") + bytes(5000))
        with pytest.raises(NotACapture) as refused:
            open_timeline([path])
        assert f"perf script -i {path}" in refused.value.remedy

    @pytest.mark.machine
    @pytest.mark.skipif(not shutil.which("perf"), reason="needs perf")
    def test_what_the_real_perf_prints(self, tmp_path):
        """Half a second of a busy loop, by perf's own hand; not everybody may run perf."""
        data, text = tmp_path / "perf.data", tmp_path / "perf.txt"
        program = "import time\nt=time.time()\nwhile time.time()-t<.5: sum(range(1000))"
        record = ["perf", "record", "-e", "cpu-clock", "-F", "199", "-g", "-o", str(data)]
        ran = subprocess.run([*record, sys.executable, "-c", program], capture_output=True)
        if ran.returncode:
            pytest.skip("perf may not record here")
        with pytest.raises(NotACapture, match="perf's binary data"):
            open_timeline([data])
        with text.open("w") as out:
            subprocess.run(["perf", "script", "-i", str(data)], stdout=out, check=True,
                           stderr=subprocess.DEVNULL)  # fmt: skip
        timeline = open_timeline([text])

        assert timeline.samples.weight_ns.sum() / 1e9 == pytest.approx(0.5, rel=0.5)
        assert any(timeline.names[i] for i in timeline.samples.name)


def profiles() -> profiles_pb2.ProfilesData:
    data = profiles_pb2.ProfilesData()
    words = ["", "cpu", "nanoseconds", "main", "decode", "thread.id"]
    data.dictionary.string_table.extend(words)
    for index in (3, 4):
        data.dictionary.function_table.add().name_strindex = index
    for function in (0, 1):
        data.dictionary.location_table.add().lines.add().function_index = function
    data.dictionary.stack_table.add()
    data.dictionary.stack_table.add().location_indices.extend([1, 0])
    attribute = data.dictionary.attribute_table.add()
    attribute.key_strindex = 5
    attribute.value.int_value = 77
    resource = data.resource_profiles.add()
    pid = resource.resource.attributes.add()
    pid.key, pid.value.int_value = "process.pid", 42
    profile = resource.scope_profiles.add().profiles.add()
    profile.sample_type.type_strindex, profile.sample_type.unit_strindex = 1, 2
    profile.time_unix_nano = 1_700_000_000_000_000_000
    sample = profile.samples.add()
    sample.stack_index = 1
    sample.attribute_indices.append(0)
    sample.values.extend([5_000_000, 7_000_000])
    sample.timestamps_unix_nano.extend([1_700_000_000_000_000_000, 1_700_000_000_010_000_000])
    return data


class _NoSizes:
    def decoded_bytes(self, raw: bytes, most_bytes: int) -> int:
        tracemalloc.reset_peak()  # of the space that the file was read into
        return 0


class TestOtlpProfiles:
    @pytest.mark.parametrize("form", ["protobuf", "json"])
    def test_samples(self, tmp_path, form):
        path = tmp_path / "profiles"
        data = profiles()
        raw = data.SerializeToString()
        path.write_bytes(raw if form == "protobuf" else json_format.MessageToJson(data).encode())
        timeline = open_timeline([path])

        assert timeline.sources == ("OTLP profiles",)
        assert timeline.samples.weight_ns.tolist() == [5_000_000, 7_000_000]
        assert {timeline.names[i] for i in timeline.samples.name} == {"decode"}
        track = timeline.tracks[timeline.samples.track[0]]
        assert (track.pid, track.number) == (42, 77)

    def test_samples_without_a_value_or_a_time_count_for_nothing(self, tmp_path):
        data, path = profiles(), tmp_path / "p"
        profile = data.resource_profiles[0].scope_profiles[0].profiles[0]
        for _ in range(1_000):
            profile.samples.add()
        path.write_bytes(data.SerializeToString())
        timeline = otlp_profiles.read(path)
        assert timeline.samples.weight_ns.tolist() == [5_000_000, 7_000_000]
        assert "1,000 samples without a value or a time" in timeline.notes

    def test_samples_of_one_thread_share_a_track(self, tmp_path):
        data, path = profiles(), tmp_path / "p"
        profile = data.resource_profiles[0].scope_profiles[0].profiles[0]
        attribute = data.dictionary.attribute_table.add(key_strindex=5)
        attribute.value.int_value = 78
        for at in (1, 0, 1):
            profile.samples.add(values=[5], attribute_indices=[at])
        path.write_bytes(data.SerializeToString())
        timeline = otlp_profiles.read(path)
        numbers = [timeline.tracks[at].number for at in timeline.samples.track]
        assert numbers == [77, 77, 78, 77, 78]

    def test_damage_is_refused_or_read_but_never_a_defect(self, tmp_path):
        raw, path = profiles().SerializeToString(), tmp_path / "p"
        rng = random.Random(3)
        for _ in range(500):
            damaged = bytearray(raw)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                otlp_profiles.read(path)
            except CaptureError as error:
                assert error.remedy

    @pytest.mark.parametrize("what", ["threads", "stacks", "locations"])
    def test_all_that_is_kept_is_accounted_for(self, tmp_path, monkeypatch, what):
        data = profiles()
        profile = data.resource_profiles[0].scope_profiles[0].profiles[0]
        samples = [profile.samples.add(values=[5]) for _ in range(5_000)]
        for number, sample in enumerate(samples):
            if what == "threads":
                attribute = data.dictionary.attribute_table.add(key_strindex=5)
                attribute.value.int_value = 1_000 + number
                sample.attribute_indices.append(number + 1)
            elif what == "stacks":
                sample.stack_index = 1_000 + number
        if what == "locations":
            stack = data.dictionary.stack_table.add()
            stack.location_indices.extend(range(1_000, 20_000))
            samples[0].stack_index = 2
        path = tmp_path / "p"
        path.write_bytes(data.SerializeToString())
        # What the message takes once it is decoded is not of Python's memory.
        monkeypatch.setattr(protobuf_size, "sizes_of", lambda _: _NoSizes())
        taken_bytes, held_bytes = charged(otlp_profiles, path, monkeypatch)
        assert taken_bytes < held_bytes

    @pytest.mark.parametrize("unit", [b"\x12\0", b"{},"])
    def test_nothing_but_empty_messages_is_within_the_limit(self, tmp_path, monkeypatch, unit):
        """Profiles of a scope: each takes a hundred bytes or more."""
        path = tmp_path / "p"
        if unit == b"{},":
            head = b'{"resourceProfiles": [{"scopeProfiles": [{"profiles": ['
            path.write_bytes(head + unit * 400_000 + b"{}]}]}]}")
        else:
            made = profiles()
            made.resource_profiles[0].scope_profiles[0].MergeFromString(unit * 400_000)
            path.write_bytes(made.SerializeToString())
        monkeypatch.setenv("SONDE_READ_LIMIT", "64M")
        with pytest.raises(CaptureTooLarge):
            otlp_profiles.read(path)

    def test_nothing_of_the_schema(self, tmp_path, capsys):
        path = tmp_path / "p"
        path.write_bytes(b"\x0a\x00")
        assert cli.main(["explain", str(path)]) == 1
        assert "opentelemetry-proto 1.45" in capsys.readouterr().err
