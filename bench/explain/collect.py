# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.collect OUT [--seeds …] [--kinds …]`: run programs, keep traces."""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tarfile
import time
from pathlib import Path

BATCH = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--budget", type=float, default=500, help="seconds, then no new run")
    args = parser.parse_args()
    from bench.explain import harness
    from bench.explain.every_program import KINDS

    began = time.monotonic()
    scratch = Path("/tmp/explain-runs")
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [(kind, seed) for seed in args.seeds for kind in args.kinds or KINDS]
    for first in range(0, len(wanted), BATCH):
        if time.monotonic() - began > args.budget:
            print("budget spent", flush=True)
            break
        start = time.monotonic()
        try:
            truths = harness.batch(wanted[first : first + BATCH], scratch)
        except Exception as error:
            truths = [{"kind": str(wanted[first : first + BATCH]), "error": repr(error)}]
        print(f"{time.monotonic() - start:5.1f} s")
        for truth in truths:
            shown = {k: v for k, v in truth.items() if k not in ("parameters", "waits")}
            print(f"  {json.dumps(shown)}"[:400], flush=True)
    for number, folder in enumerate(sorted(scratch.iterdir())):
        trace = folder / "trace.json"
        if trace.exists():
            with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb", 5) as packed:
                shutil.copyfileobj(plain, packed)
            trace.unlink()
        with tarfile.open(args.out / f"runs{number % 5}.tar", "a") as tar:
            tar.add(folder, folder.name)


if __name__ == "__main__":
    main()
