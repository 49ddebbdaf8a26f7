# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.diff_trial [PAIRS [SECONDS]]`: is `sonde diff --fail-above 3%` right?

Records the workload of `make demo` (NumPy feeding an OpenCL device) again and again: pairs of the
same program, which must not fail, and pairs whose second one has a slowdown put into it: each
sample is prepared twice. Prints how often it failed, and over what.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEMO = Path(__file__).parents[2] / "demo"
ABOVE = "3%"
_PREPARE = "prepare(packed[index], rng)"


def recorded(folder: Path, name: str, program: Path, seconds: float) -> Path:
    """A recording of the program at work, without its start."""
    capture, ready = folder / f"{name}.sonde", folder / f"{name}.ready"
    command = [sys.executable, str(program), "--seconds", str(seconds + 60), "--ready", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as work:
        try:
            deadline = time.monotonic() + 90
            while not ready.exists():
                if work.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{program} did not start")
                time.sleep(0.05)
            record = [sys.executable, "-m", "sonde", "record", "-p", str(work.pid), "-q", "-f"]
            record += ["-d", str(seconds), "-o", str(capture)]
            subprocess.run(record, check=True, timeout=seconds + 60)
        finally:
            work.kill()
    return capture


def failed(before: Path, after: Path) -> list[tuple[str, str]]:
    """(kind, name) of what got worse."""
    command = [sys.executable, "-m", "sonde", "diff", str(before), str(after), "--json"]
    result = subprocess.run([*command, "--fail-above", ABOVE], capture_output=True, text=True)
    if result.returncode not in (0, 1):
        raise RuntimeError(result.stderr)
    return [(one["kind"], one["name"]) for one in json.loads(result.stdout)["failed"]]


def main() -> int:
    """Exit code 0; the figures are printed."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 6.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        slow = folder / "train.py"
        text = (DEMO / "train.py").read_text()
        assert _PREPARE in text
        slow.write_text(text.replace(_PREPARE, f"({_PREPARE}, {_PREPARE})[1]"))
        (folder / "train.cl").write_text((DEMO / "train.cl").read_text())
        before = recorded(folder, "first", DEMO / "train.py", seconds)
        false, found = 0, 0
        over: collections.Counter[str] = collections.Counter()
        for number in range(pairs):
            same = recorded(folder, f"same{number}", DEMO / "train.py", seconds)
            wrong = failed(before, same)
            false += bool(wrong)
            over.update(f"{kind} {name}" for kind, name in wrong)
            slower = failed(same, recorded(folder, f"slow{number}", slow, seconds))
            found += bool(slower)
            print(f"pair {number}: same {wrong or 'passes'}; slower {slower[:3]}", flush=True)
            before.unlink()
            before = same
    print(f"the same program failed in {false} of {pairs} pairs, the slower one in {found}")
    for what, count in over.most_common():
        print(f"  {count} x {what}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
