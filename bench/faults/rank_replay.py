# SPDX-License-Identifier: Apache-2.0
"""A job of 1,024 ranks replayed: is the late rank, or the late link, named?

    python -m bench.faults.rank_replay [--seeds N] [--shapes FOLDER] [--json FILE]

Made up: a pipeline of 8 stages times 128 replicas, forward and backward of 4 micro batches, then an
all-reduce of each stage. Each seed is replayed with one rank that computes 15 % to 60 % longer,
with one link between two stages over which a transfer takes 10 to 40 ms (others 2 ms), and with
neither. Durations vary as those of FOLDER do (`trace-AR.parquet` of
ByteDance-Seed/StragglerAnalysis, without its slow worker), else by 3 %; clocks of
nodes (8 ranks each) differ by up to 0.5 ms.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sonde.analyze.slow_ranks import Pieces, RankTimes, slow_links, slow_ranks

STAGES, REPLICAS, MICRO, STEPS = 8, 128, 4, 6
NODE_RANKS = 8
COMPUTE_S, TRANSFER_S, REDUCE_S = 0.02, 0.002, 0.03
SKEW_S = 0.0005
Array = npt.NDArray[np.float64]
COMPUTE, EXCHANGE, REDUCE = 0, 1, 2


@dataclass(frozen=True)
class Truth:
    """What was made late; ranks are stage * replicas + replica."""

    kind: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Runs:
    """Kernels: columns of equal length; times in s."""

    rank: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    start: Array
    end: Array
    steps: Array
    """Begin of each step, and the end of the last."""


def shapes(folder: Path | None, chance: np.random.Generator) -> Array:
    """Durations by the median of the same rank's operation."""
    if folder is None:
        return np.exp(0.03 * chance.standard_normal(10_000))
    import pyarrow.parquet as pq

    its: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in pq.read_table(folder / "trace-AR.parquet").to_pylist():
        if "compute" in row["optype"] and row["rank"] != 0:
            its[row["rank"], row["optype"], row["mc"], row["mb_id"]].append(row["duration"])
    return np.concatenate([np.array(one) / np.median(one) for one in its.values()])


