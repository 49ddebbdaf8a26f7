# SPDX-License-Identifier: Apache-2.0
"""Puts incidents of trials into tests/data/incidents, named after what was injected.

python -m bench.faults.keep TRIALS.jsonl FOLDER [CAUSE/VICTIM …]

FOLDER is that of `bench.faults run --keep`. One incident of each fault and victim, or of those
named: the first that was reported. Whether the verdict is right is not asked: what was injected is.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.faults.score import is_fault
from sonde.cli.incidents import read
from sonde.diagnose.moments import Who
from sonde.diagnose.recorded import Recorded, shrunk

TO = Path(__file__).parents[2] / "tests/data/incidents"


def main() -> None:
    """Copy them."""
    trials_file, folder, *wanted = sys.argv[1:]
    trials = [json.loads(line) for line in Path(trials_file).read_text().splitlines()]
    kept: set[str] = set()
    for path in sorted(Path(folder).glob("*.json.gz")):
        incident, window = read(path)
        for trial in trials:
            name = f"{trial['fault']}/{trial['victim']}"
            if incident.victim not in trial["victim_pids"] or name in kept:
                continue
            is_reported = is_fault({"verdict": {"change": incident.verdict.change}})
            if not is_reported or incident.noticed_ns < trial["onset_ns"]:
                continue
            if wanted and name not in wanted:
                continue
            kept.add(name)
            window = shrunk(window)
            window.who = {pid: _plain(one, trial) for pid, one in window.who.items()}
            raw = msgspec.json.encode(Recorded(1, incident, window))
            to = TO / f"{name.replace('/', '--').replace(': ', '-').replace(' ', '-')}.json.gz"
            to.write_bytes(gzip.compress(raw, 9, mtime=0))


def _plain(who: Who, trial: dict[str, Any]) -> Who:
    """Of the machine's other processes no name is kept."""
    is_cast = who.pid in trial["cast"] or who.pid in trial["culprits"]
    name = who.name if is_cast or who.is_kernel else "another"
    return Who(who.pid, name, who.parent, "", "", who.is_kernel)


if __name__ == "__main__":
    main()
