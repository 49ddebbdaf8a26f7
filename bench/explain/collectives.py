# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.collectives [--out DIR]`: explain on NCCL between GPUs of one host.

Each rank multiplies and all-reduces in a loop; in some rounds one rank multiplies more, so that the
others wait for it in NCCL. Needs two GPUs and PyTorch, about a minute. `--judge DIR` scores the
traces of an earlier run again, without a GPU.

The truth is a plain sweep over each rank's raw trace: the share of its time in which a kernel of
NCCL ran and no other; beside it the same by the clock, from how much longer the steps took than in
the balanced round. The straggler is the rank that was given more to do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.explain.truth import NothingRanError
from sonde.analyze.bound import explain
from sonde.model.causes import Bound
from sonde.recording.timelines import open_timeline

STEPS, SIZE, PRODUCTS = 60, 4096, 12
WITHIN = 5.0
"""Points that blame may be off."""
ROUNDS = {"balanced": (-1, 1.0), "last x2": (1, 2.0), "first x2": (0, 2.0), "last x1.5": (1, 1.5)}
"""Which rank multiplies more (-1 none), and how many times as much."""


@dataclass(frozen=True)
class RankScore:
    """One rank in one round; shares are points of its time."""

    round: str
    rank: int
    verdict: str
    share: float
    """Blamed on collectives."""
    truth: float
    """With a kernel of NCCL and no other, by a plain sweep over the raw trace."""
    clock: float
    """The same from the step times against those of the balanced round."""
    straggler: bool
    """Whether it was given more to do."""
    named: bool
    """Whether explain makes it the straggler: the rank that waits the least for the others."""


def rank(number: int, count: int, folder: str, barrier: Any) -> None:
    """One process: a trace of each round, and how long its steps took."""
    import os

    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(number)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl", init_method=store, rank=number, world_size=count)
    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(8 << 20, device="cuda")
    took: dict[str, float] = {}

    for name, (late, times) in ROUNDS.items():
        products = round(PRODUCTS * (times if number == late else 1))

        def step(products: int = products) -> None:
            for _ in range(products):
                a @ a
            dist.all_reduce(gradient)
            torch.cuda.synchronize()

        for _ in range(5):
            step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            barrier.wait(60)  # setting up the tracer takes each its time
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            took[name] = (time.perf_counter() - began) / STEPS
        profiler.export_chrome_trace(f"{folder}/{name}-rank{number}.json")
    Path(f"{folder}/rank{number}.txt").write_text(json.dumps(took))
    dist.destroy_process_group()


def only_nccl(path: Path) -> float:
    """Share of the time from the first operation on the device to the end of the last in which
    only collectives ran. Raises NothingRanError for an empty trace."""
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [one for one in events if one.get("cat") == "kernel"]
    edges: list[tuple[float, int, int]] = []
    for one in kernels:
        collective = int("nccl" in one["name"].lower())
        end = one["ts"] + one["dur"]
        edges += [(one["ts"], collective, 1), (end, collective, -1)]
    others = [one for one in events if one.get("cat") in ("gpu_memcpy", "gpu_memset")]
    if not edges:
        raise NothingRanError(f"{path.name} holds no kernel")
    first = min(one["ts"] for one in (*kernels, *others))
    last = max(one["ts"] + one["dur"] for one in (*kernels, *others))
    running, alone, since = [0, 0], 0.0, 0.0
    for at, collective, change in sorted(edges):
        if running[1] and not running[0]:
            alone += at - since
        running[collective] += change
        since = at
    return float(alone / (last - first))


def judge(folder: Path) -> list[RankScore]:
    """Explain each rank's trace of each round, and compare."""
    count = len(list(folder.glob("rank*.txt")))
    took = [json.loads((folder / f"rank{number}.txt").read_text()) for number in range(count)]
    scores = []
    for name, (late, _) in ROUNDS.items():
        found = []
        for number in range(count):
            path = folder / f"{name}-rank{number}.json"
            (verdict, *_) = explain(open_timeline([path])).verdicts
            share = sum(one.share for one in verdict.causes if one.bound == Bound.COMMUNICATION)
            truth = only_nccl(path)
            usual = only_nccl(folder / f"balanced-rank{number}.json")
            mine, balanced = took[number][name], took[number]["balanced"]
            clock = (usual * balanced + (mine - balanced) * (number != late)) / mine
            found.append((verdict.bounds[0].key, 100 * share, 100 * truth, 100 * clock))
        least = min(range(count), key=lambda number: found[number][1])
        for number, figures in enumerate(found):
            scores.append(RankScore(name, number, *figures, number == late, number == least))
    return scores


def table(scores: list[RankScore]) -> str:
    """All ranks, then the sums."""
    lines = ["round      rank  verdict          in collectives  truth  clock  straggler  named"]
    for one in scores:
        skewed = one.round != "balanced"
        lines.append(
            f"{one.round:10s} {one.rank:4}  {one.verdict:15s} {one.share:15.1f} {one.truth:6.1f} "
            f"{one.clock:6.1f}  {'yes' if one.straggler else '-':9s}  "
            f"{('yes' if one.named else '-') if skewed else ''}"
        )
    near = sum(abs(one.share - one.truth) <= WITHIN for one in scores)
    uneven = [one for one in scores if one.round != "balanced"]
    named = sum(one.straggler and one.named for one in uneven)
    lines.append(f"in collectives within {WITHIN:g} points: {near} of {len(scores)}")
    lines.append(f"straggler named: {named} of {sum(one.straggler for one in uneven)}")
    return "\n".join(lines)


def measure(folder: Path) -> int:
    """Run all rounds; 3 where there are no two GPUs."""
    try:
        import torch
        import torch.multiprocessing as processes
    except ModuleNotFoundError:
        print("needs PyTorch and two GPUs")
        return 3
    count = torch.cuda.device_count()
    if count < 2:
        print(f"needs two GPUs; here are {count}")
        return 3
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    barrier = processes.get_context("spawn").Barrier(2)
    started: Any = processes.spawn(rank, (2, str(folder), barrier), nprocs=2, join=False)
    deadline = time.monotonic() + 120
    while not started.join(timeout=1):
        if time.monotonic() > deadline:
            for one in started.processes:
                one.kill()
            print("took longer than two minutes: stopped")
            return 1
    return 0


def main() -> int:
    """Exit code 1 where blame is 5 points off, or a straggler is not named."""
    parser = argparse.ArgumentParser(prog="python -m bench.explain.collectives")
    parser.add_argument("--out", type=Path, default=Path("/tmp/explain-collectives"))
    parser.add_argument("--judge", type=Path, metavar="DIR", help="traces of an earlier run")
    args = parser.parse_args()
    began = time.monotonic()
    if args.judge is None and (code := measure(args.out)):
        return code
    scores = judge(args.judge or args.out)
    print(table(scores))
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(one) for one in scores]
    (args.out / "collectives.json").write_text(json.dumps(rows, indent=1))
    print(f"{time.monotonic() - began:.0f} s")
    near = all(abs(one.share - one.truth) <= WITHIN for one in scores)
    return int(not near or any(one.straggler and not one.named for one in scores))


if __name__ == "__main__":
    raise SystemExit(main())
