# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.service.kills`: 50 kills of server, sender or both, and the recount."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import killed_service


def main() -> int:
    """Run; 1 where a chunk is lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", type=Path, help="directory on the disk to be tried")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        found = killed_service.run(Path(folder), args.kills, args.seed)
    result = dataclasses.asdict(dataclasses.replace(found, kills=Counter()))
    result["kills"] = dict(found.kills)
    accepting = found.accepting_s[1:]
    result["accepting_s"] = {
        "first_start": round(found.accepting_s[0], 2),
        "median": round(statistics.median(accepting), 2),
        "most": round(max(accepting), 2),
    }
    print(json.dumps(result, indent=2))
    good = not found.lost and not found.doubled
    return 0 if good and found.sample_rows_stored == found.sample_rows_expected else 1


if __name__ == "__main__":
    sys.exit(main())
