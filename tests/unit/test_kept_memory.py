# SPDX-License-Identifier: Apache-2.0
"""What an aggregator frees is there for the next reports, and goes when nobody needs it."""

import json
import subprocess
import sys

ROUNDS = """
import json, resource
from pathlib import Path
from sonde._native import keep_memory, release_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

keep_memory()
taken = []
for _ in range(4):
    before = faults()
    reports = [bytes(range(256)) * 280 for _ in range(400)]
    del reports
    taken.append(faults() - before)
kept = resident()
release_memory()
print(json.dumps({"taken": taken, "released": kept - resident()}))
"""


def test_memory_is_taken_once_and_given_back_when_asked() -> None:
    output = subprocess.run(
        [sys.executable, "-c", ROUNDS], capture_output=True, check=True, text=True
    ).stdout
    found = json.loads(output)
    pages = 400 * 70_000 // 4096
    assert found["taken"][0] > pages  # the first reports' memory is new
    assert sum(found["taken"][2:]) < pages // 100
    assert found["released"] > pages * 0.9
