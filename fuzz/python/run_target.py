# SPDX-License-Identifier: Apache-2.0
"""Run one Python target under libFuzzer (atheris), or over given inputs alone.

run_target.py NAME [libFuzzer's options and corpora]
run_target.py --replay NAME FILE_OR_FOLDER...     without atheris; prints what took longest

A target is a module beside this file with a function `one(raw)`. What it may raise is SondeError,
as the command line reports it; anything else is a crash.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
TIMEOUT_S = 5.0


def load(name: str) -> Callable[[bytes], None]:
    """The function of a target that takes an input."""
    sys.path[:0] = [str(_HERE), str(_ROOT / "tests")]
    one = importlib.import_module(name).one
    from sonde.errors import SondeError

    def guarded(raw: bytes) -> None:
        try:
            one(raw)
        except SondeError as error:
            str(error)

    return guarded


def replay(name: str, paths: Iterable[Path]) -> None:
    """Give a target these inputs, one after another. Raises what it raises."""
    target = load(name)
    slowest_s, count = 0.0, 0
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            began = time.process_time()
            try:
                target(file.read_bytes())
            except BaseException:
                print(f"input: {file}", file=sys.stderr)
                raise
            took_s = time.process_time() - began
            if took_s > TIMEOUT_S:
                raise TimeoutError(f"{file} took {took_s:.1f} s")
            slowest_s, count = max(slowest_s, took_s), count + 1
    # Not ru_maxrss, which keeps what the process had been before it became this program.
    peak_kb = re.search(r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    peak_mb = int(peak_kb[1]) / 1024 if peak_kb else 0.0
    print(f"replayed {count} inputs, slowest {slowest_s:.2f} s, peak {peak_mb:.0f} MB")


def main() -> None:
    """Fuzz, or replay."""
    if sys.argv[1] == "--replay":
        replay(sys.argv[2], map(Path, sys.argv[3:]))
        return
    import atheris

    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["sonde"]):
        target = load(name)
        target(b"")  # what is imported late is not the first input's time
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    # One core: DuckDB and Arrow would start a thread for each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
