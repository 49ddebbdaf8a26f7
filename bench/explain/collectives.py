# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.collectives`: what explain says of NCCL between GPUs of one host.

Each rank multiplies and all-reduces in a loop; the last one multiplies twice as much, so that the
others wait in NCCL. Needs two GPUs and PyTorch. The truth is the share of a step that the work of
the last rank takes beyond that of the first.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.profiler import ProfilerActivity, profile

from sonde.analyze.bound import explain
from sonde.cli.timelines import open_timeline
from sonde.export import verdict

STEPS, SIZE, PRODUCTS = 60, 4096, 12


def rank(number: int, count: int, folder: str, late: int) -> None:
    """One process: its trace, and how long its steps took."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", rank=number, world_size=count)
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(8 << 20, device="cuda")

    def step() -> None:
        for _ in range(PRODUCTS * (late if number == count - 1 else 1)):
            a @ a
        dist.all_reduce(gradient)
        torch.cuda.synchronize()

    for _ in range(5):
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        seconds = (time.perf_counter() - began) / STEPS
    profiler.export_chrome_trace(f"{folder}/rank{number}-{late}.json")
    Path(f"{folder}/rank{number}-{late}.txt").write_text(str(seconds))
    dist.destroy_process_group()


def main() -> int:
    """Exit code 1 where the first rank's verdict is another, or its blame 5 points off."""
    count = torch.cuda.device_count()
    if count < 2:
        print("needs two GPUs")
        return 3
    with tempfile.TemporaryDirectory() as folder:
        for late in (1, 2):
            processes.spawn(rank, (count, folder, late), nprocs=count)
        steps = [float(Path(f"{folder}/rank0-{late}.txt").read_text()) for late in (1, 2)]
        explanation = explain(open_timeline([Path(f"{folder}/rank0-2.json")]))
    print(verdict.render(explanation))
    found = explanation.verdicts[0]
    share = sum(one.share for one in found.causes if one.bound == "communication")
    truth = 1 - steps[0] / steps[1]
    print(f"in collectives {100 * share:.1f} %; by the step times at least {100 * truth:.1f} %")
    return int(found.bounds[0].key != "communication" or share < truth - 0.05)


if __name__ == "__main__":
    raise SystemExit(main())
