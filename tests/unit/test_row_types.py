# SPDX-License-Identifier: Apache-2.0
"""Rows as records: what scripts/row_types.py makes of abi/tables.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.collect.collector import Batch
from sonde.model import rows
from sonde.model.rows import ActivityRow, EventRow, UsageRow

ROOT = Path(__file__).parents[2]
TABLES = json.loads((ROOT / "abi/tables.json").read_text())["tables"]


def test_the_records_are_made_from_the_contract():
    script = ROOT / "scripts" / "row_types.py"
    done = subprocess.run([sys.executable, str(script), "--check"])
    assert done.returncode == 0, "run scripts/row_types.py"


@pytest.mark.parametrize(("kind", "table"), rows._TABLES.items())
def test_a_record_has_the_columns_of_its_table(kind, table):
    assert list(kind._fields) == [name for name, *_ in TABLES[table]["columns"]]


def test_rows_that_were_written_as_tuples_are_read_as_records():
    batch = Batch()
    what = (1, "device", "clFinish", "opencl", "sync", "", 0)
    batch.add("activity", (*what, 7, 10_000_000, 8, 5, 900, 64, 300, 0, 0))
    (row,) = batch.records(ActivityRow)
    assert (row.kind, row.op, row.tid, row.count, row.ns) == ("device", "sync", 8, 5, 900)
    assert list(batch.records(UsageRow)) == []


def test_rows_are_counted_and_handed_on_by_table():
    batch = Batch()
    assert batch.most_rows() == 0
    for number in range(3):
        batch.add("event", EventRow(number, "notice", "x", 0, 0, 1.0, ""))
    batch.rows["usage"] = []
    assert batch.most_rows() == 3
    assert [(table, len(rows)) for table, rows in batch.by_table()] == [("event", 3), ("usage", 0)]


WRONG = (
    'batch.add("event", (0, "notice", "x", 0, 0, 1.0, ""))',
    'batch.add("usage", (0, 1))',
    'batch.rows["activity"] = [("now",)]',
    "next(batch.records(EventRow)).txt",
)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """What mypy reports of them: `strict` in scripts/check."""
    module = tmp_path_factory.mktemp("rows") / "wrong.py"
    module.write_text(
        "from sonde.collect.collector import Batch\n"
        "from sonde.model.rows import EventRow\nbatch = Batch()\n" + "\n".join(WRONG) + "\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(module)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout


@pytest.mark.parametrize("line", WRONG)
def test_a_row_of_another_shape_is_found_before_it_runs(line, complaints):
    assert f"wrong.py:{4 + WRONG.index(line)}: error" in complaints
