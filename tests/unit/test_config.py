# SPDX-License-Identifier: Apache-2.0
"""The configuration: file, then environment, then flags; what makes no sense is refused by name."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from sonde.config import Config, load
from sonde.errors import UsageError


@pytest.fixture
def file(tmp_path):
    """Writes a configuration file and gives the environment that names it."""

    def write(text):
        path = tmp_path / "config.toml"
        path.write_text(text)
        return {"SONDE_CONFIG": str(path)}

    return write


def test_defaults_hold_where_nothing_is_set(file):
    assert load({}, file("")) == Config()


def test_a_file_sets_fields(file):
    assert load({}, file("hz = 49\noff_cpu = false\nchunk_s = 2\n")) == Config(
        hz=49, off_cpu=False, chunk_s=2.0
    )


def test_the_environment_wins_over_the_file_and_flags_over_both(file):
    environ = file("hz = 11\ntick_s = 2.0\nwait_span_ms = 3.0\n")
    environ |= {"SONDE_HZ": "22", "SONDE_TICK_S": "0.5"}
    config = load({"hz": 33}, environ)
    assert (config.hz, config.tick_s, config.wait_span_ms) == (33, 0.5, 3.0)


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_switches_are_words_in_the_environment(file, text):
    assert load({}, file("launches = false") | {"SONDE_LAUNCHES": text}).launches


def test_processes_may_be_listed(file):
    wanted = frozenset({7, 8})
    assert load({}, file("pids = [7, 8]")).pids == wanted
    assert load({}, file("") | {"SONDE_PIDS": "7,8"}).pids == wanted
    assert load({"pids": [8, 7, 7]}, file("")).pids == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("hz", 0), ("hz", 10_001), ("hz", -1)],
        *[("tick_s", 0.0), ("tick_s", 61), ("chunk_s", 0.5), ("chunk_s", 601)],
        *[("wait_span_ms", 0), ("stack_gap_ms", -1), ("probe_budget", 1.1)],
        *[("tick_s", float("nan")), ("chunk_s", float("inf"))],
    ],
)
def test_values_out_of_range_are_refused_by_name(file, name, value):
    with pytest.raises(UsageError, match=name) as refused:
        load({name: value}, file(""))
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hz = 'often'", "hz"),
        ("hertz = 99", "hertz"),
        ("off_cpu = 'perhaps'", "off_cpu"),
        ("pids = ['one']", "pids"),
        ("pids = 5", "pids"),
        ("hz = ", "config.toml"),
        ("hz = [1]", "hz"),
        ("hz = 99.7", "hz"),
        ("hz = true", "hz"),
        ("prometheus = 9400", "prometheus"),
        ("device_time_allow = 'user:me'", "device_time_allow"),
        ("off_cpu = 1", "off_cpu"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_bad(file, text, named):
    with pytest.raises(UsageError, match=named) as refused:
        load({}, file(text))
    assert refused.value.remedy


def test_a_bad_environment_names_its_variable(file):
    with pytest.raises(UsageError, match="SONDE_HZ"):
        load({}, file("") | {"SONDE_HZ": "fast"})


def test_a_named_file_must_be_there(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        load({}, {"SONDE_CONFIG": str(tmp_path / "nowhere.toml")})


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"config\.toml"):
        load({}, {"SONDE_CONFIG": str(path)})


def test_a_pipe_or_a_device_or_a_file_without_end_is_no_configuration(tmp_path):
    path = tmp_path / "config.toml"
    os.mkfifo(path)
    signal.alarm(5)  # where it would wait for a writer
    try:
        with pytest.raises(UsageError, match="is a pipe"):
            load({}, {"SONDE_CONFIG": str(path)})
    finally:
        signal.alarm(0)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="is a device"):
        load({}, {"SONDE_CONFIG": str(path)})
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(UsageError, match="longer than"):
        load({}, {"SONDE_CONFIG": str(path)})


def test_no_process_at_all_is_refused(file):
    with pytest.raises(UsageError, match="process"):
        load({"pids": []}, file(""))


def test_whose_device_time_may_be_listed(file):
    wanted = ("unit:train-*.service", "user:alice")
    text = 'device_time = "allow-list"\ndevice_time_allow = ["unit:train-*.service", "user:alice"]'
    config = load({}, file(text))
    assert (config.device_time, config.device_time_allow) == ("allow-list", wanted)
    environ = {"SONDE_DEVICE_TIME_ALLOW": "unit:train-*.service, user:alice"}
    assert load({}, file("") | environ).device_time_allow == wanted


def test_device_time_is_off_unless_asked_for(file):
    assert load({}, file("")).device_time == "off"
    with pytest.raises(UsageError, match="device_time is 'always'"):
        load({}, file('device_time = "always"'))


def test_a_configuration_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().hz = 1
