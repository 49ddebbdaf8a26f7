# SPDX-License-Identifier: Apache-2.0
"""`%%sonde` in a notebook, executed by Jupyter's own client and kernel."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="records: needs root")

WORK = """%%sonde {}
import time

def turn(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sum(range(1000))

turn(2.5)
"""


def executed(folder: Path, *cells: str, may_fail: bool = False) -> list[list[dict]]:
    """What each cell shows."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(it) for it in cells])
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        allow_errors=may_fail,
    )
    client.execute()
    return [cell["outputs"] for cell in notebook.cells]


def test_a_cell_is_recorded_and_shows_its_verdict_and_flame_graph(tmp_path):
    capture = tmp_path / "cell.sonde"
    outputs = executed(
        tmp_path,
        "%load_ext sonde",
        WORK.format(capture),
        f"import sonde\nrecording = sonde.open({str(capture)!r})\n"
        "print(any('turn' in str(one) for one in recording.functions()))",
        "recording",
    )

    shown = [one["data"] for one in outputs[1] if "data" in one]
    assert len(shown) == 1
    page = shown[0]["text/html"]
    assert "CPU-bound" in page
    assert "turn" in page
    assert "<iframe sandbox=" in page
    assert outputs[2][0]["text"] == "True\n"
    assert outputs[3][0]["data"]["text/html"][:5] == page[:5]


def test_wrong_use_of_the_magic_is_one_line(tmp_path):
    wrong = WORK.format(tmp_path / "no" / "where.sonde")
    outputs = executed(tmp_path, "%load_ext sonde", wrong, may_fail=True)
    (line,) = [one["text"] for one in outputs[1] if one.get("name") == "stderr"]
    assert line.startswith("UsageError: ")
    assert "Traceback" not in line
