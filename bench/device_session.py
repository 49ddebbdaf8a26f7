# SPDX-License-Identifier: Apache-2.0
"""All that device time has to show on a GPU, in one go: about 15 minutes.

    python -m bench.device_session [--out DIR] [--blocks 200] [--cycles 200] [--stub]

What dies first: contexts that come and go, exits; then attach, detach and killed recorders beside
live loops, with the same results bit by bit; then cost and truth. Each goes on where another fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time


def main() -> int:
    """Run each as a separate program; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--stub", action="store_true", help="without a GPU, to see that it runs")
    args = parser.parse_args()
    stub = ["--stub"] if args.stub else []
    quick = args.stub
    parts = {
        "context_churn": ["--seconds", "1" if quick else "10", "--times", "3" if quick else "20"],
        "attach_cycles": [
            *("--cycles", str(args.cycles), "--kills", "3" if quick else "20"),
            *("--loads", "3" if quick else "10", "--out", f"{args.out}/attach_cycles.json"),
        ],
        "device_time": ["--blocks", str(args.blocks), "--out", args.out]
        + (["--loops", "eager,graph,decode"] if quick else []),
    }
    failed = []
    for name, words in parts.items():
        began = time.monotonic()
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.{name}", *words, *stub]).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
