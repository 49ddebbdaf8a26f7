# SPDX-License-Identifier: Apache-2.0
"""What ranks wait for, on traces of training jobs that others labelled.

    python -m bench.faults.stragglers FOLDER [--json FILE]

FOLDER: `trace-NAME.parquet` of ByteDance-Seed/StragglerAnalysis (operations of all ranks, with
stage, step, micro batch, start and duration). Only computing is passed to
`sonde.analyze.stragglers`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq

from sonde.analyze.stragglers import Straggling, Work, straggling

TRUTH = {"AR": "slow-worker", "ST": "slow-stage", "SE": "unequal-sequences"}
"""The authors' label of each."""


def finding_of(path: Path) -> Straggling:
    """Of one trace."""
    rows = pq.read_table(path).to_pylist()
    return straggling(
        Work(
            f"{row['optype']} {row['mc']}", row["stage"], row["dp_rank"], row["step"],
            row["mb_id"], row["duration"],
        )
        for row in rows if "compute" in row["optype"]
    )  # fmt: skip


def main() -> None:
    """Print the finding on each, and the truth."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.stragglers")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {}
    for path in sorted(args.folder.glob("trace-*.parquet")):
        name = path.stem.removeprefix("trace-")
        one = finding_of(path)
        found[name] = {
            "truth": TRUTH.get(name, ""),
            "found": str(one.kind),
            "excess": {str(kind): round(value, 3) for kind, value in one.excess.items()},
            "stage": one.stage,
            "replica": one.replica,
        }
    text = json.dumps(found, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
