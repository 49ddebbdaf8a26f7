# SPDX-License-Identifier: Apache-2.0
"""Launches kernels, and for each line on standard input traces STEPS steps by torch.profiler.

Answers with a line of JSON: events of the trace by category and name, without the few that a
session itself begins and ends with.
"""

import json
import select
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 300
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver")


def step(x, y):
    for _ in range(10):
        y = torch.relu(y @ x)
    return y.sum()


def trace(x, y):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as made:
        for _ in range(STEPS):
            step(x, y)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        made.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = Counter(f"{it['cat']} {it['name']}" for it in events if it.get("cat") in CATEGORIES)
    print(json.dumps(found), flush=True)


def main():
    x = torch.randn(128, 128, device="cuda") / 128
    y = torch.randn(128, 128, device="cuda")
    step(x, y)
    torch.cuda.synchronize()
    print("ready", flush=True)
    while True:
        for _ in range(20):
            step(x, y)
        torch.cuda.synchronize()
        if select.select([0], [], [], 0)[0]:
            if not sys.stdin.readline():
                break
            trace(x, y)


main()
