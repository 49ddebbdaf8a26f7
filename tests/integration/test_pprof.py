# SPDX-License-Identifier: Apache-2.0
"""The real pprof opens our file, and its tables agree with ours."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sonde.export import pprof
from sonde.model.profile import ProfileKind
from sonde.query import queries

_BUILT = Path(__file__).parents[2] / "build" / "tools" / "pprof"
PPROF = str(_BUILT) if _BUILT.exists() else shutil.which("pprof")

EVERYTHING = ("-nodecount=0", "-nodefraction=0", "-edgefraction=0")

pytestmark = pytest.mark.skipif(not PPROF, reason="needs pprof (scripts/setup test)")


@pytest.fixture(scope="module")
def profile(session, tmp_path_factory):
    path = tmp_path_factory.mktemp("pprof") / "scene.pb.gz"
    with path.open("wb") as out:
        pprof.write(session, out)
    return path


@pytest.fixture
def ask(profile, tmp_path):
    def ask(*flags):
        done = subprocess.run(
            [PPROF, *flags, "-symbolize=none", str(profile)],
            capture_output=True,
            text=True,
            timeout=60,
            env={"HOME": str(tmp_path), "PPROF_TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return ask


def top(text):
    """Function to (flat, cum) of a `-top -unit=...` listing."""
    rows = {}
    for line in text.splitlines():
        number = r"(-?[\d.]+)[a-zA-Z]*"
        share = r"[\d.]+%"
        row = re.match(rf"\s*{number}\s+{share}\s+{share}\s+{number}\s+{share}\s+(.*)", line)
        if row:
            rows[row.group(3).removesuffix(" (inline)")] = (
                float(row.group(1)),
                float(row.group(2)),
            )
    return rows


def ours(session, kind, own, whole):
    """The same of our own table; pprof puts functions of one name together."""
    rows = {}
    for use in queries.top_functions(session, kind):
        flat, cum = rows.get(use.function, (0, 0))
        rows[use.function] = (flat + getattr(use, own), cum + getattr(use, whole))
    return rows


@pytest.mark.parametrize(
    ("index", "unit", "kind", "field"),
    [
        ("samples", "count", ProfileKind.ON_CPU, "count"),
        ("cpu", "ns", ProfileKind.ON_CPU, "ns"),
        ("waits", "count", ProfileKind.OFF_CPU, "count"),
        ("off_cpu", "ns", ProfileKind.OFF_CPU, "ns"),
        ("run_queue_waits", "count", ProfileKind.RUN_QUEUE, "count"),
        ("run_queue", "ns", ProfileKind.RUN_QUEUE, "ns"),
        ("gpu_calls", "count", ProfileKind.GPU_CALLS, "count"),
        ("gpu_call_time", "ns", ProfileKind.GPU_CALLS, "ns"),
        ("gpu_call_bytes", "B", ProfileKind.GPU_CALLS, "bytes"),
    ],
)
def test_top_tables_agree(ask, session, index, unit, kind, field):
    shown = top(ask("-top", *EVERYTHING, f"-sample_index={index}", f"-unit={unit}"))
    wanted = ours(session, kind, f"self_{field}", f"total_{field}")
    assert set(shown) == {name for name, row in wanted.items() if any(row)}
    for name, row in shown.items():
        assert row == pytest.approx(wanted[name], abs=2), name  # weights are rounded to whole ns


def test_the_time_on_cpus_is_what_it_shows_first(ask):
    text = ask("-top")
    assert "Type: cpu" in text
    assert "Duration: 10s" in text
    assert re.search(r"3030\.30ms .* memmove$", text, re.MULTILINE)


def test_raw_shows_mappings_lines_labels_and_losses(ask):
    text = ask("-raw")
    assert re.search(r"libc\.so\.6 [0-9a-f]{40} \[FN\]", text)
    assert re.search(r"train_step /src/train\.cc:120", text)
    assert "pid:[4211]" in text
    assert "reason:[futex]" in text
    assert "recorded by sonde" in text


def test_processes_and_reasons_can_be_focused_on(ask):
    focused = top(ask("-top", "-sample_index=samples", "-tagfocus=pid=5000:5000"))
    assert set(focused) == {"fold", "parse", "main", "_start"}
    futex = top(ask("-top", *EVERYTHING, "-sample_index=waits", "-tagfocus=reason=futex"))
    assert futex["schedule"] == (400, 400)
