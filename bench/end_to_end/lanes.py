# SPDX-License-Identifier: Apache-2.0
"""Loads side by side on a machine with many CPUs: `python -m bench.end_to_end.lanes OUT PART`.

    python -m bench.end_to_end.lanes OUT 1|2 [--minutes 9]

Each lane is a run of `bench.end_to_end` on CPUs that it has to itself, and on a GPU that it has to
itself. No lane records the whole machine, as the others would feel it; recorders of one process do
have programs at every switch of the machine, so what a lane measures is beside those. OUT has a
file a lane; a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.end_to_end.subject import ROOT

CPU_ARMS: Final = "nothing,nothing again,attached,record -p,py-spy"
GPU_ARMS: Final = f"{CPU_ARMS},record --device-time,torch.profiler"
CPUS: Final = 2
GPU_CPUS: Final = 6
PARTS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "1": (("python",), ("mappings",), ("locks",), ("server",), ("python", "--quota", "0.5")),
    "2": (
        ("switches-20k,switches-200k",), ("threads",), ("files",), ("forks",),
        ("server", "--quota", "0.5"),
    ),
}  # fmt: skip
ON_GPU: Final = (("gpu-train", "gpu-eager", "gpu-loader"), ("gpu-graph", "gpu-decode", "gpu-eager"))
"""By GPU."""


def lane(
    out: Path, loads: str, arms: str, cpus: range, minutes: float, *rest: str, gpu: int = 0
) -> subprocess.Popen[bytes]:
    """Start one."""
    name = "-".join([loads.replace(",", "-"), *rest[1:]])
    log = (out / f"{name}.log").open("wb")
    return subprocess.Popen(
        [sys.executable, "-m", "bench.end_to_end", str(out / f"{name}.jsonl"), "--loads", loads,
         "--arms", arms, "--blocks", "1000", "--minutes", str(minutes), *rest],
        cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )  # fmt: skip


def main() -> None:
    """All lanes of a part, then their tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.end_to_end.lanes", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--gpus", type=int, default=len(ON_GPU))
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    lanes, cpu = [], 0
    for loads, *rest in PARTS[args.part]:
        cpus = range(cpu, cpu + CPUS)
        lanes.append(lane(args.out, loads, CPU_ARMS, cpus, args.minutes - 0.7, *rest))
        cpu += CPUS
    for gpu, loads_there in enumerate(ON_GPU[: args.gpus]):
        cpus = range(cpu, cpu + GPU_CPUS)
        loads = ",".join(loads_there)
        lanes.append(lane(args.out, loads, GPU_ARMS, cpus, args.minutes - 1.3, gpu=gpu))
        cpu += GPU_CPUS
    for each in lanes:
        each.wait()
    for log in sorted(args.out.glob("*.log")):
        print(log.read_text())


if __name__ == "__main__":
    main()
