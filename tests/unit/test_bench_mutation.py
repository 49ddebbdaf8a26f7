# SPDX-License-Identifier: Apache-2.0
"""Which mutants are drawn, how the tests of one end, and what is reported of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.mutation import __main__ as bench
from bench.mutation.mutants import Mutant, _meaning, drawn

ROOT = Path(__file__).parents[2]
MANY = [
    Mutant("a.py", f"{line}:4", f"{change}: x", f"{line} {change}")
    for line in range(50)
    for change in ("Add_Sub", "Add_Mul", "AddNot")
]


def test_the_same_seed_draws_the_same_and_another_one_others():
    first = drawn(MANY, 20, "1")
    assert drawn(MANY, 20, "1") == first
    assert {it.place for it in drawn(MANY, 20, "2")[:20]} != {it.place for it in first[:20]}
    assert len(first) == len({mutant.place for mutant in first}) == 50


def test_for_each_that_cannot_be_compiled_another_one_is_drawn(monkeypatch):
    monkeypatch.setattr(bench, "possible", lambda *_: MANY)
    parts = [{"package": "p", "files": ["a.py"]}]
    ten = [it for _, it in bench.chosen(parts, 10, "1", {})]
    assert ten == drawn(MANY, 10, "1")[:10]
    known = {bench.key_of(it): {"outcome": "stillborn"} for it in (ten[0], ten[4])}
    twelve = [it for _, it in bench.chosen(parts, 10, "1", known)]
    assert twelve == drawn(MANY, 10, "1")[:12]


@pytest.mark.parametrize(
    ("code", "same"),
    [
        ("def f(a: str) -> int:\n    return a + 1\n", True),
        ('def f(a):\n    """Text."""\n    return a + 1\n', True),
        ("@lru_cache(maxsize=9)\ndef f(a):\n    return a + 1\n", False),
        ("def f(a):\n    return a - 1\n", False),
    ],
)
def test_what_alters_nothing_is_no_mutant(code, same):
    assert (_meaning("def f(a: int):\n    return a + 1\n") == _meaning(code)) is same
    assert _meaning("@lru_cache(maxsize=1)\ndef f(): pass") == _meaning(
        "@lru_cache(maxsize=2)\ndef f(): pass"
    )
    assert _meaning("def f(:") is None


def test_every_file_and_every_test_that_is_named_is_there():
    for part in bench.targets():
        assert all((ROOT / file).is_file() for file in part["files"])
        for tests in bench.stages(part):
            named = [it.partition("::")[0] for it in tests if it.startswith("tests/")]
            assert named and all((ROOT / it).is_file() for it in named)


HANGS = """
import subprocess, sys, time
def test_it():
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    print(subprocess.Popen(child, start_new_session=True).pid, flush=True)
    time.sleep(600)
"""


def test_tests_that_hang_are_killed_with_all_that_they_started(tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "test_it.py").write_text(HANGS)
    body = (
        "import ctypes, json, sys; from pathlib import Path\n"
        "from bench.mutation import __main__ as bench\n"
        "ctypes.CDLL(None).prctl(bench._PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)\n"
        "arguments = (Path(sys.argv[1]), ['-s', 'test_it.py'], float(sys.argv[2]))\n"
        "print(json.dumps(bench.run_tests(*arguments)))\n"
    )
    for limit_s in (4.0, 20.0):  # on a busy machine 4 s may be too few to begin the test
        command = [sys.executable, "-c", body, str(tmp_path), str(limit_s)]
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        outcome, seconds, tail = json.loads(done.stdout)
        assert outcome == "late"
        assert seconds >= limit_s and time.monotonic() - began < 60
        started = [int(line) for line in tail.splitlines() if line.isdecimal()]
        if started:
            break
    assert started and not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_a_reason_is_found_by_the_change_wherever_its_line_has_moved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "HERE", tmp_path)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("code")
    (tmp_path / "survivors.toml").write_text("[reason]\n'a.py AddNot: x' = 'equivalent'\n")
    results = [
        {"package": "p", "outcome": "survived", "mutant": MANY[2].name},
        *({"package": "p", "outcome": "killed", "mutant": it.name} for it in MANY[3:22]),
        {"package": "p", "outcome": "stillborn", "mutant": MANY[30].name},
    ]
    out = tmp_path / "out.json"
    assert bench.report(results, MANY[:21], "1", out) == 0
    written = json.loads(out.read_text())
    assert written["packages"]["p"] == {
        "survived": 1, "killed": 19, "stillborn": 1, "share_killed": 0.95,
    }  # fmt: skip
    assert written["survivors"] == [{"mutant": MANY[2].name, "reason": "equivalent"}]
    assert bench.report(results[:5], MANY[:5], "1", out) == 1, "under 95 %"
    assert bench.report(results, MANY[:22], "1", out) == 1, "one has not run"
    assert "not run yet: 1" in capsys.readouterr().out
