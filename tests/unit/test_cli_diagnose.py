# SPDX-License-Identifier: Apache-2.0
"""What `sonde diagnose` prints, keeps and sends: incidents one by one, their parts as one line."""

from __future__ import annotations

import argparse

import pytest

from sonde.cli.diagnose import Printer
from sonde.cli.incident_exporters import IncidentExporters, add_arguments
from sonde.cli.incidents import as_text
from sonde.diagnose.incident import Candidate, FaultCause, Incident, Verdict
from sonde.diagnose.moments import Window

WINDOW = Window(5, 2, [], [], {}, [], [])


class Exporters(IncidentExporters):
    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        super().__init__(parser.parse_args([]))
        self.sent: list[int] = []

    def take(self, incident: Incident) -> None:
        self.sent.append(incident.number)


def incident(number: int, part_of: int = 0, name="python train.py", slowdown=2.0) -> Incident:
    first = Candidate(FaultCause.CPU_CONTENTION, 1.0, ("without a CPU for 0.40 s more",))
    lost = {"ready": 0.4, "cpu": 0.2, "sleep": 0.3}
    verdict = Verdict((first,), slowdown, lost)
    return Incident(5, name, "", 1, 2, 3, ("ready",), verdict, number, part_of)


@pytest.fixture
def exporters():
    return Exporters()


def test_parts_are_one_line_before_the_next_incident_and_at_the_end(exporters, tmp_path, capsys):
    printer = Printer(False, False, tmp_path / "kept", exporters)
    for number, part_of, name in ((1, 0, "a"), (2, 1, "b"), (3, 1, "b"), (4, 1, "c"), (5, 0, "d")):
        printer.take(incident(number, part_of, name), WINDOW)
    printer.take(incident(6, 5, "e"), WINDOW)
    printer.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert lines == [
        "a (5): 2.0 times as slow: cpu-contention (100% of the lost time)",
        "cpu-contention of a (5) goes on: 3 more slowdowns, of b 2, c 1",
        "d (5): 2.0 times as slow: cpu-contention (100% of the lost time)",
        "cpu-contention of d (5) goes on: 1 more slowdown, of e 1",
    ]
    assert exporters.sent == [1, 5]
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_json_has_no_parts_but_with_all(exporters, capsys):
    for changes_too, lines in ((False, 1), (True, 2)):
        printer = Printer(True, changes_too, None, exporters)
        printer.take(incident(1), WINDOW)
        printer.take(incident(2, 1), WINDOW)
        printer.close()
        assert len(capsys.readouterr().out.splitlines()) == lines


def test_what_does_as_much_is_not_called_slow():
    text = as_text(incident(1, slowdown=1.0))
    assert "waits 0.40 s more of each second" in text
