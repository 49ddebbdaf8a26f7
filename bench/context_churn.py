# SPDX-License-Identifier: Apache-2.0
"""Contexts that come and go, and processes that exit, while their launches are timed: does any die?

    python -m bench.context_churn [--seconds 10] [--times 20] [--stub]

Needs cc and an NVIDIA driver, or `--stub`. Each way is run beside itself without the library.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.stub import PROGRAMS, build
from sonde.attach import library
from sonde.collect import inject_abi as abi

REQUEST = f"{int(abi.Request.EVENTS | abi.Request.STACKS)}:20000"


def compiled(folder: Path, stub: bool) -> Path:
    """The program, on the driver or its stub."""
    program = folder / "contexts"
    cc = ["cc", "-O2", "-pthread", "-o", str(program), str(PROGRAMS / "contexts.c")]
    if stub:
        build(folder)
        more = [str(folder / "libcuda.so.1"), f"-Wl,-rpath,{folder}"]
    else:
        more = ["-DREAL_DRIVER", "-l:libcuda.so.1"]
    subprocess.run([*cc, *more], check=True)
    return program


def main() -> int:
    """Run all, and print how each ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--times", type=int, default=20, help="of exits")
    parser.add_argument("--stub", action="store_true", help="without a GPU")
    args = parser.parse_args()
    died = 0
    timed = {"LD_PRELOAD": str(library.path()), "SONDE_INJECT": REQUEST}
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder), args.stub)
        for way in ("destroy", "primary", "reset", "exit"):
            for name, more in (("with", timed), ("without", {})):
                ends = [
                    subprocess.run(
                        [program, str(args.seconds), way],
                        env=os.environ | more, capture_output=True, text=True,
                    )
                    for _ in range(args.times if way == "exit" else 1)
                ]  # fmt: skip
                bad = [end for end in ends if end.returncode]
                died += len(bad) if more else 0
                counts = ends[-1].stdout.split()[1:]
                why = bad[0].stderr.strip()[-200:] if bad else ""
                print(f"{way:8} {name:8} ended well {len(ends) - len(bad)} of {len(ends)}", end="")
                print(f"; launches and lives of the last: {' '.join(counts)} {why}", flush=True)
    return 1 if died else 0


if __name__ == "__main__":
    sys.exit(main())
