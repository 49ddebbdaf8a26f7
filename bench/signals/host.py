# SPDX-License-Identifier: Apache-2.0
"""Each signal of the host beside its independent truth, several times over, as root:
`python -m bench.signals.host [ROUNDS]`. Runs the tests that hold them to 5 % and gathers what they
saw: the median of recorded / truth, and the least and the most.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = tuple(f"tests/kernel/test_{of}_truth.py" for of in ("usage", "host", "network"))
SEEN_IN = (
    *("share_a_cpu", "bytes_and_major", "over_the_limit", "quota", "memory_limit"),
    *("limit_on_a_disk", "flood", "narrow_queue"),
)


def main() -> int:
    """Print the table; 1 where a median is off by more than 5 %."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "truths"
        notes.touch()
        environment = os.environ | {"SONDE_TRUTHS": str(notes)}
        command = [sys.executable, "-m", "pytest", "-q", "-k", " or ".join(SEEN_IN), *TESTS]
        for _ in range(rounds):
            subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
    ratios: dict[str, list[float]] = {}
    truths: dict[str, list[float]] = {}
    for line in lines:
        if line["truth"]:
            ratios.setdefault(line["what"], []).append(line["recorded"] / line["truth"])
            truths.setdefault(line["what"], []).append(line["truth"])
    print(f"{'recorded / truth':<48}{'median':>9}{'least':>9}{'most':>9}{'times':>7}{'truth':>16}")
    worst = 0.0
    for what, found in ratios.items():
        middle = statistics.median(found)
        worst = max(worst, abs(middle - 1))
        print(
            f"{what:<48}{middle:>9.4f}{min(found):>9.4f}{max(found):>9.4f}{len(found):>7}"
            f"{statistics.median(truths[what]):>16,.6g}"
        )
    return int(worst > 0.05)


if __name__ == "__main__":
    sys.exit(main())