def replay(
    kind: str, seed: int, spread: Array, stages: int = STAGES, replicas: int = REPLICAS
) -> tuple[Truth, Runs]:
    """A job with one late `rank` or `link`, or `nothing`."""
    chance = np.random.default_rng([seed, len(kind)])
    slow = np.ones((stages, replicas))
    transfer = np.full((stages - 1, replicas), TRANSFER_S)
    truth = Truth(kind)
    if kind == "rank":
        at = chance.integers(stages), chance.integers(replicas)
        slow[at] = chance.uniform(1.15, 1.6)
        truth = Truth(kind, (int(at[0] * replicas + at[1]),))
    elif kind == "link":
        at = chance.integers(stages - 1), chance.integers(replicas)
        transfer[at] = chance.uniform(0.01, 0.04)
        first = int(at[0] * replicas + at[1])
        truth = Truth(kind, (first, first + replicas))
    columns: list[tuple[Array, int, Array, Array]] = []
    every = np.arange(stages * replicas, dtype=np.float64).reshape(stages, replicas)

    def put(stage: int, what: int, start: Array, end: Array) -> None:
        columns.append((every[stage], what, start.copy(), end.copy()))

    clock = np.zeros((stages, replicas))
    edges = [0.0]
    for _ in range(STEPS):
        free = clock.copy()
        for forward in (True, False):
            order = range(stages) if forward else range(stages - 1, -1, -1)
            factor = 1.0 if forward else 2.0
            ready = np.zeros(replicas)
            for _ in range(MICRO):
                before = -1
                for stage in order:
                    if before >= 0:
                        link = transfer[min(stage, before)]
                        posted, sent = free[stage].copy(), free[before].copy()
                        end = np.maximum(posted, sent) + link * chance.uniform(0.95, 1.05, replicas)
                        put(before, EXCHANGE, sent, end)
                        put(stage, EXCHANGE, posted, end)
                        free[before] = free[stage] = end
                        ready = end
                    begin = np.maximum(free[stage], ready) if before >= 0 else free[stage]
                    took = COMPUTE_S * factor * slow[stage] * chance.choice(spread, replicas)
                    put(stage, COMPUTE, begin, begin + took)
                    free[stage] = begin + took
                    before = stage
        for stage in range(stages):
            end = np.full(replicas, free[stage].max() + REDUCE_S)
            put(stage, REDUCE, free[stage].copy(), end)
            clock[stage] = end
        clock[:] = clock.max() + 0.001
        edges.append(float(clock[0, 0]))
    skew = np.repeat(
        chance.uniform(-SKEW_S, SKEW_S, stages * replicas // NODE_RANKS + 1), NODE_RANKS
    )
    rank = np.concatenate([one[0] for one in columns]).astype(np.int64)
    what = np.concatenate([np.full(len(one[0]), one[1]) for one in columns])
    start = np.concatenate([one[2] for one in columns]) + skew[rank]
    end = np.concatenate([one[3] for one in columns]) + skew[rank]
    return truth, Runs(rank, what, start, end, np.array(edges))


def named(runs: Runs, ranks: int) -> Truth:
    """By the rule that `sonde job` uses, on the same numbers as a store gives it."""
    steps = len(runs.steps) - 1
    step = np.clip(np.searchsorted(runs.steps, runs.start + SKEW_S, "right") - 1, 0, steps - 1)
    length = np.diff(runs.steps)
    at = runs.rank * steps + step
    took = runs.end - runs.start
    working = runs.kind == COMPUTE

    def summed(which: npt.NDArray[np.bool_]) -> Array:
        filled = np.bincount(at[which], took[which], ranks * steps)
        return filled.astype(np.float64).reshape(ranks, steps)

    times = RankTimes(summed(working) * 1e9, summed(~working) * 1e9, length * 1e9, True)
    order = np.lexsort((runs.start, at))
    number = np.cumsum(~working[order])
    first = np.searchsorted(at[order], np.arange(ranks * steps))
    piece = np.empty(len(at), np.int64)
    piece[order] = number - number[first][at[order]]
    pieces = Pieces(runs.rank[working], step[working], piece[working], took[working])
    slow = slow_ranks(times, pieces)
    if slow.ranks:
        return Truth("rank" if slow.others_wait else "unequal-work", slow.ranks)
    of_two = runs.kind == EXCHANGE
    links = slow_links(
        runs.rank[of_two],
        (runs.start[of_two] * 1e9).astype(np.int64), (runs.end[of_two] * 1e9).astype(np.int64),
    )  # fmt: skip
    if links:
        return Truth("link", links[0].ranks)
    return Truth(str(slow.kind))


def main() -> None:
    """Replay, and print how often the right one was named."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.rank_replay")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--shapes", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spread = shapes(args.shapes, np.random.default_rng(0))
    found: dict[str, Any] = {
        "ranks": STAGES * REPLICAS, "seeds": args.seeds, "shapes": args.shapes is not None,
        "spread": round(float(spread.std()), 4),
    }  # fmt: skip
    began = time.perf_counter()
    for kind in ("rank", "link", "nothing"):
        right, wrong = 0, []
        for seed in range(args.seeds):
            truth, runs = replay(kind, seed, spread)
            one = named(runs, STAGES * REPLICAS)
            if one == truth:
                right += 1
            else:
                wrong.append([seed, truth.ranks, one.kind, one.ranks[:4]])
        named_wrongly = sum(1 for one in wrong if one[3])
        found[kind] = {"right": right, "named_wrongly": named_wrongly, "others": wrong[:20]}
    found["seconds"] = round(time.perf_counter() - began, 1)
    text = json.dumps(found, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
