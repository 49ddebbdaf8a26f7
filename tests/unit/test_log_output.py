# SPDX-License-Identifier: Apache-2.0
"""Log output of daemons and services: text, JSON, and the choice between them."""

import json
import logging
import os
import sys
import time

import pytest

from sonde.cli import log_output
from sonde.cli.main import build_command_parser
from sonde.sinks.otlp import OtlpPusher


def log_all(as_json, level):
    log = logging.getLogger("sonde.fleet.test")
    with log_output.to_stderr(as_json, level):
        log.info("reports: %d", 3)
        log.warning("a name with \x1b[31m in it")
        try:
            raise OSError("disk full")
        except OSError:
            log.exception("a job failed")


def test_text_has_a_level_and_no_escapes_for_the_terminal(capsys):
    log_all(False, "info")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("INFO reports: 3")
    assert "WARNING a name with" in lines[1]
    assert "\x1b" not in lines[1]
    assert lines[-1] == "OSError: disk full"


def test_json_is_one_object_per_line(capsys):
    log_all(True, "info")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"]) == ("info", "reports: 3")
    assert first["logger"] == "sonde.fleet.test"
    assert second["message"] == "a name with \x1b[31m in it"
    assert third["level"] == "error"
    assert third["exception"].endswith("OSError: disk full")


def test_the_level_is_a_lower_bound_and_ends_with_the_block(capsys):
    before = logging.getLogger("sonde").level
    log_all(False, "warning")
    assert "reports: 3" not in capsys.readouterr().err
    assert logging.getLogger("sonde").level == before


@pytest.mark.parametrize(("choice", "expected"), [("json", True), ("text", False)])
def test_an_explicit_format_holds_everywhere(monkeypatch, choice, expected):
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    assert log_output.is_json(choice) is expected


def test_json_is_the_default_only_if_stderr_is_the_stream_of_journald(monkeypatch, tmp_path):
    with (tmp_path / "stream").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        stat = os.fstat(stream.fileno())
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        assert not log_output.is_json("auto")
        monkeypatch.setenv("JOURNAL_STREAM", f"{stat.st_dev}:{stat.st_ino + 1}")
        assert not log_output.is_json("auto")
        monkeypatch.setenv("JOURNAL_STREAM", f"{stat.st_dev}:{stat.st_ino}")
        assert log_output.is_json("auto")


@pytest.mark.parametrize("command", ["agent", "serve"])
def test_daemons_take_format_and_level_of_their_log(command):
    required = ["--store", "unused"] if command == "serve" else []
    parser = build_command_parser(command)

    args = parser.parse_args([command, *required, "--log-format", "json", "--log-level", "debug"])

    assert (args.log_format, args.log_level) == ("json", "debug")
    assert parser.parse_args([command, *required]).log_level == "info"


def test_a_collector_that_fails_is_logged_once_until_it_takes_metrics_again(caplog):
    pusher = OtlpPusher("http://127.0.0.1:1", 10, list, {})
    with caplog.at_level("INFO", logger="sonde"):
        pusher.push()
        pusher.push()

    assert pusher.failed == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "takes no metrics" in caplog.text


def test_a_bug_in_a_metric_is_a_failed_push_and_not_the_end_of_them():
    def families():
        raise KeyError("a metric")

    pusher = OtlpPusher("http://127.0.0.1:1", 0.001, families, {})
    pusher.start()
    while pusher.failed < 3 and pusher._thread.is_alive():
        time.sleep(0.001)
    pusher.close()

    assert pusher.failed >= 3
    assert pusher.error == "KeyError: 'a metric'"
