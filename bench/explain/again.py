# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.again DIR...`: score kept runs again, where there is no GPU.

`DIR`: where `python -m bench.explain OUT --keep DIR` put its archives, or where they were unpacked.
Runs without their capture of the machine's waits are scored if the trace alone shows their cause,
and listed if not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.explain.expected import EXPECTED
from bench.explain.score import Score, score, table
from bench.explain.truth import NothingRanError
from sonde.errors import SondeError


def again(folder: Path) -> Score | str:
    """The run's score, or why it has none."""
    known = json.loads((folder / "truth.json").read_text())
    name = f"{known['kind']}-{known['seed']}"
    if "error" in known:
        return f"{name}: {known['error']}"[-200:]
    try:
        return score(folder)
    except NothingRanError as error:
        return str(error)
    except SondeError as error:
        if EXPECTED[known["kind"]][2]:
            return f"{name}: {error}"
        return score(folder, with_waits=False)


def main() -> int:
    """Exit code 1 where none could be scored."""
    parser = argparse.ArgumentParser(prog="python -m bench.explain.again", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--kinds", nargs="+", default=list(EXPECTED))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(2) as pool:
        roots = []
        for number, folder in enumerate(args.folders):
            root = Path(scratch, str(number))
            roots += [folder, root]
            for path in sorted(folder.glob("runs-*.tar")):
                try:
                    with tarfile.open(path) as archive:
                        archive.extractall(root, filter="data")
                except tarfile.ReadError as error:
                    print(f"{path.name} is cut: {error}")
        runs = [path.parent for root in roots for path in sorted(root.glob("*/truth.json"))]
        runs = [run for run in runs if run.name.rsplit("-", 1)[0] in args.kinds]
        made = list(pool.map(again, runs))
    scores = [one for one in made if isinstance(one, Score)]
    print(table(scores))
    for text in made:
        if isinstance(text, str):
            print(f"no score: {text}")
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(one) for one in scores], indent=1))
    return 0 if scores else 1


if __name__ == "__main__":
    raise SystemExit(main())
