# SPDX-License-Identifier: Apache-2.0
"""Several files: a trace is joined with a capture of its time; each capture has its verdict."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from dataclasses import replace

import pytest
from test_explain_requests import FIRST, shop

from captures import Writer
from sonde.analyze.merge import grouped
from sonde.cli.main import main
from timelines import Scene, repeated
from training_capture import process

SLOW = ("slow", "[python]", "batch.py", 7, "python")
SECOND_NS = 1_000_000_000


@pytest.fixture
def two(tmp_path):
    """A shop in the whole machine, and a batch of 3 s that was recorded alone."""
    machine = Writer(seconds=5)
    shop(machine)
    alone = Writer(seconds=3, chunk_seconds=3, host={"whole_machine": False})
    key = process(alone)
    alone.on_cpu(key, FIRST, alone.stack(SLOW), 280)
    return [
        str(machine.write(tmp_path / "shop.sonde")),
        str(alone.write(tmp_path / "batch.sonde")),
    ]


def test_two_captures_have_each_its_verdict(two, capsys):
    assert main(["explain", *two]) == 0

    lines = capsys.readouterr().out.splitlines()
    first, second = (number for number, line in enumerate(lines) if line.startswith("== "))
    assert lines[first].endswith("shop.sonde, 5.00 s, whole machine")
    assert lines[first + 1].startswith("requests of Page.do_GET")
    assert lines[second].endswith("batch.sonde, 3.00 s, chosen processes")
    assert "slow batch.py:7" in "\n".join(lines[second:])
    assert "slow batch.py:7" not in "\n".join(lines[:second])


def test_verdicts_of_scripts_name_their_file(two, capsys):
    assert main(["explain", *two, "--json"]) == 0

    document = json.loads(capsys.readouterr().out)
    files = [one["files"] for one in document["verdicts"]]
    assert [two[0]] == files[0]
    assert [two[1]] == files[-1]
    assert document["sources"] == ["sonde", "sonde"]
    assert all(note.startswith(tuple(two)) for note in document["notes"])


def test_a_process_of_one_of_them(two, capsys):
    assert main(["explain", *two, "--pid", "42"]) == 0
    assert capsys.readouterr().out.count("== ") == 2
    assert main(["explain", *two, "--pid", str(10**6)]) == 2


def test_one_file_for_another_program_is_of_one_record(two, tmp_path, capsys):
    assert main(["explain", *two, "--chrome", str(tmp_path / "out.json")]) == 2
    assert "not of one record" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def late(scene: Scene, t: float) -> None:
    scene.kernel(t, t + 1000)
    scene.kernel(t + 9000, t + 9990)


def test_a_trace_is_joined_with_what_is_of_its_time():
    trace = replace(repeated(Scene(), late).timeline(), wall_offset_ns=1000 * SECOND_NS)
    begin, end = trace.start_ns, trace.end_ns

    def capture(shift_ns: int):
        plain = replace(Scene().timeline(), sources=("sonde",), extent_ns=(begin, end))
        return replace(plain, wall_offset_ns=trace.wall_offset_ns + shift_ns)

    same, later, unknown = capture(0), capture(300 * SECOND_NS), capture(-trace.wall_offset_ns)
    assert grouped([same, trace]) == [[1, 0]]
    assert grouped([later, trace]) == [[0], [1]]
    assert grouped([trace, unknown]) == [[0, 1]]
    assert grouped([same, same]) == [[0], [1]]
    assert grouped([trace, later, same]) == [[0, 2], [1]]


def test_an_error_names_standard_input_not_the_copy_that_was_read(monkeypatch, capsys):
    read, write = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(write, b"x\n"), os.close(write)))
    saved = os.dup(0)
    os.dup2(read, 0)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    try:
        writer.start()
        assert main(["explain", "-"]) == 1
        writer.join()
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(read)
    assert capsys.readouterr().err.startswith("sonde: standard input has no known format")
